"""A table that would pin a choice is found out, and the reason said with its numbers."""

from __future__ import annotations

import math

import pytest

from dcut_kernels.cost import CostTable, CostTableError, PaperRatios, TokenCounts, check, problems
from python_tests.published_costs import paper_table

RULE = PaperRatios((0.5, 0.75, 1.0), 15)


def found(table: CostTable, **options: bool) -> list[tuple[str, int | None]]:
    return [(problem.name, problem.batch) for problem in problems(table, **options)]


def test_what_is_measured_well_passes() -> None:
    check(CostTable((1, 16), ((1.0, 1.01, 1.02), (2.0, 2.5, 3.0)), RULE))
    check(CostTable((1,), ((1.0, 1.0, 1.05),), RULE))
    check(CostTable((16,), ((math.inf, math.inf, 3.0),), RULE))  # all but one bucket disabled is a choice


@pytest.mark.parametrize(
    ("costs", "name", "words"),
    [
        ((1.0, math.nan, 2.0), "nan", ["batch 32", "384 tokens is NaN"]),
        ((1.0, 0.0, 2.0), "not_positive", ["batch 32", "0 ms at 384"]),
        ((-math.inf, -1.5, 2.0), "not_positive", ["256, 384 tokens", "-inf ms at 256"]),
        ((math.inf,) * 3, "disabled", ["batch 32", "every draft token is verified"]),
        ((1.0, 2.0, 1.999), "inverted", ["512 tokens costs 1.999 ms", "2 ms of one of 384", "smoothed()"]),
        ((2.0, 3.0, 1.0), "inverted", ["512 tokens costs 1 ms", "3 ms of one of 384"]),
        ((2.0, math.inf, 1.0), "inverted", ["512 tokens costs 1 ms", "2 ms of one of 256"]),
    ],
)
def test_problems_of_a_row(costs: tuple[float, ...], name: str, words: list[str]) -> None:
    table = CostTable((16, 32), ((1.0, 2.0, 3.0), costs), RULE)
    assert found(table) == [(name, 32)]
    with pytest.raises(CostTableError) as error:
        check(table, allow_flat=True)
    assert [problem.name for problem in error.value.problems] == [name]
    assert isinstance(error.value, ValueError)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_token_counts_that_do_not_hold_the_bonus_tokens_are_no_choice() -> None:
    rule = TokenCounts((8, 64))
    assert found(CostTable((32, 65), ((1.0, 2.0), (1.0, 2.0)), rule)) == [("disabled", 65)]
    # from 8 to 64 the cost doubles, but at batch 32 only 64 and 128 are there to choose from
    assert found(CostTable((32,), ((1.0, 2.0, 2.01),), TokenCounts((8, 64, 128)))) == [("flat", None)]


@pytest.mark.parametrize(
    ("batches", "rows", "flat"),
    [
        ((1, 16, 32), ((1.0, 1.5, 2.0), (1.0, 1.0, 1.04), (2.0, 2.0, 2.09)), True),
        ((1, 16, 32), ((1.0, 1.0, 1.0), (1.0, 1.0, 1.04), (2.0, 2.0, 2.11)), False),
        ((1, 15), ((1.0, 1.0, 1.04), (1.0, 1.0, 1.0)), True),
        ((1, 15), ((1.0, 1.0, 1.04), (1.0, 1.0, 1.1)), False),
        ((16,), ((math.inf, 1.0, 1.04),), True),
    ],
)
def test_flat_tables(batches: tuple[int, ...], rows: tuple[tuple[float, ...], ...], flat: bool) -> None:
    table = CostTable(batches, rows, RULE)
    assert found(table) == ([("flat", None)] if flat else [])
    assert found(table, allow_flat=True) == []
    if flat:
        (problem,) = problems(table)
        assert ("batch 16: 1 to 1.04 ms" if 16 in batches else "batch 15: 1 to 1 ms") in problem.explanation
        assert all(word in problem.explanation for word in ("5%", "pruning saves nothing", "allow_flat=True"))


def test_published_tables_need_smoothing_only_at_small_batches() -> None:
    assert found(paper_table("h20")) == [("inverted", 1)]
    assert found(paper_table("h800")) == [("inverted", 8)]
    for device in ("h20", "h800"):
        check(paper_table(device).smoothed())
