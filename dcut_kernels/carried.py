"""The budget that one step chooses and the next one verifies, on the device and as the host sees it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._check import INT32_MAX
from .cost._values import integer

UINT32_MAX = 2**32 - 1


class NextBudget(NamedTuple):
    """What the host has read of the next budget."""

    calls: int  # of `select` so far, modulo 2^32
    tokens: int  # tokens of the step; 2^31 - 1: everything


class CarriedBudget:
    """The carried budget of a planner.

    Attributes
    ----------
    next_budget : Tensor, int32 [2]
        On the device: the budget, and how many were computed.
    host_budget : Tensor, int64 [1]
        The same in one word, in pinned memory where the device is a GPU.
    options : dict
        Of `select_and_pack`.
    """

    def __init__(self, device: torch.device) -> None:
        self.next_budget = torch.tensor([INT32_MAX, 0], dtype=torch.int32, device=device)
        self.host_budget = torch.full((1,), INT32_MAX, pin_memory=device.type == "cuda")
        self.options = {
            "budget": self.next_budget[:1], "next_budget": self.next_budget, "host_budget": self.host_budget,
        }  # fmt: skip
        self._base: int | None = None  # base tokens of the last step
        self._calls, self._grown = 0, 0  # steps begun, and what the last of them added

    def begin(self, base_tokens: int | None) -> None:
        """Count a step, and let the budget grow and shrink with its base tokens; None leaves it."""
        self._calls = self._calls + 1 & UINT32_MAX
        if base_tokens is None:
            return
        self._grown, self._base = 0 if self._base is None else base_tokens - self._base, base_tokens
        if self._grown:
            budget = self.next_budget[:1]
            budget.copy_(torch.where(budget == INT32_MAX, budget, (budget + self._grown).clamp(min=0)))

    def publish(self) -> None:
        """Show the host what was written to the device by others than the operator."""
        calls, budget = self.next_budget[1].long() & UINT32_MAX, self.next_budget[0].long()
        self.host_budget.copy_(calls << 32 | budget, non_blocking=True)

    def read(self) -> NextBudget:
        """What the host sees, without waiting for the device."""
        word = int(self.host_budget)
        calls, tokens = word >> 32 & UINT32_MAX, word & UINT32_MAX
        coming = calls == self._calls - 1 & UINT32_MAX and tokens != INT32_MAX
        return NextBudget(calls, max(0, tokens + self._grown) if coming else tokens)

    def state(self) -> dict[str, Any]:
        """Everything, as plain Python values."""
        return {"next_budget": self.next_budget.tolist(), "base": self._base}

    @staticmethod
    def parse(state: dict[str, Any]) -> tuple[Tensor, int | None]:
        """What `state` returned, checked, for `restore`."""
        budget, calls = state["next_budget"]
        base = state["base"] if state["base"] is None else integer("base", state["base"], 0)
        return torch.tensor([integer("budget", budget, 0), calls], dtype=torch.int32), base

    def restore(self, next_budget: Tensor, base: int | None) -> None:
        """What `parse` returned, once more."""
        self.next_budget.copy_(next_budget)
        self._base, self._calls, self._grown = base, int(next_budget[1]) & UINT32_MAX, 0
        self.publish()
