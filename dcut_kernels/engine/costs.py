"""What steps of this engine cost: the buckets that it offers, and their measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..cost import AngelSlimRatios, CostTable, Fingerprint, interpolate
from ..cost import profile as profile_steps
from ..integration import SpeculativeEngine

PASSES = 5  # over all batches: a shared machine is slow for seconds, and not alike for all kinds of steps
SETTLE = 5  # the first plain steps after drafted ones take up to 10% longer


def bucket_depths(draft_len: int) -> list[float]:
    """Drafts per request of each bucket, on average: halves below 3, where most choices fall, then all up to ``D``."""
    return [half / 2 for half in range(2 * min(3, draft_len))] + list(range(min(3, draft_len), draft_len + 1))


def profile(
    engine: SpeculativeEngine,
    batches: Sequence[int],
    depths: Sequence[int],
    repeats: int = 2,
    on_step: Callable[[int], object] = lambda steps: None,
) -> CostTable:
    """Measure whole steps of an engine, and price all `bucket_depths`.

    This engine pads nothing, so costs between measured depths lie on a line; look batches up by ``"linear"``.

    Parameters
    ----------
    engine : SpeculativeEngine
        Idle engine, configured as in serving.
    batches, depths : sequence of int
        What to measure, ascending; the last depth is ``D``.
    repeats : int
        Turns over all depths of a batch in each of `PASSES`; one more warms up.
    on_step : callable
        Called after each timed step with the number of all.
    """
    most = depths[-1]
    measured = profile_steps(
        engine.run_step,
        batches,
        AngelSlimRatios(tuple(depth / most for depth in depths), most),
        plain=lambda batch: engine.run_step(batch, batch, False),
        repeats=repeats,
        passes=PASSES,
        settle=SETTLE,
        on_progress=lambda done, steps: on_step(steps),
        fingerprint=Fingerprint.here("a target and a drafter", "dcut_kernels.engine", "float32"),
    )
    return interpolate(measured.smoothed(), AngelSlimRatios(tuple(d / most for d in bucket_depths(most)), most))
