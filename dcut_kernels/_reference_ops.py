"""The operators of the reference backend: check, turn tensors into lists, call `reference`, turn lists into tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import _check, reference
from ._schema import OUTPUTS, parse

ROW_INPUTS = ("draft_lens", "min_keep", "max_keep", "weight", "row_index", "base_lens", "num_reqs")


def _bound(name: str, function: Callable) -> Callable:
    """Call `function` with every argument of the schema by name, defaults filled in."""
    arguments = parse(name).arguments

    def call(*positional: Any, **keywords: Any) -> Any:
        args = {a.name: a.default_value for a in arguments}
        args.update(zip(args, positional, strict=False))
        args.update(keywords)
        return function(args)

    return call


def _list(t: torch.Tensor | None) -> Any:
    if t is None:
        return None
    return (t.float() if t.is_floating_point() else t).tolist()


def _rows(args: dict[str, Any], sizes: _check.Sizes) -> list[reference.Row]:
    given = {name: _list(args.get(name)) for name in ROW_INPUTS}
    return reference.read_rows(sizes.batch, sizes.slots, sizes.draft_len, **given)


def _decide(
    step: reference.Step, args: dict[str, Any], device: torch.device
) -> tuple[reference.Decision, torch.Tensor, torch.Tensor]:
    budget = None if args["budget"] is None else int(args["budget"])
    decision = reference.decide(step, _list(args["budgets"]), _list(args["costs"]), budget, args["count_bonus"])
    result = _decision(decision.bucket, decision.tokens, decision.padded, device)
    return decision, result, torch.tensor(decision.gains, dtype=torch.int64, device=device)


def _decision(bucket: int, tokens: int, padded: int, device: torch.device) -> torch.Tensor:
    tokens, padded = min(tokens, reference.INT32_MAX), min(padded, reference.INT32_MAX)
    return torch.tensor([bucket, tokens, tokens, padded], dtype=torch.int32, device=device)


def _empty(args: dict[str, Any], sizes: _check.Sizes) -> dict[str, torch.Tensor]:
    """Fresh results: every packed position holds its tail value, since earlier base tokens are not written."""
    tail = {"token_ids": args["pad_token"], "request_ids": -1, "slot_mapping": -1, "draft_index": -1}
    return {
        name: torch.full(dims, tail.get(name, 0), dtype=dtype, device=args["draft_ids"].device)
        for name, (dtype, dims) in _check.out_shapes(sizes, args["draft_ids"].dtype).items()
    }


def _pack(
    out: dict[str, torch.Tensor],
    args: dict[str, Any],
    rows: Sequence[reference.Row],
    keep: Sequence[int],
    draft_len: int,
) -> int:
    """Pack into `out` and return the total number of tokens."""
    packed = reference.Packed(**{name: out[name].tolist() for name in OUTPUTS[:9]}, total=0)
    inputs = {name: _list(args[name]) for name in ("draft_ids", "bonus_ids", "seq_lens", "block_table")}
    reference.pack(packed, rows, keep, draft_len, args["block_size"], args["pad_token"], **inputs)
    for name in OUTPUTS[:9]:
        out[name].copy_(torch.tensor(getattr(packed, name), dtype=out[name].dtype))
    return packed.total


def _select(args: dict[str, Any], out: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    sizes = _check.select_and_pack(args, out)
    out = out or _empty(args, sizes)
    rows = _rows(args, sizes)
    shifted, log = args["score"] == "shifted", args["log_confidence"]
    prefix = reference.prefix_sums(_list(args["confidence"]), rows, sizes.draft_len, shifted, log)
    step = reference.Step(rows, prefix, sizes.capacity)
    decision, decision_tensor, gains = _decide(step, args, args["confidence"].device)
    _pack(out, args, rows, step.depths(decision.tokens), sizes.draft_len)
    out["decision"].copy_(decision_tensor)
    out["gains"].copy_(gains)
    return out


def select_and_pack(args: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    return tuple(_select(args, None).values())


def select_and_pack_out(args: dict[str, Any]) -> None:
    _select(args, {name: args[name] for name in OUTPUTS})


def log_prefix_sum(args: dict[str, Any]) -> torch.Tensor:
    batch, slots, draft_len = _check.log_prefix_sum(args)
    rows = reference.read_rows(batch, slots, draft_len, row_index=_list(args["row_index"]))
    confidence = args["confidence"]
    prefix = reference.prefix_sums(
        _list(confidence), rows, draft_len, args["score"] == "shifted", args["log_confidence"]
    )
    return torch.tensor(prefix, dtype=torch.int32, device=confidence.device).reshape(batch, draft_len)


def _step(args: dict[str, Any], sizes: _check.Sizes) -> reference.Step:
    rows = _rows(args, sizes)
    return reference.Step(rows, reference.harmless_prefix(_list(args["prefix"]), rows), sizes.capacity)


def segmented_topk(args: dict[str, Any]) -> torch.Tensor:
    sizes = _check.ranked(args)
    step = _step(args, sizes)
    budgets = reference.table_row(_list(args["budgets"]), sum(row.active for row in step.rows))
    depths = [step.depths(step.clamp(budget)) for budget in budgets]
    return torch.tensor(depths, dtype=torch.int32, device=args["prefix"].device).reshape(sizes.buckets, sizes.batch)


def bucket_argmax(args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = _check.bucket_argmax(args)
    return _decide(_step(args, sizes), args, args["prefix"].device)[1:]


def pack_prefixes(args: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    sizes = _check.pack_prefixes(args)
    out = _empty(args, sizes)
    rows = _rows(args, sizes)
    keep = [min(max(kept, 0), row.drafts) for kept, row in zip(_list(args["keep_lens"]), rows, strict=True)]
    total = _pack(out, args, rows, keep, sizes.draft_len)
    out["decision"].copy_(_decision(-1, total, total, args["draft_ids"].device))
    return tuple(out.values())


OPERATORS = {
    "select_and_pack": select_and_pack,
    "select_and_pack.out": select_and_pack_out,
    "log_prefix_sum": log_prefix_sum,
    "segmented_topk": segmented_topk,
    "bucket_argmax": bucket_argmax,
    "pack_prefixes": pack_prefixes,
}


def register(library: torch.library.Library, key: str) -> None:
    """Implement every operator of one namespace with the reference, for one dispatch key."""
    for name, function in OPERATORS.items():
        library.impl(name, _bound(name, function), key)
