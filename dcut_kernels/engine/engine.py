"""Batched speculative decoding with packed ragged verification."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..batch import VerifyBatch
from ..integration import Drafts, select
from ..models import Drafter, Target
from .cache import PagedCache
from .costs import StepCosts
from .policies import Policy, parse
from .requests import Request, Scheduler
from .sampling import sample


class Step(NamedTuple):
    """What happened in a step."""

    requests: list[Request]  # B rows
    drafts: Drafts
    keep_lens: list[int]  # B, drafts verified
    accepted: list[int]  # B, drafts accepted
    tokens: int  # committed
    verified: int  # packed tokens, those of prompts included
    bucket: int  # -1 where the budget was given
    seconds: dict[str, float]  # draft, select, verify, rest


class Engine:
    """Decodes many requests at once; implements `dcut_kernels.integration.SpeculativeEngine`.

    Parameters
    ----------
    target, drafter : Target, Drafter
        Models, see `dcut_kernels.engine.load_pair`.
    policy : str
        "ar", "full", "dcut", "uniform-K" or "ratio-R".
    costs : StepCosts, optional
        Measured costs of this engine on this machine; "dcut" needs them.
    max_batch : int
        Requests that run together.
    max_len : int
        Longest prompt and text; fixes the size of the cache.
    block_size : int
        Tokens of a cache block.
    chunk : int
        Prompt tokens that a request reads per step.
    temperature : float
        0 is greedy; above, the target is sampled with noise fixed by the seed of each request.
    eos : int
        Token that ends a text.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        policy: str = "dcut",
        costs: StepCosts | None = None,
        *,
        max_batch: int = 64,
        max_len: int = 256,
        block_size: int = 16,
        chunk: int = 32,
        temperature: float = 0.0,
        eos: int = 0,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.policy: Policy = parse(policy)
        if self.policy.needs_costs and costs is None:
            raise ValueError(f"costs: expected StepCosts for policy {policy!r}, got None")
        self.costs, self.temperature, self.eos = costs, temperature, eos
        self.draft_len, self.block_size, self.chunk, self.max_len = drafter.draft_len, block_size, chunk, max_len
        self.row_blocks = -(-(max_len + self.draft_len) // block_size)
        blocks = max_batch * self.row_blocks
        self.scheduler = Scheduler(max_batch, blocks, block_size, self.draft_len)
        self.target_cache = PagedCache(target.config, blocks, block_size)
        self.drafter_cache = PagedCache(drafter.config, blocks, block_size)
        self.buffers: dict[tuple[int, int], VerifyBatch] = {}  # by rows and buckets

    @torch.inference_mode()
    def step(self) -> Step:
        """One speculative step: draft, select, verify, commit."""
        times = [time.perf_counter()]
        self.scheduler.update()
        if not self.scheduler.running:
            raise RuntimeError("step: expected a waiting or running request, got none")
        times.append(time.perf_counter())
        drafts = self.propose()
        times.append(time.perf_counter())
        batch = self.select(drafts)
        times.append(time.perf_counter())
        tokens = self.verify(drafts, batch)
        times.append(time.perf_counter())
        accepted, committed = self.commit(drafts, batch, tokens.tolist())
        times.append(time.perf_counter())
        update, draft, choose, verify, commit = (b - a for a, b in pairwise(times))
        return Step(
            requests=self.scheduler.running,
            drafts=drafts,
            keep_lens=batch.keep_lens.tolist(),
            accepted=accepted,
            tokens=committed,
            verified=int(batch.decision[2]),
            bucket=int(batch.decision[0]),
            seconds={"draft": draft, "select": choose, "verify": verify, "rest": update + commit},
        )

    def propose(self, drafting: bool | None = None) -> Drafts:
        """Rows of the step; see `SpeculativeEngine.propose`."""
        rows = self.scheduler.running
        base = [min(self.chunk, len(r.prompt) - r.cached) if r.in_prompt else 1 for r in rows]
        ends = [r.cached + n - 1 if r.in_prompt else r.last_position for r, n in zip(rows, base, strict=True)]
        bonus = [r.prompt[end] if r.in_prompt else r.output[-1] for r, end in zip(rows, ends, strict=True)]
        left = [0 if r.in_prompt else min(self.draft_len, r.max_tokens - len(r.output) - 1) for r in rows]
        if not (self.policy.drafts if drafting is None else drafting):
            left = [0] * len(rows)
        drafts = Drafts(
            confidence=torch.zeros(len(rows), self.draft_len),
            draft_ids=torch.zeros(len(rows), self.draft_len, dtype=torch.int64),
            bonus_ids=torch.tensor(bonus),
            seq_lens=torch.tensor(ends),
            draft_lens=torch.tensor(left, dtype=torch.int32),
            base_lens=torch.tensor(base, dtype=torch.int32),
            block_table=torch.tensor(
                [r.blocks + [0] * (self.row_blocks - len(r.blocks)) for r in rows], dtype=torch.int32
            ),
        )
        chosen = drafts.draft_lens.nonzero()[:, 0]
        if len(chosen):
            confidence, draft_ids = self._draft(
                drafts.bonus_ids[chosen], drafts.seq_lens[chosen], drafts.block_table[chosen]
            )
            drafts.confidence[chosen], drafts.draft_ids[chosen] = confidence, draft_ids
        return drafts

    def _draft(self, bonus_ids: Tensor, seq_lens: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
        """Draft every given row: confidence [n, D] and draft tokens [n, D]."""
        block = self.draft_len + 1
        positions = seq_lens[:, None] + torch.arange(block)
        slots = block_table.gather(1, positions // self.block_size).long() * self.block_size
        slots = (slots + positions % self.block_size).flatten()
        starts = torch.arange(len(seq_lens) + 1) * block
        rows = self.drafter_cache.rows(starts, seq_lens + block, block_table, causal=False)
        attend = self.drafter_cache.attention(slots, rows)
        hidden = self.drafter(self.target.embed_tokens(bonus_ids), seq_lens, attend)
        logits = self.target.logits(hidden.contiguous())
        best, draft_ids = logits.max(-1)
        return (best - logits.logsumexp(-1)).exp(), draft_ids

    def select(self, drafts: Drafts, budget: int | None = None) -> VerifyBatch:
        """Choose and pack with this engine's policy, or with a given budget."""
        rows = len(drafts.bonus_ids)
        capacity = rows * max(self.chunk, self.draft_len + 1)
        options = self.policy.options(drafts) if budget is None else {"budget": budget}
        if self.costs is None or options:
            budgets, costs = torch.tensor([capacity], dtype=torch.int32), torch.ones(1)
        else:
            budgets, costs = self.costs.table(int((drafts.draft_lens > 0).sum()), int(drafts.base_lens.sum()))
        key = (rows, len(budgets))
        if key not in self.buffers:
            self.buffers[key] = VerifyBatch.allocate(rows, self.draft_len, len(budgets), capacity, torch.int64)
        return select(
            drafts, budgets, costs, block_size=self.block_size, capacity=capacity, out=self.buffers[key], **options
        )

    def verify(self, drafts: Drafts, batch: VerifyBatch) -> Tensor:
        """Run the target over the packed tokens; see `SpeculativeEngine.verify`."""
        rows, total = self.scheduler.running, int(batch.decision[2])
        self._fill_in_prompts(drafts, batch)
        positions, slots = batch.positions[:total], batch.slot_mapping[:total]
        groups = self.target_cache.rows(batch.cu_seqlens, batch.kv_lens, drafts.block_table, causal=True)
        hidden, features = self.target(batch.token_ids[:total], positions, self.target_cache.attention(slots, groups))
        if self.policy.drafts:  # rejected drafts leave keys behind that the next step overwrites before it reads them
            for layer, (keys, values) in enumerate(self.drafter.context(features, positions)):
                self.drafter_cache.write(layer, slots, keys, values)
        verified = batch.logits_indices[: int(batch.keep_lens.sum()) + len(rows)].long()
        seeds = [rows[i].seed for i in batch.request_ids[verified].tolist()] if self.temperature else []
        places = (positions[verified] + 1).tolist() if self.temperature else []
        return sample(self.target.logits(hidden[verified]), self.temperature, seeds, places)

    def _fill_in_prompts(self, drafts: Drafts, batch: VerifyBatch) -> None:
        """Write the prompt tokens in front of each bonus token."""
        for row, request in enumerate(self.scheduler.running):
            before = int(drafts.base_lens[row]) - 1
            if before:
                places = slice(start := int(batch.cu_seqlens[row]), start + before)
                positions = torch.arange(request.cached, request.cached + before)
                batch.token_ids[places] = torch.tensor(request.prompt[request.cached : request.cached + before])
                batch.positions[places], batch.request_ids[places] = positions, row
                blocks = drafts.block_table[row, positions // self.block_size].long()
                batch.slot_mapping[places] = blocks * self.block_size + positions % self.block_size

    def commit(self, drafts: Drafts, batch: VerifyBatch, tokens: list[int]) -> tuple[list[int], int]:
        """Append what the target confirmed, and its next token; returns drafts accepted per row, and tokens in all."""
        drafted = batch.token_ids[batch.logits_indices[: len(tokens)].long()].tolist()
        accepted, committed, first = [], 0, 0
        for row, (request, keep) in enumerate(zip(self.scheduler.running, batch.keep_lens.tolist(), strict=True)):
            n = 0
            while n < keep and drafted[first + n + 1] == tokens[first + n]:
                n += 1
            if request.in_prompt:
                request.cached += int(drafts.base_lens[row])
            if not request.in_prompt or request.cached == len(request.prompt):
                committed += request.commit(tokens[first : first + n + 1], self.eos)
            accepted.append(n)
            first += keep + 1
        return accepted, committed

    @torch.inference_mode()
    def run_step(self, batch: int, tokens: int, drafting: bool = True) -> None:
        """A step that commits nothing; see `SpeculativeEngine.run_step`."""
        if self.scheduler.waiting or any(not request.stand_in for request in self.scheduler.running):
            raise RuntimeError("run_step: expected an engine without requests of its own")
        if len(self.scheduler.running) != batch:
            self._stand_in(batch)
        drafts = self.propose(drafting)
        self.verify(drafts, self.select(drafts, budget=tokens))

    def _stand_in(self, batch: int) -> None:
        """Replace the running requests by ones of random text that have just been read."""
        for request in self.scheduler.running:
            request.finished = True
        noise = torch.Generator().manual_seed(batch)
        prompts = torch.randint(2, self.target.config.vocab_size, (batch, self.max_len // 2), generator=noise).tolist()
        self.scheduler.waiting.extend(Request(prompt, self.max_len // 2, stand_in=True) for prompt in prompts)
        self.step()
        while any(request.in_prompt for request in self.scheduler.running):
            self.step()
        for request in self.scheduler.running:
            request.finished = False  # whatever its first token was

    def request(self, prompt: list[int], max_tokens: int, seed: int = 0) -> Request:
        """A request that fits this engine, to be appended to ``scheduler.waiting``."""
        if not 1 <= max_tokens < self.max_len:
            raise ValueError(f"max_tokens: expected 1 to {self.max_len - 1} (max_len {self.max_len}), got {max_tokens}")
        if not 1 <= len(prompt) <= self.max_len - max_tokens:
            most = f"{self.max_len - max_tokens} tokens (max_len {self.max_len}, max_tokens {max_tokens})"
            raise ValueError(f"prompt: expected 1 to {most}, got {len(prompt)}")
        vocab = self.target.config.vocab_size
        if wrong := [token for token in prompt if type(token) is not int or not 0 <= token < vocab]:
            raise ValueError(f"prompt: expected token ids from 0 to {vocab - 1}, got {wrong[0]!r}")
        return Request(prompt, max_tokens, seed)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        seeds: Sequence[int] | None = None,
        on_step: Callable[[Step], None] = lambda step: None,
    ) -> list[list[int]]:
        """Texts of prompts, in their order.

        Parameters
        ----------
        prompts : sequence of token sequences
            Prompts, of one token at least.
        max_tokens : int
            Most tokens per text.
        seeds : sequence of int, optional
            Seed of each request's noise; its number by default.
        on_step : callable
            Called after each step.
        """
        requests = self.submit(prompts, max_tokens, seeds)
        while not all(request.finished for request in requests):
            on_step(self.step())
        self.scheduler.update()
        return [request.output for request in requests]

    def submit(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, seeds: Sequence[int] | None = None
    ) -> list[Request]:
        """Add requests to those that wait; arguments as of `generate`."""
        numbered = zip(prompts, seeds or range(len(prompts)), strict=True)
        requests = [self.request(list(prompt), max_tokens, seed) for prompt, seed in numbered]
        self.scheduler.waiting.extend(requests)
        return requests
