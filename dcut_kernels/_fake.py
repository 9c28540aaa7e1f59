"""Shapes and dtypes of every result, for tracing; apart from devices, all checks stay with the operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._check import Sizes, fail, out_shapes
from ._schema import parse


def _packed(draft_ids: Tensor, batch: int, buckets: int, capacity: int | None) -> tuple[Tensor, ...]:
    slots, width = draft_ids.shape
    sizes = Sizes(batch, slots, width, buckets, batch * (width + 1) if capacity is None else capacity)
    shapes = out_shapes(sizes, draft_ids.dtype).values()
    return tuple(draft_ids.new_empty(dims, dtype=dtype) for dtype, dims in shapes)


def select_and_pack(
    confidence: Tensor, draft_ids: Tensor, bonus_ids: Tensor, seq_lens: Tensor, budgets: Tensor, costs: Tensor,
    *, capacity: int | None = None, **_: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _packed(draft_ids, bonus_ids.shape[0], budgets.shape[-1], capacity)


def select_and_pack_out(*_: object, **__: object) -> None:
    return None


def log_prefix_sum(confidence: Tensor, *, row_index: Tensor | None = None, **_: object) -> Tensor:
    batch = (confidence if row_index is None else row_index).shape[0]
    return confidence.new_empty([batch, confidence.shape[1]], dtype=torch.int32)


def segmented_topk(prefix: Tensor, budgets: Tensor, **_: object) -> Tensor:
    return prefix.new_empty([budgets.shape[-1], prefix.shape[0]], dtype=torch.int32)


def bucket_argmax(prefix: Tensor, budgets: Tensor, costs: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    return prefix.new_empty([4], dtype=torch.int32), prefix.new_empty([budgets.shape[-1]], dtype=torch.int64)


def pack_prefixes(
    keep_lens: Tensor,
    draft_ids: Tensor,
    bonus_ids: Tensor,
    seq_lens: Tensor,
    *,
    capacity: int | None = None,
    **_: object,
) -> tuple[Tensor, ...]:
    return _packed(draft_ids, bonus_ids.shape[0], 0, capacity)


def draft_confidence(logits: Tensor, *, statistics: Sequence[str], **_: object) -> tuple[Tensor, Tensor]:
    rows = logits.shape[:2]
    ids = logits.new_empty(rows, dtype=torch.int64)
    return ids, logits.new_empty([len(statistics), *rows], dtype=torch.float32)


FAKES: dict[str, Callable[..., Any]] = {
    "select_and_pack": select_and_pack,
    "select_and_pack.out": select_and_pack_out,
    "log_prefix_sum": log_prefix_sum,
    "segmented_topk": segmented_topk,
    "bucket_argmax": bucket_argmax,
    "pack_prefixes": pack_prefixes,
    "draft_confidence": draft_confidence,
}


def _on_one_device(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a meta tensor among others: torch sends such a call here and would return what the fake allocates."""
    names = [argument.name for argument in parse(name).arguments]

    def checked(*positional: Any, **keywords: Any) -> Any:
        given = dict(zip(names, positional, strict=False)) | keywords
        tensors = {n: t for n, t in given.items() if isinstance(t, Tensor)}
        first = next(iter(tensors.values())).device
        for n, t in tensors.items():
            device = torch.device("cpu") if n == "host_budget" and first.type != "meta" else first
            if t.device != device:
                fail(n, f"device {device}", t.device)
        return fake(*positional, **keywords)

    return checked


def register(namespace: str, library: torch.library.Library) -> None:
    """Register the fake of every operator of one namespace."""
    for name, fake in FAKES.items():
        torch.library.register_fake(f"{namespace}::{name}", _on_one_device(name, fake), lib=library)
