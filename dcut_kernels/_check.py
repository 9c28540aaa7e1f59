"""Argument checks of the Python backends; the compiled ones make the same checks with the same words.

Every message reads ``name: expected X, got Y``.  Only what the host can see is checked here; values that live in
tensors are made harmless by the backends instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._schema import (
    MAX_BATCH_LAUNCH,
    MAX_BUCKETS,
    MAX_DRAFT_LEN,
    MAX_DRAFTS_LAUNCH,
    MAX_TOKENS_CPU,
    OUTPUTS,
    STATISTICS,
)

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
IDS = (torch.int32, torch.int64)
INT32 = (torch.int32,)
INT64 = (torch.int64,)
FLOAT32 = (torch.float32,)
INT32_MAX = 2**31 - 1
CALIBRATION_CELLS = 64
POLICIES = ("argmax", "early_stop", "history")
ROW_OPTIONS = ("draft_lens", "min_keep", "max_keep", "weight", "base_lens", "num_reqs")


@dataclass(frozen=True)
class Sizes:
    """The shape of one call: batch ``B``, table ``slots``, draft length ``D``, buckets ``R``, packed ``capacity``."""

    batch: int
    slots: int
    draft_len: int
    buckets: int
    capacity: int


def fail(name: str, expected: object, got: object) -> None:
    raise RuntimeError(f"{name}: expected {expected}, got {got}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _one_of(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _shape(dims: Sequence[int | None]) -> str:
    return "[" + ", ".join("*" if d is None else str(d) for d in dims) + "]"


def defined(name: str, t: object) -> None:
    if not isinstance(t, torch.Tensor):
        fail(name, "a tensor", "None" if t is None else type(t).__name__)


def tensor(
    name: str, t: torch.Tensor, dtypes: Sequence[torch.dtype], dims: Sequence[int | None], device: torch.device
) -> None:
    """Check rank and shape (None: any size), dtype, device and contiguity of one tensor."""
    defined(name, t)
    if t.dim() != len(dims) or any(d is not None and d != s for d, s in zip(dims, t.shape, strict=True)):
        fail(name, f"shape {_shape(dims)}", _shape(t.shape))
    if t.dtype not in dtypes:
        fail(name, f"dtype {_one_of([_name(d) for d in dtypes])}", _name(t.dtype))
    if t.device != device:
        fail(name, f"device {device}", t.device)
    if not t.is_contiguous():
        fail(name, "a contiguous tensor", f"strides {_shape(t.stride())} for shape {_shape(t.shape)}")


def optional(
    name: str,
    t: torch.Tensor | None,
    dtypes: Sequence[torch.dtype],
    dims: Sequence[int | None],
    device: torch.device,
) -> None:
    if t is not None:
        tensor(name, t, dtypes, dims, device)


def table(name: str, t: torch.Tensor, dtypes: Sequence[torch.dtype], device: torch.device) -> int:
    """Check one bucket table, [R] or [M, R], and return R."""
    defined(name, t)
    if t.dim() not in (1, 2):
        fail(name, "shape [R] or [M, R]", _shape(t.shape))
    if t.dim() == 2 and t.shape[0] < 1:
        fail(name, "at least one row", _shape(t.shape))
    tensor(name, t, dtypes, t.shape, device)
    return t.shape[-1]


def budget_table(budgets: torch.Tensor, device: torch.device) -> int:
    buckets = table("budgets", budgets, INT32, device)
    if buckets > MAX_BUCKETS:
        fail("budgets", f"at most {MAX_BUCKETS} buckets", buckets)
    return buckets


def cost_table(costs: torch.Tensor, budgets: torch.Tensor, device: torch.device) -> None:
    buckets = table("costs", costs, FLOAT32, device)
    if buckets != budgets.shape[-1]:
        fail("costs", f"{budgets.shape[-1]} buckets, as in budgets", _shape(costs.shape))
    if budgets.dim() == costs.dim() == 2 and budgets.shape[0] != costs.shape[0]:
        fail("costs", f"{budgets.shape[0]} rows, as in budgets", _shape(costs.shape))


def row_options(batch: int, device: torch.device, **given: torch.Tensor | None) -> None:
    """Check the per-row options: int32 [B], weight float32 [B], num_reqs int32 [1]."""
    for name, t in given.items():
        dims = [1] if name == "num_reqs" else [batch]
        optional(name, t, FLOAT32 if name == "weight" else INT32, dims, device)


def paging(block_table: torch.Tensor | None, block_size: int, batch: int, device: torch.device) -> None:
    optional("block_table", block_table, INT32, [batch, None], device)
    if block_table is not None and not 1 <= block_size <= INT32_MAX:
        fail("block_size", f"1 to {INT32_MAX} with a block_table", block_size)


def score_name(value: str) -> None:
    if value not in ("inclusive", "shifted"):
        fail("score", "'inclusive' or 'shifted'", f"'{value}'")


def calibration(t: torch.Tensor | None, width: int, device: torch.device) -> None:
    optional("calibration", t, INT32, [width, CALIBRATION_CELLS + 1], device)


def envelope(t: torch.Tensor | None, budgets: torch.Tensor, policy: str, device: torch.device) -> None:
    if policy != "early_stop":
        if t is not None:
            fail("envelope", "None without policy 'early_stop'", "a tensor")
        return
    if t is None:
        fail("envelope", "a tensor with policy 'early_stop'", "None")
    assert t is not None
    if t.dim() not in (2, 3):
        fail("envelope", "shape [R, 2] or [M, R, 2]", _shape(t.shape))
    if t.dim() == 3 and t.shape[0] < 1:
        fail("envelope", "at least one row", _shape(t.shape))
    rows = [budgets.shape[0] if budgets.dim() == 2 else None] if t.dim() == 3 else []
    tensor("envelope", t, INT32, [*rows, budgets.shape[-1], 2], device)


def history(args: dict[str, Any], device: torch.device) -> None:
    """Check the budget that is given, and where the one of the next step goes."""
    budget, next_budget, host_budget = args["budget"], args["next_budget"], args["host_budget"]
    optional("budget", budget, INT32, [1], device)
    if args["policy"] == "history" and budget is None:
        fail("budget", "a value with policy 'history'", "None")
    if args["policy"] == "history" and next_budget is None:
        fail("next_budget", "a tensor with policy 'history'", "None")
    optional("next_budget", next_budget, INT32, [2], device)
    if host_budget is not None and next_budget is None:
        fail("host_budget", "None without next_budget", "a tensor")
    optional("host_budget", host_budget, INT64, [1], torch.device("cpu"))


def policy(args: dict[str, Any], device: torch.device) -> None:
    """Check how the budget is chosen."""
    if args["policy"] not in POLICIES:
        fail("policy", "'argmax', 'early_stop' or 'history'", f"'{args['policy']}'")
    history(args, device)
    envelope(args["envelope"], args["budgets"], args["policy"], device)
    if args["host_budget"] is not None and device.type == "cuda" and not args["host_budget"].is_pinned():
        fail("host_budget", "a tensor in pinned memory", "one in pageable memory")


def draft_len(name: str, size: int) -> None:
    if size > MAX_DRAFT_LEN:
        fail(name, f"at most {MAX_DRAFT_LEN} draft tokens a row", size)


def size_limits(name: str, batch: int, slots: int, width: int, one_launch: bool) -> None:
    """Check the sizes against what the CPU path, or one launch on a GPU, takes."""
    if one_launch and batch > MAX_BATCH_LAUNCH:
        fail(name, f"at most {MAX_BATCH_LAUNCH} requests in one GPU launch", batch)
    if one_launch and batch * width > MAX_DRAFTS_LAUNCH:
        fail(name, f"batch * draft tokens at most {MAX_DRAFTS_LAUNCH} in one GPU launch", batch * width)
    if batch * (width + 1) >= MAX_TOKENS_CPU:
        fail(name, f"batch * (draft tokens + 1) below {MAX_TOKENS_CPU}", batch * (width + 1))
    if slots * width > INT32_MAX:
        fail(name, f"slots * draft tokens at most {INT32_MAX}", slots * width)


def pad_value(value: int, ids_dtype: torch.dtype) -> None:
    if ids_dtype == torch.int32 and not -(2**31) <= value <= INT32_MAX:
        fail("pad_token", "a value of int32, as draft_ids", value)


def resolve_capacity(value: int | None, batch: int, width: int, has_base: bool, out: int | None = None) -> int:
    """Resolve and check the packed capacity; ``out`` is the capacity of given output buffers."""
    if value is None:
        if out is None and has_base:
            fail("capacity", "a value, since base_lens is given", "None")
        value = batch * (width + 1) if out is None else out
    if not batch <= value <= INT32_MAX:
        fail("capacity", f"{batch} (the batch) to {INT32_MAX}", value)
    if out is not None and value != out:
        fail("capacity", f"{out}, the size of out's token_ids", value)
    return value


def drafts(args: dict[str, Any], device: torch.device, one_launch: bool) -> tuple[int, int, int]:
    """Check the token inputs and return (batch, slots, draft_len)."""
    draft_ids, bonus_ids, row_index = args["draft_ids"], args["bonus_ids"], args["row_index"]
    tensor("draft_ids", draft_ids, IDS, [None, None], device)
    tensor("bonus_ids", bonus_ids, (draft_ids.dtype,), [None], device)
    batch, (slots, width) = bonus_ids.shape[0], draft_ids.shape
    draft_len("draft_ids", width)
    if row_index is None and slots != batch:
        fail("draft_ids", f"{batch} rows, as bonus_ids, without row_index", slots)
    tensor("seq_lens", args["seq_lens"], IDS, [batch], device)
    optional("row_index", row_index, INT32, [batch], device)
    size_limits("draft_ids", batch, slots, width, one_launch)
    return batch, slots, width


def out_shapes(sizes: Sizes, ids_dtype: torch.dtype) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Dtype and shape of every result, in the order of the schema."""
    batch, capacity = sizes.batch, sizes.capacity
    shapes = {name: (torch.int32, [capacity]) for name in OUTPUTS}
    shapes |= {"keep_lens": (torch.int32, [batch]), "cu_seqlens": (torch.int32, [batch + 1])}
    shapes |= {"kv_lens": (torch.int32, [batch]), "token_ids": (ids_dtype, [capacity])}
    shapes |= {"positions": (torch.int64, [capacity]), "slot_mapping": (torch.int64, [capacity])}
    return shapes | {"decision": (torch.int32, [4]), "gains": (torch.int64, [sizes.buckets])}


def select_and_pack(args: dict[str, Any], out: dict[str, torch.Tensor] | None, one_launch: bool = False) -> Sizes:
    """All checks of the fused operator, in the order in which every backend makes them."""
    defined("confidence", args["confidence"])
    device = args["confidence"].device
    batch, slots, width = drafts(args, device, one_launch)
    tensor("confidence", args["confidence"], FLOATS, [slots, width], device)
    buckets = budget_table(args["budgets"], device)
    cost_table(args["costs"], args["budgets"], device)
    row_options(batch, device, **{n: args[n] for n in ROW_OPTIONS})
    paging(args["block_table"], args["block_size"], batch, device)
    score_name(args["score"])
    policy(args, device)
    calibration(args["calibration"], width, device)
    return packed(args, batch, slots, width, buckets, out)


def packed(
    args: dict[str, Any], batch: int, slots: int, width: int, buckets: int, out: dict[str, torch.Tensor] | None = None
) -> Sizes:
    """Check what shapes the packed results: pad token, capacity, and the output buffers when they are given."""
    ids, device = args["draft_ids"].dtype, args["draft_ids"].device
    pad_value(args["pad_token"], ids)
    if out is not None:
        tensor("token_ids", out["token_ids"], (ids,), [None], device)
    out_capacity = None if out is None else out["token_ids"].shape[0]
    capacity = resolve_capacity(args["capacity"], batch, width, args["base_lens"] is not None, out_capacity)
    sizes = Sizes(batch, slots, width, buckets, capacity)
    if out is not None:
        for name, (dtype, dims) in out_shapes(sizes, ids).items():
            tensor(name, out[name], (dtype,), dims, device)
    return sizes


def log_prefix_sum(args: dict[str, Any], one_launch: bool = False) -> Sizes:
    confidence, row_index = args["confidence"], args["row_index"]
    defined("confidence", confidence)
    tensor("confidence", confidence, FLOATS, [None, None], confidence.device)
    slots, width = confidence.shape
    draft_len("confidence", width)
    optional("row_index", row_index, INT32, [None], confidence.device)
    batch = slots if row_index is None else row_index.shape[0]
    size_limits("confidence", batch, slots, width, one_launch)
    score_name(args["score"])
    calibration(args["calibration"], width, confidence.device)
    return Sizes(batch, slots, width, 0, 0)


def ranked(args: dict[str, Any], one_launch: bool = False) -> Sizes:
    """Checks that `segmented_topk` and `bucket_argmax` share."""
    prefix = args["prefix"]
    defined("prefix", prefix)
    tensor("prefix", prefix, INT32, [None, None], prefix.device)
    batch, width = prefix.shape
    draft_len("prefix", width)
    size_limits("prefix", batch, batch, width, one_launch)
    buckets = budget_table(args["budgets"], prefix.device)
    if "costs" in args:
        cost_table(args["costs"], args["budgets"], prefix.device)
    row_options(batch, prefix.device, **{n: args[n] for n in ROW_OPTIONS})
    capacity = resolve_capacity(args["capacity"], batch, width, args["base_lens"] is not None)
    return Sizes(batch, batch, width, buckets, capacity)


def bucket_argmax(args: dict[str, Any], one_launch: bool = False) -> Sizes:
    sizes = ranked(args, one_launch)
    policy(args, args["prefix"].device)
    return sizes


def pack_prefixes(args: dict[str, Any], one_launch: bool = False) -> Sizes:
    defined("draft_ids", args["draft_ids"])
    device = args["draft_ids"].device
    batch, slots, width = drafts(args, device, one_launch)
    tensor("keep_lens", args["keep_lens"], INT32, [batch], device)
    row_options(batch, device, base_lens=args["base_lens"], num_reqs=args["num_reqs"])
    paging(args["block_table"], args["block_size"], batch, device)
    return packed(args, batch, slots, width, 0)


def draft_confidence(args: dict[str, Any], one_launch: bool = False) -> None:
    logits = args["logits"]
    defined("logits", logits)
    tensor("logits", logits, FLOATS, [None, None, None], logits.device)
    batch, width, vocab = logits.shape
    draft_len("logits", width)
    size_limits("logits", batch, batch, width, one_launch)
    if not 1 <= vocab <= INT32_MAX:
        fail("logits", f"a vocabulary of 1 to {INT32_MAX} tokens", vocab)
    optional("temperature", args["temperature"], FLOAT32, [width], logits.device)
    optional("draft_ids", args["draft_ids"], INT64, [batch, width], logits.device)
    for name in args["statistics"]:
        if name not in STATISTICS:
            fail("statistics", _one_of([f"'{known}'" for known in STATISTICS]), f"'{name}'")
