"""The kernels of the reference backend: turn tensors into lists, call `reference`, turn lists into tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import reference
from ._check import Sizes
from ._schema import OUTPUTS

ROW_INPUTS = ("draft_lens", "min_keep", "max_keep", "weight", "row_index", "base_lens", "num_reqs")


def _list(t: torch.Tensor | None) -> Any:
    if t is None:
        return None
    return (t.float() if t.is_floating_point() else t).tolist()


def _rows(args: dict[str, Any], sizes: Sizes) -> list[reference.Row]:
    given = {name: _list(args.get(name)) for name in ROW_INPUTS}
    return reference.read_rows(sizes.batch, sizes.slots, sizes.draft_len, **given)


def _write(result: torch.Tensor, values: Sequence) -> None:
    result.copy_(torch.tensor(values, dtype=result.dtype).reshape(result.shape))


def _decide(step: reference.Step, args: dict[str, Any], decision: torch.Tensor, gains: torch.Tensor) -> int:
    """Write decision and gains, and return the tokens of the step."""
    budget = None if args["budget"] is None else int(args["budget"])
    budgets, costs, envelope = (_list(args[name]) for name in ("budgets", "costs", "envelope"))
    made = reference.decide(step, budgets, costs, budget, args["count_bonus"], envelope)
    _write_decision(decision, made.bucket, made.tokens, made.padded)
    _write(gains, made.gains)
    if args["next_budget"] is not None:
        count = (int(args["next_budget"][1]) + 1) & 0xFFFFFFFF
        _write(args["next_budget"], [made.next_budget, reference.wrap(count, 32)])
        if args["host_budget"] is not None:
            args["host_budget"].fill_(reference.wrap(count << 32 | made.next_budget, 64))
    return made.tokens


def _write_decision(decision: torch.Tensor, bucket: int, tokens: int, padded: int) -> None:
    tokens, padded = min(tokens, reference.INT32_MAX), min(padded, reference.INT32_MAX)
    _write(decision, [bucket, tokens, tokens, padded])


def _fill_tails(out: dict[str, torch.Tensor], args: dict[str, Any]) -> None:
    """Every packed position of new buffers holds its tail value, since earlier base tokens are not written."""
    tail = {"token_ids": args["pad_token"], "request_ids": -1, "slot_mapping": -1, "draft_index": -1}
    for name in OUTPUTS:
        out[name].fill_(tail.get(name, 0))


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


def select_and_pack(args: dict[str, Any], sizes: Sizes, out: dict[str, torch.Tensor], fresh: bool) -> None:
    if fresh:
        _fill_tails(out, args)
    rows = _rows(args, sizes)
    shifted, log = args["score"] == "shifted", args["log_confidence"]
    calibration = _list(args["calibration"])
    prefix = reference.prefix_sums(_list(args["confidence"]), rows, sizes.draft_len, shifted, log, calibration)
    step = reference.Step(rows, prefix, sizes.capacity)
    tokens = _decide(step, args, out["decision"], out["gains"])
    _pack(out, args, rows, step.depths(tokens), sizes.draft_len)


def log_prefix_sum(args: dict[str, Any], sizes: Sizes, prefix: torch.Tensor) -> None:
    rows = reference.read_rows(sizes.batch, sizes.slots, sizes.draft_len, row_index=_list(args["row_index"]))
    shifted, log = args["score"] == "shifted", args["log_confidence"]
    confidence, calibration = _list(args["confidence"]), _list(args["calibration"])
    _write(prefix, reference.prefix_sums(confidence, rows, sizes.draft_len, shifted, log, calibration))


def _step(args: dict[str, Any], sizes: Sizes) -> reference.Step:
    rows = _rows(args, sizes)
    return reference.Step(rows, reference.harmless_prefix(_list(args["prefix"]), rows), sizes.capacity)


def segmented_topk(args: dict[str, Any], sizes: Sizes, keep: torch.Tensor) -> None:
    step = _step(args, sizes)
    budgets = reference.table_row(_list(args["budgets"]), sum(row.active for row in step.rows))
    _write(keep, [step.depths(step.clamp(budget)) for budget in budgets])


def bucket_argmax(args: dict[str, Any], sizes: Sizes, decision: torch.Tensor, gains: torch.Tensor) -> None:
    _decide(_step(args, sizes), args, decision, gains)


def pack_prefixes(args: dict[str, Any], sizes: Sizes, out: dict[str, torch.Tensor]) -> None:
    _fill_tails(out, args)
    rows = _rows(args, sizes)
    keep = [min(max(kept, 0), row.drafts) for kept, row in zip(_list(args["keep_lens"]), rows, strict=True)]
    total = _pack(out, args, rows, keep, sizes.draft_len)
    _write_decision(out["decision"], -1, total, total)
