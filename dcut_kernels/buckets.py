"""The buckets that a planner offers: its cost table as tensors on the device."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .cost import CostTable, integer_envelope
from .cost._values import number, require

KNOWN = 4096  # steps whose buckets are kept


class StepTables(NamedTuple):
    """Buckets of one step."""

    budgets: Tensor  # int32 [R] or [M, R]
    costs: Tensor  # float32, alike
    envelope: Tensor | None  # int32 [R, 2] or [M, R, 2], for early stop
    host: tuple[list, list]  # budgets and costs once more

    def row(self, batch: int) -> tuple[list[int], list[float]]:
        """Budgets and costs of a batch, on the host."""
        budgets, costs = self.host
        return (budgets, costs) if self.budgets.dim() == 1 else (budgets[batch - 1], costs[batch - 1])


class Buckets:
    """Buckets of all batches, and of steps in which prompts are read.

    Parameters
    ----------
    table : CostTable
        Measured costs.
    max_batch : int
        Most rows of a step.
    lookup : str
        As in `CostTable.dense`.
    convex : bool
        Whether envelopes are needed, for early stop.
    device : torch.device

    Attributes
    ----------
    dense : StepTables
        Those of all batches, ``[M, R]``; its tensors stay the same.
    """

    def __init__(self, table: CostTable, max_batch: int, lookup: str, convex: bool, device: torch.device) -> None:
        self.table, self.lookup, self.convex, self.device = table, lookup, convex, device
        budgets, costs = (t.to(device) for t in table.dense(max_batch, lookup))
        envelope = table.envelope(max_batch, lookup).to(device) if convex else None
        self.dense = StepTables(budgets, costs, envelope, (budgets.tolist(), costs.tolist()))
        self._all_costs, self._latency_ms = costs.clone(), float("inf")
        self._steps: dict[tuple[int, int], StepTables] = {}
        self._plain: dict[int, float | None] = {}

    def set_latency(self, latency_ms: float | None) -> None:
        """Disable the buckets of steps that take longer, but for the cheapest of each batch; None enables all."""
        latency_ms = float("inf") if latency_ms is None else number("latency_ms", latency_ms)
        require("latency_ms", not math.isnan(latency_ms), "milliseconds or None", latency_ms)
        self._latency_ms = latency_ms
        self.dense.costs.copy_(self._within(self._all_costs))
        self.dense = self.dense._replace(host=(self.dense.budgets.tolist(), self.dense.costs.tolist()))
        self._steps.clear()

    def of_step(self, rows: int, base_tokens: int) -> StepTables:
        """Buckets of a step; arguments as of `CostTable.step`."""
        key = rows, base_tokens
        if key not in self._steps:
            if len(self._steps) == KNOWN:
                self._steps.clear()
            budgets, costs = self.table.step(rows, base_tokens, self.lookup)
            envelope = None
            if self.convex:
                corners = integer_envelope(budgets.tolist(), costs.tolist())
                envelope = torch.tensor(corners, dtype=torch.int32).to(self.device)
            costs = self._within(costs[None])[0]
            host = budgets.tolist(), costs.tolist()
            self._steps[key] = StepTables(budgets.to(self.device), costs.to(self.device), envelope, host)
        return self._steps[key]

    def plain(self, batch: int) -> float | None:
        """Cost of plain decoding, None if it was not measured or nothing is decoded."""
        if batch not in self._plain:
            self._plain[batch] = self.table.plain_at(batch, self.lookup) if batch > 0 else None
        return self._plain[batch]

    def cost_of(self, batch: int, tokens: int) -> float | None:
        """Cost of a step that verifies so many tokens, by the cheapest bucket that holds them; None if none does."""
        pairs = zip(*self.dense.row(batch), strict=True)
        return min((cost for budget, cost in pairs if budget >= tokens and 0 < cost < math.inf), default=None)

    def _within(self, costs: Tensor) -> Tensor:
        """Costs [M, R] of which those above the latency are disabled."""
        priced = torch.where(torch.isfinite(costs) & (costs > 0), costs, torch.inf)
        allowed = torch.maximum(priced.amin(1, keepdim=True), costs.new_tensor(self._latency_ms))
        return torch.where(costs <= allowed, costs, torch.inf)
