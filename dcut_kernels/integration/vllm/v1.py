"""The V1 runner of vLLM: on CPUs, and on GPUs without async scheduling.

After each step the engine takes the drafts of the next one from the runner, request by request; `Trimmer` takes them in
its place and hands on the prefixes worth verifying.  vLLM schedules ragged drafts by itself, so nothing else changes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from ... import draft_confidence
from ...batch import VerifyBatch
from ...calibration import PositionRates
from ...cost import CostTable
from ...planner import Planner
from .costs import load_or_measure
from .options import Options, changed

logger = init_logger(__name__)

# What is called or replaced, with the parameters that it has in 0.32; None where they are passed on as they are.
RUNNER: dict[str, str | None] = {
    "initialize_kv_cache": "kv_cache_config is_profiling",
    "take_draft_token_ids": "",
    "_dummy_run": "num_tokens cudagraph_runtime_mode force_attention",
}
DRAFTER: dict[str, str | None] = {"_greedy_sample": "hidden_states", "propose": None, "take_last_draft_probs": ""}
NGRAM = ("ngram", "suffix")  # drafters without probabilities


def install() -> None:
    """Let each runner that is switched on attach a `Trimmer` as soon as it has its cache."""
    if getattr(GPUModelRunner.initialize_kv_cache, "dcut", False):
        return
    original = GPUModelRunner.initialize_kv_cache

    @functools.wraps(original)
    def initialize_kv_cache(self: Any, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any) -> None:
        original(self, kv_cache_config, is_profiling, **kwargs)
        options = Options.of(self.vllm_config)
        if options is not None and not is_profiling:
            if (reason := obstacle(self)) is None:
                Trimmer(self, options).attach()
            else:
                logger.warning("dcut: not used, drafts are verified in full: %s", reason)

    initialize_kv_cache.dcut = True  # type: ignore[attr-defined]
    GPUModelRunner.initialize_kv_cache = initialize_kv_cache


def obstacle(runner: Any) -> str | None:
    """Why the drafts of a runner cannot be trimmed, None if they can."""
    if runner.speculative_config is None or not hasattr(runner, "drafter"):
        return "speculative_config: expected one, got none"
    if runner.use_async_scheduling:
        return "async_scheduling: expected False, as drafts are trimmed on the host, got True"
    functions = [(type(runner), RUNNER)]
    if runner.speculative_config.method not in NGRAM:
        drafter = runner.drafter
        for name in ("use_local_argmax_reduction", "use_heterogeneous_vocab"):
            if getattr(drafter, name, False):
                return f"{name}: expected False, as confidences need the drafter's own logits, got True"
        functions.append((type(drafter), DRAFTER))
    for owner, expected in functions:
        for name, parameters in expected.items():
            if not hasattr(owner, name):
                return f"{owner.__name__}.{name}: expected a method, got none"
            if parameters is not None and (difference := changed(getattr(owner, name), parameters)) is not None:
                return difference
    return None


class Trimmer:
    """Trims the drafts of one runner.

    Parameters
    ----------
    runner : GPUModelRunner
    options : Options
    table : CostTable, optional
        Instead of one that is loaded or measured.

    Attributes
    ----------
    planner : Planner
    """

    def __init__(self, runner: Any, options: Options, table: CostTable | None = None) -> None:
        self.runner, self.draft_len = runner, runner.num_spec_tokens
        spec = runner.speculative_config
        sampled = bool(getattr(runner.drafter, "_enable_probabilistic_draft_probs", False))
        self.rates = PositionRates(self.draft_len) if spec.method in NGRAM else None
        if options.costs is not None:
            table = CostTable.load(options.costs)
        self.planner = Planner(
            table or load_or_measure(runner), runner.max_num_reqs, self.draft_len,
            policy=options.policy or ("early_stop" if sampled else "argmax"),
            score="shifted" if sampled else "inclusive", draft_sampling="sampled" if sampled else "greedy",
            calibration=self.rates, latency_ms=options.latency_ms,
            floor=options.floor, floor_every=options.floor_every,
        )  # fmt: skip
        self.confidence: Tensor | None = None  # [B, K] of the drafts that were proposed last
        self.calls: list[Tensor] = []  # of the drafter's head in one proposal
        self.last: tuple[list[str], VerifyBatch, list[int], list[int]] | None = None

    def attach(self) -> None:
        """Stand between the runner, its drafter and the engine; on these objects, not on their classes."""
        runner, drafter = self.runner, self.runner.drafter
        self.take = runner.take_draft_token_ids
        runner.take_draft_token_ids = self.trim
        runner.dcut = self
        if self.rates is None:
            self.propose = drafter.propose
            drafter.propose, drafter._greedy_sample = self.proposed, self.greedy
        logger.info("dcut: trims drafts of %d; %s", self.draft_len, self.planner.table.fingerprint or "given costs")

    def greedy(self, hidden_states: Tensor) -> Tensor:
        """The drafter's most likely tokens [n], with their probabilities."""
        logits = self.runner.drafter.model.compute_logits(hidden_states)
        found = draft_confidence(logits.unsqueeze(1).contiguous(), statistics=["max_prob"])
        self.calls.append(found.values[0, :, 0])
        return found.draft_ids[:, 0]

    def proposed(self, *args: Any, **kwargs: Any) -> Tensor:
        """Draft, and keep the confidences: of one call for all positions, or of one call for each."""
        self.calls.clear()
        drafts = self.propose(*args, **kwargs)
        probabilities = self.runner.drafter.take_last_draft_probs()
        if probabilities is not None:
            self.confidence = probabilities.gather(-1, drafts.unsqueeze(-1).long())[..., 0].float()
        elif self.calls:
            flat = self.calls[0] if len(self.calls) == 1 else torch.stack(self.calls, 1)
            self.confidence = flat.reshape(drafts.shape).float()
        return drafts

    def trim(self) -> DraftTokenIds | None:
        """What the engine takes: the drafts of each request that are worth verifying."""
        taken = self.take()
        confidence, self.confidence = self.confidence, None
        self.observe()
        if taken is None or (confidence is None and self.rates is None):
            return taken
        drafts = [list(tokens) for tokens in taken.draft_token_ids]
        if self.rates is not None:
            confidence = torch.ones(len(drafts), self.draft_len)
        assert confidence is not None
        rows = enumerate(zip(taken.req_ids, drafts, strict=True))
        lengths = [min(len(tokens), self.room(row, name)) for row, (name, tokens) in rows]
        keep = self.decide(taken.req_ids, confidence, lengths)
        return DraftTokenIds(taken.req_ids, [tokens[:n] for tokens, n in zip(drafts, keep, strict=True)])

    def room(self, row: int, name: str) -> int:
        """Drafts that a request can still use: none in its prompt, and none beyond ``max_tokens``."""
        request = self.runner.requests[name]
        if self.runner.discard_request_mask.np[row]:
            return 0
        limit = request.sampling_params.max_tokens if request.sampling_params else None
        return self.draft_len if limit is None else max(0, limit - len(request.output_token_ids) - 1)

    def decide(self, names: list[str], confidence: Tensor, lengths: list[int]) -> list[int]:
        """Drafts kept of each request."""
        batch, planner = len(names), self.planner
        for name in names:
            if name not in planner.metrics.requests:
                planner.join(name)
        for gone in set(planner.metrics.requests) - set(self.runner.requests):
            planner.leave(gone)
        nothing = torch.zeros(batch, self.draft_len, dtype=torch.int64)
        planner.begin(names)
        decided = planner.select(
            confidence.contiguous(), nothing, nothing[:, 0].clone(), nothing[:, 0].clone(),
            draft_lens=torch.tensor(lengths, dtype=torch.int32),
        )  # fmt: skip
        outputs = [len(self.runner.requests[name].output_token_ids) for name in names]
        self.last = list(names), decided, lengths, outputs
        return decided.keep_lens.tolist()

    def observe(self) -> None:
        """Count what the target accepted of the drafts before these."""
        if self.last is None:
            return
        (names, decided, lengths, outputs), self.last = self.last, None
        accepted, verified = [], []
        for name, length, before, keep in zip(names, lengths, outputs, decided.keep_lens.tolist(), strict=True):
            request = self.runner.requests.get(name)
            grown = len(request.output_token_ids) - before if request is not None else 0
            verified.append(length if grown > 0 else 0)  # else it was preempted, or ended otherwise
            accepted.append(min(max(grown - 1, 0), keep))
        self.planner.observe(names, decided, verified, accepted)
        if self.rates is not None:
            kept = decided.keep_lens.clamp(max=torch.tensor(verified, dtype=torch.int32))
            self.rates.update(kept, torch.tensor(accepted, dtype=torch.int32))
            self.planner.calibrate()
