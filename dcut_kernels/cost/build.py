"""Cost tables from measurements that were made elsewhere."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from .._schema import MAX_BUCKETS
from ._values import integer, number, require
from .envelope import priced
from .fingerprint import Fingerprint
from .rules import AngelSlimRatios, PaperRatios, Rule, TokenCounts, token_counts
from .table import CostTable

CONVENTIONS = {"paper": PaperRatios, "angelslim": AngelSlimRatios}


def from_ratios(
    costs: Mapping[int, Sequence[float]],
    ratios: Sequence[float],
    draft_len: int,
    convention: str = "paper",
    *,
    plain_ms: Mapping[int, float] | None = None,
    draft_ms: Mapping[int, float] | None = None,
    fingerprint: Fingerprint | None = None,
) -> CostTable:
    """Table of whole steps that were measured at shares of the draft tokens.

    Parameters
    ----------
    costs : mapping of int to sequence of float [R]
        Milliseconds of each ratio, by batch.
    ratios : sequence of float [R]
        Ascending, from 0 to 1.
    draft_len : int
        ``D``, draft tokens per request.
    convention : {"paper", "angelslim"}
        ``K = max(B, ceil(rho * B * (D + 1)))`` or ``K = B + ceil(rho * B * D)``.
    plain_ms, draft_ms : mapping of int to float, optional
        Milliseconds of plain decoding, and of drafting, at the same batches.
    fingerprint : Fingerprint, optional
        What was measured.
    """
    require("convention", convention in CONVENTIONS, f"one of {', '.join(CONVENTIONS)}", repr(convention))
    batches = sorted(costs)
    return CostTable(
        tuple(batches),
        tuple(tuple(costs[batch]) for batch in batches),
        CONVENTIONS[convention](tuple(ratios), draft_len),
        _by_batch("plain_ms", plain_ms, batches),
        _by_batch("draft_ms", draft_ms, batches),
        fingerprint,
    )


def from_captured_sizes(
    sizes: Sequence[int],
    verify_ms: Sequence[float],
    draft_ms: Mapping[int, float],
    max_tokens: int | None = None,
    step_above: int | None = None,
    *,
    above: Mapping[int, float] | None = None,
    batches: Sequence[int] | None = None,
    plain_ms: Mapping[int, float] | None = None,
    fingerprint: Fingerprint | None = None,
) -> CostTable:
    """Table of an engine that pads verification to captured graph sizes, and runs uncaptured above the last.

    A bucket costs ``draft(B)`` plus the `captured_cost` of its tokens.  The buckets are the captured sizes, and with
    `max_tokens` token counts above the last of them.

    Parameters
    ----------
    sizes : sequence of int
        Captured sizes in tokens, ascending.
    verify_ms : sequence of float
        Milliseconds of verification at each size.
    draft_ms : mapping of int to float
        Milliseconds of drafting by batch; on lines between the given ones.
    max_tokens : int, optional
        Largest bucket above the last captured size; needs `above`.
    step_above : int, optional
        Distance of the buckets above the last captured size, by default that from it to `max_tokens`.
    above : mapping of int to float, optional
        Milliseconds of verification at token counts above the last captured size.
    batches : sequence of int, optional
        Rows of the table; those of `draft_ms` by default.
    plain_ms : mapping of int to float, optional
        Milliseconds of plain decoding at the batches.
    fingerprint : Fingerprint, optional
        What was measured.
    """
    counts = list(sizes)
    captured_cost(1, sizes, verify_ms, above)
    if max_tokens is not None:
        max_tokens = integer("max_tokens", max_tokens, counts[-1] + 1)
        distance = integer("step_above", max_tokens - counts[-1] if step_above is None else step_above)
        between = range(counts[-1] + distance, max_tokens, distance)
        total = len(counts) + len(between) + 1
        fits = f"a distance that gives at most {MAX_BUCKETS} buckets"
        require("step_above", total <= MAX_BUCKETS, fits, f"{distance}, which gives {total}")
        counts += [*between, max_tokens]
    else:
        require("step_above", step_above is None, "None without max_tokens", step_above)
    verify = [captured_cost(count, sizes, verify_ms, above) for count in counts]
    return _sum(draft_ms, lambda batch: verify, TokenCounts(tuple(counts)), batches, plain_ms, fingerprint)


def captured_cost(
    tokens: int, sizes: Sequence[int], verify_ms: Sequence[float], above: Mapping[int, float] | None = None
) -> float:
    """Milliseconds of verifying `tokens`: those of the smallest captured size that holds them.

    Above the last captured size, where nothing is padded, cost is on the line through the points of `above`, which does
    not connect to the captured sizes: the cliff between them stays.  With one point, the line is as steep as the one
    through the last two captured sizes.

    Parameters
    ----------
    tokens : int
        Tokens of the step.
    sizes, verify_ms, above
        As in `from_captured_sizes`.
    """
    counts, tokens = token_counts("sizes", tuple(sizes)), integer("tokens", tokens)
    require("verify_ms", len(verify_ms) == len(sizes), f"{len(sizes)} values, as in sizes", len(verify_ms))
    times, last = [number("verify_ms", time) for time in verify_ms], counts[-1]
    if tokens <= last:
        return times[bisect_left(counts, tokens)]
    if above is None:
        raise ValueError(
            f"above: expected costs above {last} tokens, the last captured size, to price {tokens}, got None"
        )
    points = _points("above", above)
    require("above", points[0][0] > last, f"token counts above {last}, the last captured size", points[0][0])
    if len(points) == 1:
        require("above", len(sizes) > 1, "two points or two captured sizes, to know how cost grows", len(points))
        (start, cost), slope = points[0], (times[-1] - times[-2]) / (last - counts[-2])
        return cost + slope * (tokens - start)
    return _on_line(tokens, points)


def additive(
    draft_ms: Mapping[int, float],
    verify_ms: Mapping[int, float],
    budgets: Rule | Sequence[int],
    *,
    batches: Sequence[int] | None = None,
    plain_ms: Mapping[int, float] | None = None,
    fingerprint: Fingerprint | None = None,
) -> CostTable:
    """Table of ``draft(B) + verify(K)``, for engines that pad nothing.

    Both parts are on lines between measured points.  Beyond the last point the line through the last two goes on; below
    the first, cost is that of the first.

    Parameters
    ----------
    draft_ms : mapping of int to float
        Milliseconds of drafting, by batch.
    verify_ms : mapping of int to float
        Milliseconds of everything else, by tokens.
    budgets : Rule or sequence of int
        Buckets; numbers are token counts.
    batches : sequence of int, optional
        Rows of the table; those of `draft_ms` by default.
    plain_ms : mapping of int to float, optional
        Milliseconds of plain decoding at the batches.
    fingerprint : Fingerprint, optional
        What was measured.
    """
    rule, points = as_rule(budgets), _points("verify_ms", verify_ms)

    def verify(batch: int) -> list[float]:
        times = [(budget, _on_line(max(budget, points[0][0]), points)) for budget in rule.budgets(batch)]
        for budget, time in times:
            require("verify_ms", time > 0, "points whose line stays above 0", f"{time:.4g} ms at {budget} tokens")
        return [time for _, time in times]

    return _sum(draft_ms, verify, rule, batches, plain_ms, fingerprint)


def interpolate(table: CostTable, rule: Rule) -> CostTable:
    """A table of other buckets, priced on the lines between those that were measured; for engines that pad nothing.

    Raises
    ------
    ValueError
        If a budget lies outside of those that were measured at its batch.
    """
    rows = []
    for batch, costs in zip(table.batches, table.costs_ms, strict=True):
        points: dict[int, float] = {}
        for budget, cost in zip(table.rule.budgets(batch), costs, strict=True):
            if priced(cost):
                points[budget] = min(cost, points.get(budget, cost))
        known = sorted(points.items())
        for budget in rule.budgets(batch):
            inside = bool(known) and known[0][0] <= budget <= known[-1][0]
            limits = f"{known[0][0]} to {known[-1][0]} tokens" if known else "none"
            require("rule", inside, f"budgets inside the priced ones at batch {batch}, {limits}", budget)
        rows.append(tuple(_on_line(budget, known) for budget in rule.budgets(batch)))
    return replace(table, costs_ms=tuple(rows), rule=rule)


def merge(tables: Sequence[CostTable]) -> CostTable:
    """One table with the batches of several, which were measured alike.

    Raises
    ------
    ValueError
        If rules, fingerprints or the fields that are there differ, or a batch is in two tables.
    """
    require("tables", len(tables) > 0, "at least one table", 0)
    first = tables[0]
    for other in tables[1:]:
        for name in ("rule", "fingerprint"):
            mine, others = getattr(first, name), getattr(other, name)
            require("tables", mine == others, f"the same {name} in all, {mine}", others)
        for name in ("plain_ms", "draft_ms"):
            both = (getattr(first, name) is None) == (getattr(other, name) is None)
            require("tables", both, f"{name} in all or in none", "some with and some without")
    rows: dict[int, tuple[CostTable, int]] = {}
    for table in tables:
        for row, batch in enumerate(table.batches):
            require("tables", batch not in rows, "each batch in one table", f"batch {batch} in two")
            rows[batch] = table, row
    order = [rows[batch] for batch in sorted(rows)]

    def times(name: str) -> tuple[float, ...] | None:
        return None if getattr(first, name) is None else tuple(getattr(table, name)[row] for table, row in order)

    costs = tuple(table.costs_ms[row] for table, row in order)
    return CostTable(tuple(sorted(rows)), costs, first.rule, times("plain_ms"), times("draft_ms"), first.fingerprint)


def as_rule(budgets: Rule | Sequence[int]) -> Rule:
    """A rule as it is, numbers as token counts."""
    return budgets if isinstance(budgets, Rule) else TokenCounts(token_counts("budgets", tuple(budgets)))


def _sum(
    draft_ms: Mapping[int, float],
    verify: Callable[[int], Sequence[float]],
    rule: Rule,
    batches: Sequence[int] | None,
    plain_ms: Mapping[int, float] | None,
    fingerprint: Fingerprint | None,
) -> CostTable:
    """Table of ``draft(B)`` plus what `verify` gives for each bucket of a batch."""
    points = _points("draft_ms", draft_ms)
    rows = sorted(draft_ms) if batches is None else list(batches)
    drafts = [_on_line(max(batch, points[0][0]), points) for batch in rows]
    costs = [tuple(draft + cost for cost in verify(batch)) for batch, draft in zip(rows, drafts, strict=True)]
    plain = _by_batch("plain_ms", plain_ms, rows)
    return CostTable(tuple(rows), tuple(costs), rule, plain, tuple(drafts), fingerprint)


def _by_batch(name: str, values: Mapping[int, float] | None, batches: Sequence[int]) -> tuple[float, ...] | None:
    if values is None:
        return None
    require(name, set(values) == set(batches), f"the batches {', '.join(map(str, batches))}", list(values))
    return tuple(values[batch] for batch in batches)


def _points(name: str, values: Mapping[int, float]) -> list[tuple[int, float]]:
    """Measured points, ascending."""
    require(name, isinstance(values, Mapping) and len(values) > 0, "a mapping with at least one point", repr(values))
    points = sorted((integer(name, place), number(name, time)) for place, time in values.items())
    require(name, all(0 <= time < math.inf for _, time in points), "finite values of 0 and above", dict(points))
    return points


def _on_line(place: int, points: Sequence[tuple[int, float]]) -> float:
    """Value on the line between two points, or on that through the outermost two."""
    if len(points) == 1:
        return points[0][1]
    right = min(max(bisect_right(points, place, key=lambda point: point[0]), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1 : right + 1]
    return y1 if place == x1 else y0 + (y1 - y0) / (x1 - x0) * (place - x0)
