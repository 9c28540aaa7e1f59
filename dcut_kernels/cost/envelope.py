"""The lower convex envelope of a row of costs, in integers."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from .._check import INT32_MAX

TOP = 1 << 30  # the greatest height of an envelope
TOLERANCE = 1 << 15  # heights are within one part in so many


def priced(cost: float) -> bool:
    """Whether a bucket of this cost takes part."""
    return 0 < cost < math.inf


def integer_envelope(budgets: Sequence[int], costs: Sequence[float]) -> list[tuple[int, int]]:
    """Height and slope of the envelope at each budget.

    All numbers of a row share one unit, in which the greatest height is 2^30.  Slopes, in units per token, are rounded
    down, which keeps them ascending, and heights follow from them: from one budget to the next the height grows by
    exactly slope times tokens.

    Parameters
    ----------
    budgets : sequence of int
        Never decreasing.
    costs : sequence of float
        A bucket whose cost is not in ``(0, inf)`` does not shape the envelope.

    Returns
    -------
    list of (int, int)
        Height at the budget and slope to its right, 2^31 - 1 from the last priced budget on.  A bucket that is not
        priced gets those of the envelope at its budget, or (0, 0) outside of it.

    Raises
    ------
    ValueError
        If rounding would move a height by more than one part in 2^15: the budgets span too many tokens for what the
        cheapest of them costs.
    """
    cheapest: dict[int, Fraction] = {}
    for budget, cost in zip(budgets, costs, strict=True):
        if budget > 0 and priced(cost):
            cheapest[budget] = min(Fraction(cost), cheapest.get(budget, Fraction(cost)))
    if not cheapest:
        return [(0, 0)] * len(budgets)
    unit = math.lcm(*(cost.denominator for cost in cheapest.values()))
    corners = _lower_hull([(budget, int(cost * unit)) for budget, cost in sorted(cheapest.items())])
    top = max(height for _, height in corners)
    heights, slopes = [corners[0][1] * TOP // top], []
    for (left, low), (right, high) in pairwise(corners):
        slopes.append((high - low) * TOP // (top * (right - left)))
        heights.append(heights[-1] + slopes[-1] * (right - left))
    for (budget, exact), height in zip(corners, heights, strict=True):
        if abs(height * top - exact * TOP) * TOLERANCE >= exact * TOP:
            raise ValueError(
                f"budgets: expected heights within 2^-15 when rounded to integers, got {height * top / TOP / unit:.6g} "
                f"instead of {exact / unit:.6g} at {budget} tokens; the budgets span too many tokens, or the costs "
                "differ too much"
            )
    places = [budget for budget, _ in corners]

    def at(budget: int) -> tuple[int, int]:
        if not places[0] <= budget <= places[-1]:
            return 0, 0
        corner = bisect_left(places, budget)
        if budget == places[corner]:
            return heights[corner], (*slopes, INT32_MAX)[corner]
        return heights[corner] - slopes[corner - 1] * (places[corner] - budget), slopes[corner - 1]

    return [at(budget) for budget in budgets]


def _lower_hull(points: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Corners of the lower convex hull of points that ascend in x."""
    hull: list[tuple[int, int]] = []
    for x, y in points:
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x1) < (y - y1) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull
