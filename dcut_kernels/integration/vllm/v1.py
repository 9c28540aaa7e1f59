"""The V1 runner of vLLM: on CPUs, and on GPUs without async scheduling.

After each step the engine takes the drafts of the next one from the runner, request by request; `Trimmer` takes them in
its place and hands on the prefixes worth verifying.  vLLM schedules ragged drafts by itself, so nothing else changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from ... import draft_confidence
from ...batch import VerifyBatch
from ...calibration import PositionRates
from ...planner import Planner
from .costs import load_or_measure
from .metrics import Trimmed
from .options import Options, difference, logger

# What is called or replaced, with its parameters in 0.32.
RUNNER = {"take_draft_token_ids": "", "_dummy_run": "... num_tokens force_attention profile_seq_lens"}
DRAFTER = {"_greedy_sample": "hidden_states", "propose": "...", "take_last_draft_probs": ""}
NGRAM = ("ngram", "suffix")  # drafters without probabilities


def attach(runner: Any, options: Options) -> None:
    """Trim the drafts of a runner that is warm and whose graphs are captured, if that can be done."""
    if not isinstance(runner, GPUModelRunner) or hasattr(runner, "dcut"):
        return
    if (reason := obstacle(runner, options)) is None:
        Trimmer(runner, options).attach()
    else:
        logger.warning("dcut: not used, drafts are verified in full: %s", reason)


def obstacle(runner: Any, options: Options) -> str | None:
    """Why the drafts of a runner cannot be trimmed, None if they can."""
    spec, parallel = runner.speculative_config, runner.parallel_config
    if spec is None:
        return "speculative_config: expected one, got none"
    if runner.use_async_scheduling:
        return "async_scheduling: expected False, as drafts are trimmed on the host, got True"
    if parallel.pipeline_parallel_size > 1:
        return f"pipeline_parallel_size: expected 1, got {parallel.pipeline_parallel_size}"
    if parallel.data_parallel_size > 1 and options.costs is None:
        return f"data_parallel_size: expected 1, or a table in costs, got {parallel.data_parallel_size}"
    if spec.method in NGRAM:
        return difference(type(runner), RUNNER)
    for name in ("use_local_argmax_reduction", "use_heterogeneous_vocab"):
        if getattr(runner.drafter, name, False):
            return f"{name}: expected False, as confidences need the drafter's own logits, got True"
    if getattr(type(runner.drafter), "_greedy_sample", None) is not SpecDecodeBaseProposer._greedy_sample:
        return f"{type(runner.drafter).__name__}._greedy_sample: expected that of all proposers, got its own"
    return difference(type(runner), RUNNER) or difference(type(runner.drafter), DRAFTER)


class Trimmer:
    """Trims the drafts of one runner.

    Parameters
    ----------
    runner : GPUModelRunner
    options : Options

    Attributes
    ----------
    planner : Planner
        On the host, where vLLM's scheduler takes its drafts.
    """

    def __init__(self, runner: Any, options: Options) -> None:
        self.runner, self.draft_len = runner, runner.num_spec_tokens
        sampled = bool(getattr(runner.drafter, "_enable_probabilistic_draft_probs", False))
        self.rates = PositionRates(self.draft_len) if runner.speculative_config.method in NGRAM else None
        self.planner = Planner(
            options.table() or load_or_measure(runner),
            runner.max_num_reqs,
            self.draft_len,
            policy=options.policy or ("early_stop" if sampled else "argmax"),
            score="shifted" if sampled else "inclusive",
            draft_sampling="sampled" if sampled else "greedy",
            calibration=self.rates,
            latency_ms=options.latency_ms,
            floor=options.floor,
            floor_every=options.floor_every,
        )
        self.confidence: Tensor | None = None  # [B, K] of the drafts that were proposed last
        self.blind = False  # a drafter that does not use its head
        self.calls: list[Tensor] = []  # of the drafter's head in one proposal
        self.last: tuple[list[str], VerifyBatch, list[int], list[int]] | None = None

    def attach(self) -> None:
        """Stand between the runner, its drafter and the engine; on these objects, not on their classes."""
        runner, drafter = self.runner, self.runner.drafter
        self.take = runner.take_draft_token_ids
        runner.take_draft_token_ids, runner.dcut = self.trim, self
        if self.rates is None:
            self.propose = drafter.propose
            drafter.propose, drafter._greedy_sample = self.proposed, self.greedy
        table = self.planner.table
        costs = [f"{n}: {min(row):.3g} to {max(row):.3g}" for n, row in zip(table.batches, table.costs_ms, strict=True)]
        logger.info("dcut: trims drafts of %d; ms by requests: %s", self.draft_len, ", ".join(costs))

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
        else:
            self.confidence = torch.ones(drafts.shape)
            if not self.blind:
                logger.warning("dcut: the drafter does not use its head, all drafts count as certain")
            self.blind = True
        return drafts

    def trim(self) -> DraftTokenIds | None:
        """What the engine takes: the drafts of each request that are worth verifying."""
        taken, confidence, self.confidence = self.take(), self.confidence, None
        self.observe()
        if taken is None:
            return None
        drafts = [list(tokens) for tokens in taken.draft_token_ids]
        if confidence is None:  # the rates of positions decide; drafts that no drafter has made are zeros
            confidence = torch.full((len(drafts), self.draft_len), float(self.rates is not None))
        if len(confidence) != len(drafts):
            return taken
        confidence = torch.nn.functional.pad(confidence.cpu(), (0, self.draft_len - confidence.shape[1]))
        rows = enumerate(zip(taken.req_ids, drafts, strict=True))
        lengths = [min(len(tokens), self.room(row, name)) for row, (name, tokens) in rows]
        keep, bucket = self.decide(taken.req_ids, confidence, lengths)
        left = [tokens[:n] for tokens, n in zip(drafts, keep, strict=True)]
        return Trimmed(taken.req_ids, left, kept=sum(keep), drafts=sum(lengths), bucket=bucket)

    def room(self, row: int, name: str) -> int:
        """Drafts that a request can still use: none in its prompt, and none beyond ``max_tokens``."""
        request = self.runner.requests[name]
        if self.runner.discard_request_mask.np[row]:
            return 0
        limit = request.sampling_params.max_tokens if request.sampling_params else None
        return self.draft_len if limit is None else max(0, limit - len(request.output_token_ids) - 1)

    def decide(self, names: list[str], confidence: Tensor, lengths: list[int]) -> tuple[list[int], int]:
        """Drafts kept of each request, and the bucket, in tokens."""
        planner, known = self.planner, self.planner.metrics.requests
        for gone in set(known) - set(self.runner.requests):
            planner.leave(gone)
        for name in names:
            if name not in known:
                planner.join(name)
        nothing = torch.zeros(len(names), self.draft_len, dtype=torch.int64)  # what is packed is not used
        planner.begin(names)
        decided = planner.select(
            confidence.contiguous(), nothing, nothing[:, 0].clone(), nothing[:, 0].clone(),
            draft_lens=torch.tensor(lengths, dtype=torch.int32),
        )  # fmt: skip
        outputs = [len(self.runner.requests[name].output_token_ids) for name in names]
        self.last = list(names), decided, lengths, outputs
        return decided.keep_lens.tolist(), int(decided.decision[3])

    def observe(self) -> None:
        """Count what the target accepted of the drafts before these."""
        if self.last is None:
            return
        (names, decided, lengths, outputs), self.last = self.last, None
        seen, verified, accepted = [], [], []
        for name, length, before, keep in zip(names, lengths, outputs, decided.keep_lens.tolist(), strict=True):
            request = self.runner.requests.get(name)
            grown = len(request.output_token_ids) - before if request is not None else 0
            seen.append(length if grown > 0 else 0)  # else it was preempted, or ended otherwise
            verified.append(min(request.prev_num_draft_len, keep) if grown > 0 else 0)  # a grammar may forbid some
            accepted.append(min(max(grown - 1, 0), verified[-1]))
        self.planner.observe(names, decided, seen, accepted)
        if self.rates is not None:
            self.rates.update(*(torch.tensor(values, dtype=torch.int32) for values in (verified, accepted)))
            self.planner.calibrate()
