"""The kernels of the backend "simt": the CUDA source executed on the CPU.  For tests, in editable installs only."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from . import _params, _simt  # type: ignore[attr-defined]
from ._check import Sizes

Args = dict[str, Any]


def _run(name: str, *arguments: ctypes.Structure | Tensor) -> None:
    """Call one emulated kernel with the addresses of its structs and arrays."""
    getattr(_simt, name)(*(a.data_ptr() if isinstance(a, Tensor) else ctypes.addressof(a) for a in arguments))


def select_and_pack(args: Args, sizes: Sizes, out: dict[str, Tensor], fresh: bool) -> None:
    _run(
        "select_and_pack",
        _params.rows(args, sizes),
        _params.scores(args),
        _params.tables(args, sizes),
        _params.tokens(args),
        _params.packed(out, fresh),
        _params.decision(args, out["decision"], out["gains"]),
    )


def log_prefix_sum(args: Args, sizes: Sizes, prefix: Tensor) -> None:
    _run("log_prefix_sum", _params.rows(args, sizes), _params.scores(args), prefix)


def segmented_topk(args: Args, sizes: Sizes, keep: Tensor) -> None:
    _run("segmented_topk", _params.rows(args, sizes), _params.scores(args), _params.tables(args, sizes), keep)


def bucket_argmax(args: Args, sizes: Sizes, decision: Tensor, gains: Tensor) -> None:
    results = _params.decision(args, decision, gains)
    _run("bucket_argmax", _params.rows(args, sizes), _params.scores(args), _params.tables(args, sizes), results)


def pack_prefixes(args: Args, sizes: Sizes, out: dict[str, Tensor]) -> None:
    results = _params.decision(args, out["decision"], out["gains"])
    rows, tokens, packed = _params.rows(args, sizes), _params.tokens(args), _params.packed(out, True)
    _run("pack_prefixes", rows, args["keep_lens"], tokens, packed, results)
