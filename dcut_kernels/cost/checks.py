"""What is wrong with a cost table, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from .envelope import priced
from .table import CostTable

FLAT_BELOW = 0.05  # more cost of the largest bucket than of the smallest, as a share
FLAT_FROM = 16  # small batches are bound by other things than tokens, and may be flat


class Problem(NamedTuple):
    """One reason not to trust a table.

    Attributes
    ----------
    name : {"nan", "not_positive", "disabled", "inverted", "flat"}
        What kind of problem it is.
    batch : int or None
        Batch of the row, None for the table as a whole.
    explanation : str
        What was found, what follows from it and what mends it.
    """

    name: str
    batch: int | None
    explanation: str


class CostTableError(ValueError):
    """A table has problems.

    Attributes
    ----------
    problems : list of Problem
        All of them; the message holds their explanations.
    """

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(problem.explanation for problem in problems))
        self.problems = problems


def check(table: CostTable, allow_flat: bool = False) -> None:
    """Refuse a table that would lead to wrong decisions without any other sign.

    Parameters
    ----------
    table : CostTable
        Table.
    allow_flat : bool
        Accept costs that hardly grow with the tokens.

    Raises
    ------
    CostTableError
        With the explanations of all problems.
    """
    if found := problems(table, allow_flat):
        raise CostTableError(found)


def problems(table: CostTable, allow_flat: bool = False) -> list[Problem]:
    """List what is wrong with a table: row by row, then as a whole."""
    found: list[Problem] = []
    for batch, costs in zip(table.batches, table.costs_ms, strict=True):
        found += _of_row(batch, table.rule.budgets(batch), costs)
    if not allow_flat:
        found += _flat(table)
    return found


def _of_row(batch: int, budgets: tuple[int, ...], costs: tuple[float, ...]) -> Iterator[Problem]:
    pairs = list(zip(budgets, costs, strict=True))
    if missing := [budget for budget, cost in pairs if math.isnan(cost)]:
        yield Problem(
            "nan",
            batch,
            f"At batch {batch} the cost of {_tokens(missing)} is NaN: the measurement failed. The bucket is never "
            "chosen; measure it again, or disable it on purpose with a cost of inf.",
        )
    if wrong := [(budget, cost) for budget, cost in pairs if cost <= 0]:
        budget, cost = wrong[0]
        yield Problem(
            "not_positive",
            batch,
            f"At batch {batch} the cost of {_tokens([budget for budget, _ in wrong])} is not positive ({cost:g} ms at "
            f"{budget}). No step is free: the clock was read wrongly, or the step did not wait for the device. The "
            "bucket is never chosen; measure it again.",
        )
    usable = [(budget, cost) for budget, cost in pairs if priced(cost)]
    if not any(budget >= batch for budget, _ in usable):
        yield Problem(
            "disabled",
            batch,
            f"At batch {batch} no bucket of {batch} tokens or more, which would hold the bonus tokens, has a cost, and "
            "without one every draft token is verified. Measure one, or leave the batch out so that others serve it.",
        )
    drops = [(high - low, few, high, many, low) for few, high in usable for many, low in usable if few < many]
    if drops and max(drops)[0] > 0:
        _, few, high, many, low = max(drops)
        yield Problem(
            "inverted",
            batch,
            f"At batch {batch} a step of {many} tokens costs {low:.6g} ms, less than the {high:.6g} ms of one of {few} "
            f"tokens. The smaller bucket can then never win, so noise of the measurement decides what is verified. "
            "Measure with more repeats, or use smoothed(), which replaces such runs by their mean.",
        )


def _flat(table: CostTable) -> Iterator[Problem]:
    rows = []
    for batch, costs in zip(table.batches, table.costs_ms, strict=True):
        pairs = zip(table.rule.budgets(batch), costs, strict=True)
        usable = [cost for budget, cost in pairs if budget >= batch and priced(cost)]
        if len(usable) > 1:
            rows.append((batch, usable[0], usable[-1]))
    rows = [row for row in rows if row[0] >= FLAT_FROM] or rows
    if rows and all(last < (1 + FLAT_BELOW) * first for _, first, last in rows):
        seen = "; ".join(f"batch {batch}: {first:.6g} to {last:.6g} ms" for batch, first, last in rows)
        yield Problem(
            "flat",
            None,
            f"The largest bucket costs less than {FLAT_BELOW:.0%} more than the smallest ({seen}). Then the largest "
            "practically always wins, every draft token is verified, and pruning saves nothing. Either the timing does "
            "not see the tokens (all steps padded to one size, a part of the step timed alone, no wait for the "
            "device), or at these batches a step hardly costs more with more tokens, so measure the larger ones that "
            "you serve. If the table is right, allow it: allow_flat=True, or --allow-flat.",
        )


def _tokens(counts: list[int]) -> str:
    return f"{', '.join(map(str, counts))} token{'s' if counts != [1] else ''}"
