"""What decides whether to draft: the learned curve, how promises were kept, and when the way changes."""

from __future__ import annotations

import math

import pytest

from dcut_kernels.expectation import PRIOR, Expectation
from dcut_kernels.gate import DOUBT, LEAD, SETTLING, SHARE, SKIPPED, Gate


def test_the_curve_is_a_line_through_the_gains_of_a_request() -> None:
    """Two requests with drafts; buckets of 2, 3 and 8 tokens."""
    learned = Expectation(draft_len=4)
    learned.update(2, [2, 3, 8], [2.0, 3.0, 5.0], promised=3.0, kept=3)
    assert learned.curve == pytest.approx([1.0, 1.7, 2.1, 2.5, 2.5])  # 1.5 at 1.5 tokens, 2.5 from 4 on
    assert learned.best(2, [2, 3, 8], [4.0, 4.0, 5.0]) == pytest.approx((2 * 2.5 / 5, 5.0))
    assert learned.best(10, [5, 15], [1.0, 10.0])[0] == pytest.approx(10 * 1.35 / 10)  # 5 do not hold 10 bonus tokens
    assert learned.best(2, [2, 3], [float("inf"), 0.0]) == (0.0, 0.0)


def test_the_average_forgets() -> None:
    learned = Expectation(draft_len=1, memory=64.0)
    for seen, gain in ((8, 1.5), (16, 1.9), (24, 1.1)):
        learned.update(8, [16], [8 * gain], promised=8 * gain, kept=8)
        assert learned.seen == seen
    assert learned.curve[1] == pytest.approx(1.5)  # of all so far
    for _ in range(100):
        learned.update(8, [16], [8.0], promised=8.0, kept=8)
    assert learned.seen == 64
    learned.update(8, [16], [16.0], promised=16.0, kept=8)
    assert learned.curve[1] == pytest.approx(1 + 8 / 72, abs=1e-5)  # of the last 64 and the new 8
    alone, after_a_pause = (Expectation(draft_len=1, memory=64.0, seen=64.0, curve=[1.0, 1.0]) for _ in range(2))
    alone.update(1, [2], [2.0], promised=2.0, kept=1, steps=1)
    after_a_pause.update(1, [2], [2.0], promised=2.0, kept=1, steps=100)
    assert alone.curve[1] == pytest.approx(1 + 1 / 65)
    assert after_a_pause.curve[1] == pytest.approx(1 + 8 / 72)  # stands for an eighth of what is known at most
    young = Expectation(draft_len=1, memory=64.0, seen=16.0, curve=[1.0, 1.0])
    young.update(1, [2], [2.0], promised=2.0, kept=1, steps=100)
    assert young.seen == 16 + 2


def test_promises_count_by_how_they_were_kept() -> None:
    learned = Expectation(draft_len=1, memory=1024.0)
    for seen in range(8, 8000, 8):
        learned.update(8, [16], [16.0], promised=16.0, kept=8)
        honest = (seen * 0.5 + PRIOR) / (seen + PRIOR)
        assert learned.best(8, [16], [1.0])[0] == pytest.approx(16 * honest)
    before = learned.kept, learned.promised, learned.judged
    learned.update(8, [16], [8.0], promised=None, kept=8)  # a floor kept more than the bucket holds
    assert (learned.kept, learned.promised, learned.judged) == before
    assert learned.curve[1] < 2


def gate(gain: float, min_gain: float = 0.0, seen: float = 1e12) -> Gate:
    """A gate that has learned what two tokens of a request bring, from so many steps of requests."""
    made = Gate(1, 5, min_gain)
    made.expectation = Expectation(draft_len=1, curve=[1.0, gain], promised=1.0, kept=1.0, seen=seen, judged=100.0)
    return made


def test_drafting_has_to_lead() -> None:
    for gain, pays in ((1.99, False), (2.01, True)):
        assert gate(gain).pays(4, [8], [2.0], plain=1.0) is pays
        assert gate(1.1 * gain, 0.1).pays(4, [8], [2.0], plain=1.0) is pays
        assert gate(gain).pays(4, [8], [20.0], plain=10.0) is pays


def test_the_way_changes_only_for_a_lead() -> None:
    made, answers = gate(2.0), []
    for gain in (1.99, 2.01, 2 * LEAD + 0.01, 2.01, 1.99, 2 / LEAD - 0.01, 1.99):
        made.expectation.curve[1] = gain
        made._best.clear()
        answers.append(made.pays(4, [8], [2.0], plain=1.0))
    assert answers == [False, False, True, True, True, False, False]


@pytest.mark.parametrize("seen", [1, 4, 16, 64, 256, 1000])
def test_what_is_little_known_has_the_benefit_of_the_doubt(seen: int) -> None:
    """Plain decoding teaches nothing of drafting; where as much is known as counts, there is none."""
    least = 2 / (1 + DOUBT * max(0, 1 / math.sqrt(seen) - 1 / math.sqrt(256)))
    assert gate(least + 0.01, seen=seen).pays(4, [8], [2.0], plain=1.0)
    assert not gate(least - 0.01, seen=seen).pays(4, [8], [2.0], plain=1.0)


def test_steps_before_drafting_do_not_count_towards_a_probe() -> None:
    made = gate(1.0)
    assert [(made.pays(4, [8], [2.0], plain=1.0), made.probes(4)) for _ in range(4)] == [(False, False)] * 4
    assert made.pays(8, [16], [2.0], plain=2.5)  # of other requests
    assert [(made.pays(4, [8], [2.0], plain=1.0), made.probes(4)) for _ in range(5)] == [(False, False)] * 4 + [
        (False, True)
    ]


@pytest.mark.parametrize(
    ("gain", "every"),
    [(0.01, 1200), (0.2, 1160), (0.5, 800), (0.9, 320), (0.98, 224), (1.0, 200), (1.02, 176), (1.2, 16), (1.4, 16)],
)
def test_probes_are_as_frequent_as_they_are_cheap(gain: float, every: int) -> None:
    """A drafted step takes as long as three plain ones; probes may waste a quarter of a percent of the time."""
    made = gate(3 * gain + 1e-9, min_gain=0.5)
    made.probe_every = 1200
    assert not made.pays(8, [16], [6.0], plain=2.0)
    assert [made.probes(8) for _ in range(every)] == [False] * (every - 1) + [True]
    assert not made.probes(8)


@pytest.mark.parametrize(("rows", "steps"), [(1, 8), (2, 4), (3, 3), (8, 1), (64, 1)])
def test_a_probe_drafts_eight_requests_steps(rows: int, steps: int) -> None:
    made, budgets = gate(0.9 * 3, min_gain=0.5), [2 * rows]
    made.probe_every = 2000
    every = math.ceil((0.1 * 3 * steps + SETTLING) / SHARE - 1e-9)  # all of them are waste
    for _ in range(2):
        assert not made.pays(rows, budgets, [6.0], plain=2.0)
        answers = [made.probes(rows) for _ in range(every + steps)]
        assert answers == [False] * (every - 1) + [True] * steps + [False]
        made.idle = 0


def test_a_probe_ends_where_drafting_pays() -> None:
    made = gate(0.9, min_gain=0.5)
    made.probe_every = 16
    assert not made.pays(1, [2], [1.0], plain=1.0)
    assert [made.probes(1) for _ in range(17)] == [False] * 15 + [True, True]
    made.expectation.curve[1] = 2.0
    made.forget_rates()
    assert made.pays(1, [2], [1.0], plain=1.0)
    made.expectation.curve[1] = 1.0
    made.forget_rates()
    assert not made.pays(1, [2], [1.0], plain=1.0)
    assert not made.probes(1)


def test_nothing_is_decided_before_enough_was_seen() -> None:
    made = gate(0.1, seen=0.0)
    for _ in range(32):  # of four requests each
        assert made.choose(4, [8], [2.0], plain=1.0) == (True, True)
        made.learn([1] * 4, [0] * 4, [8], [4.0], promised=4.0)
    assert made.choose(4, [8], [2.0], plain=1.0) == (False, False)


def test_what_is_learned_is_used_at_once() -> None:
    made = gate(3.0, seen=200.0)
    assert made.pays(2, [4], [2.0], plain=1.0)
    for _ in range(400):
        made.learn([1, 1], [0, 0], [4], [2.0], promised=2.0)
    assert not made.pays(2, [4], [2.0], plain=1.0)
    restored = gate(3.0)
    assert restored.pays(2, [4], [2.0], plain=1.0)
    restored.restore(made.state())
    assert not restored.pays(2, [4], [2.0], plain=1.0)
    assert restored.state() == made.state()


def test_once_enough_is_known_one_step_of_four_teaches() -> None:
    """But each probe does."""
    made, step = gate(1.5, seen=250.0), ([1] * 4, [1] * 4, [8], [8.0], 8.0)
    before = made.state()
    for learns in [True, True, *[False] * SKIPPED, True, *[False] * SKIPPED, True]:
        made.learn(*step)
        assert (made.state() != before) == learns
        before = made.state()
    made.probe_every = made._every = 5
    assert [made.probes(4) for _ in range(5)] == [False] * 4 + [True]
    made.learn(*step)
    assert made.state() != before


def test_rows_without_drafts_take_no_part() -> None:
    """Four rows, of which two had drafts: the others' tokens are in budgets and gains, and not in what is learned."""
    made, alone = Gate(3, 5, 0.0), Gate(3, 5, 0.0)
    made.learn([3, 0, 2, 0], [2, 0, 1, 0], [4, 6, 12], [4.0, 5.5, 7.0], promised=5.5)
    alone.learn([3, 2], [2, 1], [2, 4, 7], [2.0, 3.5, 5.0], promised=3.5)
    assert made.state() == alone.state()
    assert made.expectation.kept == 2.5


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_a_probe_stands_for_the_steps_before_it(rows: int) -> None:
    made = Gate(1, 8, 0.0)
    made.expectation = gate(1.5, seen=8000.0).expectation
    made.expectation.memory = 1e6
    assert [made.probes(rows) for _ in range(8)] == [False] * 7 + [True]
    made.learn([1] * rows, [1] * rows, [2 * rows], [1.5 * rows], promised=1.5 * rows)
    for _ in range(8 // rows - 1):
        assert made.probes(rows)
        made.learn([1] * rows, [1] * rows, [2 * rows], [1.5 * rows], promised=1.5 * rows)
    assert made.expectation.seen == 8000 + rows * 8
    made.learn([1] * rows, [1] * rows, [2 * rows], [1.5 * rows], promised=1.5 * rows)
    assert made.expectation.seen == 8000 + rows * 9
    assert not made.probes(rows)
