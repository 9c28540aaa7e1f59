"""What a planner refuses."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from . import ops
from ._check import INT32_MAX
from .batch import VerifyBatch
from .calibration import Calibration
from .cost import CostTable
from .cost._values import integer, number, require

POLICIES = ("argmax", "early_stop", "history")
OWN = {"budget", "next_budget", "host_budget", "envelope", "calibration", "policy", "score", "out"}


def check_options(
    table: CostTable, draft_len: int, policy: str, floor: int, floor_every: int, min_gain: float, probe_every: int,
    capacity: int | None, authority: str, agree: bool,
) -> None:  # fmt: skip
    """Arguments of `Planner`."""
    require("table", isinstance(table, CostTable), "a CostTable", type(table).__name__)
    of_table = getattr(table.rule, "draft_len", draft_len)
    require("table", of_table == draft_len, f"buckets for {draft_len} drafts (draft_len)", of_table)
    for name, value, least in (
        ("draft_len", draft_len, 0), ("floor", floor, 0), ("floor_every", floor_every, 0),
        ("probe_every", probe_every, 1), ("capacity", 1 if capacity is None else capacity, 1),
    ):  # fmt: skip
        integer(name, value, least)
    require("min_gain", 0 <= number("min_gain", min_gain) < INT32_MAX, "0 or more", min_gain)
    require("policy", policy in POLICIES, f"one of {', '.join(POLICIES)}", repr(policy))
    require("authority", authority in ("all", "rank0"), "'all' or 'rank0'", repr(authority))
    require("agree", not agree or authority == "all", "False with authority='rank0'", agree)
    require("agree", not agree or policy == "history", f"False with policy {policy!r}", agree)


def check_rows(rows: int, max_batch: int, name: str) -> int:
    """A number of rows."""
    valid = isinstance(rows, Integral) and 0 <= rows <= max_batch
    require(name, valid, f"0 to {max_batch} rows (max_batch)", rows)
    return rows


def rows_of(name: str, values: Collection[Any], max_batch: int) -> int:
    """Rows of what holds one value for each."""
    listed = values.dim() > 0 if isinstance(values, Tensor) else isinstance(values, Collection)
    require(name, listed, "one value a row", type(values).__name__)
    return check_rows(len(values), max_batch, name)


def check_timed(batch: int, max_batch: int, tokens: int, milliseconds: float) -> int:
    """Arguments of `Planner.timed`; returns the rows."""
    require("batch", check_rows(batch, max_batch, "batch") > 0, f"1 to {max_batch} rows (max_batch)", batch)
    integer("tokens", tokens, batch)
    require("milliseconds", 0 < number("milliseconds", milliseconds) < math.inf, "above 0, finite", milliseconds)
    return batch


def check_backend(backend: ops.Backend | None, ids: torch.dtype, calibration: Calibration | None) -> None:
    """More arguments of `Planner`."""
    known = backend is None or isinstance(backend, ops.Backend)
    require("backend", known, "a Backend of backends.get", repr(backend))
    require("ids", ids in (torch.int32, torch.int64), "torch.int32 or torch.int64", ids)
    compiles = calibration is None or callable(getattr(calibration, "table", None))
    require("calibration", compiles, "an object with a method table", repr(calibration))


def check_call(
    confidence: Tensor, draft_ids: Tensor, ids: torch.dtype, draft_len: int, options: Mapping[str, Any], own: set[str]
) -> None:
    """Arguments of `Planner.select`; `own` are the options that the planner sets."""
    for name, given in (("confidence", confidence), ("draft_ids", draft_ids)):
        require(name, isinstance(given, Tensor), "a tensor", type(given).__name__)
    require("draft_ids", draft_ids.dtype == ids, f"{ids} (ids of the planner)", draft_ids.dtype)
    if confidence.dim() == 2:
        columns = confidence.shape[1]
        require("confidence", columns == draft_len, f"{draft_len} columns (draft_len)", columns)
    for name in own & set(options):
        require(name, options[name] is None, "to be left to the planner", "a value")


def kept_of(batch: VerifyBatch) -> list[int]:
    """Drafts kept of each row of a step."""
    require("batch", isinstance(batch, VerifyBatch), "what select returned", type(batch).__name__)
    return batch.keep_lens.tolist()


def check_drafts(draft_lens: Sequence[int], kept: Sequence[int], most: int) -> list[int]:
    """Drafts kept of each row, none of a row that does not count."""
    require("requests", len(draft_lens) == len(kept), f"{len(kept)}, the rows of the batch", len(draft_lens))
    for n, keep in zip(draft_lens, kept, strict=True):
        require("draft_lens", n == 0 or keep <= n <= most, f"0, or {keep} (kept) to {most} (draft_len)", n)
    return [keep if n else 0 for n, keep in zip(draft_lens, kept, strict=True)]


def check_accepted(accepted: Sequence[int], kept: Sequence[int]) -> None:
    """Accepted drafts of each row."""
    for n, most in zip(accepted, kept, strict=True):
        require("accepted", 0 <= n <= most, f"0 to {most}, the drafts kept of its row", n)


def counts(name: str, values: Sequence[int] | Tensor, rows: int) -> list[int]:
    """Whole numbers, one a row."""
    given = values.tolist() if isinstance(values, Tensor) else values
    given = list(given) if isinstance(given, Iterable) else given
    whole = (
        isinstance(given, list) and len(given) == rows and all(type(n) is int or isinstance(n, Integral) for n in given)
    )
    require(name, whole, f"{rows} ints", given)
    return [int(n) for n in given]


def weight_of(priority: float, allowed: bool) -> float:
    """Weight of a request that joins with a priority; other than 1 only where `allowed`."""
    require("priority", number("priority", priority) > 0, "a number above 0", priority)
    require("priority", allowed or priority == 1, "1 in a planner without priorities=True", priority)
    return float(priority)


def check_state(state: Mapping[str, Any], own: Mapping[str, Any], priorities: bool) -> None:
    """What `Planner.load_state_dict` gets; `own` is the planner's present one."""
    require("state", isinstance(state, Mapping), "what state_dict returned", type(state).__name__)
    missing = sorted(set(own) - set(state))
    require("state", not missing, "what state_dict returned", f"one without {', '.join(missing)}")
    for name in ("steps", "priority", "calibration"):
        require("state", isinstance(state[name], type(own[name])), f"{name} as state_dict returned it", state[name])
    for priority in state["priority"].values():
        weight_of(priority, priorities)
    for name in ("rule", "draft_len"):
        require("state", state[name] == own[name], f"{name} {own[name]}", state[name])
