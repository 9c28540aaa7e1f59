"""Steps that are timed correct what the cost table says of drafting and plain decoding."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from statistics import median

import pytest

from dcut_kernels.expectation import Expectation
from dcut_kernels.gate import SHARE, Gate
from dcut_kernels.pace import DRAFTED, MOST, SETTLE, SOONEST, TRIAL, TRIALS, WINDOW, Pace

TOKENS = 1.9  # that a drafted step of a request commits


def run(pace: Pace, drafted: bool, ratios: list[float]) -> list[bool]:
    return [pace.add(drafted, ratio) for ratio in ratios]


def trial(pace: Pace, plain: float, drafted: float) -> None:
    """As many drafted steps as it takes, and a trial; the first steps of each kind are slow."""
    run(pace, True, [50.0])
    while not pace.tries(1.0):
        assert run(pace, True, [drafted]) == [False]
    plains = [50.0] * SETTLE + [plain] * (TRIAL - SETTLE)
    assert run(pace, False, plains) == [False] * (TRIAL - 1) + [True]
    assert not pace.tries(1.0)


def test_trials_and_the_table_vote() -> None:
    pace, votes = Pace(0.01), [1.0]
    assert pace.correction() == 1.0
    for plain, drafted in ((0.9, 1.0), (0.8, 1.0), (1.6, 2.0), (2.4, 3.0), (6.0, 5.0)):
        trial(pace, plain, drafted)
        votes.append(plain / drafted)
        assert pace.correction() == pytest.approx(median(votes))
    for _ in range(TRIALS):
        trial(pace, 10.0, 1.0)
    assert list(pace.ratios) == [10.0] * TRIALS
    assert pace.correction() == 2.0
    assert Pace(0.01, [0.1, 0.1]).correction() == 0.5


def test_a_trial_is_compared_with_the_last_steps_before_it() -> None:
    pace = Pace(0.01)
    run(pace, True, [7.0] * 50 + [1.0] * WINDOW)
    assert pace.tries(1.0)
    run(pace, False, [9.0] * SETTLE + [0.1, 0.7, 0.8, 0.9, 100.0] + [1.0])
    assert list(pace.ratios) == pytest.approx([0.8])


def test_plain_steps_are_compared_without_a_trial_too() -> None:
    pace = Pace(0.01)
    run(pace, True, [9.0] + [2.0] * 6)
    run(pace, False, [7.0] * (TRIAL - 1))  # one too few
    run(pace, True, [9.0] + [4.0] * 7)
    run(pace, False, [1.0] * TRIAL)
    assert list(pace.ratios) == [0.25]
    assert not pace.tries(1.0)
    run(pace, True, [4.0] * (TRIAL - SETTLE))  # and the first does not count
    assert run(pace, False, [1.0] * TRIAL) == [False] * TRIAL
    assert list(pace.ratios) == [0.25]


@pytest.mark.parametrize(
    ("gain", "known", "steps"),
    [(0.92, 0, SOONEST), (1.0, 0, 20), (4.0, 0, 170), (1.0, 1, 30), (1.0, 8, 100), (1.25, 4, 180), (2.0, 8, 600)],
)
def test_trials_are_as_frequent_as_they_are_cheap(gain: float, known: int, steps: int) -> None:
    """What ten plain steps and the change take longer for their tokens may be a hundredth of the time, in the end."""
    pace = Pace(0.01, [1.0] * known)
    run(pace, True, [1.0] * (steps - 1))
    assert not pace.tries(gain)
    run(pace, True, [1.0])
    assert pace.tries(gain)


def test_a_trial_that_began_ends() -> None:
    pace = Pace(0.02)
    run(pace, True, [1.0] * SOONEST)
    assert not pace.tries(1.0, timeable=False)
    assert pace.tries(1.0)
    run(pace, False, [1.0])
    assert pace.tries(5.0, timeable=False)  # the steps between those that are timed are plain too


def test_a_trial_is_given_up_where_too_few_steps_are_timed() -> None:
    """And the next one waits, longer each time."""
    pace = Pace(0.01)
    for wait in (20, 30, 40, 50, 60, 70, 80, 90, 100, 100):
        run(pace, True, [1.0] * (wait - 1))
        assert not pace.tries(1.0)
        run(pace, True, [1.0])
        assert [pace.tries(1.0) for _ in range(MOST * TRIAL + 1)] == [True] * MOST * TRIAL + [False]
    assert not pace.ratios


@pytest.mark.parametrize(
    ("gain", "known", "wait"), [(1.0, 8, 100), (0.9, 8, 220), (0.9, 0, 44), (0.5, 0, 140), (1.1, 0, 16)]
)
def test_where_plain_decoding_pays_some_steps_are_drafted(gain: float, known: int, wait: int) -> None:
    """What six drafted steps and the change waste may be a hundredth of the time; only steps that are timed count."""
    pace, call = Pace(0.01, [1.0] * known), (gain + 1e-9, 2.0)
    assert not any(pace.tries_drafting(*call) for _ in range(999))  # nobody times steps
    pace = Pace(0.01, [1.0] * known)
    pace.add(False, 1.0)
    assert not any(pace.tries_drafting(*call) for _ in range(wait - 1))
    for _ in range(DRAFTED):
        assert [pace.tries_drafting(*call, timeable=timeable) for timeable in (True, False)] == [True, False]
        pace.add(True, 2.0)
    assert not pace.tries_drafting(*call)
    assert run(pace, False, [9.0] * SETTLE + [1.0] * (TRIAL - SETTLE)) == [False] * (TRIAL - 1) + [True]
    assert pace.ratios[-1] == 0.5


def test_a_drafted_trial_ends_where_nothing_is_timed() -> None:
    pace, most = Pace(0.01, [1.0] * TRIALS), MOST * DRAFTED
    pace.add(False, 1.0)
    answers = [pace.tries_drafting(1.0, 2.0) for _ in range(200)]
    assert answers == [False] * 99 + [True] * most + [False] * (100 - most) + [True]


def test_steps_that_are_not_timed_put_a_drafted_trial_off() -> None:
    pace = Pace(0.01, [1.0] * TRIALS)
    pace.add(False, 1.0)
    assert not any(pace.tries_drafting(1.0, 2.0, timeable=False) for _ in range(500))
    for timeable in [True, *[False] * 9] * (MOST * DRAFTED - 1):
        assert pace.tries_drafting(1.0, 2.0, timeable) == timeable
    assert not pace.tries_drafting(1.0, 2.0)


def test_drafted_trials_become_rarer_whether_or_not_they_tell_anything() -> None:
    pace = Pace(0.01)
    pace.add(False, 1.0)
    answers = [pace.tries_drafting(1.0, 2.0) for _ in range(20 + 30 + 40 + 1)]
    begins = [at + 1 for at, (a, b) in enumerate(pairwise([False, *answers])) if b and not a]
    assert begins == [20, 20 + 30, 20 + 30 + 40]


def test_a_drafted_trial_ends_where_drafting_pays() -> None:
    pace = Pace(0.02)
    pace.add(False, 1.0)
    assert [pace.tries_drafting(1.0, 2.0) for _ in range(SOONEST)] == [False] * (SOONEST - 1) + [True]
    for _ in range(2):
        assert not pace.tries(1.2)
        assert not any(pace.tries_drafting(1.0, 2.0) for _ in range(SOONEST - 1))


def test_plain_steps_in_a_long_row_say_nothing() -> None:
    pace = Pace(0.01)
    for _ in range(2):
        for _ in range(TRIAL):
            assert pace.listens
            pace.add(False, 1.0)
        assert not pace.listens
        pace.add(False, 1.0)
        assert not pace.listens
        run(pace, True, [1.0] * (2 * TRIAL))


def decode(table_gain: float, true_gain: float, seed: int, steps: int = 1000) -> tuple[float, float]:
    """Drafting gains other than by the table: speed, the better way's is 1, and share of drafted steps in the end."""
    gate, rng = Gate(1, 1024, 0.05), random.Random(seed)
    gate.expectation = Expectation(draft_len=1, curve=[1.0, TOKENS], promised=1.0, kept=1.0, seen=1e9, judged=1e9)
    time = tokens = late = 0.0
    for step in range(steps):
        drafts, probes = gate.choose(1, [2], [TOKENS / table_gain], plain=1.0)
        took, priced = (TOKENS / true_gain, TOKENS / table_gain) if drafts else (1.0, 1.0)
        if not probes:
            gate.time(1, drafts, took / priced * rng.lognormvariate(0, 0.1))
        time, tokens = time + took, tokens + (TOKENS if drafts else 1.0)
        late += drafts and step >= steps // 2
    return tokens / time / max(1.0, true_gain), 2 * late / steps


@pytest.mark.parametrize("true_gain", [0.8, 0.9, 0.95, 1.0, 1.1, 1.25, 1.6])
@pytest.mark.parametrize("error", [0.8, 0.9, 1.0, 1.1, 1.2])
def test_the_faster_way_wins_where_the_table_is_wrong(error: float, true_gain: float) -> None:
    speeds, shares = zip(*(decode(error * true_gain, true_gain, seed) for seed in range(5)), strict=True)
    assert median(speeds) > 0.96
    assert sorted(speeds)[1] > 0.9  # once in a while the first trials mislead
    if not 0.94 < true_gain < 1.2:  # otherwise both ways will do
        assert (median(shares) > 0.5) == (true_gain > 1)


def test_no_trial_in_steps_that_will_not_be_timed() -> None:
    gate = Gate(1, 10**9, 0.05)
    gate.expectation = Expectation(draft_len=1, curve=[1.0, TOKENS], promised=1.0, kept=1.0, seen=1e9, judged=1e9)
    call = (8, [16], [TOKENS / 0.95], 1.0)
    for timeable in (False, True):
        answers = []
        for _ in range(2000):
            answers.append(gate.choose(*call, timeable=timeable))
            gate.time(8, answers[-1][0], 1.0)
        assert any(drafts and not probes for drafts, probes in answers) == timeable


@pytest.mark.parametrize("period", [1, 3, 100])
@pytest.mark.parametrize(("table_gain", "ratio"), [(1.2, 1.25), (0.95, 0.75)])
def test_a_table_that_is_wrong_at_one_size_alone(period: int, table_gain: float, ratio: float) -> None:
    """Five to eight requests take longer to draft than it says, or less long; one takes as long."""
    gate, late = Gate(1, 1024, 0.05), {1: 0, 5: 0, 8: 0}
    gate.expectation = Expectation(draft_len=1, curve=[1.0, TOKENS], promised=1.0, kept=1.0, seen=1e9, judged=1e9)
    for step in range(8000):
        rows = 1 if step // period % 2 else (5, 8)[step // period // 2 % 2]
        drafts, probes = gate.choose(rows, [2 * rows], [TOKENS / table_gain], plain=1.0)
        late[rows] += drafts and step >= 7000
        if not probes:
            gate.time(rows, drafts, ratio if drafts and rows > 1 else 1.0)
    assert [late[1] > 400, late[5] > 150, late[8] > 150] == [table_gain > 1, ratio < 1, ratio < 1]
    assert min(late[1], late[5], late[8]) < 50


def test_the_gate_uses_a_trial_at_once_and_keeps_it() -> None:
    gate = Gate(1, 1024, 0.05)
    gate.expectation = Expectation(draft_len=1, curve=[1.0, TOKENS], promised=1.0, kept=1.0, seen=1e9, judged=1e9)
    call = (1, [2], [TOKENS / 1.1], 1.0)
    steps = 0
    while (choice := gate.choose(*call)) == (True, False):
        gate.time(1, True, 1.0)
        steps += 1
    assert steps == math.ceil((TRIAL * (1 - 1 / 1.1) + 1) / SHARE * 2 / (TRIALS + 2))
    assert choice == (False, False)  # a trial is no probe
    for _ in range(TRIAL):
        assert gate.choose(*call) == (False, False)
        assert gate.idle == 0
        gate.time(1, False, 0.8)
    assert gate.choose(*call) == (False, False)
    assert gate.idle == 1
    restored = Gate(1, 1024, 0.05)
    restored.restore(gate.state())
    assert restored.state() == gate.state()
    assert list(restored.pace(1).ratios) == pytest.approx([0.8])
    assert not restored.pays(*call)
    assert restored.pace(1).share == SHARE
