"""Which combinations keep the target's distribution: what is claimed, against exact enumeration."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dcut_kernels import backends, lossless
from dcut_kernels.ops import Backend
from python_tests.enumeration import (
    COMBINATIONS,
    VERIFIERS,
    WRONG_STOPS,
    Combination,
    Distances,
    Instance,
    after,
    committed,
    distances,
    instance,
    is_exact,
    keep,
    outcomes,
    shared_noise,
    text,
)

EXACT, BIASED = 1e-12, 1e-3
INSTANCES = {"cpu": 200, "simt": 20, "reference": 20}
REACTS = [
    one for one in COMBINATIONS if (one.confidence_source, one.drafter) != ("token_independent", "block_parallel")
]
SAFE = [one for one in COMBINATIONS if is_exact("rejection", one)]
REFUSED = [one for one in lossless.combinations() if not lossless.is_lossless(**one._asdict())]


@pytest.fixture(params=list(INSTANCES))
def here(request: pytest.FixtureRequest) -> str:
    """Name of a backend that is here."""
    if request.param not in backends.available():
        pytest.skip(f"backend {request.param} is not available")
    return request.param


@functools.cache
def instances(name: str) -> list[Instance]:
    """Smaller ones where the operator is slow."""
    return [instance(seed, small=name != "cpu") for seed in range(INSTANCES[name])]


@functools.cache
def enumerated(name: str, combination: Combination) -> Distances:
    return distances(name, combination, instances(name))


@pytest.mark.parametrize("combination", [*COMBINATIONS, *WRONG_STOPS], ids="-".join)
def test_what_is_claimed_is_what_enumerates(here: str, combination: Combination) -> None:
    """Under every verifier; exact means in every instance."""
    found = enumerated(here, combination)
    for verifier, of in found.of.items():
        assert len(of) == INSTANCES[here]
        if is_exact(verifier, combination):
            assert of.max() <= EXACT, verifier
        else:
            assert of.max() > BIASED, verifier


@pytest.mark.parametrize("combination", REACTS, ids="-".join)
def test_the_drafts_decide_in_many_instances(combination: Combination) -> None:
    """Exactness would say nothing where the same is kept whatever is drafted."""
    name = "cpu" if "cpu" in backends.available() else "reference"
    found = enumerated(name, combination)
    late = combination.confidence_source == "token_independent" and combination.score == "shifted"
    share = 0.03 if late else 0.1  # of few scores: only those of third drafts depend on a token
    assert found.varied.mean() > share
    if combination.policy in ("argmax", "early_stop"):
        assert (found.sizes > 1).mean() > share / 2


@pytest.mark.parametrize("combination", SAFE, ids="-".join)
def test_floors_caps_and_weights_that_know_no_draft_keep_exactness(here: str, combination: Combination) -> None:
    chosen = [instance(seed, small=True, with_options=True) for seed in range(40 if here == "cpu" else 6)]
    for of in distances(here, combination, chosen).of.values():
        assert of.max() <= EXACT
    operator, differ = backends.get(here), 0
    for one in chosen[:4]:
        limited, free = (keep(operator, each, combination) for each in (one, replace(one, options={})))
        differ += not np.array_equal(limited.keep_lens, free.keep_lens)
    assert differ


def test_every_committed_distribution_is_one() -> None:
    """Probabilities sum to 1 under every verifier, whatever is kept."""
    for seed in range(6):
        one = instance(seed)
        for drafter in one.drafters:
            for name in VERIFIERS:
                for probability, tokens in outcomes(one, drafter, name):
                    assert probability.sum() == pytest.approx(1, abs=EXACT)
                    drawn = tokens[probability > 0]
                    assert drawn.min() >= 0
                    assert np.abs(drawn.sum(-1) - 1).max() < EXACT


@pytest.mark.parametrize("name", VERIFIERS)
def test_full_verification_commits_the_text_of_the_target(name: str) -> None:
    one = instance(2)
    for drafter in one.drafters:
        for p, (probability, tokens) in zip(one.target, outcomes(one, drafter, name), strict=True):
            assert np.abs(probability @ tokens[:, -1] - text(p)).max() < EXACT


def test_the_text_after_a_prefix() -> None:
    p = instance(0).target[0]
    whole = text(p).reshape(2, 2, 2, 2)
    expected = np.zeros_like(whole)
    expected[1, 0] = whole[1, 0] / whole[1, 0].sum()
    assert np.abs(after(p, np.array([1, 0])) - expected.ravel()).max() < EXACT


def test_two_tokens_with_shared_uniform_noise_are_the_gumbel_coupling() -> None:
    """P(both are token a) = 1 / sum_j max(p_j / p_a, q_j / q_a) with Gumbel noise."""
    p, q = np.array([0.3, 0.7]), np.array([0.6, 0.4])
    for token in (0, 1):
        both = 1 / np.maximum(p / p[token], q / q[token]).sum()
        assert q[token] * shared_noise(p, q, token)[token] == pytest.approx(both, abs=EXACT)


def first_token(here: Backend, budgets: list[int], costs: list[float], others: list[float], **options: Any) -> float:
    """Probability of token 0 where p = (.5, .5) and q = (.9, .1), if the drawn token's probability ranks it."""
    p, q, result = [np.array([[0.5, 0.5]]), np.full((2, 2), 0.5)], [np.array([[0.9, 0.1]])], 0.0
    zeros = torch.zeros(1 + len(others), dtype=torch.int32)
    for z in (0, 1):
        batch = here.select_and_pack(
            torch.tensor([[q[0][0, z]], *[[c] for c in others]], dtype=torch.float32), zeros[:, None].contiguous(),
            zeros, zeros, torch.tensor(budgets, dtype=torch.int32), torch.tensor(costs), **options,
        )  # fmt: skip
        tokens = committed(p, q, np.array([z]), VERIFIERS["rejection"])[int(batch.keep_lens[0])]
        result += q[0][0, z] * tokens[:2].sum()
    return result


def test_the_example_of_the_paper(here: str) -> None:
    """Verifying a draft only if it is likely commits the likely token with probability .55 instead of .5."""
    operator = backends.get(here)
    assert first_token(operator, [1, 2], [1.0, 1.5], []) == pytest.approx(0.55, abs=EXACT)
    assert first_token(operator, [3], [1.0], [0.5], budget=3) == pytest.approx(0.55, abs=EXACT)
    assert first_token(operator, [1, 2], [1.0, 1.5], [], score="shifted") == pytest.approx(0.5, abs=EXACT)


def test_each_combination_is_in_one_row() -> None:
    every = list(lossless.combinations())
    assert len(set(every)) == 96
    for combination in every:
        assert sum(row.holds(combination) for row in lossless.TABLE) == 1
    assert {one[1:] for one in every} == set(map(tuple, COMBINATIONS))
    assert {verifier.draft_sampling for verifier in VERIFIERS.values()} == set(lossless.VALUES["draft_sampling"])


@pytest.mark.parametrize("combination", list(lossless.combinations()), ids="-".join)
def test_what_enumerates_as_exact_is_accepted_and_nothing_else(combination: lossless.Combination) -> None:
    """Against the enumeration itself, not against the table."""
    name = "cpu" if "cpu" in backends.available() else "reference"
    found = enumerated(name, Combination(*combination[1:]))
    verifiers = [verifier for verifier, one in VERIFIERS.items() if one.draft_sampling == combination.draft_sampling]
    exact = all(found.of[verifier].max() <= EXACT for verifier in verifiers)
    chosen = combination._asdict()
    assert lossless.is_lossless(**chosen) is exact
    lossless.require_lossless(**chosen, allow_biased=True)
    if exact:
        lossless.require_lossless(**chosen)
    else:
        with pytest.raises(ValueError, match="which is biased"):
            lossless.require_lossless(**chosen)


@pytest.mark.parametrize("combination", REFUSED, ids="-".join)
def test_the_error_names_what_is_biased_why_and_what_is_safe(combination: lossless.Combination) -> None:
    with pytest.raises(ValueError, match=r"^combination: expected one that keeps") as raised:
        lossless.require_lossless(**combination._asdict())
    message = str(raised.value)
    for name, value in combination._asdict().items():
        assert f"{name}={value!r}" in message
    row = next(row for row in lossless.TABLE if row.holds(combination))
    assert row.why in message
    offered = lossless.safe_choices("sampled", combination.drafter)
    safe_part = message.split("Safe are: ")[1]
    for (source, score), policies in offered.items():
        part = next(part for part in safe_part.split(";") if f"source={source!r}, score={score!r}, policy=" in part)
        for policy in lossless.VALUES["policy"]:
            chosen = {"confidence_source": source, "score": score, "policy": policy}
            safe = lossless.is_lossless(**combination._asdict() | chosen)
            assert (policy in policies) is safe
            assert (repr(policy) in part.split("policy=")[1]) is safe
    assert ("drawn_token", "inclusive") not in offered
    assert "draft_sampling='greedy'" in message
    assert "allow_biased=True" in message


@pytest.mark.parametrize("name", lossless.VALUES)
def test_a_value_that_is_none(name: str) -> None:
    values: dict[str, Any] = {key: choices[0] for key, choices in lossless.VALUES.items()}
    with pytest.raises(ValueError, match=f"^{name}: expected '.*' or '.*', got 'other'$"):
        lossless.is_lossless(**values | {name: "other"})
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        lossless.require_lossless(**values | {name: "other"}, allow_biased=True)


def test_a_drafter_is_block_parallel_unless_said_otherwise() -> None:
    values: dict[str, Any] = {"draft_sampling": "sampled", "confidence_source": "token_independent", "score": "shifted"}
    assert lossless.is_lossless(**values, policy="argmax")
    assert not lossless.is_lossless(**values, policy="argmax", drafter="conditional")
