"""The truncation policies that the demo compares, and what each asks of the op."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from .tables import CostTable

RATIOS = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Policy:
    """One way to choose how much of each draft is verified.

    Parameters
    ----------
    name
        Name in the tables.
    ratio
        Verify this share of all ``B * (D + 1)`` positions; None lets the op choose the bucket.
    uniform
        Cut every draft at the same depth instead of ranking the positions of the whole batch.
    table
        For D-cut: the cost table that the choice is made with.
    """

    name: str
    ratio: float | None = None
    uniform: bool = False
    table: str | None = None

    def arguments(self, batch: int, draft_len: int) -> dict[str, Any]:
        """Keyword arguments of ``select_and_pack`` that express the policy."""
        if self.ratio is None:
            return {"policy": "argmax"}
        budget = paper_budget(self.ratio, batch, draft_len)
        given = {"budget": torch.tensor([budget], dtype=torch.int32)}
        if not self.uniform:
            return given
        return given | {"max_keep": torch.full((batch,), budget // batch - 1, dtype=torch.int32)}


def paper_budget(ratio: float, batch: int, draft_len: int) -> int:
    """Verified positions of a step, bonus tokens included: ``max(B, ceil(ratio * B * (D + 1)))``."""
    return max(batch, math.ceil(ratio * batch * (draft_len + 1)))


def all_policies(tables: list[CostTable], draft_len: int) -> list[Policy]:
    """Full depth, uniform depth, fixed ratio, and D-cut once for each cost table."""
    uniform = [Policy(f"uniform depth {int(r * (draft_len + 1)) - 1}", r, uniform=True) for r in RATIOS]
    fixed = [Policy(f"ratio {r:g}", r) for r in RATIOS]
    return [Policy("full depth", 1.0), *uniform, *fixed, *(Policy("D-cut", table=table.name) for table in tables)]
