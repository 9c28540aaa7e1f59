"""Calls that must be refused: what one is, and those about how the budget is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Bad(NamedTuple):
    """One call that must fail: `args` replaces valid arguments, `out` replaces buffers of a valid `out`."""

    op: str
    message: str
    args: dict[str, Any] = {}  # noqa: RUF012
    out: dict[str, Any] | None = None

    def __str__(self) -> str:
        return f"{self.op}-{self.message.split(', got')[0]}".replace(" ", "_")


def int32(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int32)


def gapped(t: Tensor) -> Tensor:
    """The same values, every second element of a longer tensor."""
    return torch.stack((t, t), -1)[..., 0]


def policies(op: str) -> Iterator[Bad]:
    """How the budget is chosen, and where the next one goes."""
    yield Bad(op, "policy: expected 'argmax', 'early_stop' or 'history', got 'greedy'", {"policy": "greedy"})
    envelope, pair, host = int32(5, 2), int32(2), torch.zeros(1, dtype=torch.int64)
    for policy in ("argmax", "history"):
        yield Bad(
            op, "envelope: expected None without policy 'early_stop', got a tensor",
            {"policy": policy, "envelope": envelope, "budget": int32(1), "next_budget": pair},
        )  # fmt: skip
    yield Bad(op, "envelope: expected a tensor with policy 'early_stop', got None", {"policy": "early_stop"})
    for bad, problem in (
        (int32(5), "shape [R, 2] or [M, R, 2], got [5]"),
        (int32(0, 5, 2), "at least one row, got [0, 5, 2]"),
        (int32(4, 2), "shape [5, 2], got [4, 2]"),
        (int32(3, 5, 1), "shape [*, 5, 2], got [3, 5, 1]"),
        (envelope.float(), "dtype int32, got float32"),
        (envelope.to("meta"), "device cpu, got meta"),
        (gapped(envelope), "a contiguous tensor, got strides [4, 2] for shape [5, 2]"),
    ):
        yield Bad(op, f"envelope: expected {problem}", {"policy": "early_stop", "envelope": bad})
    tables = {"budgets": int32(2, 5), "costs": torch.ones(2, 5)}
    message = "envelope: expected shape [2, 5, 2], got [3, 5, 2]"
    yield Bad(op, message, tables | {"policy": "early_stop", "envelope": int32(3, 5, 2)})
    yield Bad(op, "budget: expected a value with policy 'history', got None", {"policy": "history"})
    yield Bad(
        op, "next_budget: expected a tensor with policy 'history', got None",
        {"policy": "history", "budget": int32(1)},
    )  # fmt: skip
    for bad, problem in (
        (int32(1), "shape [2], got [1]"),
        (pair.long(), "dtype int32, got int64"),
        (pair.to("meta"), "device cpu, got meta"),
        (gapped(pair), "a contiguous tensor, got strides [2] for shape [2]"),
    ):
        yield Bad(op, f"next_budget: expected {problem}", {"next_budget": bad})
    yield Bad(op, "host_budget: expected None without next_budget, got a tensor", {"host_budget": host})
    for bad, problem in (
        (host.new_zeros(2), "shape [1], got [2]"),
        (host.int(), "dtype int64, got int32"),
        (host.to("meta"), "device cpu, got meta"),
    ):
        yield Bad(op, f"host_budget: expected {problem}", {"next_budget": pair, "host_budget": bad})
