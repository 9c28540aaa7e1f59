"""One speculative step, enumerated: every draft that a small drafter can draw goes through the real operator.

``python -m python_tests.enumeration --instances 200`` prints how far each combination is from the target.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dcut_kernels import VerifyBatch, backends, lossless
from dcut_kernels.cost import integer_envelope
from dcut_kernels.ops import Backend

Array = NDArray[np.float64]
Chain = list[Array]  # of one request: entry k, [V^k, V], holds the next token's probabilities after each prefix

ROUNDED_DOWN, WHOLE_BUCKETS = "early_stop, rounded down", "early_stop, whole buckets"
SHAPES = [(2, 3, 2), (2, 2, 2), (2, 2, 3), (1, 3, 3), (2, 3, 2), (2, 2, 2), (2, 2, 3), (1, 3, 2), (2, 3, 2), (2, 2, 2)]
SMALL_SHAPES = [(2, 2, 2), (1, 3, 2)]
STATISTICS: list[Callable[[Array], Array]] = [
    lambda q: q.max(-1),
    lambda q: (q**2).sum(-1),
    lambda q: np.diff(np.sort(q, -1)[..., -2:], axis=-1)[..., 0],
]


class Combination(NamedTuple):
    """What decides, but for how drafts are drawn and verified; see `lossless.Combination`."""

    confidence_source: str
    score: str
    policy: str
    drafter: str


COMBINATIONS = [Combination(*values) for values in product(*list(lossless.VALUES.values())[1:])]
WRONG_STOPS = [
    Combination("drawn_token", "shifted", policy, "block_parallel") for policy in (ROUNDED_DOWN, WHOLE_BUCKETS)
]


@dataclass(frozen=True, eq=False)
class Instance:
    """A target, drafters, and the buckets of a step."""

    target: list[Chain]  # [B][D + 1]
    drafters: dict[str, list[Chain]]  # [B][D] of each kind
    statistic: Callable[[Array], Array]
    budgets: list[int]  # [R]
    noise: Array  # [R], of the costs
    touched: int  # a bucket, see `costs`
    fixed: int  # a budget
    before: int  # a joint draft, that of the step before
    options: dict[str, Any] = field(default_factory=dict)  # of the operator

    @property
    def vocab(self) -> int:
        return self.target[0][0].shape[1]

    @property
    def draft_len(self) -> int:
        return len(self.target[0]) - 1

    @functools.cached_property
    def drafts(self) -> NDArray[np.int64]:
        """All drafts of one request, [V^D, D]."""
        return np.array(list(product(range(self.vocab), repeat=self.draft_len)))

    @functools.cached_property
    def joint(self) -> NDArray[np.int64]:
        """All drafts of all requests, as indices into `drafts`, [V^(B * D), B]."""
        return np.array(list(product(range(len(self.drafts)), repeat=len(self.target))))


def random_chain(rng: np.random.Generator, vocab: int, length: int, conditional: bool = True) -> Chain:
    """Probabilities of full support, of some prefixes flat and of others peaked."""
    chain = []
    for k in range(length):
        weights = rng.standard_gamma(np.repeat(rng.choice([0.4, 3.0], (vocab**k, 1)), vocab, 1))
        chain.append(0.04 / vocab + 0.96 * weights / weights.sum(1, keepdims=True))
    return chain if conditional else [np.repeat(q[:1], len(q), 0) for q in chain]


@functools.cache
def instance(seed: int, small: bool = False, with_options: bool = False) -> Instance:
    """A random instance: 1 or 2 requests, 2 or 3 drafts each, 2 or 3 tokens."""
    rng = np.random.default_rng(seed)
    shapes = SMALL_SHAPES if small else SHAPES
    batch, draft_len, vocab = (2, 3, 3) if seed % 50 == 49 and not small else shapes[seed % len(shapes)]
    budgets = np.arange(batch, batch * (draft_len + 1) + 1)
    if rng.random() < 0.3:
        budgets = budgets[[0, -1]]
    else:
        budgets = np.sort(rng.choice(budgets, int(rng.integers(2, 5)), replace=False))
    options: dict[str, Tensor] = {}
    if with_options:
        limits = {"min_keep": rng.integers(0, 2, batch), "max_keep": rng.integers(1, draft_len + 1, batch)}
        options = {name: torch.tensor(values, dtype=torch.int32) for name, values in limits.items()}
        options["weight"] = torch.tensor(rng.uniform(0.5, 2, batch), dtype=torch.float32)
    return Instance(
        target=[random_chain(rng, vocab, draft_len + 1) for _ in range(batch)],
        drafters={
            name: [random_chain(rng, vocab, draft_len, name == "conditional") for _ in range(batch)]
            for name in lossless.VALUES["drafter"]
        },
        statistic=STATISTICS[seed % len(STATISTICS)],
        budgets=budgets.tolist(),
        noise=np.exp(rng.normal(0, 0.02, len(budgets))),
        touched=int(rng.integers(len(budgets) - 1)),
        fixed=int(rng.integers(batch + 1, batch * (draft_len + 1))),
        before=int(rng.integers(vocab ** (draft_len * batch))),
        options=options,
    )


def prefix_index(tokens: NDArray[np.int64], vocab: int) -> Any:
    """Number of a prefix, the last dimension of `tokens`, among all of its length."""
    return tokens @ vocab ** np.arange(tokens.shape[-1])[::-1]


def along(chain: list[Array], instance: Instance, drawn: bool) -> Array:
    """Entries of a chain along all drafts, [V^D, D]: of the drawn token, or one for each prefix."""
    columns = []
    for k in range(instance.draft_len):
        values = chain[k][prefix_index(instance.drafts[:, :k], instance.vocab)]
        columns.append(values[np.arange(len(values)), instance.drafts[:, k]] if drawn else values)
    return np.stack(columns, 1)


def confidences(instance: Instance, combination: Combination) -> Array:
    """What a combination tells the operator about every joint draft, [V^(B * D), B, D]."""
    drafters = instance.drafters[combination.drafter]
    if combination.confidence_source == "drawn_token":
        known = [along(q, instance, drawn=True) for q in drafters]
    else:
        known = [along([instance.statistic(q_k) for q_k in q], instance, drawn=False) for q in drafters]
    return np.stack([of_row[instance.joint[:, i]] for i, of_row in enumerate(known)], 1)


def costs(instance: Instance, combination: Combination) -> list[float]:
    """Costs that leave the decision to the drafts, [R].

    Buckets cost about what they gain on average; for early stop, the line that touches the average gain at a bucket.
    """
    confidence = confidences(instance, combination)
    if combination.score == "shifted":
        confidence = np.concatenate([np.ones_like(confidence[..., :1]), confidence[..., :-1]], -1)
    scores = -np.sort(-confidence.cumprod(-1).reshape(len(confidence), -1)).mean(0)  # [B * D], descending
    kept = np.array(instance.budgets) - len(instance.target)
    gains = np.array([len(instance.target) + scores[:drafts].sum() for drafts in kept])
    if combination.policy in ("early_stop", ROUNDED_DOWN):
        gains = gains[instance.touched] + scores[kept[instance.touched]] * (kept - kept[instance.touched])
    return np.sort(gains * instance.noise).tolist()


class Kept(NamedTuple):
    """What the operator answers to every joint draft."""

    keep_lens: NDArray[np.int64]  # [V^(B * D), B]
    tokens: NDArray[np.int64]  # [V^(B * D)], of the step


def keep(backend: Backend, instance: Instance, combination: Combination) -> Kept:
    """Ask the operator about every joint draft."""
    confidence = torch.tensor(confidences(instance, combination), dtype=torch.float32)
    draft_ids = torch.tensor(instance.drafts[instance.joint], dtype=torch.int32)
    budgets = torch.tensor(instance.budgets, dtype=torch.int32)
    prices = costs(instance, combination)
    priced = torch.tensor(prices, dtype=torch.float32)
    zeros = torch.zeros(len(instance.target), dtype=torch.int32)
    out = VerifyBatch.allocate(len(zeros), instance.draft_len, len(budgets))
    next_budget = torch.zeros(2, dtype=torch.int32)

    def call(confidence: Tensor, draft_ids: Tensor, **options: Any) -> VerifyBatch:
        return backend.select_and_pack(
            confidence, draft_ids, zeros, zeros, budgets, priced, score=combination.score, out=out,
            **instance.options, **options,
        )  # fmt: skip

    options: dict[str, Any] = {}
    if combination.policy == "fixed":
        options = {"budget": torch.tensor([instance.fixed], dtype=torch.int32)}
    elif combination.policy == "history":
        options = {"policy": "history", "next_budget": next_budget}
        call(confidence[instance.before], draft_ids[instance.before], budget=instance.fixed, **options)
        options["budget"] = next_budget[:1].clone()
    elif combination.policy.startswith("early_stop"):
        envelope = torch.tensor(integer_envelope(instance.budgets, prices), dtype=torch.int32)
        options = {"policy": "early_stop", "envelope": envelope}

    keep_lens, tokens = [], []
    for row_confidence, row_ids in zip(confidence, draft_ids, strict=True):
        batch = call(row_confidence, row_ids, **options)
        if combination.policy == ROUNDED_DOWN:
            batch = call(row_confidence, row_ids, budget=instance.budgets[max(int(batch.decision[0]) - 1, 0)])
        elif combination.policy == WHOLE_BUCKETS:
            stop = first_bucket(batch.gains.tolist(), prices)
            batch = call(row_confidence, row_ids, budget=instance.budgets[stop])
        keep_lens.append(batch.keep_lens.tolist())
        tokens.append(int(batch.decision[2]))
    return Kept(np.array(keep_lens), np.array(tokens))


def first_bucket(gains: list[int], prices: list[float]) -> int:
    """The bucket after which the next one, as a whole, is not worth its cost."""
    bucket = 0
    while bucket + 1 < len(gains) and gains[bucket + 1] * prices[bucket] > gains[bucket] * prices[bucket + 1]:
        bucket += 1
    return bucket


def text(p: Chain) -> Array:
    """Distribution of the first ``len(p)`` tokens, [V^len(p)]."""
    return functools.reduce(lambda before, p_k: (before[:, None] * p_k).ravel(), p, np.ones(1))


def after(p: Chain, prefix: NDArray[np.int64], first: Array | None = None) -> Array:
    """The same given a prefix, [V^len(p)]; `first` replaces the probabilities of the token that follows it."""
    vocab, k = p[0].shape[1], len(prefix)
    index = int(prefix_index(prefix, vocab))
    rest = p[k][index] if first is None else first
    for p_k in p[k + 1 :]:
        rest = (rest[:, None] * p_k[index * len(rest) : (index + 1) * len(rest)]).ravel()
    result = np.zeros(vocab ** len(p))
    result[index * len(rest) : (index + 1) * len(rest)] = rest
    return result


Coupling = Callable[[Array, Array, int], Array]


def own_token(p: Array, q: Array, z: int) -> Array:
    """V1: the target draws its own token, whatever the draft is."""
    return p


def rejection(p: Array, q: Array, z: int) -> Array:
    """V2: accept with probability min(1, p / q), else draw from the residual max(0, p - q)."""
    accepted = min(1.0, p[z] / q[z])
    residual = np.maximum(p - q, 0)
    tokens = (1 - accepted) * residual / residual.sum() if accepted < 1 else np.zeros_like(p)
    tokens[z] += accepted
    return tokens


def shared_noise(p: Array, q: Array, z: int) -> Array:
    """V3: both invert their distribution function at the same uniform number; of two tokens, the Gumbel coupling."""
    low, high = q[:z].sum(), q[: z + 1].sum()
    edges = np.clip(np.concatenate([[0.0], np.cumsum(p)]), low, high)
    edges[-1] = high
    return np.diff(edges) / (high - low)


class Verifier(NamedTuple):
    draft_sampling: str  # of `lossless`; where noise is drawn anew it is what the bias is like
    coupling: Coupling  # distribution of the token at a position whose draft is known
    greedy: bool = False  # drafts are the drafter's most likely tokens
    keeps_noise: bool = False  # positions that were not verified use the noise of their draft


VERIFIERS = {
    "own token": Verifier("greedy", own_token),
    "greedy drafts": Verifier("greedy", rejection, greedy=True),
    "rejection": Verifier("sampled", rejection),
    "shared noise": Verifier("gumbel", shared_noise, keeps_noise=True),
    "noise drawn anew": Verifier("sampled", shared_noise),
}


def committed(p: Chain, q: Chain, z: NDArray[np.int64], verifier: Verifier) -> Array:
    """Distribution of the next ``D + 1`` tokens given a draft of which 0 to D are verified, [D + 1, V^(D + 1)].

    The position after the verified drafts, if all were accepted, or after the first rejection is drawn from the target,
    and so is all that follows, in this step and the next ones.
    """
    vocab, prefixes = p[0].shape[1], [int(prefix_index(z[:k], p[0].shape[1])) for k in range(len(z))]
    if verifier.keeps_noise:
        chain = [
            np.stack([verifier.coupling(row, q_k[prefix], token) for row in p_k])
            for p_k, q_k, prefix, token in zip(p, q, prefixes, z, strict=False)
        ]
        return np.tile(text([*chain, p[-1]]), (len(p), 1))
    result, rejected, reached = [], np.zeros(vocab ** len(p)), 1.0
    for k, (prefix, token) in enumerate(zip(prefixes, z, strict=True)):
        result.append(rejected + reached * after(p, z[:k]))
        tokens = verifier.coupling(p[k][prefix], q[k][prefix], token)
        rejected = rejected + reached * after(p, z[:k], np.where(np.arange(vocab) == token, 0, tokens))
        reached *= tokens[token]
    return np.stack([*result, rejected + reached * after(p, z)])


@functools.cache
def outcomes(instance: Instance, drafter: str, name: str) -> list[tuple[Array, Array]]:
    """Of each request: probability of every draft, [V^D], and what is committed, [V^D, D + 1, V^(D + 1)]."""
    verifier, result = VERIFIERS[name], []
    for p, q in zip(instance.target, instance.drafters[drafter], strict=True):
        if verifier.greedy:
            q = [np.eye(instance.vocab)[q_k.argmax(-1)] for q_k in q]
        probability = along(q, instance, drawn=True).prod(1)
        tokens = np.zeros((len(instance.drafts), instance.draft_len + 1, instance.vocab ** (instance.draft_len + 1)))
        for index in probability.nonzero()[0]:
            tokens[index] = committed(p, q, instance.drafts[index], verifier)
        result.append((probability, tokens))
    return result


def joint_text(instance: Instance, drafter: str, verifier: str, kept: Kept) -> Array:
    """Distribution of what all requests commit, [V^(D + 1), V^(D + 1)], or [V^(D + 1), 1] of one request."""
    probability, tokens = np.ones(len(instance.joint)), []
    for i, (of_draft, of_tokens) in enumerate(outcomes(instance, drafter, verifier)):
        index = instance.joint[:, i]
        probability *= of_draft[index]
        tokens.append(of_tokens[index, kept.keep_lens[:, i]])
    first, second = (*tokens, np.ones((len(probability), 1)))[:2]
    return (first * probability[:, None]).T @ second


def total_variation(instance: Instance, drafter: str, verifier: str, kept: Kept) -> float:
    """Distance of what is committed from the target's own text."""
    first, second = (*map(text, instance.target), np.ones(1))[:2]
    difference = joint_text(instance, drafter, verifier, kept) - np.outer(first, second)
    return float(np.abs(difference).sum() / 2)


class Distances(NamedTuple):
    """Of one combination, in many instances."""

    of: dict[str, Array]  # total variation by verifier, [instances]
    varied: Array  # whether the number of kept tokens of a request depends on the drafts, [instances]
    sizes: Array  # different sizes of the step over the drafts, [instances]


def distances(backend: str, combination: Combination, instances: list[Instance]) -> Distances:
    """Enumerate a combination."""
    operator = backends.get(backend)
    answers = [keep(operator, one, combination) for one in instances]
    pairs = list(zip(instances, answers, strict=True))
    return Distances(
        {name: np.array([total_variation(one, combination.drafter, name, kept) for one, kept in pairs])
         for name in VERIFIERS},
        np.array([len(np.unique(kept.keep_lens, axis=0)) > 1 for kept in answers]),
        np.array([len(np.unique(kept.tokens)) for kept in answers]),
    )  # fmt: skip


def is_exact(verifier: str, combination: Combination) -> bool:
    """What `lossless` says; stopping early in a wrong way is as biased as the argmax."""
    policy = "argmax" if combination.policy in (ROUNDED_DOWN, WHOLE_BUCKETS) else combination.policy
    chosen = combination._replace(policy=policy)._asdict()
    return lossless.is_lossless(draft_sampling=VERIFIERS[verifier].draft_sampling, **chosen)  # type: ignore[arg-type]


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=20, help="of each combination")
    parser.add_argument("--backend", action="append", choices=["reference", "cpu", "simt"], help="all that there are")
    args = parser.parse_args()
    here = [name for name in ("cpu", "simt", "reference") if name in backends.available()]
    for backend in args.backend or here:
        instances = [instance(seed, small=backend != "cpu") for seed in range(args.instances)]
        table = Table(title=f"{backend}: largest total variation, and instances above 1e-3 of {len(instances)}")
        for heading in ("confidence", "score", "policy", "drafter", "sizes vary", *VERIFIERS):
            table.add_column(heading)
        for combination in [*COMBINATIONS, *WRONG_STOPS]:
            found = distances(backend, combination, instances)
            cells = []
            for name, of in found.of.items():
                expected = "exact" if is_exact(name, combination) else "biased"
                cells.append(f"{expected} {of.max():.0e} ({(of > 1e-3).sum()})")
            table.add_row(*combination, str((found.sizes > 1).sum()), *cells)
        Console(width=190).print(table)


if __name__ == "__main__":
    main()
