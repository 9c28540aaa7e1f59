"""Batched speculative decoding with packed ragged verification."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..batch import VerifyBatch
from ..cost import CostTable
from ..gate import PROBED
from ..integration import Drafts, select
from ..models import Drafter, Target
from ..planner import Planner
from ..sampling import Dice, reject, sample
from .cache import PagedCache
from .policies import Policy, parse
from .requests import Request, Scheduler

UNWRITTEN = 64  # most steps whose features wait until a drafter needs them: written together they cost less


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
        "ar", "full", "uniform-K", "ratio-R", or "dcut", "dcut-early_stop" or "dcut-history", each of which may be
        followed by "-auto": it then does not draft where plain decoding is faster.  K is at most the drafter's
        `draft_len`.
    costs : CostTable, optional
        Measured costs of this engine on this machine; D-cut needs them.
    max_batch : int
        Requests that run together.
    max_len : int
        Longest prompt and text; fixes the size of the cache.
    block_size : int
        Tokens of a cache block.
    chunk : int
        Prompt tokens that a request reads per step.
    temperature : float
        0 is greedy; above, the target is sampled.
    dice : Dice, optional
        Draws drafts too, which rejection sampling then verifies; their scores are ``"shifted"``.  Without it drafts are
        greedy, and the target's noise is fixed by the seed of each request.
    eos : int
        Token that ends a text.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        policy: str = "dcut",
        costs: CostTable | None = None,
        *,
        max_batch: int = 64,
        max_len: int = 256,
        block_size: int = 16,
        chunk: int = 32,
        temperature: float = 0.0,
        dice: Dice | None = None,
        eos: int = 0,
    ) -> None:
        sizes = {"max_batch": max_batch, "max_len": max_len, "block_size": block_size, "chunk": chunk}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name}: expected 1 or more, got {value}")
        if not 0 <= temperature < float("inf") or (dice and not temperature):
            raise ValueError(f"temperature: expected {'above 0 with dice' if dice else '0 or more'}, got {temperature}")
        self.target, self.drafter = target, drafter
        self.policy: Policy = parse(policy, drafter.draft_len)
        self.temperature, self.dice, self.eos = temperature, dice, eos
        self.drafted = self.draft_probs = torch.zeros(0)  # of this step: rows with drafts, and [rows, D, vocab]
        self.planner: Planner | None = None
        if self.policy.plan:
            if costs is None:
                raise ValueError(f"costs: expected a CostTable for policy {policy!r}, got None")
            self.planner = Planner(
                costs, max_batch, drafter.draft_len, policy=self.policy.plan, lookup="linear",
                score="shifted" if dice else "inclusive", draft_sampling="sampled" if dice else "greedy",
            )  # fmt: skip
        self.draft_len, self.block_size, self.chunk, self.max_len = drafter.draft_len, block_size, chunk, max_len
        self.row_blocks = -(-(max_len + self.draft_len) // block_size)
        blocks = max_batch * self.row_blocks
        self.scheduler = Scheduler(max_batch, blocks, block_size, self.draft_len)
        self.target_cache = PagedCache(target.config, blocks, block_size)
        self.drafter_cache = PagedCache(drafter.config, blocks, block_size)
        self.features = torch.zeros(blocks * block_size, len(target.feature_layers) * target.config.hidden_size)
        self.unread = torch.zeros(blocks * block_size, dtype=torch.bool)  # slots whose features no draft has read yet
        self.verified: list[tuple[Tensor, Tensor]] = []  # slots and features of steps that are not written yet
        self.buffers: dict[int, VerifyBatch] = {}  # by rows

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
        if self.planner and len(self.drafted):
            self.planner.observe(self.scheduler.running, batch, drafts.draft_lens.tolist(), accepted)
        times.append(time.perf_counter())
        keep_lens, (bucket, _, verified, _) = batch.keep_lens.tolist(), batch.decision.tolist()
        if self.planner and self.policy.auto and (len(self.drafted) or self.planner.gate.pace(len(keep_lens)).listens):
            self._time(self.planner, keep_lens, verified, 1000 * (times[-1] - times[0]))
        update, draft, choose, verify, commit = (b - a for a, b in pairwise(times))
        seconds = {"draft": draft, "select": choose, "verify": verify, "rest": update + commit}
        return Step(self.scheduler.running, drafts, keep_lens, accepted, committed, verified, bucket, seconds)

    def propose(self, drafting: bool | None = None) -> Drafts:
        """Rows of the step; see `SpeculativeEngine.propose`."""
        rows = self.scheduler.running
        base = [min(self.chunk, len(r.prompt) - r.cached) if r.in_prompt else 1 for r in rows]
        ends = [r.cached + n - 1 if r.in_prompt else r.last_position for r, n in zip(rows, base, strict=True)]
        bonus = [r.prompt[end] if r.in_prompt else r.output[-1] for r, end in zip(rows, ends, strict=True)]
        left = [0 if r.in_prompt else min(self.draft_len, r.max_tokens - len(r.output) - 1) for r in rows]
        if drafting is None:
            left = self._worth_drafting(left)
        elif not drafting:
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
        self.drafted = chosen = drafts.draft_lens.nonzero()[:, 0]
        if len(chosen):
            confidence, draft_ids = self._draft(
                drafts.bonus_ids[chosen], drafts.seq_lens[chosen], drafts.block_table[chosen]
            )
            drafts.confidence[chosen], drafts.draft_ids[chosen] = confidence, draft_ids
        return drafts

    def _worth_drafting(self, left: list[int]) -> list[int]:
        """Drafts of each row: all that are left, none, or where it is only to be seen whether they pay, a few rows'."""
        if self.planner is None or not self.policy.auto:
            return left if self.policy.drafts else [0] * len(left)
        rows = [row for row, n in enumerate(left) if n > 0]
        if not rows or not self.planner.should_draft(len(left), timeable=all(left)):
            return [0] * len(left)
        if self.planner.probing:
            rows = rows[:: -(-len(rows) // PROBED)]
        return [n if row in rows else 0 for row, n in enumerate(left)]

    def _time(self, planner: Planner, keep_lens: list[int], verified: int, milliseconds: float) -> None:
        """Tell the planner how long a step took, if no prompt was read and all rows drafted or none did."""
        rows, drafted = len(keep_lens), len(self.drafted)
        if not planner.probing and verified == rows + sum(keep_lens) and drafted in (0, rows):
            planner.timed(rows, verified, drafted > 0, milliseconds)

    def _draft(self, bonus_ids: Tensor, seq_lens: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
        """Draft every given row: confidence [n, D] and draft tokens [n, D]."""
        self._catch_up(seq_lens, block_table)
        block = self.draft_len + 1
        positions = seq_lens[:, None] + torch.arange(block)
        slots = block_table.gather(1, positions // self.block_size).long() * self.block_size
        slots = (slots + positions % self.block_size).flatten()
        starts = torch.arange(len(seq_lens) + 1) * block
        rows = self.drafter_cache.rows(starts, seq_lens + block, block_table, causal=False)
        attend = self.drafter_cache.attention(slots, rows)
        hidden = self.drafter(self.target.embed_tokens(bonus_ids), seq_lens, attend)
        logits = self.target.logits(hidden.contiguous())
        if self.dice:
            self.draft_probs = (logits / self.temperature).softmax(-1)
            draft_ids = self.dice.draw(self.draft_probs)
            return self.draft_probs.gather(-1, draft_ids[..., None])[..., 0], draft_ids
        best, draft_ids = logits.max(-1)
        return (best - logits.logsumexp(-1)).exp(), draft_ids

    def _catch_up(self, seq_lens: Tensor, block_table: Tensor) -> None:
        """Let the drafter read what was verified since it last drafted for these rows."""
        self._write_features()
        positions = torch.arange(int(seq_lens.max()))
        slots = block_table[:, positions // self.block_size].long() * self.block_size + positions % self.block_size
        new = self.unread[slots] & (positions < seq_lens[:, None])
        slots, positions = slots[new], positions.expand_as(slots)[new]
        for layer, (keys, values) in enumerate(self.drafter.context(self.features[slots], positions)):
            self.drafter_cache.write(layer, slots, keys, values)
        self.unread[slots] = False

    def _write_features(self) -> None:
        """Write what was verified, step by step: those of rejected drafts are overwritten before they are read."""
        for slots, features in self.verified:
            self.features.index_copy_(0, slots, features)
            self.unread.index_fill_(0, slots, True)
        self.verified.clear()

    def select(self, drafts: Drafts, budget: int | None = None) -> VerifyBatch:
        """Choose and pack with this engine's policy, or with a given budget."""
        rows = len(drafts.bonus_ids)
        capacity = rows * max(self.chunk, self.draft_len + 1)
        drafting = int((drafts.draft_lens > 0).sum())
        if self.planner and budget is None and drafting:
            base_tokens = int(drafts.base_lens.sum())
            self.planner.begin(self.scheduler.running, base_tokens)
            tables = self.planner.tables(drafting, base_tokens)
            return self.planner.select(
                drafts.confidence, drafts.draft_ids, drafts.bonus_ids, drafts.seq_lens, tables=tables,
                capacity=capacity, draft_lens=drafts.draft_lens, base_lens=drafts.base_lens,
                block_table=drafts.block_table, block_size=self.block_size,
            )  # fmt: skip
        options = self.policy.options(drafts) if budget is None else {"budget": budget}
        if rows not in self.buffers:
            self.buffers[rows] = VerifyBatch.allocate(rows, self.draft_len, 1, capacity, torch.int64)
        budgets, costs = torch.tensor([capacity], dtype=torch.int32), torch.ones(1)
        return select(
            drafts, budgets, costs, block_size=self.block_size, capacity=capacity, out=self.buffers[rows], **options
        )

    def verify(self, drafts: Drafts, batch: VerifyBatch) -> Tensor:
        """Run the target over the packed tokens; see `SpeculativeEngine.verify`."""
        rows, total = self.scheduler.running, int(batch.decision[2])
        self._fill_in_prompts(drafts, batch)
        positions, slots = batch.positions[:total], batch.slot_mapping[:total]
        groups = self.target_cache.rows(batch.cu_seqlens, batch.kv_lens, drafts.block_table, causal=True)
        hidden, features = self.target(batch.token_ids[:total], positions, self.target_cache.attention(slots, groups))
        if self.policy.drafts:
            self.verified.append((slots.clone(), features))
            if len(self.verified) == UNWRITTEN:
                self._write_features()
        verified = batch.logits_indices[: int(batch.keep_lens.sum()) + len(rows)].long()
        if self.dice:
            return self._reject(self.target.logits(hidden[verified]), batch, verified)
        seeds = [rows[i].seed for i in batch.request_ids[verified].tolist()] if self.temperature else []
        places = (positions[verified] + 1).tolist() if self.temperature else []
        return sample(self.target.logits(hidden[verified]), self.temperature, seeds, places)

    def _reject(self, logits: Tensor, batch: VerifyBatch, verified: Tensor) -> Tensor:
        """Tokens of rejection sampling: drafts that are accepted, and one more after the last of each row."""
        assert self.dice is not None
        row_of = torch.zeros(len(batch.keep_lens), dtype=torch.int64)
        row_of[self.drafted] = torch.arange(len(self.drafted))
        behind = torch.cat((verified[1:], verified[:1]))  # the draft that each position decides about
        index, following = batch.draft_index[behind].long(), batch.token_ids[behind]
        row, k = row_of[index.clamp(min=0) // self.draft_len], index % self.draft_len
        draft = self.draft_probs[row, k] if len(self.draft_probs) else torch.ones_like(logits)
        target = (logits / self.temperature).softmax(-1)
        return reject(target, draft, torch.where(index < 0, -1, following), self.dice)

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
        if not 1 <= batch <= self.scheduler.max_batch:
            raise ValueError(f"batch: expected 1 to {self.scheduler.max_batch} (max_batch), got {batch}")
        if len(self.scheduler.running) != batch:
            self._stand_in(batch)
        rows = self.scheduler.running
        newest = torch.tensor([r.last_position for r in rows])[:, None] - torch.tensor([1, 2])
        blocks = torch.tensor([r.blocks for r in rows]).gather(1, newest // self.block_size)
        self.unread[blocks * self.block_size + newest % self.block_size] = True  # about what a step would commit
        drafts = self.propose(drafting)
        self.verify(drafts, self.select(drafts, budget=tokens))

    def _stand_in(self, batch: int) -> None:
        """Replace the running requests by ones of random text that have just been read."""
        for request in self.scheduler.running:
            request.finished = True
        noise = torch.Generator().manual_seed(batch)
        prompts = torch.randint(2, self.target.config.vocab_size, (batch, self.max_len), generator=noise).tolist()
        for row, prompt in enumerate(prompts):  # of different lengths, as texts in progress are
            read = self.max_len // 4 + (2 * row + 1) * self.max_len // (4 * batch)
            self.scheduler.waiting.append(Request(prompt[:read], self.max_len - read, stand_in=True))
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
