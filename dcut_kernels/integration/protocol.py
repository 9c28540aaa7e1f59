"""The protocol between an engine and the selection: what comes in, what goes out, what is profiled."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from .. import select_and_pack
from ..batch import VerifyBatch


class Drafts(NamedTuple):
    """What comes in: the rows of one step, ``B`` requests with up to ``D`` draft tokens each.

    Attributes
    ----------
    confidence : Tensor, float32, float16 or bfloat16 [B, D]
        Drafter's probability of each draft token, given that those before it are right.
    draft_ids : Tensor, int32 or int64 [B, D]
        Draft tokens.
    bonus_ids : Tensor, dtype of draft_ids, [B]
        Last token of each request in this step that is known for sure: the last one that was generated, or in
        mid-prompt the last prompt token of the chunk.
    seq_lens : Tensor, int32 or int64 [B]
        Position of the bonus token in its sequence.
    draft_lens : Tensor, int32 [B]
        Draft tokens that exist; 0 in mid-prompt.
    base_lens : Tensor, int32 [B]
        Tokens of the step that are no drafts: 1 for the bonus token, or the size of the prompt chunk.
    block_table : Tensor, int32 [B, max_blocks]
        Blocks of the paged KV cache; ``block_size`` tokens each.
    """

    confidence: Tensor
    draft_ids: Tensor
    bonus_ids: Tensor
    seq_lens: Tensor
    draft_lens: Tensor
    base_lens: Tensor
    block_table: Tensor


class SpeculativeEngine(Protocol):
    """What an engine implements.

    A step is ``propose``, `select` and ``verify``, then the engine commits what was accepted.  Drafts that were not
    kept cost nothing: they are not in the packed batch, and the next step drafts again from the last accepted token.

    Attributes
    ----------
    block_size : int
        Tokens of a KV-cache block.
    """

    block_size: int

    def propose(self) -> Drafts:
        """Run the drafter for every running request; rows in mid-prompt bring their next chunk instead."""
        ...

    def verify(self, drafts: Drafts, batch: VerifyBatch) -> Tensor:
        """Run the target once over the packed tokens and return its own token after each verified position.

        Linear layers run on ``token_ids[:total]`` at ``positions[:total]``, ``total = decision[2]``.  Keys and values
        go to ``slot_mapping[:total]``.  Token ``t`` of row ``i`` attends to the row's first ``positions[t] + 1``
        cached positions through the block table; rows start at ``cu_seqlens[i]`` and end at ``kv_lens[i]`` cached
        tokens.  Before that, the engine fills in prompt tokens in front of a bonus token (``base_lens``).

        Returns
        -------
        Tensor, int64 [n]
            One token for each of the ``n`` leading ``logits_indices``: ``keep_lens[i] + 1`` per row.  Draft ``k`` of
            a row is accepted if it equals the token after position ``k - 1`` and all before it were accepted; the
            token after the last accepted one is the next bonus token.
        """
        ...

    def run_step(self, batch: int, tokens: int, drafting: bool = True) -> None:
        """What is profiled: a whole step of `batch` requests and `tokens` verified positions.

        Drafting is included, unless `drafting` is False: that prices plain decoding.

        It commits nothing, so that it can be repeated, and is otherwise configured as in serving.
        """
        ...


def select(
    drafts: Drafts,
    budgets: Tensor,
    costs: Tensor,
    *,
    block_size: int,
    capacity: int,
    out: VerifyBatch | None = None,
    **options: Any,
) -> VerifyBatch:
    """What goes out: the packed batch of the budget with the most expected tokens per cost (eq. 5).

    Parameters
    ----------
    drafts : Drafts
        Rows of the step.
    budgets, costs : Tensor, int32 and float32 [R] or [M, R]
        Tokens of the step per bucket, base tokens included, and the measured cost of such a step.
    block_size : int
        Tokens of a KV-cache block.
    capacity : int
        Size of the packed buffers, at least the base tokens and drafts of the step.
    out : VerifyBatch, optional
        Buffers to reuse.
    **options
        Further options of `dcut_kernels.select_and_pack`, such as ``budget`` or ``max_keep``.

    Returns
    -------
    VerifyBatch
    """
    return select_and_pack(
        drafts.confidence,
        drafts.draft_ids,
        drafts.bonus_ids,
        drafts.seq_lens,
        budgets,
        costs,
        draft_lens=drafts.draft_lens,
        base_lens=drafts.base_lens,
        block_table=drafts.block_table,
        block_size=block_size,
        capacity=capacity,
        out=out,
        **options,
    )
