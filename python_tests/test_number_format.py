"""Both polynomials through the operators: every mantissa, every fraction, within 0.51 units of the exact value."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dcut_kernels import backends
from dcut_kernels.ops import Backend

UNIT = 1 << 20
Q_MAX = (1 << 26) - 1
TOLERANCE = 0.51
WIDTH = 63
LOG2_E = np.longdouble("1.4426950408889634073599246810018921")


@pytest.fixture(scope="module")
def reference() -> Backend:
    return backends.get("reference")


def q_of(backend: Backend, values: torch.Tensor, log: bool = False) -> np.ndarray:
    """q of every value, in order: one value a row, so that no sum saturates."""
    return prefixes(backend, values.reshape(-1, 1), log).ravel()


def prefixes(backend: Backend, rows: torch.Tensor, log: bool = False) -> np.ndarray:
    """Prefix sums of any number of rows, in calls of the size of one GPU launch where that is the limit."""
    size = 1024 if backend.name == "simt" else max(len(rows), 1)
    return np.concatenate([backend.log_prefix_sum(part, log_confidence=log).numpy() for part in rows.split(size)])


def q_of_rows(backend: Backend, values: np.ndarray) -> np.ndarray:
    """The same in rows of 63, which cannot saturate for confidences of 1/2 and above."""
    rows = np.concatenate([values, np.ones(-len(values) % WIDTH, np.float32)]).reshape(-1, WIDTH)
    prefix = prefixes(backend, torch.from_numpy(rows))
    return np.diff(prefix, axis=1, prepend=0).ravel()[: len(values)]


def assert_close(q: np.ndarray, exact: np.ndarray) -> None:
    error = np.abs(q - np.minimum(exact, Q_MAX))
    worst = int(error.argmax())
    assert error[worst] <= TOLERANCE, f"value {worst}: q {q[worst]}, exact {exact[worst]}"


def assert_exact_log2(q: np.ndarray, confidence: np.ndarray) -> None:
    """Close to -log2 of ascending confidences, and never increasing."""
    assert_close(q, -np.log2(confidence.astype(np.longdouble)) * UNIT)
    assert (np.diff(q) <= 0).all()


def floats(first: float, last: float, count: int | None = None) -> np.ndarray:
    """The float32 values of ``[first, last)`` in ascending order, all of them or about `count`, evenly spread."""
    low, high = np.array([first, last], np.float32).view(np.int32)
    step = 1 if count is None else max(1, (high - low) // count)
    return np.arange(low, high, step, dtype=np.int32).view(np.float32)


def test_every_mantissa(compiled: Backend) -> None:
    confidence = floats(0.5, 1)
    assert len(confidence) == 2**23
    chunks = np.split(confidence, 8)  # the largest batch is below 2^23 rows of one
    alone = np.concatenate([q_of(compiled, torch.from_numpy(chunk)) for chunk in chunks])
    assert_exact_log2(alone, confidence)
    assert (q_of_rows(compiled, confidence) == alone).all()


def test_sampled_mantissas(reference: Backend) -> None:
    confidence = floats(0.5, 1, 60_000)
    assert_exact_log2(q_of(reference, torch.from_numpy(confidence)), confidence)


def test_every_binade(variant: Backend) -> None:
    count = 200 if variant.name == "reference" else 1 << 14
    confidence = np.concatenate([floats(2.0**-n, 2.0 ** (1 - n), count) for n in range(126, 0, -1)])
    assert_exact_log2(q_of(variant, torch.from_numpy(confidence)), confidence)


def test_powers_of_two_are_exact(variant: Backend) -> None:
    n = np.arange(150)
    q = q_of(variant, torch.from_numpy(np.float32(2.0) ** -n.astype(np.float32)))
    assert q.tolist() == np.minimum(n * UNIT, Q_MAX).tolist()


def test_steps_next_to_powers_of_two_do_not_cross_them(variant: Backend) -> None:
    powers = np.float32(2.0) ** -np.arange(64, dtype=np.float32)[::-1]
    around = np.stack([np.nextafter(powers, np.float32(0)), powers, np.nextafter(powers, np.float32(9))], 1).ravel()
    assert_exact_log2(q_of(variant, torch.from_numpy(around)[:-1]), around[:-1])


@pytest.mark.parametrize("value", [np.nan, -np.nan, -1.0, -np.inf, -1e-45, 0.0, -0.0, 1e-45, 1e-38, 5e-20])
def test_nothing_left(variant: Backend, value: float) -> None:
    assert q_of(variant, torch.tensor([value])).item() == Q_MAX


@pytest.mark.parametrize("value", [1.0, 1.0000001, 2.0, 3e38, np.inf])
def test_certain(variant: Backend, value: float) -> None:
    assert q_of(variant, torch.tensor([value])).item() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("log", [False, True], ids=["confidence", "log"])
def test_all_halves_read_as_their_float32(variant: Backend, dtype: torch.dtype, log: bool) -> None:
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    assert (q_of(variant, halves, log) == q_of(variant, halves.float(), log)).all()
    values = halves.double().numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = -values.astype(np.longdouble) * LOG2_E if log else -np.log2(values.astype(np.longdouble))
    exact = np.where(np.isnan(exact), np.inf, np.maximum(exact, 0)) * UNIT
    assert_close(q_of(variant, halves, log), exact)


def test_log_confidences(variant: Backend) -> None:
    count = 30_000 if variant.name == "reference" else 1 << 21
    log = -floats(2.0**-24, 64.5, count)[::-1]
    q = q_of(variant, torch.from_numpy(log.copy()), log=True)
    assert_close(q, -log.astype(np.longdouble) * LOG2_E * UNIT)
    assert (np.diff(q) <= 0).all()


@pytest.mark.parametrize(("log", "q"), [
    (0.0, 0), (-0.0, 0), (0.5, 0), (np.inf, 0), (-1e-45, 0), (-1e-7, 0), (-np.inf, Q_MAX), (np.nan, Q_MAX),
    (-44.37, Q_MAX), (-64.0, Q_MAX), (-3e38, Q_MAX),
])  # fmt: skip
def test_log_limits(variant: Backend, log: float, q: int) -> None:
    assert q_of(variant, torch.tensor([log]), log=True).item() == q


def test_prefix_saturates(variant: Backend) -> None:
    prefix = variant.log_prefix_sum(torch.tensor([[2.0**-40, 2.0**-23, 0.5, 0.5], [0.0, 1.0, 1.0, 1.0]]))
    assert prefix.tolist() == [[40 * UNIT, 63 * UNIT, Q_MAX, Q_MAX], [Q_MAX] * 4]
    assert variant.log_prefix_sum(torch.zeros(1, WIDTH)).tolist() == [[Q_MAX] * WIDTH]


def _weights(units: int) -> torch.Tensor:
    return torch.full((1,), 2.0**units)


def scores_one_by_one(backend: Backend, keys: np.ndarray, units: int) -> np.ndarray:
    """Scores of ascending prefix sums under the weight ``2^units``: differences of the gains of 256 buckets."""
    rows = min(4, -(-len(keys) // WIDTH))
    buckets = rows * WIDTH + 1
    budgets = torch.arange(rows, rows + buckets, dtype=torch.int32)
    costs, weight = torch.ones(buckets), _weights(units).expand(rows).contiguous()
    scores = []
    for chunk in np.split(keys, range(rows * WIDTH, len(keys), rows * WIDTH)):
        prefix = np.pad(chunk, (0, rows * WIDTH - len(chunk)), mode="edge").reshape(rows, WIDTH)
        _, gains = backend.bucket_argmax(torch.from_numpy(prefix), budgets, costs, weight=weight, count_bonus=False)
        scores.append(np.diff(gains.numpy())[: len(chunk)])
    return np.concatenate(scores)


def scores_by_lane(backend: Backend, keys: np.ndarray, units: int) -> np.ndarray:
    """The same from 8 buckets and one draft a row, on the upper and the lower half of 16 rows in turn."""
    budgets, costs = torch.arange(17, 25, dtype=torch.int32), torch.ones(8)
    weight, prefix = _weights(units).expand(16).contiguous(), torch.from_numpy(keys.reshape(-1, 16, 1))
    halves = torch.tensor([[1] * 8 + [0] * 8, [0] * 8 + [1] * 8], dtype=torch.int32)
    gains = [
        backend.bucket_argmax(p, budgets, costs, draft_lens=half, weight=weight, count_bonus=False)[1]
        for p in prefix
        for half in halves
    ]
    return torch.stack(gains).diff(dim=1, prepend=torch.zeros(len(gains), 1, dtype=torch.int64)).numpy().ravel()


def assert_exact_exp2(scores: np.ndarray, keys: np.ndarray, units: int) -> None:
    """Within half a unit of rounding and 0.01 units before it; above a score of 1 the latter grows with the score."""
    tolerance = 0.5 + 0.01 * max(1, 2**units)
    exact = np.exp2(np.longdouble(30 + units) - keys.astype(np.longdouble) / UNIT)
    error = np.abs(scores - exact)
    worst = int(error.argmax())
    assert error[worst] <= tolerance, f"prefix {keys[worst]}: {scores[worst]}, exact {exact[worst]}"
    assert (np.diff(scores) <= 0).all()


def fractions(whole: int, step: int = 1) -> np.ndarray:
    return np.arange(whole * UNIT, (whole + 1) * UNIT, step, dtype=np.int32)


@pytest.mark.parametrize("units", [0, 8])
def test_every_fraction_one_by_one(compiled: Backend, units: int) -> None:
    """Under the weight 2^8 the scores have the most digits; one in 127 where kernels are executed thread by thread."""
    keys = fractions(0, 127 if compiled.name == "simt" else 1)
    assert_exact_exp2(scores_one_by_one(compiled, keys, units), keys, units)


def test_every_fraction_by_lane(compiled: Backend) -> None:
    keys = fractions(0, 127 if compiled.name == "simt" else 1)
    keys = keys[: len(keys) // 16 * 16]
    assert_exact_exp2(scores_by_lane(compiled, keys, 8), keys, 8)


def sampled(backend: Backend) -> Iterator[tuple[np.ndarray, int]]:
    step = {"reference": 65537, "simt": 16381}.get(backend.name, 257)
    for whole in range(56):
        yield fractions(whole, step), 0
    for units in range(-8, 9):
        yield fractions(1, step), units


def test_sampled_fractions(variant: Backend) -> None:
    for keys, units in sampled(variant):
        assert_exact_exp2(scores_one_by_one(variant, keys, units), keys, units)


def test_sampled_fractions_by_lane(variant: Backend) -> None:
    for keys, units in sampled(variant):
        keys = keys[: len(keys) // 16 * 16]
        assert_exact_exp2(scores_by_lane(variant, keys, units), keys, units)


def test_powers_of_two_score_exactly(variant: Backend) -> None:
    keys = np.arange(56, dtype=np.int32) * UNIT
    scores = scores_one_by_one(variant, keys, 8)
    assert scores.tolist() == [1 << 38 >> n if n <= 38 else int(n == 39) for n in range(56)]


def test_scores_below_the_last_digit_count_as_zero(variant: Backend) -> None:
    keys = np.array([56 * UNIT - 1, 56 * UNIT, Q_MAX], dtype=np.int32)
    assert scores_one_by_one(variant, keys, 0).tolist() == [0, 0, 0]


def test_weights(variant: Backend) -> None:
    """A step without drafts gains its weights, as exactly as the format holds them."""
    count = 200 if variant.name == "reference" else 5000
    weights = np.concatenate([floats(2.0**-8, 2.0**8, count), 2.0 ** np.arange(-8, 9, dtype=np.float32)])
    empty, budgets = torch.zeros(1, 0, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    gains = [
        variant.bucket_argmax(empty, budgets, torch.ones(1), weight=torch.from_numpy(w))[1].item()
        for w in weights[:, None]
    ]
    exact = weights.astype(np.longdouble) * 2**30
    unit = np.log(2.0) / UNIT
    assert (np.abs(gains - exact) <= TOLERANCE * (exact * unit + 1)).all()
    assert (np.array(gains) == exact)[-17:].all()
