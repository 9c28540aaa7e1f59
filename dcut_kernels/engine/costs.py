"""The measured cost of a step, C(B, K), and the buckets that it prices."""

from __future__ import annotations

import functools
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..integration import SpeculativeEngine

SCHEMA_VERSION = 1


def bucket_depths(draft_len: int) -> list[float]:
    """Drafts per request of each bucket, on average: halves below 3, where most choices fall, then all up to ``D``."""
    return [half / 2 for half in range(2 * min(3, draft_len))] + list(range(min(3, draft_len), draft_len + 1))


@dataclass(frozen=True)
class StepCosts:
    """Milliseconds of whole steps, by batch and drafts verified per request.

    This engine pads nothing, so its cost is smooth and lines between measured points are honest; where steps are
    padded to captured graph sizes they would not be.

    Attributes
    ----------
    batches : list of int
        Batch sizes that were measured, ascending.
    depths : list of int
        Drafts verified per request, 0 to ``D``, ascending.
    step_ms : list of list of float
        ``[batches][depths]``, drafting included; never decreasing in depth.
    plain_ms : list of float
        ``[batches]``, a step of plain decoding, without drafting.
    device : str
        What it was measured on.
    """

    batches: list[int]
    depths: list[int]
    step_ms: list[list[float]]
    plain_ms: list[float]
    device: str = ""
    schema_version: int = SCHEMA_VERSION

    @functools.cached_property
    def _tables(self) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
        return {}

    def table(self, rows: int, base_tokens: int) -> tuple[Tensor, Tensor]:
        """Buckets of a step at all `bucket_depths`: budgets, int32 [R], and their costs, float32 [R].

        Parameters
        ----------
        rows : int
            Requests that have drafts.
        base_tokens : int
            Tokens of the step that are no drafts; more than `rows` where prompts are read in the same step.
        """
        key = (rows, base_tokens)
        if key not in self._tables:
            self._tables[key] = self._price(rows, base_tokens)
        return self._tables[key]

    def _price(self, rows: int, base_tokens: int) -> tuple[Tensor, Tensor]:
        measured = [np.interp(rows, self.batches, column) for column in zip(*self.step_ms, strict=True)]
        depths = np.array(bucket_depths(self.depths[-1]))
        at_depth = np.interp(depths, self.depths, measured)
        slope = (at_depth[-1] - at_depth[0]) / max(1, rows * depths[-1])
        prompt_tokens = base_tokens - rows
        budgets = torch.from_numpy((base_tokens + np.floor(depths * rows)).astype(np.int32))
        return budgets, torch.from_numpy((at_depth + slope * prompt_tokens).astype(np.float32))

    def save(self, path: Path) -> None:
        """Write the costs as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> StepCosts:
        """Read costs that `save` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.get("schema_version") != SCHEMA_VERSION:
            found = values.get("schema_version")
            raise ValueError(f"{path}: expected step costs of schema version {SCHEMA_VERSION}, got {found}")
        return cls(**values)


def profile(
    engine: SpeculativeEngine,
    batches: Sequence[int],
    depths: Sequence[int],
    repeats: int = 5,
    on_step: Callable[[], None] = lambda: None,
) -> StepCosts:
    """Measure whole steps of an engine: the median of `repeats` turns over all depths of a batch.

    Parameters
    ----------
    engine : SpeculativeEngine
        Idle engine, configured as in serving.
    batches, depths : sequence of int
        What to measure, ascending.
    repeats : int
        Turns; one more warms up.
    on_step : callable
        Called after each of the ``len(batches) * (len(depths) + 1) * (repeats + 1)`` steps.
    """
    step_ms, plain_ms = [], []
    for batch in batches:
        turns = []
        for _ in range(repeats + 1):
            times = [_timed(engine, batch, batch, False, on_step)]
            times += [_timed(engine, batch, batch * (1 + depth), True, on_step) for depth in depths]
            turns.append(times)
        plain, *drafted = np.median(turns[1:], axis=0).tolist()
        plain_ms.append(plain)
        step_ms.append(np.maximum.accumulate(drafted).tolist())
    device = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return StepCosts(list(batches), list(depths), step_ms, plain_ms, device)


def _timed(engine: SpeculativeEngine, batch: int, tokens: int, drafting: bool, on_step: Callable[[], None]) -> float:
    start = time.perf_counter()
    engine.run_step(batch, tokens, drafting)
    milliseconds = 1000 * (time.perf_counter() - start)
    on_step()
    return milliseconds
