"""Operators of the backends that are called from Python: bind arguments, check, allocate, run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from . import _check
from ._check import Sizes
from ._schema import OUTPUTS, parse

Args = dict[str, Any]


class Kernels(Protocol):
    """What such a backend provides: each function writes all results in place.

    ``args`` holds every argument of the schema by name; ``out`` the results by name.  ``fresh``: the buffers are new,
    so earlier base tokens get the tail values.
    """

    def select_and_pack(self, args: Args, sizes: Sizes, out: dict[str, Tensor], fresh: bool) -> None: ...
    def log_prefix_sum(self, args: Args, sizes: Sizes, prefix: Tensor) -> None: ...
    def segmented_topk(self, args: Args, sizes: Sizes, keep: Tensor) -> None: ...
    def bucket_argmax(self, args: Args, sizes: Sizes, decision: Tensor, gains: Tensor) -> None: ...
    def pack_prefixes(self, args: Args, sizes: Sizes, out: dict[str, Tensor]) -> None: ...


def _named(name: str, function: Callable) -> Callable:
    """Call `function` with a dict of every argument of the schema, defaults filled in."""
    arguments = parse(name).arguments
    names, defaults = [a.name for a in arguments], {a.name: a.default_value for a in arguments}

    def call(*positional: Any, **keywords: Any) -> Any:
        return function(defaults | dict(zip(names, positional, strict=False)) | keywords)

    return call


def _empty(sizes: Sizes, like: Tensor) -> dict[str, Tensor]:
    shapes = _check.out_shapes(sizes, like.dtype).items()
    return {name: torch.empty(dims, dtype=dtype, device=like.device) for name, (dtype, dims) in shapes}


class _Operators:
    def __init__(self, kernels: Kernels, one_launch: bool) -> None:
        self.kernels, self.one_launch = kernels, one_launch

    def select_and_pack(self, args: Args) -> tuple[Tensor, ...]:
        sizes = _check.select_and_pack(args, None, self.one_launch)
        out = _empty(sizes, args["draft_ids"])
        self.kernels.select_and_pack(args, sizes, out, True)
        return tuple(out.values())

    def select_and_pack_out(self, args: Args) -> None:
        out = {name: args[name] for name in OUTPUTS}
        self.kernels.select_and_pack(args, _check.select_and_pack(args, out, self.one_launch), out, False)

    def log_prefix_sum(self, args: Args) -> Tensor:
        sizes = _check.log_prefix_sum(args, self.one_launch)
        prefix = args["confidence"].new_empty([sizes.batch, sizes.draft_len], dtype=torch.int32)
        self.kernels.log_prefix_sum(args, sizes, prefix)
        return prefix

    def segmented_topk(self, args: Args) -> Tensor:
        sizes = _check.ranked(args, self.one_launch)
        keep = args["prefix"].new_empty([sizes.buckets, sizes.batch])
        self.kernels.segmented_topk(args, sizes, keep)
        return keep

    def bucket_argmax(self, args: Args) -> tuple[Tensor, Tensor]:
        sizes = _check.bucket_argmax(args, self.one_launch)
        decision = args["prefix"].new_empty([4])
        gains = args["prefix"].new_empty([sizes.buckets], dtype=torch.int64)
        self.kernels.bucket_argmax(args, sizes, decision, gains)
        return decision, gains

    def pack_prefixes(self, args: Args) -> tuple[Tensor, ...]:
        sizes = _check.pack_prefixes(args, self.one_launch)
        out = _empty(sizes, args["draft_ids"])
        self.kernels.pack_prefixes(args, sizes, out)
        return tuple(out.values())


class ConfidenceKernel(Protocol):
    """Fills `draft_ids` int64 [B, D] and `values` float32 [S, B, D]; ``args`` holds the arguments by name."""

    def __call__(self, args: Args, draft_ids: Tensor, values: Tensor) -> None: ...


def register_confidence(
    library: torch.library.Library, key: str, kernel: ConfidenceKernel, *, one_launch: bool
) -> None:
    """Implement `draft_confidence` of one namespace for one dispatch key; parameters as in `register`."""

    def draft_confidence(args: Args) -> tuple[Tensor, Tensor]:
        _check.draft_confidence(args, one_launch)
        logits = args["logits"]
        draft_ids = logits.new_empty(logits.shape[:2], dtype=torch.int64)
        values = logits.new_empty([len(args["statistics"]), *draft_ids.shape], dtype=torch.float32)
        kernel(args, draft_ids, values)
        return draft_ids, values

    library.impl("draft_confidence", _named("draft_confidence", draft_confidence), key)


def register(library: torch.library.Library, key: str, kernels: Kernels, *, one_launch: bool) -> None:
    """Implement every operator of one namespace for one dispatch key.

    Parameters
    ----------
    library : torch.library.Library
        Of a namespace that `_schema.define` made.
    key : str
        Dispatch key, such as "CPU" or "CUDA".
    kernels : Kernels
    one_launch : bool
        Whether the sizes are limited to what one GPU launch takes.
    """
    operators = _Operators(kernels, one_launch)
    for name in ("select_and_pack", "log_prefix_sum", "segmented_topk", "bucket_argmax", "pack_prefixes"):
        library.impl(name, _named(name, getattr(operators, name)), key)
    library.impl("select_and_pack.out", _named("select_and_pack.out", operators.select_and_pack_out), key)
