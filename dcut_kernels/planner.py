"""The one object that an engine holds: tables, buffers, calibration, history and counts around ``select_and_pack``."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from . import ops
from ._check import INT32_MAX
from ._planner_checks import (
    OWN,
    check_accepted,
    check_backend,
    check_call,
    check_drafts,
    check_options,
    check_rows,
    check_state,
    check_timed,
    counts,
    kept_of,
    rows_of,
    weight_of,
)
from .batch import VerifyBatch
from .buckets import Buckets, StepTables
from .calibration import Calibration
from .calibration.table import fit_of, restore_fit
from .carried import CarriedBudget, NextBudget
from .cost import CostTable
from .cost._values import integer, require
from .gate import Gate
from .lossless import ConfidenceSource, DrafterKind, DraftSampling, Policy, Score, require_lossless
from .metrics import UNIT, Metrics, RequestStats
from .ranks import Ranks


class Planner:
    """Plans the verification of every step of an engine.

    Each step: `begin` on the host, `select` (one launch, no synchronization, fit for capture in a CUDA graph), and when
    the results are on the host, `observe`.  Before drafting, `should_draft` says whether plain decoding is faster.

    Parameters
    ----------
    table : CostTable
        Measured costs of this engine.
    max_batch : int
        Most rows of a step.
    draft_len : int
        ``D``.
    policy : {"argmax", "early_stop", "history"}
        As in `select_and_pack`.  Under "history" the planner carries the budget from step to step.
    score : {"inclusive", "shifted"}
        As in `select_and_pack`.
    draft_sampling, confidence_source, drafter, allow_biased
        As in `lossless.require_lossless`, which refuses what would change the output distribution.
    lookup : str
        As in `CostTable.dense`.
    calibration : Calibration, optional
        Its table is used; call `calibrate` after an update.
    floor, floor_every : int
        Every so many steps each request keeps at least so many drafts, so that none starves.  0: never.
    priorities : bool
        Whether requests may join with a priority.
    latency_ms : float, optional
        Buckets of costlier steps are disabled; the cheapest bucket stays.
    min_gain : float
        How much more tokens per time than plain decoding drafting has to promise.  Step costs do not show all: a text
        whose prompt is read takes part in a step and is not drafted.
    probe_every : int
        Where plain decoding wins, steps from one probe to the next, which drafts eight requests' steps all the same, to
        see whether it still does; fewer where that costs at most a quarter of a percent of the speed.
    capacity : int, optional
        Of the packed buffers, for each batch; by default every draft fits.
    ids : torch.dtype
        Of token ids.
    authority : {"all", "rank0"}
        Who decides among tensor-parallel ranks: each for itself, which is the same where all hold the same
        confidences to the bit; or rank 0, which sends `keep_lens` and `decision` to the others, which only pack.
    agree : bool
        Whether data-parallel ranks agree on the next bucket, so that all pad to one size: under "history" they sum up
        their gains, which are integers, after each step.
    group : ProcessGroup, optional
        Of those ranks; the default group without it.
    backend : Backend, optional
        Of `backends.get`; the public functions by default.
    device : torch.device or str

    Attributes
    ----------
    metrics : Metrics
    gate : Gate
        What it has learned of drafting.
    probing : bool
        Whether the last answer of `should_draft` was only to see whether drafting pays: a few requests will do.
    buckets : Buckets
        Tables in use.
    next_budget : Tensor, int32 [2]
        Under "history": the budget of the next step, and how many were computed.
    host_budget : Tensor, int64 [1]
        The same in one word, in pinned memory where `device` is a GPU.
    """

    def __init__(
        self,
        table: CostTable,
        max_batch: int,
        draft_len: int,
        *,
        policy: Literal["argmax", "early_stop", "history"] = "argmax",
        score: Score = "inclusive",
        draft_sampling: DraftSampling = "greedy",
        confidence_source: ConfidenceSource = "drawn_token",
        drafter: DrafterKind = "block_parallel",
        allow_biased: bool = False,
        lookup: str = "nearest",
        calibration: Calibration | None = None,
        floor: int = 1,
        floor_every: int = 0,
        priorities: bool = False,
        latency_ms: float | None = None,
        min_gain: float = 0.05,
        probe_every: int = 1024,
        capacity: int | None = None,
        ids: torch.dtype = torch.int64,
        authority: Literal["all", "rank0"] = "all",
        agree: bool = False,
        group: dist.ProcessGroup | None = None,
        backend: ops.Backend | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        kind: Policy = policy
        check_options(table, draft_len, policy, floor, floor_every, min_gain, probe_every, capacity, authority, agree)
        check_backend(backend, ids, calibration)
        require_lossless(
            draft_sampling=draft_sampling, confidence_source=confidence_source, score=score, policy=kind,
            drafter=drafter, allow_biased=allow_biased,
        )  # fmt: skip
        self.table, self.max_batch, self.draft_len, self.capacity = table, max_batch, draft_len, capacity
        self.policy, self.score, self.lookup, self.ids = policy, score, lookup, ids
        self.floor, self.floor_every = floor, floor_every
        self.device = torch.device(device)
        self._backend = backend or ops.Backend("public", "dcut")
        self.buckets = Buckets(table, max_batch, lookup, policy == "early_stop", self.device)
        self.buckets.set_latency(latency_ms)
        self.calibration = calibration
        self._curves = None if calibration is None else calibration.table().to(self.device)
        self._carried = CarriedBudget(self.device)
        self.next_budget, self.host_budget = self._carried.next_budget, self._carried.host_budget
        self._min_keep = torch.zeros(max_batch, dtype=torch.int32, device=self.device)
        self._weight = torch.ones(max_batch, device=self.device) if priorities else None
        self._priority: dict[Hashable, float] = {}
        self._buffers: dict[tuple[int, int, int], VerifyBatch] = {}
        self.metrics = Metrics([0] * (self.buckets.dense.budgets.shape[1] + 1))
        self.gate = Gate(draft_len, probe_every, min_gain)
        self.probing, self._steps = False, 0
        self._used: dict[int, StepTables] = {}  # by the address of the decision that they led to
        self._ranks = Ranks(group) if authority == "rank0" or agree else None
        self._follows = authority == "rank0" and dist.get_rank(group) != 0
        self._leads = authority == "rank0" and not self._follows
        self._agrees = agree

    def set_latency(self, latency_ms: float | None) -> None:
        """Disable the buckets of steps that take longer; None enables all again.

        Parameters
        ----------
        latency_ms : float, optional
            Milliseconds of a step.
        """
        self.buckets.set_latency(latency_ms)
        self.gate.forget_rates()

    def tables(self, rows: int, base_tokens: int) -> StepTables:
        """Buckets of a step in which prompts are read, or in which not every row has drafts; for `select`.

        Parameters
        ----------
        rows, base_tokens : int
            As in `CostTable.step`.
        """
        return self.buckets.of_step(rows, base_tokens)

    def calibrate(self) -> None:
        """Take over what the calibration has learned since."""
        if self.calibration is None or self._curves is None:
            raise ValueError("calibration: expected a Calibration, got None")
        self._curves.copy_(self.calibration.table())

    def join(self, request: Hashable, priority: float = 1.0) -> None:
        """Start to count a request.

        Parameters
        ----------
        request : hashable
            Its name in the engine.
        priority : float
            Above 0; multiplies its scores (``weight`` of `select_and_pack`): above 1 more of its drafts are kept.
        """
        if request in self.metrics.requests:
            raise ValueError(f"request: expected one that has not joined, got {request!r}")
        self._priority[request] = weight_of(priority, self._weight is not None)
        self.metrics.requests[request] = RequestStats()

    def leave(self, request: Hashable) -> RequestStats:
        """Forget a request and return its counts."""
        if request not in self.metrics.requests:
            raise ValueError(f"request: expected one that has joined, got {request!r}")
        del self._priority[request]
        return self.metrics.requests.pop(request)

    def begin(self, requests: Sequence[Hashable], base_tokens: int | None = None) -> None:
        """Prepare a step.

        It writes buffers that `select` reads; where `select` is captured in a CUDA graph, call it before each replay.

        Parameters
        ----------
        requests : sequence of hashable [B]
            Row by row.
        base_tokens : int, optional
            Tokens of the step that are no drafts, by default one a row.  Under "history" the budget of the last step
            grows and shrinks with them, where buckets follow the batch; numbers of tokens stay what they are.
        """
        rows = rows_of("requests", requests, self.max_batch)
        base_tokens = rows if base_tokens is None else integer("base_tokens", base_tokens, 0)
        self._steps += 1
        follows = self.table.rule.follows_batch and not self._agrees
        self._carried.begin(base_tokens if follows else None)
        if self._ranks is not None and self._agrees:
            self._ranks.finish(self.next_budget)
            self._carried.publish()
        if self.floor_every > 0:
            self._min_keep.fill_(self.floor if self._steps % self.floor_every == 0 else 0)
        if self._weight is not None:
            self._weight[: len(requests)] = torch.tensor([self._priority.get(request, 1.0) for request in requests])

    def select(
        self,
        confidence: Tensor,
        draft_ids: Tensor,
        bonus_ids: Tensor,
        seq_lens: Tensor,
        *,
        tables: StepTables | None = None,
        capacity: int | None = None,
        **options: Any,
    ) -> VerifyBatch:
        """Decide and pack, in one launch.

        Parameters
        ----------
        confidence, draft_ids, bonus_ids, seq_lens, **options
            As in `select_and_pack`, but for what the planner sets itself.
        tables : StepTables, optional
            Buckets of this step, of `tables`, instead of those of its batch size.
        capacity : int, optional
            Of the packed buffers, in place of the planner's.

        Returns
        -------
        VerifyBatch
            The planner's own buffers for this batch size, overwritten by the next step of that size.
        """
        batch = rows_of("bonus_ids", bonus_ids, self.max_batch)
        own = {"min_keep": self._min_keep if self.floor_every else None, "weight": self._weight}
        own = {name: values[:batch] for name, values in own.items() if values is not None}
        check_call(confidence, draft_ids, self.ids, self.draft_len, options, OWN | set(own))
        options |= own
        used = self.buckets.dense if tables is None else tables
        require("tables", isinstance(used, StepTables), "what tables returned", type(used).__name__)
        budgets, costs, envelope, _ = used
        capacity = self.capacity or batch * (self.draft_len + 1) if capacity is None else integer("capacity", capacity)
        if envelope is not None:
            options["envelope"] = envelope
        if self.policy == "history":
            options |= self._carried.options
        if self._curves is not None:
            options["calibration"] = self._curves
        if self._ranks is not None and self._follows:
            return self._ranks.follow(self._backend, batch, draft_ids, bonus_ids, seq_lens, capacity, options)
        agreed = self.next_budget[:1].clone() if self._agrees else None
        out = self._backend.select_and_pack(
            confidence, draft_ids, bonus_ids, seq_lens, budgets, costs, policy=self.policy, score=self.score,
            capacity=capacity, out=self._out(batch, budgets.shape[-1], capacity), **options,
        )  # fmt: skip
        if self._ranks is not None and self._leads:
            self._ranks.lead(out)
        if self._ranks is not None and agreed is not None:
            total, padded = out.decision[2:3], out.decision[3:]  # ranks that keep less pad to the same size
            padded.copy_(torch.where(agreed == INT32_MAX, padded, torch.maximum(total, agreed)))
            self._ranks.start(out.gains, budgets, costs, batch)
        self._used[out.decision.data_ptr()] = used
        return out

    def _out(self, batch: int, buckets: int, capacity: int) -> VerifyBatch:
        key = batch, buckets, capacity
        if key not in self._buffers:
            self._buffers[key] = VerifyBatch.allocate(
                batch, self.draft_len, buckets, capacity, self.ids, device=self.device
            )
        return self._buffers[key]

    def read_next(self) -> NextBudget:
        """The newest budget that the host can see, without waiting for the device.

        Compare `NextBudget.calls` with that of the step before to tell a new budget from a stale one.  After `begin` it
        is that of the coming step, with the base tokens that came and went.
        """
        return self._carried.read()

    def observe(
        self,
        requests: Sequence[Hashable],
        batch: VerifyBatch,
        draft_lens: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        """Count a step whose results are on the host, at the latest before the next `select` of as many rows.

        Parameters
        ----------
        requests : sequence of hashable [B]
            Row by row, as in `begin`; without the padding rows of a captured step, see ``num_reqs``.
        batch : VerifyBatch
            What `select` returned and a later one of as many rows overwrites; copies are not known.
        draft_lens : sequence of int [B]
            Drafts that existed; rows without any (prompts, or requests that have ended) teach nothing about drafting.
        accepted : sequence of int [B]
            Drafts that the target accepted.
        """
        rows = rows_of("requests", requests, self.max_batch)
        draft_lens, accepted = counts("draft_lens", draft_lens, rows), counts("accepted", accepted, rows)
        held = kept_of(batch)
        if rows < len(held) and bool(batch.cu_seqlens[rows] == batch.cu_seqlens[-1]):  # what is left are padding rows
            held = held[:rows]
        kept = check_drafts(draft_lens, held, self.draft_len)
        check_accepted(accepted, kept)
        budgets, _ = self._used.get(batch.decision.data_ptr(), self.buckets.dense).row(rows)
        bucket, used, total, padded = batch.decision.tolist()
        if bucket < 0:
            bucket = budgets.index(padded) if padded in budgets else len(budgets)
        gains = [gain / UNIT for gain in batch.gains.tolist()]
        promised = gains[bucket] if bucket < len(gains) and total <= budgets[bucket] else None  # floors keep more
        self.metrics.add(requests, draft_lens, kept, accepted, bucket, promised or 0.0)
        if gains and any(draft_lens):
            prompts = used - sum(kept) - rows
            self.gate.learn(draft_lens, accepted, [budget - prompts for budget in budgets], gains, promised)

    def should_draft(self, batch: int, timeable: bool = True) -> bool:
        """Whether a speculative step of so many requests promises more tokens per time than plain decoding.

        Without `CostTable.plain_ms` it does.  Before 128 requests' steps were observed, and now and then where it does
        not (see `probe_every`), the answer is yes all the same, and `probing` is set.

        Parameters
        ----------
        batch : int
            Requests of the step; those that still read their prompts count, for it is their time too.  With
            ``authority="rank0"`` every rank asks, and all get the answer of rank 0.
        timeable : bool
            Whether the step will be reported to `timed`, if that is ever called: no request reads its prompt or is at
            its last token.  Only such a step is tried the way that does not pay.
        """
        if self._ranks is not None and self._follows:
            return self._ranks.hear(self.device)
        drafts = self._should_draft(check_rows(batch, self.max_batch, "batch"), timeable)
        if self._ranks is not None and self._leads:
            self._ranks.say(drafts, self.device)
        return drafts

    def _should_draft(self, batch: int, timeable: bool) -> bool:
        plain = self.buckets.plain(batch)
        drafts, self.probing = True, False
        if plain is not None:
            drafts, self.probing = self.gate.choose(batch, *self.buckets.dense.row(batch), plain, timeable)
        self.metrics.probes += self.probing
        self.metrics.plain += not drafts
        return drafts

    def timed(self, batch: int, tokens: int, drafted: bool, milliseconds: float) -> None:
        """Say how long a step took, so that `should_draft` knows what both ways cost now, and not only when measured.

        From the first call on, a few steps now and then go the way that does not pay.  Ranks that decide each for
        itself must not call it: their clocks differ.

        Parameters
        ----------
        batch, tokens : int
            Requests of the step, none of which read its prompt, and tokens that it verified.
        drafted : bool
            Whether all of them drafted, or none did.
        milliseconds : float
            From the question whether to draft to the last commit.
        """
        batch = check_timed(batch, self.max_batch, tokens, milliseconds)
        plain = self.buckets.plain(batch)
        cost = self.buckets.cost_of(batch, tokens) if drafted else plain
        if plain is not None and cost is not None:
            self.gate.time(batch, drafted, milliseconds / cost)

    def state_dict(self) -> dict[str, Any]:
        """What is worth keeping over a restart; `load_state_dict` of a planner made alike restores it."""
        return copy.deepcopy(
            {
                "rule": repr(self.table.rule),
                "draft_len": self.draft_len,
                "carried": self._carried.state(),
                "metrics": self.metrics.state(),
                "gate": self.gate.state(),
                "priority": dict(self._priority),
                "steps": self._steps,
                "calibration": fit_of(self.calibration),
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, the fit of the calibration included if it is a ``torch.nn.Module``.

        Raises
        ------
        ValueError
            If it is none, or belongs to a planner of another draft length or of other buckets.
        """
        check_state(state, self.state_dict(), self._weight is not None)
        state = copy.deepcopy(dict(state))
        gate = copy.copy(self.gate)
        try:
            metrics = Metrics.of(state["metrics"])
            gate.restore(state["gate"])
            carried = self._carried.parse(state["carried"])
            learned = restore_fit(self.calibration, state["calibration"])
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"state: expected what state_dict returned, got another one: {error!r}") from None
        self.metrics, self.gate, self._priority = metrics, gate, state["priority"]
        self._steps = state["steps"]
        self._carried.restore(*carried)
        if learned:
            self.calibrate()
