"""Launch the kernels through CuPy on torch's tensors and torch's current stream, without a copy."""

from __future__ import annotations

import ctypes
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import _load, _params
from .._bind import Args
from .._check import Sizes
from .._params import Plan
from .source import ARGMAX, KERNELS, PACK, PREFIX, SELECT, TOPK, options, source

OPERATIONS = {"select_and_pack": 0, "log_prefix_sum": 1, "segmented_topk": 2, "bucket_argmax": 2, "pack_prefixes": 3}
PLAIN_SHARED = 48 * 1024  # what a block gets without asking


def make_plan(operation: str, sizes: Sizes, shared_bytes: int = 0) -> Plan:
    """Shape of one launch without clusters, which CuPy cannot ask for: large batches run on one block.

    `shared_bytes` is what a block of the device can ask for.
    """
    return _load.gpu_plan(OPERATIONS[operation], sizes, shared_bytes, 1)


@cache
def _cupy() -> ModuleType:
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(
            f"cupy: expected CuPy 14 or newer, got {error!r}. Install cupy-cuda12x or cupy-cuda13x, whichever is "
            "the CUDA of this torch"
        ) from error
    return cupy


@cache
def _module() -> Any:
    """All kernels in one module; CuPy compiles it once per architecture and loads it once per device."""
    return _cupy().RawModule(code=source(), options=options(), backend="nvrtc", name_expressions=KERNELS)


@cache
def _kernel(name: str) -> Any:
    return _module().get_function(name)


@cache
def _shared_limit(device: int) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin


def _argument(value: ctypes.Structure | Tensor) -> Any:
    """A kernel parameter as CuPy takes it: structs, by value, as arrays of bytes."""
    import numpy as np

    if isinstance(value, ctypes.Structure):
        return np.frombuffer(bytes(value), np.uint8)
    return np.uint64(value.data_ptr())


def _launch(name: str, plan: Plan, device: torch.device, *parameters: ctypes.Structure | Tensor) -> None:
    arguments = tuple(map(_argument, (*parameters, plan)))
    with torch.cuda.device(device):
        kernel = _kernel(name)
        if plan.shared_bytes > PLAIN_SHARED:
            kernel.max_dynamic_shared_size_bytes = plan.shared_bytes
        with _cupy().cuda.Stream.from_external(torch.cuda.current_stream(device)):
            kernel((plan.blocks,), (plan.threads,), arguments, shared_mem=plan.shared_bytes)


class CupyKernels:
    """The five launches; arguments as `_bind.Kernels` says."""

    def select_and_pack(self, args: Args, sizes: Sizes, out: dict[str, Tensor], fresh: bool) -> None:
        device = args["confidence"].device
        plan = make_plan("select_and_pack", sizes, _shared_limit(device.index))
        _launch(
            SELECT[plan.storage], plan, device, _params.rows(args, sizes), _params.scores(args),
            _params.tables(args, sizes), _params.tokens(args), _params.packed(out, fresh),
            _params.decision(args, out["decision"], out["gains"]),
        )  # fmt: skip

    def log_prefix_sum(self, args: Args, sizes: Sizes, prefix: Tensor) -> None:
        plan = make_plan("log_prefix_sum", sizes)
        _launch(PREFIX, plan, prefix.device, _params.rows(args, sizes), _params.scores(args), prefix)

    def segmented_topk(self, args: Args, sizes: Sizes, keep: Tensor) -> None:
        plan = make_plan("segmented_topk", sizes)
        rows, tables = _params.rows(args, sizes), _params.tables(args, sizes)
        _launch(TOPK, plan, keep.device, rows, _params.scores(args), tables, keep)

    def bucket_argmax(self, args: Args, sizes: Sizes, decision: Tensor, gains: Tensor) -> None:
        plan = make_plan("bucket_argmax", sizes)
        rows, tables = _params.rows(args, sizes), _params.tables(args, sizes)
        written = _params.decision(args, decision, gains)
        _launch(ARGMAX, plan, decision.device, rows, _params.scores(args), tables, written)

    def pack_prefixes(self, args: Args, sizes: Sizes, out: dict[str, Tensor]) -> None:
        plan, keep_lens = make_plan("pack_prefixes", sizes), args["keep_lens"]
        _launch(
            PACK, plan, keep_lens.device, _params.rows(args, sizes), keep_lens, _params.tokens(args),
            _params.packed(out, True), _params.decision(args, out["decision"], out["gains"]),
        )  # fmt: skip
