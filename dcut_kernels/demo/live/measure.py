"""Runs the engine: step costs of this machine, and every policy in turn."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...cost import CostTable
from ...cost._values import powers_up_to
from ...engine import Engine, Step, profile
from ...engine.requests import Request
from ...models import Drafter, Target

DEPTHS = (0, 1, 2, 3, 7)  # measured besides the whole draft
REPEATS = 2  # of each pass
FEWEST = 8  # prompts at any concurrency
SHORTEST = 64  # of max_len: leaves the profile room for whole drafts
SLICE = 0.1  # seconds of a policy before the next one's turn: most steps find their own data in the caches


class Turn(NamedTuple):
    """All prompts of a concurrency decoded once with one policy, and others beside the last ones."""

    policy: str
    steps: list[Step]
    texts: list[list[int]]
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second, prompts included in the time, and all tokens."""
        return sum(step.tokens for step in self.steps) / self.seconds


def prompts_of(concurrency: int, most: int) -> int:
    """Prompts decoded at a concurrency: twice as many, so that a request that ends makes room for another."""
    return min(most, max(FEWEST, 2 * concurrency))


def measure_costs(
    target: Target, drafter: Drafter, concurrency: int, max_len: int, on_step: Callable[[int], None]
) -> CostTable:
    """Step costs C(B, K) on this machine, for batches up to a concurrency.

    Parameters
    ----------
    target, drafter : Target, Drafter
        The pair.
    concurrency : int
        Largest batch.
    max_len : int
        Longest prompt and text that will be decoded.
    on_step : callable
        Called after each step with the number of all steps.
    """
    batches = powers_up_to(concurrency)
    depths = [depth for depth in DEPTHS if depth < drafter.draft_len] + [drafter.draft_len]
    engine = Engine(target, drafter, "full", max_batch=concurrency, max_len=max(max_len, SHORTEST))
    return profile(engine, batches, depths, REPEATS, on_step)


def lengths(max_tokens: int, count: int) -> list[int]:
    """Tokens of texts, from half of the most: as in serving, they do not all end in the same step."""
    draw = random.Random(0)
    return [draw.randint(-(-max_tokens // 2), max_tokens) for _ in range(count)]


def join(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, first: int = 0) -> list[Request]:
    """Add a request for each prompt, with seeds from `first` on."""
    given = enumerate(zip(prompts, lengths(max_tokens, len(prompts)), strict=True), first)
    return [request for seed, (prompt, length) in given for request in engine.submit([prompt], length, [seed])]


def take_turns(
    engines: dict[str, Engine],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    rounds: int,
    on_step: Callable[[str, Step], None],
) -> dict[str, list[Turn]]:
    """Decode all prompts with every policy, a few steps each in turn: what disturbs the machine hits all alike.

    Until the last text ends, texts that end make room for others: the batch stays full, as in serving.

    Parameters
    ----------
    engines : dict
        An idle engine for each policy.
    prompts : sequence of token sequences
        What to decode.
    max_tokens, rounds : int
        Most tokens of a text, see `lengths`; how often everything is decoded.
    on_step : callable
        Called after each step with the policy and the step.

    Returns
    -------
    dict
        Turns of each policy, one a round; their time is that of their own steps.
    """
    turns: dict[str, list[Turn]] = {policy: [] for policy in engines}
    order = random.Random(0)
    for _ in range(rounds):
        for policy, turn in _round(engines, prompts, max_tokens, order, on_step).items():
            turns[policy].append(turn)
    return turns


def _round(
    engines: dict[str, Engine],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    order: random.Random,
    on_step: Callable[[str, Step], None],
) -> dict[str, Turn]:
    requests = {policy: join(engine, prompts, max_tokens) for policy, engine in engines.items()}
    steps: dict[str, list[Step]] = {policy: [] for policy in engines}
    seconds = dict.fromkeys(engines, 0.0)

    def decodes(policy: str) -> bool:
        return not all(request.finished for request in requests[policy])

    running = list(engines)
    while running:
        order.shuffle(running)  # what a policy leaves in the caches hits all alike
        for policy in running:
            engine, until = engines[policy], seconds[policy] + SLICE
            while seconds[policy] < until and decodes(policy):
                if not engine.scheduler.waiting:
                    join(engine, prompts, max_tokens, len(prompts))
                start = time.perf_counter()
                step = engine.step()
                seconds[policy] += time.perf_counter() - start
                steps[policy].append(step)
                on_step(policy, step)
        running = list(filter(decodes, running))
    for engine in engines.values():
        engine.scheduler.clear()
    return {
        policy: Turn(policy, steps[policy], [request.output for request in requests[policy]], seconds[policy])
        for policy in engines
    }
