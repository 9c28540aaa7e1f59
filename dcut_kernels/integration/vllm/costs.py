"""What a step of vLLM costs, measured at startup through its own dummy runs and kept on disk."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from vllm import __version__, envs
from vllm.distributed.parallel_state import get_world_group

from ..._schema import MAX_BUCKETS
from ...cost import CostTable, Fingerprint, TokenCounts, additive, from_captured_sizes
from ...cost._values import powers_up_to

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
    path = Path(envs.VLLM_CACHE_ROOT) / "dcut" / f"{name}.json"
    table = CostTable.load(path, expect=mark) if world.rank_in_group == 0 and path.exists() else None
    table = world.broadcast_object(table, src=0)
    if table is None:
        with torch.random.fork_rng():
            table = world.broadcast_object(_measure(runner, mark), src=0)
        if world.rank_in_group == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            table.save(path)
    return table


def cost_table(draft_ms: Curve, verify_ms: Curve, captured: int, rows: int, mark: Fingerprint | None) -> CostTable:
    """Drafting, by requests, plus verification, by tokens: steps up to the last captured size, lines above."""
    batches, above = sorted({*draft_ms, rows}), {size: ms for size, ms in verify_ms.items() if size > captured}
    most = max(verify_ms)
    if not captured:
        counts = TokenCounts(tuple(sorted({1 + (most - 1) * i // (POINTS - 1) for i in range(POINTS)})))
        return additive(draft_ms, verify_ms, counts, batches=batches, fingerprint=mark).smoothed()
    sizes = [size for size in verify_ms if size <= captured]
    sizes = sizes[:: -1 - len(sizes) // 192][::-1]  # of many, some: buckets above the last are needed too
    return from_captured_sizes(
        sizes, [verify_ms[size] for size in sizes], draft_ms, most if above else None,
        -((captured - most) // (MAX_BUCKETS - len(sizes))) if above else None, above=above or None, batches=batches,
        fingerprint=mark,
    ).smoothed()  # fmt: skip


def _fingerprint(runner: Any) -> Fingerprint:
    config, spec, parallel = runner.vllm_config, runner.speculative_config, runner.parallel_config
    drafter = spec.draft_model_config.model if spec.draft_model_config else spec.method
    limits = f"{runner.num_spec_tokens} drafts, {runner.max_num_reqs} requests, graphs {runner.cudagraph_batch_sizes}"
    return Fingerprint.here(
        model=f"{config.model_config.model} + {drafter} ({spec.method})",
        engine=f"vllm {__version__}, {limits}, {config.compilation_config.cudagraph_mode}",
        dtype=str(config.model_config.dtype),
        parallelism=f"tp{parallel.tensor_parallel_size}",
    )


def _measure(runner: Any, mark: Fingerprint) -> CostTable:
    block, rows = runner.num_spec_tokens + 1, runner.max_num_reqs
    most = min(rows * block, runner.max_num_tokens)
    captured = [size for size in runner.cudagraph_batch_sizes if size <= most]
    sizes = captured + [size for size in powers_up_to(most) if size > max(captured, default=0)]
    verify_ms = {size: _time(functools.partial(_target, runner, size)) for size in sizes}
    draft_ms = dict.fromkeys(powers_up_to(rows), 0.0)
    if hasattr(runner.drafter, "dummy_run"):
        draft_ms = {n: _time(functools.partial(runner.drafter.dummy_run, min(n * block, most))) for n in draft_ms}
    return cost_table(draft_ms, verify_ms, max(captured, default=0), rows, mark)


def _target(runner: Any, tokens: int) -> None:
    """The target alone, with its head: the drafter's part of a dummy run is measured by itself."""
    runner.drafter.dummy_run = lambda *args, **kwargs: None
    try:
        hidden, _ = runner._dummy_run(tokens, force_attention=True, profile_seq_lens=min(CONTEXT, runner.max_model_len))
        runner.model.compute_logits(hidden[:tokens])
    finally:
        del runner.drafter.dummy_run


def _time(run: Callable[[], object]) -> float:
    """Milliseconds, the median of some turns."""
    times = []
    for _ in range(TURNS):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return median(times[1:])
