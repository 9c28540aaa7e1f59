"""What a request gains from verification, learned from the gains of steps that drafted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PRIOR = 64  # requests' steps that speak for the scores before any was observed


@dataclass
class Expectation:
    """Expected tokens of a request's step by the tokens that it verifies, an average over past steps.

    Attributes
    ----------
    draft_len : int
        ``D``.
    memory : float
        Requests' steps that count: the average is over all so far, and over the last so many once there are more.
    curve : list of float [D + 1]
        Tokens committed by a request that verifies 1 to ``D + 1`` tokens; empty before the first observation.
    promised, kept : float
        Averages of what scores promised of a request's step, and of what it committed.
    seen, judged : float
        Requests' steps so far, up to `memory`; and all in which what was promised is known.
    """

    draft_len: int
    memory: float = 256.0
    curve: list[float] = field(default_factory=list)
    promised: float = 0.0
    kept: float = 0.0
    seen: float = 0.0
    judged: float = 0.0

    def update(
        self,
        rows: int,
        budgets: Sequence[int],
        gains: Sequence[float],
        promised: float | None,
        kept: int,
        steps: int = 1,
    ) -> None:
        """Learn from a step.

        Parameters
        ----------
        rows : int
            Requests of the step that had drafts.
        budgets : sequence of int [R]
            Tokens that each bucket verifies of them.
        gains : sequence of float [R]
            Expected tokens of each bucket.
        promised, kept : float, int
            Expected tokens of what was verified, None if no bucket says so, and tokens that were committed.
        steps : int
            Steps since the last observation, this one included; it stands for them, up to an eighth of what is known.
        """
        points = {1.0: 1.0} | {tokens / rows: gain / rows for tokens, gain in zip(budgets, gains, strict=True)}
        new = _on_lines(sorted(points.items()), self.draft_len + 1)
        count = max(rows, min(rows * steps, self.seen / 8))
        weight = count / (self.seen + count)
        self.seen = min(self.seen + count, self.memory)
        self.curve = [a + weight * (b - a) for a, b in zip(self.curve or new, new, strict=True)]
        if promised is not None:
            weight = count / (min(self.judged, self.memory) + count)
            self.judged += count
            self.promised += weight * (promised / rows - self.promised)
            self.kept += weight * (kept / rows - self.kept)

    def best(self, rows: int, budgets: Sequence[int], costs: Sequence[float]) -> tuple[float, float]:
        """Most tokens per unit of cost that a bucket promises, corrected by how promises were kept; and its cost.

        Parameters
        ----------
        rows : int
            Requests with drafts.
        budgets : sequence of int [R]
        costs : sequence of float [R]
            Those outside ``(0, inf)`` take no part; without any other, the answer is ``(0, 0)``.
        """
        if not self.curve:
            return 0.0, 0.0
        kept = self.kept / self.promised if self.promised > 0 else 1.0
        honest = (self.judged * kept + PRIOR) / (self.judged + PRIOR)
        pairs = [(k, c) for k, c in zip(budgets, costs, strict=True) if 0 < c < float("inf") and k >= rows]
        return max(((honest * rows * self._tokens(k / rows) / c, c) for k, c in pairs), default=(0.0, 0.0))

    def _tokens(self, verified: float) -> float:
        """The curve at a number of verified tokens, which is 1 or more."""
        depth = min(int(verified) - 1, self.draft_len)
        low, high = self.curve[depth], self.curve[min(depth + 1, self.draft_len)]
        return low + (high - low) * min(verified - 1 - depth, 1.0)

    def state(self) -> dict[str, Any]:
        """Everything, as plain Python values."""
        return asdict(self)


def _on_lines(points: list[tuple[float, float]], count: int) -> list[float]:
    """Values at 1 to `count` of the line through ascending points, the first at 1; constant behind the last."""
    values: list[float] = []
    for (left, a), (right, b) in itertools.pairwise([*points, (float("inf"), points[-1][1])]):
        slope = (b - a) / (right - left)
        while len(values) < count and len(values) + 1 <= right:
            values.append(a + slope * (len(values) + 1 - left))
    return values
