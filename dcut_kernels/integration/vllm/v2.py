"""The V2 runner of vLLM, on GPUs, with a drafter such as DSpark that says how likely each of its tokens is accepted.

vLLM trims drafts there itself: its manager chooses the tokens of a step on the host, from confidences of an earlier
step, and shares them out among the requests on the device, by those of this step.  `Decider` does both in its place.
A confidence is known before its token is drawn (``token_independent`` in docs/lossless.md), and no draft influences the
budget of its step: the target's distribution is kept, and `Options.policy` makes no difference.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.worker.gpu.spec_decode import adaptive_verification as adaptive

from ... import bucket_argmax, log_prefix_sum, select_and_pack
from ..._schema import MAX_BUCKETS
from ...cost import CostTable, from_captured_sizes
from ...lossless import require_lossless
from .options import Options, changed

logger = init_logger(__name__)
Curve = list[tuple[int, float]]
FACTORY, RANK = "maybe_create_adaptive_verification_manager", "_assign_draft_token_budget_compiled"
# What is replaced, with its parameters in 0.32 and 0.33; only the factory may have more.
FUNCTIONS = {
    FACTORY: "enable_adaptive_verification attn_groups req_states query_start_loc num_bonus_tokens max_total_logits "
    "vllm_config target_layer_names additional_attn_cg_support",
    RANK: "confidence_probs idx_mapping capacities draft_budget num_steps",
    "AdaptiveVerificationManager.set_cost_curves": "draft_curve verify_curve",
    "AdaptiveVerificationManager.get_num_tokens": "num_tokens_per_req draft_tokens",
    "AdaptiveVerificationManager.reallocate_drafts": "req_ids idx_mapping",
}


def install() -> None:
    """Let a `Decider` decide for each manager whose engine is switched on."""
    original: Any = getattr(adaptive, FACTORY, None)
    if hasattr(original, "dcut"):
        return
    if (reason := difference(adaptive)) is not None:
        logger.warning("dcut: cannot be used with the V2 runner of this vLLM: %s", reason)
        return

    @functools.wraps(original)
    def create(*, vllm_config: Any, **kwargs: Any) -> Any:
        manager, options = original(vllm_config=vllm_config, **kwargs), Options.of(vllm_config)
        if options is not None and manager is not None:
            manager.set_cost_curves = Decider(manager, options).set_cost_curves
        elif options is not None:
            logger.warning("dcut: not used: enable_adaptive_verification: expected True, got False")
        return manager

    create.dcut = True  # type: ignore[attr-defined]
    for module in (adaptive, sys.modules.get("vllm.v1.worker.gpu.model_runner", adaptive)):  # which has it by name
        setattr(module, FACTORY, create)


def difference(module: Any) -> str | None:
    """How vLLM's module differs from what this was written for, None if it does not."""
    for name, parameters in FUNCTIONS.items():
        function: Any = functools.reduce(lambda owner, part: getattr(owner, part, None), name.split("."), module)
        if function is None:
            return f"{name}: expected a function, got none"
        if (reason := changed(function, parameters)) is not None:
            return reason
        if name != FACTORY and (more := {*inspect.signature(function).parameters} - {"self", *parameters.split()}):
            return f"{name}: expected no parameters but {parameters}, got {', '.join(sorted(more))}"
    return None


def cost_table(draft_curve: Curve, verify_curve: Curve, manager: Any) -> CostTable:
    """Milliseconds of drafting, by requests, plus verification, by tokens: steps of captured sizes, lines above."""
    limit: int = manager._cudagraph_limit
    captured = [point for point in verify_curve if point[0] <= limit]
    captured = captured[:: -1 - len(captured) // 192][::-1]  # of many, some: buckets above the last are needed too
    above, draft = {size: ms for size, ms in verify_curve if size > limit} or None, dict(draft_curve)
    most = max(above) if above else None
    distance = -((limit - most) // (MAX_BUCKETS - len(captured))) if most else None
    sizes, times = [size for size, _ in captured], [ms for _, ms in captured]
    batches = sorted({*draft, manager.req_states.max_num_reqs})
    return from_captured_sizes(sizes, times, draft, most, distance, above=above, batches=batches).smoothed()


class Decider:
    """Decides for a manager, from when it knows what steps cost."""

    def __init__(self, manager: Any, options: Options) -> None:
        require_lossless(
            draft_sampling="sampled", confidence_source="token_independent", score="inclusive", policy="fixed",
            drafter="conditional",
        )  # fmt: skip
        self.manager, self.options = manager, options
        self.profiled, self.reallocated = manager.set_cost_curves, manager.reallocate_drafts
        self.steps, self.floor = 0, False  # steps so far, and whether each request keeps some drafts in this one

    def set_cost_curves(self, draft_curve: Curve, verify_curve: Curve) -> None:
        """Take over when vLLM has measured, if the manager works as it is known to."""
        manager, costs = self.manager, self.options.costs
        draft_curve, verify_curve = adaptive.get_tp_group().broadcast_object((draft_curve, verify_curve), src=0)
        self.profiled(draft_curve, verify_curve)
        try:
            self.table = CostTable.load(costs) if costs else cost_table(draft_curve, verify_curve, manager)
            self.buckets = functools.lru_cache(1024)(self.price)
            self.ids = torch.zeros_like(manager._confidence_probs, dtype=torch.int32)
            for decide in (manager.get_num_tokens, self.get_num_tokens):
                tokens, left, manager._batch_budget = decide({}, {}), manager._batch_budget, None
                if (tokens, left) != (0, ({}, {}, 0)):
                    raise ValueError(f"_batch_budget: expected drafts, other tokens and a budget, got {left}")
        except (AttributeError, ValueError) as error:
            logger.warning("dcut: not used: %s", error)
        else:
            manager.get_num_tokens, manager.reallocate_drafts = self.get_num_tokens, self.reallocate_drafts

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """Tokens of the step; how many of them are drafts is left with the manager."""
        manager, states, names = self.manager, self.manager.req_states, list(num_tokens_per_req)
        slots = np.fromiter(map(states.req_id_to_index.__getitem__, names), np.int32, len(names))
        drafts = np.fromiter((len(draft_tokens.get(name, ())) for name in names), np.int32, len(names))
        base = np.fromiter(num_tokens_per_req.values(), np.int32, len(names)) - drafts
        total, most = int(base.sum()), max(0, manager._max_total_logits - len(names) * manager.num_bonus_tokens)
        self.steps += 1
        floors, every = np.minimum(drafts, self.options.floor), self.options.floor_every
        self.floor = every > 0 and self.steps % every == 0 and int(floors.sum()) <= most
        # the other rows are in their prompts: they sample nothing, and their tokens only take up room
        counted = (drafts > 0) | (states.num_computed_tokens_np[slots] + base >= states.prefill_len.np[slots])
        index, draft_lens, base_lens, min_keep = (torch.from_numpy(a[counted]) for a in (slots, drafts, base, floors))
        rest = int(base[~counted].sum())
        budgets, costs = self.buckets(len(names), total)
        prefix = log_prefix_sum(manager._stale_confidences[manager._stale_idx].cpu, row_index=index)
        decision, _ = bucket_argmax(
            prefix, budgets - rest, costs, draft_lens=draft_lens, base_lens=base_lens,
            min_keep=min_keep if self.floor else None, capacity=total - rest + most,
        )  # fmt: skip
        budget = int(decision[1]) + rest - total
        manager._batch_budget = (*(dict(zip(names, a.tolist(), strict=True)) for a in (drafts, base)), budget)
        return total + budget

    def price(self, rows: int, base_tokens: int) -> tuple[Tensor, Tensor]:
        """Budgets, int32 [R], and costs, float32 [R], of a step."""
        budgets, costs = self.table.step(rows, base_tokens, "ceil" if rows <= self.table.batches[-1] else "nearest")
        if self.options.latency_ms is not None:
            costs[costs > max(self.options.latency_ms, float(costs.min()))] = torch.inf
        return budgets, costs

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: Tensor) -> Any:
        """What vLLM does, with `rank` in place of its own ranking, which it looks up in its module."""
        original = getattr(adaptive, RANK)
        setattr(adaptive, RANK, self.rank)
        try:
            return self.reallocated(req_ids, idx_mapping)
        finally:
            setattr(adaptive, RANK, original)

    def rank(self, probs: Tensor, idx_mapping: Tensor, capacities: Tensor, budget: int, num_steps: int) -> None:
        """Turn scheduled drafts, int32 [B], into admitted ones; one launch decides, and the host does not wait."""
        rows, zeros = len(capacities), self.ids.view(-1)  # what is packed is not used
        batch = select_and_pack(
            probs, self.ids, zeros[:rows], zeros[:rows], zeros[:0], probs.view(-1)[:0],
            draft_lens=capacities, row_index=idx_mapping.int(), budget=budget + rows,
            min_keep=torch.full_like(capacities, self.options.floor) if self.floor else None,
        )  # fmt: skip
        capacities.copy_(batch.keep_lens)
