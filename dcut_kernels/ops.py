"""The public functions, one set per backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._check import INT32_MAX, defined, fail
from ._schema import OUTPUTS
from .batch import VerifyBatch


def _given(**options: object) -> dict[str, object]:
    """Only what was given: parsing an option costs more than leaving it out."""
    return {name: value for name, value in options.items() if value is not None}


def _budget(budget: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(budget, Tensor):
        return budget
    if isinstance(budget, bool) or not (isinstance(budget, int) or hasattr(budget, "__index__")):
        fail("budget", "an int or an int32 tensor", type(budget).__name__)
    if not -INT32_MAX - 1 <= budget <= INT32_MAX:
        fail("budget", "a value of int32", budget)
    return torch.full((1,), budget, dtype=torch.int32, device=device)


class DraftConfidence(NamedTuple):
    """Draft tokens and their confidences.

    Attributes
    ----------
    draft_ids : Tensor, int64 [B, D]
        The given tokens, or the most likely ones.
    values : Tensor, float32 [S, B, D]
        One matrix for each statistic that was asked for, in that order.
    """

    draft_ids: Tensor
    values: Tensor


class Backend:
    """The operators of one namespace."""

    def __init__(self, name: str, namespace: str) -> None:
        self.name, self.namespace = name, namespace
        operators = getattr(torch.ops, namespace)
        self._select = operators.select_and_pack.default
        self._select_out = operators.select_and_pack.out
        self._prefix = operators.log_prefix_sum.default
        self._topk = operators.segmented_topk.default
        self._argmax = operators.bucket_argmax.default
        self._pack = operators.pack_prefixes.default
        self._confidence = operators.draft_confidence.default

    def __reduce__(self) -> tuple[type[Backend], tuple[str, str]]:
        return Backend, (self.name, self.namespace)  # operators do not pickle, names do

    def __repr__(self) -> str:
        return f"<dcut_kernels backend {self.name!r}>"

    def select_and_pack(
        self,
        confidence: Tensor,
        draft_ids: Tensor,
        bonus_ids: Tensor,
        seq_lens: Tensor,
        budgets: Tensor,
        costs: Tensor,
        *,
        draft_lens: Tensor | None = None,
        min_keep: Tensor | None = None,
        max_keep: Tensor | None = None,
        weight: Tensor | None = None,
        row_index: Tensor | None = None,
        base_lens: Tensor | None = None,
        num_reqs: Tensor | None = None,
        block_table: Tensor | None = None,
        block_size: int = 0,
        score: str = "inclusive",
        policy: str = "argmax",
        budget: int | Tensor | None = None,
        calibration: Tensor | None = None,
        envelope: Tensor | None = None,
        next_budget: Tensor | None = None,
        host_budget: Tensor | None = None,
        count_bonus: bool = True,
        log_confidence: bool = False,
        pad_token: int = 0,
        capacity: int | None = None,
        out: VerifyBatch | None = None,
    ) -> VerifyBatch:
        r"""Decide which draft tokens to verify, and pack them into one ragged batch.

        Scores are the paper's eq. 3, :math:`s_{i,0} = 1` and :math:`s_{i,k} = \prod_{t \le k} c_{i,t}`; positions of
        all requests are ranked by (score descending, position, request), a bucket ``r`` keeps the first ``K_r`` of
        them, and the bucket with the largest :math:`U_r = G_r / C_r` (eq. 5) wins, ties to the smallest ``r``.

        Parameters
        ----------
        confidence : Tensor, float32, float16 or bfloat16 [slots, D]
            Drafter confidence in [0, 1], or its natural logarithm with ``log_confidence``.  NaN and negative values
            count as 0, values above 1 as 1 (logarithms: NaN and -inf count as 0, values of 0 and above as 1).
        draft_ids : Tensor, int32 or int64 [slots, D]
            Draft tokens; ``D`` is at most 63.
        bonus_ids : Tensor, dtype of draft_ids, [B]
            Last accepted token of each request, verified at position 0 of its row.
        seq_lens : Tensor, int32 or int64 [B]
            Position of the bonus token in its sequence.
        budgets : Tensor, int32 [R] or [M, R]
            Tokens of the step per bucket, base tokens included; of ``[M, R]``, row ``clamp(b, 1, M) - 1`` serves a
            batch of ``b`` active requests.  At most 256 buckets.
        costs : Tensor, float32 [R] or [M, R]
            Measured cost of a step per bucket, any unit.  A bucket counts only if ``0 < cost < inf`` and its budget
            is above 0; without any, everything that fits is verified.
        draft_lens, min_keep, max_keep : Tensor, int32 [B], optional
            Drafts that exist, are kept whatever their score, and may be kept at most (this beats ``min_keep``).
        weight : Tensor, float32 [B], optional
            Multiplies all scores of a request; clamped to [2^-8, 2^8], NaN counts as 1.
        row_index : Tensor, int32 [B], optional
            Slot of each request in ``confidence`` and ``draft_ids``; out of range means no drafts.  Without it
            ``slots == B``.
        base_lens : Tensor, int32 [B], optional
            Tokens of each request in this step before its drafts, bonus included (1 by default).  Base tokens before
            the bonus are left to the engine: their entries of ``out`` are not written.  A request in mid-prompt passes
            the last prompt token of the step as its bonus, and no drafts.
        num_reqs : Tensor, int32 [1], optional
            Active requests ``b``; later rows are padding.
        block_table : Tensor, int32 [B, max_blocks], optional
            Paged KV cache, with ``block_size`` tokens a block; by request, whatever ``row_index`` says.
        score : {"inclusive", "shifted"}
            "shifted" ranks position ``k`` by the confidences before it only.
        policy : {"argmax", "early_stop", "history"}
            How the budget is chosen: by eq. 5; by the smallest budget after which no position is worth its cost on
            the convex `envelope`, which looks at no position behind that one; or, by eq. 5 too, for the next step,
            while this one uses the `budget` that the step before chose.
        budget : int or Tensor int32 [1], optional
            Tokens of the step; replaces the choice among buckets.  0 and below keep only what is mandatory.  It may
            be the first entry of `next_budget`.
        calibration : Tensor, int32 [D, 65], optional
            For each draft position the calibrated ``-log2(confidence)`` at ``j / 8``, ``j = 0 ... 64``, in units of
            2^-20; linear between, of slope 1 beyond.  Entries are clamped to ``[0, 2^26 - 1]``.
        envelope : Tensor, int32 [R, 2] or [M, R, 2], optional
            With "early_stop": height of the lower convex envelope of a step's costs at each budget, and its slope
            per token from there on, in one unit; negative values count as 0.
        next_budget : Tensor, int32 [2], optional
            Written: the raw budget that the policy chooses from this step's scores, 2^31 - 1 with all buckets
            disabled; and a count of the calls, which is read and increased by 1.
        host_budget : Tensor, int64 [1] in pinned memory, optional
            Written in one store: the same two, ``count << 32 | budget``, so that a host can tell a new budget from a
            stale one without waiting for the device.
        count_bonus : bool
            Whether each active request's bonus token counts in ``G``, with its ``weight``.
        log_confidence : bool
            ``confidence`` holds natural logarithms.
        pad_token : int
            Fills ``token_ids`` after the last token.
        capacity : int, optional
            Size of the packed buffers, at least ``B``; ``B * (D + 1)`` by default, required with ``base_lens``.
            Budgets are clamped to it.  Where mandatory tokens alone exceed it, ``decision[2]`` does too.
        out : VerifyBatch, optional
            Buffers to write and return instead of new ones (see `VerifyBatch.allocate`).  They must share no memory
            with each other or with the inputs.

        Returns
        -------
        VerifyBatch

        Raises
        ------
        RuntimeError
            Naming the argument, what was expected and what came.
        """
        options: dict[str, object] = {}
        if not draft_lens is min_keep is max_keep is weight is row_index is base_lens is num_reqs is None:
            options = _given(
                draft_lens=draft_lens, min_keep=min_keep, max_keep=max_keep, weight=weight, row_index=row_index,
                base_lens=base_lens, num_reqs=num_reqs,
            )  # fmt: skip
        if not block_table is calibration is envelope is next_budget is host_budget is capacity is None:
            options |= _given(
                block_table=block_table, calibration=calibration, envelope=envelope, next_budget=next_budget,
                host_budget=host_budget, capacity=capacity,
            )  # fmt: skip
        if budget is not None:
            defined("confidence", confidence)
            options["budget"] = _budget(budget, confidence.device)
        if block_size != 0:
            options["block_size"] = block_size
        if score != "inclusive":
            options["score"] = score
        if policy != "argmax":
            options["policy"] = policy
        if count_bonus is not True:
            options["count_bonus"] = count_bonus
        if log_confidence is not False:
            options["log_confidence"] = log_confidence
        if pad_token != 0:
            options["pad_token"] = pad_token
        if out is None:
            return VerifyBatch._make(
                self._select(confidence, draft_ids, bonus_ids, seq_lens, budgets, costs, **options)
            )
        if not isinstance(out, VerifyBatch):
            fail("out", "a VerifyBatch", type(out).__name__)
        options.update(zip(OUTPUTS, out, strict=True))
        self._select_out(confidence, draft_ids, bonus_ids, seq_lens, budgets, costs, **options)
        return out

    def log_prefix_sum(
        self,
        confidence: Tensor,
        *,
        row_index: Tensor | None = None,
        score: str = "inclusive",
        calibration: Tensor | None = None,
        log_confidence: bool = False,
    ) -> Tensor:
        """Sum ``-log2(confidence)`` along each row, in units of 2^-20, saturating at 2^26 - 1 (eq. 3).

        Parameters
        ----------
        confidence, row_index, score, calibration, log_confidence
            As in `select_and_pack`.

        Returns
        -------
        Tensor, int32 [B, D]
            Rows whose slot is out of range hold -1: they have no drafts.
        """
        return self._prefix(
            confidence, row_index=row_index, score=score, calibration=calibration, log_confidence=log_confidence
        )

    def segmented_topk(
        self,
        prefix: Tensor,
        budgets: Tensor,
        *,
        draft_lens: Tensor | None = None,
        min_keep: Tensor | None = None,
        max_keep: Tensor | None = None,
        weight: Tensor | None = None,
        base_lens: Tensor | None = None,
        num_reqs: Tensor | None = None,
        capacity: int | None = None,
    ) -> Tensor:
        """Keep depths of every request under every budget.

        Parameters
        ----------
        prefix : Tensor, int32 [B, D]
            Result of `log_prefix_sum`; other values are clamped to its range and made non-decreasing.
        budgets, draft_lens, min_keep, max_keep, weight, base_lens, num_reqs, capacity
            As in `select_and_pack`.

        Returns
        -------
        Tensor, int32 [R, B]
        """
        options = _given(
            draft_lens=draft_lens, min_keep=min_keep, max_keep=max_keep, weight=weight, base_lens=base_lens,
            num_reqs=num_reqs, capacity=capacity,
        )  # fmt: skip
        return self._topk(prefix, budgets, **options)

    def bucket_argmax(
        self,
        prefix: Tensor,
        budgets: Tensor,
        costs: Tensor,
        *,
        draft_lens: Tensor | None = None,
        min_keep: Tensor | None = None,
        max_keep: Tensor | None = None,
        weight: Tensor | None = None,
        base_lens: Tensor | None = None,
        num_reqs: Tensor | None = None,
        policy: str = "argmax",
        budget: int | Tensor | None = None,
        envelope: Tensor | None = None,
        next_budget: Tensor | None = None,
        host_budget: Tensor | None = None,
        count_bonus: bool = True,
        capacity: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Choose the bucket with the largest expected tokens per cost (eq. 5).

        Parameters
        ----------
        prefix : Tensor, int32 [B, D]
            As in `segmented_topk`; the other parameters are those of `select_and_pack`.

        Returns
        -------
        decision : Tensor, int32 [4]
        gains : Tensor, int64 [R]
            As in `VerifyBatch`.
        """
        options = _given(
            draft_lens=draft_lens, min_keep=min_keep, max_keep=max_keep, weight=weight, base_lens=base_lens,
            num_reqs=num_reqs, envelope=envelope, next_budget=next_budget, host_budget=host_budget,
            capacity=capacity,
        )  # fmt: skip
        if budget is not None:
            defined("prefix", prefix)
            options["budget"] = _budget(budget, prefix.device)
        return self._argmax(prefix, budgets, costs, policy=policy, count_bonus=count_bonus, **options)

    def pack_prefixes(
        self,
        keep_lens: Tensor,
        draft_ids: Tensor,
        bonus_ids: Tensor,
        seq_lens: Tensor,
        *,
        row_index: Tensor | None = None,
        base_lens: Tensor | None = None,
        num_reqs: Tensor | None = None,
        block_table: Tensor | None = None,
        block_size: int = 0,
        pad_token: int = 0,
        capacity: int | None = None,
    ) -> VerifyBatch:
        """Pack given keep depths; call it again with each further KV-cache group's block table.

        Parameters
        ----------
        keep_lens : Tensor, int32 [B]
            Draft tokens kept per request, clamped to ``[0, D]``.
        draft_ids, bonus_ids, seq_lens, row_index, base_lens, num_reqs, block_table, block_size, pad_token, capacity
            As in `select_and_pack`.

        Returns
        -------
        VerifyBatch
            With ``decision = (-1, total, total, total)`` and no gains.
        """
        options = _given(
            row_index=row_index, base_lens=base_lens, num_reqs=num_reqs, block_table=block_table, capacity=capacity
        )
        return VerifyBatch._make(
            self._pack(keep_lens, draft_ids, bonus_ids, seq_lens, block_size=block_size, pad_token=pad_token, **options)
        )

    def draft_confidence(
        self,
        logits: Tensor,
        *,
        temperature: Tensor | None = None,
        draft_ids: Tensor | None = None,
        statistics: Sequence[str] = ("log_prob",),
    ) -> DraftConfidence:
        r"""Confidences of draft tokens straight from the drafter's logits, in one pass and without a softmax in memory.

        With :math:`q = \mathrm{softmax}(x / T)` at each position, ``values[0]`` of "log_prob" is what
        `select_and_pack` takes with ``log_confidence=True``, and of "max_prob" what it takes as it is.

        Parameters
        ----------
        logits : Tensor, float32, float16 or bfloat16 [B, D, V]
            ``D`` is at most 63.  NaN counts as -inf, +inf as the largest float32.  In a row of -inf the token is 0, its
            "log_prob" -inf and every other statistic 0.
        temperature : Tensor, float32 [D], optional
            ``T`` of each position; NaN and values of 0 and below count as 1, others are clamped to [2^-100, 2^100].
        draft_ids : Tensor, int64 [B, D], optional
            The draft tokens, where they were sampled; one outside the vocabulary has a "log_prob" of -inf.  Without it,
            the most likely ones, ties to the smallest.
        statistics : sequence of {"log_prob", "max_prob", "collision", "margin"}
            Natural logarithm of the token's probability; the largest probability; :math:`\sum_v q_v^2`; the difference
            between the two largest.

        Returns
        -------
        DraftConfidence
            Values are within 1e-5, relatively, of exact ones, and not the same to the bit on every backend; the tokens
            are.  They carry no gradient.  In sums, probabilities below 2^-60 of the largest count as 0.

        Raises
        ------
        RuntimeError
            Naming the argument, what was expected and what came; or that a GPU needs Triton here.
        """
        defined("logits", logits)
        if isinstance(statistics, str):
            fail("statistics", "a sequence of names", f"'{statistics}'")
        return DraftConfidence._make(
            self._confidence(logits, temperature=temperature, draft_ids=draft_ids, statistics=list(statistics))
        )
