"""The measured cost of a step, C(B, K)."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from .._schema import MAX_DRAFT_LEN, MAX_TOKENS_CPU
from ._values import batch_sizes, integer, number, require, sequence
from .envelope import integer_envelope, priced
from .files import read, write
from .fingerprint import Fingerprint
from .rules import Rule, TokenCounts

LOOKUPS = ("nearest", "ceil", "exact", "linear")


@dataclass(frozen=True)
class CostTable:
    """Cost of whole steps, by batch and bucket: ``C(B, K)`` of the paper's eq. 5.

    A cost that is not in ``(0, inf)`` disables its bucket.  Where a method takes a `lookup`, it says what serves a
    batch that was not measured:

    * ``"nearest"``: the nearest measured one, the larger of two;
    * ``"ceil"``: the next larger one, for engines that pad the batch to it; an error beyond the largest;
    * ``"exact"``: none, an error;
    * ``"linear"``: the line between the two around it, bucket by bucket, or the nearest outside of them.  Only for
      engines that pad neither the batch nor the tokens of a step: between padded sizes no such costs exist.

    Attributes
    ----------
    batches : tuple of int [N]
        Batch sizes that were measured, ascending.
    costs_ms : tuple of tuples of float [N][R]
        Milliseconds of a whole step, drafting included.
    rule : Rule
        Tokens of each bucket: `PaperRatios`, `AngelSlimRatios` or `TokenCounts`.
    plain_ms : tuple of float [N], optional
        Milliseconds of a step of plain decoding.
    draft_ms : tuple of float [N], optional
        Drafting's share of `costs_ms`.
    fingerprint : Fingerprint, optional
        What was measured.

    Raises
    ------
    ValueError
        Naming the field, what was expected and what came.
    """

    batches: tuple[int, ...]
    costs_ms: tuple[tuple[float, ...], ...]
    rule: Rule
    plain_ms: tuple[float, ...] | None = None
    draft_ms: tuple[float, ...] | None = None
    fingerprint: Fingerprint | None = None

    def __post_init__(self) -> None:
        batches = batch_sizes(self.batches)
        require("rule", isinstance(self.rule, Rule), "a rule such as PaperRatios", repr(self.rule))
        measured = len(sequence("costs_ms", self.costs_ms))
        require("costs_ms", measured == len(batches), f"{len(batches)} rows, as in batches", measured)
        rows, buckets = [], len(self.rule.labels())
        for batch, row in zip(batches, self.costs_ms, strict=True):
            costs = tuple(number("costs_ms", cost) for cost in sequence("costs_ms", row))
            require("costs_ms", len(costs) == buckets, f"{buckets} buckets at batch {batch}, as in rule", len(costs))
            rows.append(costs)
        mark = self.fingerprint
        require("fingerprint", mark is None or isinstance(mark, Fingerprint), "a Fingerprint or None", repr(mark))
        for name in ("plain_ms", "draft_ms"):
            if (values := getattr(self, name)) is not None:
                times = tuple(number(name, time) for time in sequence(name, values))
                require(name, len(times) == len(batches), f"{len(batches)} values, as in batches", len(times))
                least = all(time > 0 for time in times) if name == "plain_ms" else all(time >= 0 for time in times)
                expected = f"finite values {'above 0' if name == 'plain_ms' else 'of 0 and above'}"
                require(name, least and all(time < math.inf for time in times), expected, list(times))
                object.__setattr__(self, name, times)
        object.__setattr__(self, "batches", batches)
        object.__setattr__(self, "costs_ms", tuple(rows))

    def dense(self, max_batch: int, lookup: str = "nearest") -> tuple[Tensor, Tensor]:
        """Tables for ``select_and_pack``: row ``b - 1`` serves a batch of ``b``.

        Budgets are those of ``b`` itself, costs those of the batch that `lookup` finds, at the same bucket.  A bucket
        of fewer than ``b`` tokens cannot hold the bonus tokens and is disabled.

        Parameters
        ----------
        max_batch : int
            ``M``, the largest batch.
        lookup : {"nearest", "ceil", "exact", "linear"}
            What serves a batch that was not measured; see `CostTable`.

        Returns
        -------
        budgets : Tensor, int32 [M, R]
        costs : Tensor, float32 [M, R]

        Raises
        ------
        ValueError
            If `lookup` finds no batch, or no bucket holds the bonus tokens of the largest batch.
        """
        most = self.rule.budgets(1)[-1] if isinstance(self.rule, TokenCounts) else MAX_TOKENS_CPU
        max_batch = integer("max_batch", max_batch, 1, most)
        budgets, costs = zip(*(self._price(batch, batch, lookup) for batch in range(1, max_batch + 1)), strict=True)
        return torch.tensor(budgets, dtype=torch.int32), torch.tensor(costs, dtype=torch.float32)

    def step(self, rows: int, base_tokens: int, lookup: str = "nearest") -> tuple[Tensor, Tensor]:
        """Buckets of one step, in which prompts may be read.

        Budgets that follow the batch grow by the ``base_tokens - rows`` tokens of prompts, each of which costs as much
        as the row's tokens between its first and last bucket do on average.  Token counts stay as they are, prompt
        tokens take their room, and buckets below `base_tokens` are disabled; where that disables all, the operator
        verifies everything, so list counts up to what a step may hold.

        Parameters
        ----------
        rows : int
            Requests that have drafts.
        base_tokens : int
            Tokens of the step that are no drafts, at least `rows`.
        lookup : {"nearest", "ceil", "exact", "linear"}
            What serves a batch that was not measured; see `CostTable`.

        Returns
        -------
        budgets : Tensor, int32 [R]
        costs : Tensor, float32 [R]
        """
        rows = integer("rows", rows, 0, MAX_TOKENS_CPU)
        base_tokens = integer("base_tokens", base_tokens, rows, MAX_TOKENS_CPU)
        budgets, costs = self._price(rows, base_tokens, lookup)
        return torch.tensor(budgets, dtype=torch.int32), torch.tensor(costs, dtype=torch.float32)

    def envelope(self, max_batch: int, lookup: str = "nearest") -> Tensor:
        """Lower convex envelope of each row of `dense`, in integers of one unit per row.

        Parameters
        ----------
        max_batch, lookup
            As in `dense`.

        Returns
        -------
        Tensor, int32 [M, R, 2]
            Height at each budget and slope to its right; see `dcut_kernels.cost.integer_envelope`.
        """
        budgets, costs = self.dense(max_batch, lookup)
        rows = []
        for batch, (row_budgets, row_costs) in enumerate(zip(budgets.tolist(), costs.tolist(), strict=True), start=1):
            try:
                rows.append(integer_envelope(row_budgets, row_costs))
            except ValueError as error:
                raise ValueError(f"{error}, at batch {batch}") from None
        return torch.tensor(rows, dtype=torch.int32)

    def with_bypass(self, gain: float, draft_len: int | None = None) -> CostTable:
        """A copy that verifies everything at batches where pruning cannot save enough.

        Where full verification costs less than ``1 + gain`` times the cheapest bucket, all smaller buckets are
        disabled.

        Parameters
        ----------
        gain : float
            Smallest gain that is worth a decision, such as 0.05.
        draft_len : int, optional
            ``D``, for token counts: full verification is the smallest bucket that holds ``B * (D + 1)`` tokens.
            Without it full verification is the largest bucket.
        """
        gain = number("gain", gain)
        require("gain", 0 <= gain < math.inf, "0 or more", gain)
        if draft_len is not None:
            integer("draft_len", draft_len, 0, MAX_DRAFT_LEN)
        rows = []
        for batch, costs in zip(self.batches, self.costs_ms, strict=True):
            budgets = self.rule.budgets(batch)
            most = budgets[-1] if draft_len is None else min(budgets[-1], batch * (draft_len + 1))
            full = bisect_left(budgets, most)
            usable = (cost for budget, cost in zip(budgets, costs, strict=True) if budget >= batch and priced(cost))
            cheapest = min(usable, default=math.inf)
            bypass = priced(costs[full]) and costs[full] < (1 + gain) * cheapest
            rows.append((math.inf,) * full + costs[full:] if bypass else costs)
        return replace(self, costs_ms=tuple(rows))

    def smoothed(self) -> CostTable:
        """A copy whose costs never decrease within a row: the nearest such table in least squares.

        Disabled buckets stay as they are.
        """
        rows = []
        for costs in self.costs_ms:
            rising = iter(_isotonic([cost for cost in costs if priced(cost)]))
            rows.append(tuple(next(rising) if priced(cost) else cost for cost in costs))
        return replace(self, costs_ms=tuple(rows))

    def plain_at(self, batch: int, lookup: str = "nearest") -> float | None:
        """Milliseconds of a step of plain decoding, None if it was not measured."""
        return None if self.plain_ms is None else self._time_at(self.plain_ms, batch, lookup)

    def draft_at(self, batch: int, lookup: str = "nearest") -> float | None:
        """Milliseconds of drafting, None if they were not measured."""
        return None if self.draft_ms is None else self._time_at(self.draft_ms, batch, lookup)

    def save(self, path: Path | str) -> None:
        """Write the table as JSON, with null for costs of ``inf``; NaN and ``-inf`` are refused."""
        write(Path(path), self)

    @classmethod
    def load(cls, path: Path | str, expect: Fingerprint | None = None) -> CostTable:
        """Read a table that `save` wrote.

        Parameters
        ----------
        path : Path or str
            File.
        expect : Fingerprint, optional
            What the table must have been measured on.

        Raises
        ------
        ValueError
            Naming the file and the key that is missing, unknown or wrong, or each field in which the fingerprint
            differs from what was expected.
        """
        path = Path(path)
        fields = read(path)
        try:
            table = cls(**fields)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if expect is not None:
            if table.fingerprint is None:
                raise ValueError(f"{path}: fingerprint: expected {expect}, got none")
            if differences := expect.differences(table.fingerprint):
                raise ValueError(f"{path}: fingerprint: {'; '.join(differences)}")
        return table

    def _price(self, rows: int, base_tokens: int, lookup: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Budgets and costs of the buckets of a step."""
        costs = self._costs_at(rows or self.batches[0], lookup)
        budgets = self.rule.budgets(rows)
        if self.rule.follows_batch and base_tokens > rows:
            prompt_tokens = base_tokens - rows
            extra = prompt_tokens * self._mean_slope(rows or self.batches[0], costs)
            budgets = tuple(budget + prompt_tokens for budget in budgets)
            costs = tuple(cost + extra if priced(cost) else cost for cost in costs)
        pairs = zip(budgets, costs, strict=True)
        return budgets, tuple(cost if budget >= base_tokens else math.inf for budget, cost in pairs)

    def _mean_slope(self, batch: int, costs: Sequence[float]) -> float:
        """Milliseconds per token between the first and last priced bucket; 0 where that is no rise."""
        points = [point for point in zip(self.rule.budgets(batch), costs, strict=True) if priced(point[1])]
        if not points or points[0][0] == points[-1][0]:
            return 0.0
        (few, low), (many, high) = points[0], points[-1]
        return max(0.0, (high - low) / (many - few))

    @functools.cached_property
    def _known(self) -> dict[tuple[int, str], tuple[float, ...]]:
        return {}

    def _costs_at(self, batch: int, lookup: str) -> tuple[float, ...]:
        """The row of a batch, kept since engines ask in every step."""
        key = batch, lookup
        if key not in self._known:
            first, second, part = self._around(batch, lookup)
            pairs = zip(self.costs_ms[first], self.costs_ms[second], strict=True)
            self._known[key] = tuple(a + (b - a) * part if priced(a) and priced(b) else math.inf for a, b in pairs)
        return self._known[key]

    def _time_at(self, times: Sequence[float], batch: int, lookup: str) -> float:
        first, second, part = self._around(batch, lookup)
        return times[first] + (times[second] - times[first]) * part

    def _around(self, batch: int, lookup: str) -> tuple[int, int, float]:
        """The two rows that serve a batch, and how far it is from the first to the second."""
        require("lookup", lookup in LOOKUPS, f"one of {', '.join(LOOKUPS)}", repr(lookup))
        batch, known = integer("batch", batch), self.batches
        above = bisect_left(known, batch)
        if above < len(known) and known[above] == batch:
            return above, above, 0.0
        require("batch", lookup != "exact", f"one of {', '.join(map(str, known))} (measured)", batch)
        if above == len(known):
            require("batch", lookup != "ceil", f"at most {known[-1]}, the largest that was measured", batch)
            return above - 1, above - 1, 0.0
        if above == 0:
            return 0, 0, 0.0
        small, large = known[above - 1 : above + 1]
        if lookup == "linear":
            return above - 1, above, (batch - small) / (large - small)
        nearest = above - 1 if lookup == "nearest" and batch - small < large - batch else above
        return nearest, nearest, 0.0


def _isotonic(values: Sequence[float]) -> list[float]:
    """Least-squares fit that never decreases, by pooling adjacent violators."""
    pools: list[tuple[float, int]] = []  # mean and size
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (last, n), (before, m) = pools.pop(), pools.pop()
            pools.append(((before * m + last * n) / (m + n), m + n))
    return [mean for mean, size in pools for _ in range(size)]
