"""The parameter structs of ``csrc/include/dcut/params.h`` for callers in Python, field by field in its order."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ._check import Sizes

_POINTER, _INT32, _INT64, _BOOL = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_bool
_FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)  # enum FloatType


def _fields(*names: str, type: Any = _POINTER) -> list[tuple[str, Any]]:
    return [(name, type) for name in names]


class Rows(ctypes.Structure):
    _fields_ = (
        *_fields("draft_lens", "min_keep", "max_keep", "weight", "row_index", "base_lens", "num_reqs"),
        *_fields("batch", "slots", "draft_len", "capacity", type=_INT32),
    )


class Scores(ctypes.Structure):
    _fields_ = (
        *_fields("confidence", "prefix", "calibration"),
        ("type", _INT32),
        *_fields("log", "shifted", type=_BOOL),
    )


class Tables(ctypes.Structure):
    _fields_ = (
        *_fields("budgets", "costs", "budget", "envelope"),
        *_fields("budget_rows", "cost_rows", "envelope_rows", "buckets", type=_INT32),
        ("count_bonus", _BOOL),
    )


class Tokens(ctypes.Structure):
    _fields_ = (
        *_fields("draft_ids", "bonus_ids", "seq_lens", "block_table"),
        ("pad_token", _INT64),
        *_fields("max_blocks", "block_size", type=_INT32),
        *_fields("ids_64", "seq_lens_64", type=_BOOL),
    )


class Packed(ctypes.Structure):
    _fields_ = (
        *_fields("keep_lens", "cu_seqlens", "kv_lens", "token_ids", "positions", "request_ids", "slot_mapping"),
        *_fields("draft_index", "logits_indices"),
        ("fill_gaps", _BOOL),
    )


class Decision(ctypes.Structure):
    _fields_ = _fields("decision", "gains", "next_budget", "host_budget")


class Plan(ctypes.Structure):
    """The launch shape, of ``csrc/include/dcut/plan.h``: a kernel's last parameter."""

    _fields_ = (
        *_fields("storage", "blocks", "threads", "targets", type=_INT32),
        ("shared_bytes", ctypes.c_uint32),
        *_fields("log_width", "turns", type=_INT32),
    )


def _pointers(*tensors: Tensor | None) -> list[int | None]:
    return [None if t is None else t.data_ptr() for t in tensors]


def _table_rows(t: Tensor | None, dims: int = 1) -> int:
    """Rows of a table; `dims`: of the table of one batch."""
    return t.shape[0] if t is not None and t.dim() > dims else 1


def rows(args: dict[str, Any], sizes: Sizes) -> Rows:
    return Rows(
        *_pointers(*(args.get(field[0]) for field in Rows._fields_[:7])),
        sizes.batch, sizes.slots, sizes.draft_len, sizes.capacity,
    )  # fmt: skip


def scores(args: dict[str, Any]) -> Scores:
    """Of confidences, or of the prefix sums that a part is given."""
    confidence = args.get("confidence")
    if confidence is None:
        return Scores(None, args["prefix"].data_ptr(), None, 0, False, False)
    shifted = args["score"] == "shifted"
    kind = _FLOAT_TYPES.index(confidence.dtype)
    return Scores(*_pointers(confidence, None, args["calibration"]), kind, args["log_confidence"], shifted)


def tables(args: dict[str, Any], sizes: Sizes) -> Tables:
    budgets, costs, envelope = args["budgets"], args.get("costs"), args.get("envelope")
    return Tables(
        *_pointers(budgets, costs, args.get("budget"), envelope),
        _table_rows(budgets), _table_rows(costs), _table_rows(envelope, 2), sizes.buckets,
        args.get("count_bonus", True),
    )  # fmt: skip


def tokens(args: dict[str, Any]) -> Tokens:
    draft_ids, seq_lens, block_table = args["draft_ids"], args["seq_lens"], args["block_table"]
    return Tokens(
        *_pointers(draft_ids, args["bonus_ids"], seq_lens, block_table),
        args["pad_token"], 0 if block_table is None else block_table.shape[1], args["block_size"],
        draft_ids.dtype == torch.int64, seq_lens.dtype == torch.int64,
    )  # fmt: skip


def packed(out: dict[str, Tensor], fresh: bool) -> Packed:
    return Packed(*_pointers(*(out[field[0]] for field in Packed._fields_[:9])), fresh)


def decision(args: dict[str, Any], decision: Tensor, gains: Tensor) -> Decision:
    return Decision(*_pointers(decision, gains, args.get("next_budget"), args.get("host_budget")))
