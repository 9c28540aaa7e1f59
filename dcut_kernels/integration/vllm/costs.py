"""What a step of vLLM costs, measured at startup through its own dummy runs and kept on disk."""

from __future__ import annotations

import functools
import hashlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from vllm import __version__, envs
from vllm.distributed.parallel_state import get_world_group

from ..._schema import MAX_BUCKETS
from ...calibration import isotonic_regression
from ...cost import CostTable, Fingerprint, TokenCounts, additive, from_captured_sizes
from ...cost._values import powers_up_to
from .options import logger

TURNS = 6  # the first one warms up
CONTEXT = 256  # tokens that a row has read
POINTS = 64  # buckets where nothing is padded
Curve = Mapping[int, float]


def load_or_measure(runner: Any) -> CostTable:
    """The cost table of an engine: that of its last start, or a new one.

    Every rank calls it and takes part in the dummy runs; the first one's table serves all.
    """
    mark, world = _fingerprint(runner), get_world_group()
    name = hashlib.sha256(repr(mark).encode()).hexdigest()[:16]
    path, table = Path(envs.VLLM_CACHE_ROOT) / "dcut" / f"{name}.json", None
    try:
        if world.rank_in_group == 0 and path.exists():
            table = CostTable.load(path, expect=mark)
    except (OSError, ValueError) as error:
        logger.warning("dcut: measures costs once more: %s", error)
    table = world.broadcast_object(table, src=0)
    if table is None:
        with torch.random.fork_rng():
            table = world.broadcast_object(_measure(runner, mark), src=0)
        try:
            if world.rank_in_group == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                table.save(path)
        except OSError as error:
            logger.warning("dcut: will measure costs at the next start too: %s", error)
    return table


def cost_table(draft_ms: Curve, verify_ms: Curve, captured: int, rows: int, mark: Fingerprint | None) -> CostTable:
    """Drafting, by requests, plus verification, by tokens: steps up to the last captured size, lines above."""
    batches, above = sorted({*draft_ms, rows}), {size: ms for size, ms in verify_ms.items() if size > captured}
    most = max(verify_ms)
    if not captured:
        counts = TokenCounts(tuple(sorted({1 + (most - 1) * i // (POINTS - 1) for i in range(POINTS)})))
        return additive(draft_ms, verify_ms, counts, batches=batches, fingerprint=mark).smoothed()
    sizes = [size for size in verify_ms if size <= captured]
    every = 1 + len(sizes) // 192  # of many, some, the last among them: buckets above it are needed too
    sizes = sizes[(len(sizes) - 1) % every :: every]
    beyond = (most, math.ceil((most - captured) / (MAX_BUCKETS - len(sizes)))) if above else ()
    times = [verify_ms[size] for size in sizes]
    table = from_captured_sizes(
        sizes, times, draft_ms, *beyond, above=above or None, batches=batches, fingerprint=mark
    )  # fmt: skip
    return table.smoothed()


def _fingerprint(runner: Any) -> Fingerprint:
    config, spec, parallel = runner.vllm_config, runner.speculative_config, runner.parallel_config
    drafter = spec.draft_model_config.model if spec.draft_model_config else spec.method
    limits = f"{runner.num_spec_tokens} drafts, {runner.max_num_reqs} requests, {runner.max_num_tokens} tokens, "
    limits += f"{runner.max_model_len} positions, graphs {runner.cudagraph_batch_sizes}, {spec.draft_sample_method}"
    return Fingerprint.here(
        model=f"{config.model_config.model} + {drafter} ({spec.method})",
        engine=f"vllm {__version__}, {limits}, {config.compute_hash()}",
        dtype=str(config.model_config.dtype),
        parallelism=f"tp{parallel.tensor_parallel_size}",
    )


def _measure(runner: Any, mark: Fingerprint) -> CostTable:
    block, rows = runner.num_spec_tokens + 1, runner.max_num_reqs
    most = min(rows * block, runner.max_num_tokens)
    captured = [size for size in runner.cudagraph_batch_sizes if size <= most]
    last, batches = max(captured, default=0), powers_up_to(rows)
    sizes = captured + [size for size in powers_up_to(most) if size > last]
    runs: dict[tuple[str, int], Callable[[], object]] = {}
    runs |= {("verify", size): functools.partial(_target, runner, size) for size in sizes}
    if hasattr(runner.drafter, "dummy_run"):
        dummy = runner.drafter.dummy_run
        runs |= {("draft", n): functools.partial(dummy, min(n * block, most)) for n in batches}
    times = _time(runs)
    verify_ms = {size: times["verify", size] for size in sizes}
    draft = [times.get(("draft", n), 0.0) for n in batches]  # more requests do not take less time
    draft_ms = dict(zip(batches, isotonic_regression(draft, [1.0] * len(draft)), strict=True))
    return cost_table(draft_ms, verify_ms, last, rows, mark)


def _target(runner: Any, tokens: int) -> None:
    """The target alone, with its head: the drafter's part of a dummy run is measured by itself."""
    runner.drafter.dummy_run = lambda *args, **kwargs: None
    try:
        hidden, _ = runner._dummy_run(tokens, force_attention=True, profile_seq_lens=min(CONTEXT, runner.max_model_len))
        runner.model.compute_logits(hidden[:tokens])
    finally:
        del runner.drafter.dummy_run


def _time(runs: Mapping[tuple[str, int], Callable[[], object]]) -> dict[tuple[str, int], float]:
    """Milliseconds of each, medians of turns over all: what disturbs the machine hits all alike."""
    times: dict[tuple[str, int], list[float]] = {name: [] for name in runs}
    for _ in range(TURNS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: median(taken[1:]) for name, taken in times.items()}
