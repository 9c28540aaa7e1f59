"""Which combinations of drafts, scores and budgets keep the target's distribution."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Literal, NamedTuple, get_args

DraftSampling = Literal["greedy", "sampled", "gumbel"]
ConfidenceSource = Literal["drawn_token", "token_independent"]
Score = Literal["inclusive", "shifted"]
Policy = Literal["argmax", "early_stop", "history", "fixed"]
DrafterKind = Literal["block_parallel", "conditional"]


class Combination(NamedTuple):
    """How drafts are drawn and verified, how they are ranked, and where the budget comes from.

    Attributes
    ----------
    draft_sampling : {"greedy", "sampled", "gumbel"}
        "greedy": drafts are no random choice, or tokens are the target's own and drafts only compared with them.
        "sampled": drafts are drawn from the drafter and verified by rejection sampling.  "gumbel": drafter and target
        share noise that is fixed for each position of a request, also for one that is drafted again.
    confidence_source : {"drawn_token", "token_independent"}
        The probability of the token that was drawn, or something that is known before it is drawn: the greatest
        probability, the sum of squares, the margin between the two greatest, a trained head.
    score : {"inclusive", "shifted"}
        As in `select_and_pack`.
    policy : {"argmax", "early_stop", "history", "fixed"}
        As in `select_and_pack`; "fixed" is any ``budget`` that this step's drafts have no influence on.
    drafter : {"block_parallel", "conditional"}
        Whether the distribution of a draft token depends on the draft tokens before it.
    """

    draft_sampling: DraftSampling
    confidence_source: ConfidenceSource
    score: Score
    policy: Policy
    drafter: DrafterKind


VALUES: dict[str, tuple[str, ...]] = {
    "draft_sampling": get_args(DraftSampling),
    "confidence_source": get_args(ConfidenceSource),
    "score": get_args(Score),
    "policy": get_args(Policy),
    "drafter": get_args(DrafterKind),
}


class Row(NamedTuple):
    """The combinations of all values listed; they are lossless, or all biased."""

    draft_sampling: tuple[str, ...]
    confidence_source: tuple[str, ...]
    score: tuple[str, ...]
    policy: tuple[str, ...]
    drafter: tuple[str, ...]
    lossless: bool
    why: str

    def holds(self, combination: Combination) -> bool:
        """Whether the row speaks of a combination."""
        return all(value in values for value, values in zip(combination, self[:5], strict=True))


_SAMPLED = ("sampled",)
_ANY_SCORE, _ANY_POLICY, _ANY_DRAFTER = VALUES["score"], VALUES["policy"], VALUES["drafter"]
_CAUSAL = ("early_stop", "history", "fixed")

TABLE = (
    Row(("greedy",), VALUES["confidence_source"], _ANY_SCORE, _ANY_POLICY, _ANY_DRAFTER, True,
        "every committed token is drawn from the target, or the draft that it is compared with is no random choice"),
    Row(("gumbel",), VALUES["confidence_source"], _ANY_SCORE, _ANY_POLICY, _ANY_DRAFTER, True,
        "the noise of a position decides its token, whether or not a draft of it is verified"),
    Row(_SAMPLED, ("drawn_token",), ("inclusive",), _ANY_POLICY, _ANY_DRAFTER, False,
        "a draft token's own confidence decides whether it is verified"),
    Row(_SAMPLED, ("drawn_token",), ("shifted",), ("argmax",), _ANY_DRAFTER, False,
        "the gain of a bucket holds scores behind a draft token, which its confidence moves, so that token decides "
        "whether it is verified"),
    Row(_SAMPLED, ("drawn_token",), ("shifted",), _CAUSAL, _ANY_DRAFTER, True,
        "only confidences before a draft token decide whether it is verified"),
    Row(_SAMPLED, ("token_independent",), _ANY_SCORE, _ANY_POLICY, ("block_parallel",), True,
        "no draft token has an influence on what is verified"),
    Row(_SAMPLED, ("token_independent",), _ANY_SCORE, ("argmax",), ("conditional",), False,
        "the gain of a bucket holds confidences behind a draft token, which depend on it, so that token decides "
        "whether it is verified"),
    Row(_SAMPLED, ("token_independent",), _ANY_SCORE, _CAUSAL, ("conditional",), True,
        "only draft tokens before a draft token decide whether it is verified"),
)  # fmt: skip


def combinations() -> Iterator[Combination]:
    """All of them."""
    return (Combination(*values) for values in product(*VALUES.values()))  # type: ignore[arg-type]


def _row(combination: Combination) -> Row:
    for name, value in combination._asdict().items():
        if value not in VALUES[name]:
            raise ValueError(f"{name}: expected {_alternatives(VALUES[name])}, got {value!r}")
    return next(row for row in TABLE if row.holds(combination))


def _alternatives(values: tuple[str, ...]) -> str:
    *rest, last = map(repr, values)
    return f"{', '.join(rest)} or {last}" if rest else last


def safe_choices(draft_sampling: DraftSampling, drafter: DrafterKind) -> dict[tuple[str, str], tuple[str, ...]]:
    """Policies that keep the target's distribution, by confidence source and score.

    Parameters
    ----------
    draft_sampling, drafter
        As in `Combination`.
    """
    found = {}
    for source, score in product(VALUES["confidence_source"], VALUES["score"]):
        policies = tuple(
            policy
            for policy in VALUES["policy"]
            if _row(Combination(draft_sampling, source, score, policy, drafter)).lossless  # type: ignore[arg-type]
        )
        if policies:
            found[source, score] = policies
    return found


def is_lossless(
    *,
    draft_sampling: DraftSampling,
    confidence_source: ConfidenceSource,
    score: Score,
    policy: Policy,
    drafter: DrafterKind = "block_parallel",
) -> bool:
    """Whether what is committed has the target's distribution.

    Parameters
    ----------
    draft_sampling, confidence_source, score, policy, drafter
        As in `Combination`.

    Raises
    ------
    ValueError
        If a value is none of those listed.
    """
    return _row(Combination(draft_sampling, confidence_source, score, policy, drafter)).lossless


def require_lossless(
    *,
    draft_sampling: DraftSampling,
    confidence_source: ConfidenceSource,
    score: Score,
    policy: Policy,
    drafter: DrafterKind = "block_parallel",
    allow_biased: bool = False,
) -> None:
    """Refuse a combination that does not keep the target's distribution.

    Parameters
    ----------
    draft_sampling, confidence_source, score, policy, drafter
        As in `Combination`.
    allow_biased : bool
        Accept it all the same.

    Raises
    ------
    ValueError
        If the combination is biased, with the reason and the safe ones; or if a value is none of those listed.
    """
    combination = Combination(draft_sampling, confidence_source, score, policy, drafter)
    row = _row(combination)
    if row.lossless or allow_biased:
        return
    got = ", ".join(f"{name}={value!r}" for name, value in combination._asdict().items())
    safe = [
        f"confidence_source={source!r}, score={score!r}, policy={_alternatives(policies)}"
        for (source, score), policies in safe_choices(draft_sampling, drafter).items()
    ]
    safe += [
        f"draft_sampling={other!r}"
        for other in VALUES["draft_sampling"]
        if _row(combination._replace(draft_sampling=other)).lossless  # type: ignore[arg-type]
    ]
    raise ValueError(
        f"combination: expected one that keeps the target's distribution, got {got}, which is biased: {row.why}. "
        f"Safe are: {'; '.join(safe)}. allow_biased=True overrides"
    )
