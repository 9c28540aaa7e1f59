"""Calibrated confidences: fits, reports, and what the operator makes of their tables."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats
from torch import Tensor

from dcut_kernels import backends, calibration
from dcut_kernels.calibration import DraftLogits, OnlineLogistic, PositionRates, compile_table
from dcut_kernels.ops import Backend
from microbench.cases import make

UNIT, Q_MAX = 1 << 20, (1 << 26) - 1
IDENTITY = torch.arange(65, dtype=torch.int32) * 2**17
SLOPE, INTERCEPTS = 0.6, [-0.5, 0.0, 0.4, -1.0]
D = len(INTERCEPTS)


def overconfident(rows: int, generator: torch.Generator, most: float = math.inf) -> tuple[Tensor, Tensor]:
    """Confidences and the true probabilities that they stand for, float64 [rows, 4] each; `most`: of a logit."""
    logits = 1.5 + 1.5 * torch.randn(rows, D, generator=generator, dtype=torch.float64)
    logits = logits.clamp(max=most)
    return logits.sigmoid(), (SLOPE * logits + torch.tensor(INTERCEPTS)).sigmoid()


def verify(truth: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Drafts verified, a random number of each request, and those accepted with the given probabilities."""
    keep_lens = torch.randint(truth.shape[1] + 1, truth.shape[:1], generator=generator)
    hits = torch.rand(truth.shape, generator=generator, dtype=torch.float64) < truth
    return keep_lens, torch.minimum(hits.long().cumprod(1).sum(1), keep_lens)


def trained(steps: int, batch: int = 32, most: float = math.inf, **options: float) -> OnlineLogistic:
    """A calibration that has seen so many steps of the over-confident drafter."""
    generator, model = torch.Generator().manual_seed(0), OnlineLogistic(D, **options)
    for _ in range(steps):
        confidence, truth = overconfident(batch, generator, most)
        model.update(confidence, *verify(truth, generator))
    return model


@pytest.fixture(scope="module")
def model() -> OnlineLogistic:
    return trained(400)


def test_feedback_by_hand() -> None:
    confidence = torch.tensor([[0.9, 0.8, 0.7], [0.6, 2.0, 0.4], [-1.0, 0.2, 0.1], [0.5, 0.5, 0.5], [math.nan, 1, 1]])
    values, outcome, mask = calibration.feedback(
        confidence, torch.tensor([3, 2, 3, 0, 2], dtype=torch.int32), torch.tensor([1, 2, 0, 0, 1])
    )
    assert mask.int().tolist() == [[1, 1, 0], [1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 1, 0]]
    assert outcome.int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert torch.equal(values[:3], confidence[:3].clamp(0, 1))
    assert values[4, 0] == 0


def test_report_by_hand() -> None:
    confidence = torch.tensor([0.95, 0.95, 0.95, 0.5, 0.1, 0.3])
    accepted = torch.tensor([True, True, False, True, False, True])
    mask = torch.tensor([True] * 5 + [False])
    got = calibration.report(confidence, accepted, mask)
    assert got.n == 5
    assert got.ece == pytest.approx((abs(3 * 0.95 - 2) + 0.5 + 0.1) / 5)
    assert got.brier == pytest.approx((2 * 0.05**2 + 0.95**2 + 0.5**2 + 0.1**2) / 5)
    assert got.auroc == pytest.approx((2 * 1.5 + 1) / 6)  # pairs won: .95 beats .1 and ties with .95, .5 beats .1
    bins = calibration.report(torch.tensor([0.65, 0.68]), torch.tensor([True, False]))
    assert bins.ece == pytest.approx((0.35 + 0.68) / 2)  # one bin of 14 or 16, but two of 15
    assert math.isnan(calibration.report(torch.ones(4), torch.ones(4, dtype=torch.bool)).auroc)


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=2, max_size=40))
@settings(max_examples=60, deadline=None)
def test_auroc_is_that_of_middle_ranks(pairs: list[tuple[int, bool]]) -> None:
    values, outcome = np.array([v / 8 for v, _ in pairs]), np.array([y for _, y in pairs])
    got = calibration.report(torch.from_numpy(values), torch.from_numpy(outcome)).auroc
    positive, negative = outcome.sum(), (~outcome).sum()
    won = stats.rankdata(values)[outcome].sum() - positive * (positive + 1) / 2
    assert got == pytest.approx(won / (positive * negative) if positive and negative else math.nan, nan_ok=True)


def test_identity_compiles_to_the_identity() -> None:
    assert torch.equal(compile_table([lambda c: c] * 3), IDENTITY.expand(3, 65))
    assert torch.equal(OnlineLogistic(3).table(), IDENTITY.expand(3, 65))


def test_compiled_entries_by_hand() -> None:
    table = compile_table(
        [torch.square, lambda c: c / 4, torch.zeros_like, torch.exp, lambda c: 0.5 - (abs(c - 0.5) < 0.1) / 4]
    )
    assert torch.equal(table[0], 2 * IDENTITY)
    assert torch.equal(table[1], IDENTITY + 2 * UNIT)
    assert table[2:4].tolist() == [[Q_MAX] * 65, [0] * 65]
    assert table[4].tolist() == [UNIT if 2 ** (-j / 8) >= 0.6 else 2 * UNIT for j in range(65)]  # never falls again


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_applying_a_table_is_what_the_operator_does(name: str, model: OnlineLogistic) -> None:
    if name not in backends.available():
        pytest.skip("the compiled library is not built")
    generator = torch.Generator().manual_seed(1)
    confidence = torch.rand(40, D, generator=generator)
    confidence[:5] = torch.tensor([0.0, 1.0, math.nan, 2.0**-20, -1.0])[:, None]
    for table in (model.table(), torch.randint(0, 2**22, (D, 65), generator=generator, dtype=torch.int32)):
        q = calibration.calibrated_q(table, confidence)
        sums = q.long().cumsum(1).clamp(max=Q_MAX).int()
        assert torch.equal(sums, backends.get(name).log_prefix_sum(confidence, calibration=table))
        assert torch.equal(calibration.apply(table, confidence), torch.exp2(-q.double() / UNIT))


def test_more_rows_than_one_launch_serves() -> None:
    confidence = torch.linspace(0, 1, 9000)[:, None].repeat(1, 2)
    table = torch.stack([IDENTITY, 2 * IDENTITY])
    whole = calibration.calibrated_q(table, confidence)
    assert torch.equal(whole[-50:], calibration.calibrated_q(table, confidence[-50:]))


def test_logistic_recovers_what_feedback_was_drawn_from() -> None:
    model = trained(100, batch=500, most=4.0, memory=1e6)
    assert model.slope.item() == pytest.approx(SLOPE, abs=0.05)
    assert model.intercept.tolist() == pytest.approx(INTERCEPTS, abs=0.12)


def test_logistic_is_the_maximum_of_its_likelihood() -> None:
    """The fit of scipy to the same observations; nodes coincide with their logits, so nothing is interpolated."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randint(-4, 9, (300, 2), generator=generator).double() / 2  # -2 to 4
    confidence, intercepts = logits.sigmoid(), torch.tensor([-1.0, 0.5])
    keep_lens, accepted = verify((0.5 * logits + intercepts).sigmoid(), generator)
    model = OnlineLogistic(2, strength=3.0, memory=1e12)
    model.update(confidence, keep_lens, accepted)
    model.refine(3)  # Newton steps: four in all
    _, outcome, mask = calibration.feedback(confidence, keep_lens, accepted)
    nodes = np.linspace(-4, 4, 17)

    def loss(parameters: np.ndarray) -> float:
        a, b = parameters[0], parameters[1:]
        total = 0.0
        for k in range(2):
            seen = mask[:, k].numpy()
            eta, y = a * logits[:, k].numpy()[seen] + b[k], outcome[:, k].numpy()[seen]
            total += np.sum(np.logaddexp(0, eta) - y * eta)
            eta = a * nodes + b[k]
            total += 3 / 17 * np.sum(np.logaddexp(0, eta) - eta / (1 + np.exp(-nodes)))
        return total

    best = optimize.minimize(loss, np.array([1.0, 0, 0]), method="BFGS").x
    assert [model.slope.item(), *model.intercept.tolist()] == pytest.approx(best.tolist(), abs=2e-4)


def test_calibration_improves_an_overconfident_drafter(model: OnlineLogistic) -> None:
    generator = torch.Generator().manual_seed(9)
    confidence, truth = overconfident(20000, generator)
    values, outcome, mask = calibration.feedback(confidence, *verify(truth, generator))
    before = calibration.report(values, outcome, mask)
    pooled = calibration.fit_isotonic(values[:10000], outcome[:10000], mask[:10000], pooled=True)
    each = calibration.fit_isotonic(values[:10000], outcome[:10000], mask[:10000])
    for table, error in ((model.table(), 0.02), (compile_table(each), 0.02), (compile_table(pooled), 0.02)):
        after = calibration.report(calibration.apply(table, values), outcome, mask)
        assert after.ece < error < before.ece / 4
        assert after.brier < 0.95 * before.brier


def test_order_within_a_position_is_kept(model: OnlineLogistic) -> None:
    confidence = torch.linspace(0, 1, 1001)[:, None].repeat(1, D)
    inverted = OnlineLogistic(D)  # a drafter that is right where it doubts
    for accepted in (0, 1):
        inverted.update(torch.full((500, D), 0.9 - 0.8 * accepted), *torch.tensor([[D], [D * accepted]]).expand(2, 500))
    inverted.refine(20)
    assert inverted.slope > 0
    for table in (model.table(), inverted.table(), PositionRates(D).table()):
        assert (table.diff(dim=1) >= 0).all()
        assert (calibration.calibrated_q(table, confidence).diff(dim=0) <= 0).all()


def test_table_is_the_curve_but_for_its_lines(model: OnlineLogistic) -> None:
    confidence = torch.linspace(0.01, 1, 500)[:, None].repeat(1, D)
    error = (calibration.apply(model.table(), confidence) - model(confidence)).abs()
    assert error.max() < 0.05
    assert error[confidence < 2 ** (-1 / 8)].max() < 0.01


def test_without_data_nothing_moves() -> None:
    """A position that nothing reached keeps its confidences, up to the slope that all positions share."""
    model = OnlineLogistic(3)
    model.update(torch.rand(4, 3), torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32))
    model.update(torch.full((4, 3), math.nan), torch.full((4,), 3), torch.full((4,), 1))
    model.update(
        torch.rand(4, 3), torch.full((4,), 3), torch.full((4,), 1), weight=torch.tensor([0.0, -1.0, math.nan, 0])
    )
    assert torch.equal(model.table(), IDENTITY.expand(3, 65))
    generator = torch.Generator().manual_seed(10)
    for _ in range(100):  # a slope of 1, an intercept below 0, and only the first position is ever verified
        logits = torch.linspace(-4, 4, 101)
        accepted = (torch.rand(101, generator=generator) < (logits - 1).sigmoid()).long()
        model.update(logits.sigmoid()[:, None].repeat(1, 3), torch.ones(101, dtype=torch.int64), accepted)
    assert model.intercept[0].item() == pytest.approx(-1, abs=0.1)
    assert model.intercept[1:].tolist() == pytest.approx([0, 0], abs=0.02)


@pytest.mark.parametrize("confidence", [1.0, 0.0, 0.5])
def test_constant_confidence(confidence: float) -> None:
    """Logits of 1 and 0 are infinite; each position is calibrated to its own rate all the same."""
    generator, model, rates = torch.Generator().manual_seed(2), OnlineLogistic(3), torch.tensor([0.9, 0.7, 0.5])
    for _ in range(300):
        model.update(torch.full((32, 3), confidence), *verify(rates.expand(32, 3), generator))
    got = model(torch.full((1, 3), max(confidence, 2.0**-8)))[0]
    if confidence > 0:
        assert got[0].item() == pytest.approx(0.9, abs=0.012)
        assert got.tolist() == pytest.approx(rates.tolist(), abs=0.03)
    assert 0 < model.slope < math.inf


def test_one_adversarial_request_of_32() -> None:
    """Its drafts, of confidence 1, are all rejected, for ever: it costs the others less than 0.01 of calibration."""
    names = ("without", "numbered", "unnumbered", "left out")
    without, numbered, unnumbered, left_out = models = [OnlineLogistic(D) for _ in names]
    generator, everyone = torch.Generator().manual_seed(5), torch.arange(32) + 5000
    others = torch.arange(32) != 7
    for _ in range(300):
        confidence, truth = overconfident(32, generator)
        keep_lens, accepted = verify(truth, generator)
        without.update(confidence[others], keep_lens[others], accepted[others])
        confidence[7], keep_lens[7], accepted[7] = 1.0, D, 0
        numbered.update(confidence, keep_lens, accepted, requests=everyone)
        unnumbered.update(confidence, keep_lens, accepted)
        left_out.update(confidence, keep_lens, accepted, weight=others.float())
    torch.testing.assert_close(left_out.state_dict(), without.state_dict())
    confidence, truth = overconfident(5000, generator)
    error = {name: (m(confidence) - truth).abs().mean(0) for name, m in zip(names, models, strict=True)}
    assert (error["numbered"] < error["without"] + 0.01).all()
    assert (error["unnumbered"] > error["without"] + 0.02).any()


def test_a_drafter_that_is_wrong_about_all_requests_is_believed() -> None:
    """Requests count less where they differ from the others, not where all differ from the prior."""
    generator, model = torch.Generator().manual_seed(12), OnlineLogistic(1)
    for _ in range(200):
        keep_lens, accepted = verify(torch.full((16, 1), 0.2), generator)
        model.update(torch.ones(16, 1), keep_lens, accepted, requests=torch.arange(16))
    assert model(torch.ones(1, 1)).item() == pytest.approx(0.2, abs=0.04)


def test_a_weight_is_at_most_one() -> None:
    generator = torch.Generator().manual_seed(3)
    confidence, truth = overconfident(8, generator)
    keep_lens, accepted = verify(truth, generator)
    heavy, plain = OnlineLogistic(D), OnlineLogistic(D)
    heavy.update(confidence, keep_lens, accepted, weight=torch.full((8,), 100.0))
    plain.update(confidence, keep_lens, accepted)
    assert torch.equal(heavy.table(), plain.table())
    assert not torch.equal(heavy.table(), IDENTITY.expand(D, 65))


def test_memory_fades_by_observations() -> None:
    model, rates = OnlineLogistic(1, memory=500), PositionRates(1, memory=500)
    ones = torch.ones(10, dtype=torch.int64)
    for accepted in (1, 0):
        for _ in range(300):
            model.update(torch.full((10, 1), 0.7), ones, ones * accepted)
            rates.update(ones, ones * accepted)
        assert model(torch.tensor([[0.7]])).item() == pytest.approx(accepted, abs=0.05)
        assert rates.rates().item() == pytest.approx(accepted, abs=0.02)
        assert model.seen.sum() == pytest.approx(500, rel=0.02)
        assert rates.seen.item() == pytest.approx(500, rel=0.02)


def test_state_is_saved_and_updates_repeat_themselves() -> None:
    first = trained(20)
    second = OnlineLogistic(D)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    confidence, truth = overconfident(32, torch.Generator().manual_seed(6))
    for model in (first, second):
        model.update(confidence, *verify(truth, torch.Generator().manual_seed(7)))
    assert torch.equal(first.table(), second.table())
    assert torch.equal(trained(9).table(), trained(9).table())
    rates, other = PositionRates(2), PositionRates(2)
    rates.update(torch.tensor([2]), torch.tensor([1]))
    other.load_state_dict(rates.state_dict())
    assert torch.equal(other.table(), rates.table())
    with pytest.raises(RuntimeError, match="size mismatch"):
        OnlineLogistic(D + 1).load_state_dict(first.state_dict())


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 10)), max_size=30))
@settings(max_examples=60, deadline=None)
def test_isotonic_regression_is_that_of_scipy(points: list[tuple[float, float]]) -> None:
    values, weights = [v for v, _ in points], [w for _, w in points]
    got = calibration.isotonic_regression(values, weights)
    want = optimize.isotonic_regression(values, weights=weights).x.tolist() if points else []
    assert got == pytest.approx(want, abs=1e-9)


def test_isotonic_curve_by_hand() -> None:
    confidence = torch.tensor([0.2, 0.4, 0.4, 0.6, 0.8, 0.9, 0.5], dtype=torch.float64)[:, None]
    accepted = torch.tensor([0, 1, 0, 0, 1, 1, 1]).bool()[:, None]
    mask = torch.tensor([1, 1, 1, 1, 1, 1, 0]).bool()[:, None]
    (curve,) = calibration.fit_isotonic(confidence, accepted, mask, strength=0)
    assert curve.x.tolist() == [0.2, 0.4, 0.6, 0.8, 0.9]
    assert curve.y.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1, 1])  # .4 and .6 violate: 1 of 3
    at = torch.tensor([0.0, 0.3, 0.5, 0.7, 1.0], dtype=torch.float64)
    assert curve(at).tolist() == pytest.approx([0, 1 / 6, 1 / 3, 2 / 3, 1])
    weight = torch.tensor([1, 3, 1, 1, 1, 1, 1])[:, None].double()
    (weighted,) = calibration.fit_isotonic(confidence, accepted, mask, weight=weight, strength=0)
    assert weighted(at[2:3]).item() == pytest.approx(3 / 5)


def test_isotonic_leaves_nan_out() -> None:
    confidence, accepted = torch.tensor([[0.5], [0.004], [math.nan]]), torch.tensor([[True], [False], [True]])
    (expected,) = calibration.fit_isotonic(confidence[:2], accepted[:2], strength=0)
    for pooled in (False, True):
        (curve,) = calibration.fit_isotonic(confidence, accepted, pooled=pooled, strength=0)
        assert torch.equal(curve.x, expected.x)
        assert torch.equal(curve.y, expected.y)


def test_isotonic_without_data_is_the_identity() -> None:
    nothing = torch.zeros(0, 2), torch.zeros(0, 2, dtype=torch.bool)
    for strength in (0.0, 1.0):
        assert torch.equal(compile_table(calibration.fit_isotonic(*nothing, strength=strength)), IDENTITY.expand(2, 65))
    rejected = calibration.fit_isotonic(torch.full((50, 1), 0.5), torch.zeros(50, 1, dtype=torch.bool))
    assert 0 < rejected[0](torch.tensor([0.5]).double()) < 0.02
    assert calibration.fit_isotonic(*nothing, pooled=True)[1](torch.ones(1).double()) == 1


def test_rates_by_hand() -> None:
    rates = PositionRates(3, prior_rate=0.5, strength=2.0, memory=1e12)
    rates.update(torch.tensor([3, 2, 1]), torch.tensor([1, 2, 0]))
    assert rates.rates().tolist() == pytest.approx([(2 + 1) / 5, (1 + 1) / 4, 0.5])
    table = rates.table()
    assert torch.equal(table, table[:, :1].expand(3, 65))
    assert table[1:, 0].tolist() == [UNIT, UNIT]
    assert calibration.apply(table, torch.ones(1, 3))[0].tolist() == pytest.approx([0.6, 0.5, 0.5], abs=1e-6)


def test_temperatures_by_hand() -> None:
    """Of a constant gap g and a rate r the best temperature is g / logit(r), which is infinite for a coin flip."""
    accepted = torch.arange(100)[:, None] < torch.tensor([80, 45, 99, 50])
    mask = torch.arange(100)[:, None] < torch.tensor([100, 90, 100, 0])
    logits = torch.tensor([0.0, 3.0]).repeat(100, 4, 1)  # the draft is the likelier of two tokens
    batch = DraftLogits(logits, torch.ones(100, 4, dtype=torch.int64), accepted, mask)
    batch.logits[:, 3], batch.draft_ids[:, 3] = math.nan, -1
    got = calibration.fit_temperatures(batch, strength=1e-6)
    assert got.tolist() == pytest.approx([3 / math.log(80 / 20), 16, 3 / math.log(99), 1], rel=2e-3)
    halves = [DraftLogits(*(part[rows] for part in batch)) for rows in (slice(0, 37), slice(37, 100))]
    torch.testing.assert_close(calibration.fit_temperatures(halves, strength=1e-6), got)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1e38, -math.inf])
def test_temperatures_need_finite_logits(wrong: float) -> None:
    """Of what was verified; a token may be excluded by -inf, but not all of them."""
    logits, mask = torch.zeros(3, 2, 4), torch.ones(3, 2, dtype=torch.bool)
    recorded = DraftLogits(logits, torch.zeros(3, 2, dtype=torch.int64), mask.clone(), mask)
    logits[:, :, 3] = -math.inf
    expected = calibration.fit_temperatures(recorded)
    assert torch.equal(expected, calibration.fit_temperatures(recorded._replace(logits=logits.half())))
    logits[1, 0, slice(None) if wrong < 0 else 2] = wrong
    message = rf"^logits: expected no NaN and a largest logit within 1e\+37 of 0 where mask is True, got {wrong:g} at"
    message = message.replace("1e+38", r"1e\+38")
    narrow = recorded._replace(logits=logits if math.isfinite(wrong) else logits.half())
    for bad in ([recorded], [narrow], [recorded._replace(mask=torch.zeros_like(mask)), recorded]):
        with pytest.raises(ValueError, match=rf"{message} \[1, 0\]$"):
            calibration.fit_temperatures(bad)
    mask[1] = False
    good = DraftLogits(*(part[[0, 2]] for part in recorded))
    assert torch.equal(calibration.fit_temperatures(recorded), calibration.fit_temperatures(good))


def test_temperatures_improve_an_overconfident_drafter() -> None:
    generator = torch.Generator().manual_seed(8)
    truth = 1.5 * torch.randn(3000, 3, 12, generator=generator)
    sharp = truth * torch.tensor([1.5, 2.5, 0.7])[:, None]
    draft_ids = sharp.argmax(-1)
    likely = truth.softmax(-1).gather(-1, draft_ids[..., None])[..., 0]
    keep_lens, accepted = verify(likely, generator)
    confidence = sharp.softmax(-1).gather(-1, draft_ids[..., None])[..., 0]
    values, outcome, mask = calibration.feedback(confidence, keep_lens, accepted)
    temperatures = calibration.fit_temperatures(DraftLogits(sharp, draft_ids, outcome, mask))
    assert temperatures.tolist() == pytest.approx([1.5, 2.5, 0.7], rel=0.15)
    scaled = (sharp / temperatures[:, None]).softmax(-1).gather(-1, draft_ids[..., None])[..., 0]
    assert calibration.report(scaled, outcome, mask).ece < calibration.report(values, outcome, mask).ece / 2


def test_the_operator_keeps_what_calibrated_confidences_would(backend: Backend, model: OnlineLogistic) -> None:
    generator = torch.Generator().manual_seed(11)
    for drafts in (18, 24, 30, 40):
        confidence = overconfident(12, generator)[0].float()
        scores = calibration.apply(table := model.table(), confidence).cumprod(1)
        inputs = make(str(drafts), confidence, [12 + drafts], [1.0]).inputs | {"budget": 12 + drafts}
        best = backend.select_and_pack(**inputs, calibration=table).keep_lens
        plain = backend.select_and_pack(**inputs).keep_lens
        kept, missed = ((scores * (torch.arange(D) < keep[:, None])).sum().item() for keep in (best, plain))
        top = scores.flatten().sort(descending=True).values[:drafts].sum().item()
        assert int(best.sum()) == int(plain.sum()) == drafts
        assert kept == pytest.approx(top, rel=2**-14)
        assert missed < kept * (1 - 2**-10)  # without the table it keeps others


ZERO, ONE = torch.zeros(2, dtype=torch.int32), torch.ones(1, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: OnlineLogistic(64), "draft_len: expected an int from 0 to 63, got 64"),
        (lambda: OnlineLogistic(3, strength=0), "strength: expected a number between 0 and inf, got 0"),
        (lambda: PositionRates(3, prior_rate=1.0), "prior_rate: expected a number between 0 and 1, got 1.0"),
        (lambda: OnlineLogistic(3)(torch.ones(2, 4)), r"confidence: expected float \[N, 3\], got float32 \[2, 4\]"),
        (lambda: calibration.feedback(torch.ones(2, 3), ZERO[:1], ZERO), r"keep_lens: expected int \[2\], got int32"),
        (lambda: calibration.feedback(torch.ones(2, 3), ZERO, ZERO.bool()), r"accepted: expected int \[2\], got bool"),
        (lambda: PositionRates(3).update(ZERO, ZERO, torch.ones(3)), r"weight: expected float \[2\]"),
        (lambda: compile_table([lambda c: c * math.nan]), r"curves\[0\]: expected numbers, got NaN at 1"),
        (lambda: compile_table([lambda c: c[:3]]), r"curves\[0\]: expected float \[65\], got float64 \[3\]"),
        (lambda: calibration.apply(IDENTITY[None].long(), torch.ones(2, 1)), r"table: expected int32 \[1, 65\], got"),
        (lambda: calibration.fit_isotonic(ONE, ONE > 0, weight=ONE * math.inf), "weight, strength: expected finite"),
        (lambda: calibration.fit_isotonic(ONE, ONE > 0, strength=math.inf), "weight, strength: expected finite"),
        (lambda: calibration.isotonic_regression([0.5, math.nan], [1, 1]), "values: expected finite numbers, got nan"),
        (lambda: calibration.isotonic_regression([0.5, math.inf], [1, 1]), "values: expected finite numbers, got inf"),
        (lambda: calibration.isotonic_regression([0.5], [math.nan]), "weights: expected a number between 0 and inf"),
        (lambda: calibration.fit_temperatures(iter([])), "recorded: expected batches that can be iterated over again"),
    ],
)
def test_errors_name_the_argument(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_isotonic_where_an_overconfident_drafter_lives() -> None:
    """Nearly all confidences lie between the last entry of the table and 1, and half of the drafts are wrong."""
    noise = torch.Generator().manual_seed(0)
    confidence = 0.95 + 0.05 * torch.rand(20_000, 1, generator=noise, dtype=torch.float64)
    accepted = torch.rand(20_000, 1, generator=noise, dtype=torch.float64) < 0.5
    table = compile_table(calibration.fit_isotonic(confidence, accepted))
    calibrated = calibration.apply(table, confidence.float())
    assert (calibrated - 0.5).abs().mean() < 0.05
    assert calibration.report(calibrated.float(), accepted).ece < 0.05


def test_isotonic_pools_what_is_nearest_to_an_entry() -> None:
    near = torch.exp2(-torch.tensor([[7.6], [8.4], [9.6]], dtype=torch.float64) / 8)
    (curve,) = calibration.fit_isotonic(near, torch.tensor([[True], [False], [False]]), strength=0)
    assert curve(torch.tensor([1.0, 0.51, 0.3], dtype=torch.float64)).tolist() == [0.5, 0.5, 0.0]
