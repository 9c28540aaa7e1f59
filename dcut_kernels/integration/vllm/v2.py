"""The V2 runner of vLLM, on GPUs, with a drafter such as DSpark that says how likely each of its tokens is accepted.

vLLM trims drafts there itself: its manager chooses the tokens of a step on the host, from confidences of an earlier
step, and shares them out among the requests on the device, by those of this step.  `Decider` does both in its place.
A confidence is known before its token is drawn (``token_independent`` in docs/lossless.md), and no draft influences the
budget of its step: the target's distribution is kept, and `Options.policy` makes no difference.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.spec_decode import adaptive_verification as adaptive

from ... import bucket_argmax, log_prefix_sum, select_and_pack
from ...buckets import Buckets
from ...lossless import require_lossless
from .costs import cost_table
from .options import Options, difference, logger, wrap

Curve = list[tuple[int, float]]
FACTORY, RANK = "maybe_create_adaptive_verification_manager", "_assign_draft_token_budget_compiled"
# What is replaced, with its parameters in 0.32 and 0.33.
FUNCTIONS = {
    FACTORY: "... vllm_config",
    RANK: "confidence_probs idx_mapping capacities draft_budget num_steps",
    "AdaptiveVerificationManager.set_cost_curves": "draft_curve verify_curve",
    "AdaptiveVerificationManager.get_num_tokens": "num_tokens_per_req draft_tokens",
    "AdaptiveVerificationManager.reallocate_drafts": "req_ids idx_mapping",
}


def install() -> None:
    """Let a `Decider` decide for each manager whose engine is switched on."""
    if (reason := difference(adaptive, FUNCTIONS)) is not None:
        logger.warning("dcut: cannot be used with the V2 runner of this vLLM: %s", reason)
        return
    wrap(adaptive, FACTORY, _create)
    if (runner := sys.modules.get("vllm.v1.worker.gpu.model_runner")) is not None:  # which has it by name
        setattr(runner, FACTORY, getattr(adaptive, FACTORY))


def _create(original: Any, *, vllm_config: Any, **kwargs: Any) -> Any:
    manager, options = original(vllm_config=vllm_config, **kwargs), Options.of(vllm_config)
    if options is not None and manager is not None:
        manager.set_cost_curves = Decider(manager, options).set_cost_curves
    elif options is not None:
        logger.warning(
            "dcut: not used: enable_adaptive_verification: expected True in the speculative config, or the V1 runner, "
            "VLLM_USE_V2_MODEL_RUNNER=0, got False"
        )
    return manager


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
        manager, given = self.manager, self.options.table()
        draft_curve, verify_curve = adaptive.get_tp_group().broadcast_object((draft_curve, verify_curve), src=0)
        self.profiled(draft_curve, verify_curve)
        try:
            limit, rows = manager._cudagraph_limit, manager.req_states.max_num_reqs
            table = given or cost_table(dict(draft_curve), dict(verify_curve), limit, rows, None)
            lookup = "ceil" if table.batches[-1] >= rows else "nearest"
            self.buckets = Buckets(table, rows, lookup, False, torch.device("cpu"))
            self.buckets.set_latency(self.options.latency_ms)
            self.ids = torch.zeros_like(manager._confidence_probs, dtype=torch.int32)
            for decide in (manager.get_num_tokens, self.get_num_tokens):
                tokens, left, manager._batch_budget = decide({}, {}), manager._batch_budget, None
                if (tokens, left) != (0, ({}, {}, 0)):
                    raise ValueError(f"_batch_budget: expected drafts, other tokens and a budget, got {left}")
        except (AttributeError, ValueError) as error:
            logger.warning("dcut: not used: %s", error)
        else:
            manager.get_num_tokens, manager.reallocate_drafts = self.get_num_tokens, self.reallocate_drafts
            logger.info("dcut: shares out the drafts of each step, up to %d", manager.req_states.num_speculative_steps)

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
        budgets, costs, *_ = self.buckets.of_step(len(names), total)
        prefix = log_prefix_sum(manager._stale_confidences[manager._stale_idx].cpu, row_index=index)
        decision, _ = bucket_argmax(
            prefix, budgets - rest, costs, draft_lens=draft_lens, base_lens=base_lens,
            min_keep=min_keep if self.floor else None, capacity=total - rest + most,
        )  # fmt: skip
        budget = int(decision[1]) + rest - total
        manager._batch_budget = (*(dict(zip(names, a.tolist(), strict=True)) for a in (drafts, base)), budget)
        return total + budget

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
