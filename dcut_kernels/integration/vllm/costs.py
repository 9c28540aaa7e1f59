"""What a step of vLLM costs, measured at startup through its own dummy runs and kept on disk."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from vllm import __version__, envs
from vllm.distributed.parallel_state import get_world_group

from ...cost import CostTable, Fingerprint, TokenCounts, additive, from_captured_sizes
from ...cost._values import powers_up_to

TURNS = 6  # the first one warms up
CONTEXT = 256  # tokens that a row has read
POINTS = 64  # buckets where nothing is padded


def load_or_measure(runner: Any) -> CostTable:
    """The cost table of an engine: that of its last start, or a new one.

    Every rank calls it and takes part in the dummy runs; the first one's table serves all.
    """
    mark, world = _fingerprint(runner), get_world_group()
    name = hashlib.sha256(repr(mark).encode()).hexdigest()[:16]
    path = Path(envs.VLLM_CACHE_ROOT) / "dcut" / f"{name}.json"
    table = CostTable.load(path, expect=mark) if world.rank_in_group == 0 and path.exists() else None
    table = world.broadcast_object(table, src=0)
    if table is None:
        table = world.broadcast_object(_measure(runner, mark), src=0)
        if world.rank_in_group == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            table.save(path)
    return table


def _fingerprint(runner: Any) -> Fingerprint:
    config, spec, parallel = runner.vllm_config, runner.speculative_config, runner.parallel_config
    drafter = spec.draft_model_config.model if spec.draft_model_config else spec.method
    sizes = config.compilation_config.cudagraph_capture_sizes or []
    limits = f"{runner.num_spec_tokens} drafts, {runner.max_num_reqs} requests, graphs up to {max(sizes, default=0)}"
    return Fingerprint.here(
        model=f"{config.model_config.model} + {drafter} ({spec.method})",
        engine=f"vllm {__version__}, {limits}",
        dtype=str(config.model_config.dtype),
        parallelism=f"tp{parallel.tensor_parallel_size} pp{parallel.pipeline_parallel_size}",
    )


def _measure(runner: Any, mark: Fingerprint) -> CostTable:
    block, rows = runner.num_spec_tokens + 1, runner.max_num_reqs
    most = min(rows * block, runner.max_num_tokens)
    captured = [size for size in runner.cudagraph_batch_sizes if size <= most] if runner.use_cuda_graph else []
    verify_ms = {size: _time(functools.partial(_target, runner, size)) for size in captured or powers_up_to(most)}
    draft_ms = dict.fromkeys(powers_up_to(rows), 0.0)
    if hasattr(runner.drafter, "dummy_run"):
        draft_ms = {n: _time(functools.partial(runner.drafter.dummy_run, min(n * block, most))) for n in draft_ms}
    if captured:
        return from_captured_sizes(captured, list(verify_ms.values()), draft_ms, fingerprint=mark)
    counts = sorted({1 + (most - 1) * i // (POINTS - 1) for i in range(POINTS)})
    return additive(draft_ms, verify_ms, TokenCounts(tuple(counts)), fingerprint=mark)


def _target(runner: Any, tokens: int) -> None:
    """The target alone: the drafter's part of a dummy run is measured by itself."""
    drafter = runner.drafter
    had, skipped = drafter.__dict__.get("dummy_run"), lambda *args, **kwargs: None
    drafter.dummy_run = skipped
    try:
        runner._dummy_run(tokens, force_attention=True, profile_seq_lens=min(CONTEXT, runner.max_model_len))
    finally:
        if had is None:
            del drafter.dummy_run
        else:
            drafter.dummy_run = had


def _time(run: Callable[[], object]) -> float:
    """Milliseconds, the median of some turns."""
    times = []
    for turn in range(TURNS):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if turn:
            times.append(1000 * (time.perf_counter() - start))
    return median(times)
