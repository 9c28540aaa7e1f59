"""What vLLM exports of the plugin, next to its own ``vllm:spec_decode_*``.

A worker sends what it decided with the drafts, the scheduler passes it on with its statistics of speculation, and the
process that exports those counts it.  vLLM's own counters know verified drafts only: what was trimmed is no rejection.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched import scheduler as scheduling
from vllm.v1.metrics import loggers
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.spec_decode import metrics as speculation

from .options import Options, difference, logger, wrap

SCHEDULER = {
    "Scheduler.update_draft_token_ids": "draft_token_ids",
    "Scheduler.make_stats": "... spec_decoding_stats",
}
SPECULATION = {"SpecDecodingProm.observe": "... spec_decoding_stats engine_idx"}
LOGGERS = {"PrometheusStatLogger.__init__": "... vllm_config"}
KEPT, PRUNED = -1, -2  # keys of counts, next to the tokens of buckets


@dataclass
class Trimmed(DraftTokenIds):
    """Drafts that are left of a step, and the step: how many, of how many that there were, in which bucket."""

    kept: int = 0
    drafts: int = 0
    bucket: int = 0


def install() -> None:
    """Let schedulers pass on what was decided, and exporters export it."""
    reason = difference(scheduling, SCHEDULER) or difference(speculation, SPECULATION) or difference(loggers, LOGGERS)
    if reason is not None:
        logger.warning("dcut: exports no metrics with this vLLM: %s", reason)
        return
    wrap(scheduling.Scheduler, "update_draft_token_ids", _receive)
    wrap(scheduling.Scheduler, "make_stats", _send)
    wrap(loggers.PrometheusStatLogger, "__init__", _create)
    wrap(speculation.SpecDecodingProm, "observe", _export)


def _receive(original: Any, scheduler: Any, draft_token_ids: DraftTokenIds) -> None:
    original(scheduler, draft_token_ids)
    step = draft_token_ids
    if isinstance(step, Trimmed) and scheduler.log_stats:
        counts = scheduler.__dict__.setdefault("dcut", Counter())
        counts.update({KEPT: step.kept, PRUNED: step.drafts - step.kept, step.bucket: 1})


def _send(original: Any, scheduler: Any, spec_decoding_stats: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Behind the drafts by position, a list that may have any length when it goes to another process."""
    if spec_decoding_stats is not None:
        for pair in scheduler.__dict__.pop("dcut", {}).items():
            spec_decoding_stats.num_draft_tokens_per_pos += pair
    return original(scheduler, spec_decoding_stats, *args, **kwargs)


def _create(original: Any, exporter: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """With vLLM's own counters, which replace those of an earlier engine; engines that are off have none of these."""
    original(exporter, vllm_config, *args, **kwargs)
    speculation, values = exporter.spec_decoding_prom, exporter.per_engine_labelvalues
    if Options.of(vllm_config) is None or not speculation.spec_decoding_enabled:
        return
    make, names = speculation._counter_cls, ["model_name", "engine"]
    kept = make("vllm:dcut_num_kept_draft_tokens", "Draft tokens that D-cut let through.", names)
    pruned = make("vllm:dcut_num_pruned_draft_tokens", "Draft tokens that were not verified.", names)
    steps = make("vllm:dcut_num_steps", "Steps by the tokens of their bucket.", [*names, "bucket"])
    speculation.dcut = {KEPT: create_metric_per_engine(kept, values), PRUNED: create_metric_per_engine(pruned, values)}
    speculation.dcut_steps = lambda engine, bucket: steps.labels(*values[engine], str(bucket))


def _export(original: Any, exporter: Any, spec_decoding_stats: Any, engine_idx: int = 0) -> None:
    original(exporter, spec_decoding_stats, engine_idx)
    counts = spec_decoding_stats.num_draft_tokens_per_pos[spec_decoding_stats.num_spec_tokens :]
    for key, count in zip(counts[::2], counts[1::2], strict=True) if hasattr(exporter, "dcut") else ():
        counter = exporter.dcut[key][engine_idx] if key in exporter.dcut else exporter.dcut_steps(engine_idx, key)
        counter.inc(count)
