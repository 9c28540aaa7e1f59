"""Steps are measured in turns, and a table holds their medians."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import pytest

from dcut_kernels.cost import Fingerprint, PaperRatios, TokenCounts, profile

Call = tuple[str, int, int]


class Machine:
    """An engine whose steps take as long as `seconds` says, by its own clock."""

    def __init__(self, seconds: Callable[[int, int, int], float]) -> None:
        self.seconds, self.now, self.calls = seconds, 100.0, list[Call]()

    def clock(self) -> float:
        return self.now

    def run_step(self, batch: int, tokens: int) -> None:
        call = ("step", batch, tokens)
        self.now += self.seconds(batch, tokens, self.calls.count(call))
        self.calls.append(call)

    def plain(self, batch: int) -> None:
        self.now += self.seconds(batch, 0, self.calls.count(("plain", batch, batch)))
        self.calls.append(("plain", batch, batch))


def constant(batch: int, tokens: int, turn: int) -> float:
    return 0.001 * batch + 0.0001 * tokens


def test_medians_of_whole_steps() -> None:
    """The machine is slow in some turns, and one step is an outlier."""
    turns = [90.0, 1.0, 3.0, 2.0, 1.5, 2.5]  # the first one warms up
    late = {(4, 8, 3): 7.0}
    machine = Machine(lambda batch, tokens, turn: turns[turn] * (batch + tokens) * late.get((batch, tokens, turn), 1))
    mark = Fingerprint("d", "m", "e", "t")
    rule = PaperRatios((0.5, 1.0), 3)
    table = profile(
        machine.run_step, [1, 4], rule, plain=machine.plain, repeats=5, fingerprint=mark, clock=machine.clock
    )
    assert table.costs_ms[0] == pytest.approx((2000 * 3, 2000 * 5))
    assert table.plain_ms is not None
    assert table.plain_ms[0] == pytest.approx(2000)
    assert [cost / table.plain_ms[1] for cost in table.costs_ms[1]] == pytest.approx([3, 5])
    assert (table.batches, table.rule, table.fingerprint, table.draft_ms) == ((1, 4), rule, mark, None)


def test_steps_settle_before_they_are_timed() -> None:
    """A drafted step is slow after a plain one, and so is the next; and the other way round."""
    kinds: list[bool] = []

    def seconds(batch: int, tokens: int, turn: int) -> float:
        kinds.append(tokens > 0)
        return 1.0 if kinds[-3:] == [tokens > 0] * 3 else 5.0

    machine = Machine(seconds)
    table = profile(machine.run_step, [1], [4, 8], plain=machine.plain, settle=2, repeats=3, clock=machine.clock)
    assert (table.costs_ms, table.plain_ms) == ((pytest.approx((1000, 1000)),), pytest.approx((1000,)))
    assert [machine.calls.count(("step", 1, tokens)) for tokens in (4, 8)] == [3 * 4, 4]


def test_turns_over_all_buckets_of_a_batch() -> None:
    machine = Machine(constant)
    seen: list[tuple[int, int]] = []
    profile(
        machine.run_step, [1, 3], [2, 8], plain=machine.plain, repeats=2, warm_up=1, clock=machine.clock,
        on_progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    one: list[Call] = [("step", 1, 2), ("step", 1, 8), ("plain", 1, 1)]
    three: list[Call] = [("step", 3, 8), ("plain", 3, 3)]  # two tokens do not hold three bonus tokens
    assert machine.calls == one * 3 + three * 3
    assert seen == [(n, 15) for n in range(1, 16)]


def test_passes_spread_a_batch_over_the_time_of_all() -> None:
    """The machine is slow for a while: for as long as one pass looks at a batch."""
    machine = Machine(lambda batch, tokens, turn: (batch + tokens) * (9.0 if 132 <= machine.now < 150 else 1.0))
    totals = set()
    table = profile(
        machine.run_step, [1, 3], [4, 8], repeats=1, warm_up=0, passes=3, clock=machine.clock,
        on_progress=lambda done, total: totals.add(total),
    )  # fmt: skip
    each = [("step", 1, 4), ("step", 1, 8), ("step", 3, 4), ("step", 3, 8)]
    assert machine.calls == each * 3
    assert totals == {12}
    assert table.costs_ms == (pytest.approx((5000, 9000)), pytest.approx((7000, 11000)))


def test_a_time_limit_may_end_every_pass_within_a_turn() -> None:
    """Of each turn all kinds count or none; the machine is half as fast in the second pass."""
    machine = Machine(lambda batch, tokens, turn: tokens * (1.0 if machine.now < 113 else 2.0))
    table = profile(
        machine.run_step, [1], [1, 3], repeats=9, warm_up=0, passes=2, time_limit=26, clock=machine.clock,
    )  # fmt: skip
    assert [tokens for _, _, tokens in machine.calls] == [1, 3] * 3 + [1] + [1, 3] * 2
    assert table.costs_ms == (pytest.approx((1000, 3000)),)


def test_what_is_left_of_the_time_goes_to_the_next_batch() -> None:
    """However many turns were asked for: asking for the time takes time too."""
    machine = Machine(lambda batch, tokens, turn: 1.0)
    asked = [0]

    def clock() -> float:
        asked[0] += 1
        return machine.now

    profile(machine.run_step, [1, 2], [4], repeats=10**9, warm_up=0, time_limit=20, clock=clock)
    assert len(machine.calls) == 20
    assert asked[0] < 100


def test_buckets_below_the_batch_are_disabled() -> None:
    machine = Machine(constant)
    table = profile(machine.run_step, [1, 3], [2, 8], repeats=1, warm_up=0, clock=machine.clock)
    assert table.rule == TokenCounts((2, 8))
    assert table.costs_ms[1] == (math.inf, pytest.approx(3.8))
    assert table.plain_ms is None
    assert len(machine.calls) == 3


def test_a_time_limit_ends_repetition_but_measures_everything() -> None:
    machine = Machine(lambda batch, tokens, turn: 1.0)
    table = profile(machine.run_step, [1, 2], [4, 8], repeats=100, warm_up=1, time_limit=20, clock=machine.clock)
    assert table.costs_ms == ((1000, 1000), (1000, 1000))
    # each batch has half of the time, and steps take a second
    assert [machine.calls.count(("step", batch, 4)) for batch in (1, 2)] == [5, 5]
    assert machine.now == 120

    machine = Machine(lambda batch, tokens, turn: 1.0)
    profile(machine.run_step, [1, 2], [4, 8], repeats=100, warm_up=0, time_limit=4, clock=machine.clock)
    assert len(machine.calls) == 4


def test_a_time_limit_that_is_too_short_says_how_far_it_came() -> None:
    machine = Machine(lambda batch, tokens, turn: 1.0)
    message = r"^time_limit: expected 4 points to be measured in 5\.5 s, got 2 \(at batch 2\); measure fewer batches"
    with pytest.raises(ValueError, match=message):
        profile(machine.run_step, [1, 2], [4, 8], repeats=1, warm_up=1, time_limit=5.5, clock=machine.clock)
    assert len(machine.calls) == 6


def test_the_clock_stops_when_the_step_returns() -> None:
    machine = Machine(constant)

    def slow(done: int, total: int) -> None:
        machine.now += 50.0

    table = profile(machine.run_step, [1], [10], repeats=3, on_progress=slow, clock=machine.clock)
    assert table.costs_ms[0] == pytest.approx((2.0,))


def test_progress_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(constant)
    profile(machine.run_step, [1], [4, 8], repeats=3, warm_up=1, progress=True, clock=machine.clock)
    assert "step costs" in (shown := capsys.readouterr().out)
    assert "8/8" in shown
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ImportError, match=r"^progress: expected rich, got none: pip install 'dcut_kernels\[demo\]'$"):
        profile(machine.run_step, [1], [4, 8], progress=True, clock=machine.clock)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": [0]}, "batches: expected an int from 1 to 16777216, got 0"),
        ({"batches": []}, "batches: expected at least one batch, strictly ascending, got []"),
        ({"batches": [9]}, "budgets: expected one of at least 9 tokens, for the bonus tokens, got (4, 8)"),
        ({"batches": [2, 1]}, "batches: expected at least one batch, strictly ascending, got [2, 1]"),
        ({"repeats": 0}, "repeats: expected an int from 1 to 2147483647, got 0"),
        ({"passes": 0}, "passes: expected an int from 1 to 2147483647, got 0"),
        ({"warm_up": -1}, "warm_up: expected an int from 0 to 2147483647, got -1"),
        ({"time_limit": 0}, "time_limit: expected seconds above 0, got 0.0"),
        ({"run_step": 5}, "run_step: expected a callable, got 5"),
        ({"run_step": None}, "run_step: expected a callable, got None"),
        ({"plain": 5}, "plain: expected a callable, got 5"),
        ({"on_progress": 5}, "on_progress: expected a callable, got 5"),
        ({"budgets": [8, 4]}, "budgets: expected strictly ascending values, got (8, 4)"),
    ],
)
def test_errors(options: dict[str, object], message: str) -> None:
    machine = Machine(constant)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        profile(**{"run_step": machine.run_step, "batches": [1], "budgets": [4, 8], "clock": machine.clock} | options)
    assert str(error.value) == message
    assert machine.calls == []
