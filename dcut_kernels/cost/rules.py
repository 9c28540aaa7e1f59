"""How many tokens each bucket of a table stands for."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import ClassVar

from .._schema import MAX_BUCKETS, MAX_DRAFT_LEN
from ._values import integer, number, require, sequence


def _ascending(name: str, values: Sequence[float]) -> None:
    require(name, 1 <= len(values) <= MAX_BUCKETS, f"1 to {MAX_BUCKETS} buckets", len(values))
    require(name, all(a < b for a, b in pairwise(values)), "strictly ascending values", values)


def token_counts(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Token counts of buckets, ascending."""
    counts = tuple(integer(name, count) for count in sequence(name, values))
    _ascending(name, counts)
    return counts


class Rule(ABC):
    """Budgets of the buckets at any batch; the subclasses are frozen dataclasses, and what JSON holds of a rule.

    Attributes
    ----------
    name : str
        The rule's name in JSON.
    follows_batch : bool
        Whether budgets grow with the batch, so that prompt tokens in the same step come on top of them.
    """

    name: ClassVar[str]
    follows_batch: ClassVar[bool] = True

    @abstractmethod
    def budgets(self, batch: int) -> tuple[int, ...]:
        """Tokens of each bucket at a batch, bonus tokens included, never decreasing."""

    @abstractmethod
    def labels(self) -> tuple[str, ...]:
        """A short name of each bucket."""


@dataclass(frozen=True)
class _Ratios(Rule):
    """Shares of the draft tokens.

    Attributes
    ----------
    ratios : tuple of float
        ``rho`` of each bucket, from 0 to 1, ascending.  A ratio stands for the fraction nearest to it with a
        denominator of at most a million: 0.3 is 3/10.
    draft_len : int
        ``D``, draft tokens per request.
    """

    ratios: tuple[float, ...]
    draft_len: int

    def __post_init__(self) -> None:
        ratios = tuple(number("ratios", ratio) for ratio in sequence("ratios", self.ratios))
        require("ratios", all(0 <= ratio <= 1 for ratio in ratios), "values from 0 to 1", ratios)
        _ascending("ratios", ratios)
        object.__setattr__(self, "ratios", ratios)
        object.__setattr__(self, "draft_len", integer("draft_len", self.draft_len, 0, MAX_DRAFT_LEN))

    def _shares(self, tokens: int) -> list[int]:
        # in floats 0.28 * 100 is a little more than 28
        return [math.ceil(Fraction(ratio).limit_denominator(10**6) * tokens) for ratio in self.ratios]

    def labels(self) -> tuple[str, ...]:
        return tuple(f"{ratio:.4g}" for ratio in self.ratios)


@dataclass(frozen=True)
class PaperRatios(_Ratios):
    """The paper's budgets, ``K = max(B, ceil(rho * B * (D + 1)))``."""

    name: ClassVar[str] = "paper"

    def budgets(self, batch: int) -> tuple[int, ...]:
        return tuple(max(batch, share) for share in self._shares(batch * (self.draft_len + 1)))


@dataclass(frozen=True)
class AngelSlimRatios(_Ratios):
    """The budgets of the AngelSlim D-cut page, ``K = B + ceil(rho * B * D)``; ``rho = k / D`` is k drafts a request."""

    name: ClassVar[str] = "angelslim"

    def budgets(self, batch: int) -> tuple[int, ...]:
        return tuple(batch + share for share in self._shares(batch * self.draft_len))


@dataclass(frozen=True)
class TokenCounts(Rule):
    """The same token counts for all batches, such as the sizes of captured graphs.

    Attributes
    ----------
    counts : tuple of int
        Tokens of the step per bucket, bonus and prompt tokens included, ascending.
    """

    counts: tuple[int, ...]
    name: ClassVar[str] = "tokens"
    follows_batch: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", token_counts("counts", self.counts))

    def budgets(self, batch: int) -> tuple[int, ...]:
        return self.counts

    def labels(self) -> tuple[str, ...]:
        return tuple(map(str, self.counts))


RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (PaperRatios, AngelSlimRatios, TokenCounts)}
