"""Run a policy over a recording through the public op, and read what was accepted from the packed batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from .. import VerifyBatch, log_prefix_sum, segmented_topk, select_and_pack
from .policies import Policy, paper_budget
from .recordings import Source, Step
from .tables import CostTable


@dataclass(frozen=True)
class Replay:
    """Everything that happened in a replay of S steps of B requests."""

    policy: Policy
    budgets: np.ndarray  # int64 [R]
    steps: list[Step]  # S
    keep_lens: np.ndarray  # int64 [S, B], draft tokens verified
    accepted: np.ndarray  # int64 [S, B], leading verified draft tokens that equal the target's
    acceptable: np.ndarray  # int64 [S, B], what full verification of the same drafts would accept
    verified: np.ndarray  # int64 [S], positions, bonus tokens included
    bucket: np.ndarray  # int64 [S], index of the budget that the step runs at
    op_seconds: np.ndarray  # float64 [S]
    texts: dict[int, list[int]] = field(repr=False)  # request -> tokens committed, from its first bonus token on


def replay(
    source: Source, policy: Policy, table: CostTable, steps: int, on_step: Callable[[], None] = lambda: None
) -> Replay:
    """Run `steps` steps of a recording under one policy.

    Parameters
    ----------
    source
        Recording, at its first step.
    policy
        What to verify.
    table
        Its ratios are the buckets; its costs decide if the policy lets the op choose.
    steps
        Number of steps.
    on_step
        Called after each step.
    """
    batch, draft_len = source.batch, source.draft_len
    budgets = torch.tensor([paper_budget(r, batch, draft_len) for r in table.ratios], dtype=torch.int32)
    costs = torch.tensor(table.costs, dtype=torch.float32)
    arguments = policy.arguments(batch, draft_len)
    packed = VerifyBatch.allocate(batch, draft_len, len(budgets))
    rows: list[tuple] = []
    texts: dict[int, list[int]] = {}
    for _ in range(steps):
        step = source.step()
        drafts = [torch.from_numpy(a) for a in (step.confidence, step.draft_ids, step.bonus_ids, step.seq_lens)]
        confidence, draft_ids, bonus_ids, seq_lens = drafts
        start = time.perf_counter()
        select_and_pack(confidence, draft_ids, bonus_ids, seq_lens, budgets, costs, **arguments, out=packed)
        seconds = time.perf_counter() - start
        accepted = verify(packed, step.target_ids)
        bucket = int(torch.searchsorted(budgets, packed.decision[3]))
        rows.append(
            (step, packed.keep_lens.tolist(), accepted, acceptable(step), int(packed.decision[2]), bucket, seconds)
        )
        for request, tokens in zip(step.request.tolist(), committed(packed, accepted), strict=True):
            texts.setdefault(request, []).extend(tokens)
        source.advance(accepted)
        on_step()
    recorded, *arrays = zip(*rows, strict=True)
    keep_lens, accepted_lens, acceptable_lens, verified, buckets = (np.array(a, dtype=np.int64) for a in arrays[:5])
    return Replay(
        policy=policy,
        budgets=budgets.numpy().astype(np.int64),
        steps=list(recorded),
        keep_lens=keep_lens,
        accepted=accepted_lens,
        acceptable=acceptable_lens,
        verified=verified,
        bucket=buckets,
        op_seconds=np.array(arrays[5]),
        texts=texts,
    )


def verify(packed: VerifyBatch, target_ids: np.ndarray) -> np.ndarray:
    """Accepted draft tokens [B] of a packed batch: the leading ones that equal the target's tokens [B, D+1]."""
    target = torch.from_numpy(target_ids[:, :-1].copy()).flatten()
    match = torch.zeros(target_ids[:, :-1].shape, dtype=torch.bool)
    drafts = packed.draft_index[packed.draft_index >= 0].long()  # row * D + depth, as no row_index is given
    match.view(-1)[drafts] = packed.token_ids[packed.draft_index >= 0] == target[drafts]
    return match.long().cumprod(1).sum(1).numpy()


def acceptable(step: Step) -> np.ndarray:
    """Draft tokens [B] that full verification would accept."""
    return np.cumprod(step.draft_ids == step.target_ids[:, :-1], axis=1).sum(axis=1)


def committed(packed: VerifyBatch, accepted: np.ndarray) -> list[list[int]]:
    """Tokens that each request commits in this step: its bonus token and its accepted drafts, as packed."""
    starts = packed.cu_seqlens[:-1].tolist()
    return [packed.token_ids[s : s + 1 + n].tolist() for s, n in zip(starts, accepted.tolist(), strict=True)]


def compare_texts(texts: dict[int, list[int]], source: Source) -> tuple[int, int]:
    """Number of committed texts with a recorded greedy text, and how many of them equal it token for token."""
    pairs = [(tokens, source.greedy_text(request)) for request, tokens in texts.items()]
    known = [(tokens, greedy) for tokens, greedy in pairs if greedy is not None]
    return len(known), sum(tokens == greedy[: len(tokens)].tolist() for tokens, greedy in known)


@dataclass(frozen=True)
class Curve:
    """Draft tokens accepted a step as the budget grows, over the same recorded steps."""

    verified: np.ndarray  # int64 [D], positions a step when every request verifies 1..D drafts
    top_k: np.ndarray  # float64 [D], accepted a step when the budget goes to the best positions of the batch
    uniform: np.ndarray  # float64 [D], accepted a step when every draft is cut at the same depth


def acceptance_curve(full: Replay) -> Curve:
    """Accepted against verified, for the steps of a full-depth replay and every uniform depth."""
    batch, draft_len = full.steps[0].draft_ids.shape
    depths = np.arange(1, draft_len + 1)
    verified = batch * (depths + 1)
    budgets = torch.from_numpy(verified.astype(np.int32))
    kept = np.stack(
        [segmented_topk(log_prefix_sum(torch.from_numpy(s.confidence)), budgets).numpy() for s in full.steps]
    )  # [S, D, B]
    limit = full.acceptable[:, None, :]
    return Curve(
        verified=verified,
        top_k=np.minimum(kept, limit).sum(axis=2).mean(axis=0),
        uniform=np.minimum(depths[:, None], limit).sum(axis=2).mean(axis=0),
    )
