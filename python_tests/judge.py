"""Decides in exact arithmetic whether a VerifyBatch is a right answer.

It shares nothing with the backends: scores are exact products of the float inputs (cut off at 2^-256, far below every
tolerance), not the integers of the number format.  So it accepts every answer that keeps the documented promises, and
only those:

* the rows, floors, caps and the clamped budget hold exactly, and so does everything that is packed;
* a draft kept in place of a better one scores within 2^-14 relative of it, or both count as 0;
* where two scores must come out equal or are exact, the order (score, position, request) holds exactly;
* every gain is within 2^-15 relative plus 2^-30 per position of the best that its budget allows;
* the bucket is the one with the largest gain per cost, the smallest of equals, never a disabled one.

It knows no calibration, which may be as steep as it likes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import Any

import mpmath
import torch

from dcut_kernels import VerifyBatch

BITS = 256
ONE = 1 << BITS
ZERO = ONE >> 56  # scores below count as 0
INT32_MAX = 2**31 - 1
NEVER = 10**9  # the exponent of a score that is 0
CLOSE = 1 << 14
TAIL = {"positions": 0, "request_ids": -1, "slot_mapping": -1, "draft_index": -1}
PACKED = ("token_ids", "positions", "request_ids", "slot_mapping", "draft_index")
mpmath.mp.prec = 2 * BITS


def _list(t: torch.Tensor) -> list:
    return t.double().tolist() if t.is_floating_point() else t.tolist()


def _within(value: int, low: int, high: int) -> int:
    return sorted((low, value, high))[1]


@dataclass
class Draft:
    """One draft position that may be kept or pruned."""

    request: int
    depth: int
    score: int  # exact, in units of 2^-256
    exponent: int  # of the factors that are powers of two, negated
    factors: tuple  # the others, sorted


@dataclass
class Request:
    """One row, after all harmless readings."""

    active: bool
    slot: int  # -1 if out of range
    base: int
    drafts: int = 0
    floor: int = 0
    weight: float = 1.0
    chain: list[Draft] = field(default_factory=list)


def _harmless(c: float) -> float:
    return 0.0 if math.isnan(c) or c <= 0 else min(c, 1.0)


def _weight(w: float) -> float:
    return 1.0 if math.isnan(w) else min(max(w, 2.0**-8), 2.0**8)


def _scores(confidence: Sequence[float], weight: float) -> Iterator[tuple[int, int, tuple]]:
    """Score, exponent and factors, of no confidence and after each further one."""
    numerator, shift, exponent = 1, 0, 0
    factors: list[float] = []
    for factor in (weight, *map(_harmless, confidence)):
        n, d = factor.as_integer_ratio()
        numerator, shift = numerator * n, shift + d.bit_length() - 1
        mantissa, power = math.frexp(factor)
        if factor == 0:
            exponent = NEVER
        elif mantissa == 0.5:
            exponent -= power - 1
        else:
            factors = sorted([*factors, factor])
        yield (numerator << BITS) >> shift, exponent, tuple(factors)


def _log_scores(logs: Sequence[float], weight: float) -> Iterator[tuple[int, int, tuple]]:
    """The same from natural logarithms, none of which has to be exact."""
    total = mpmath.mpf(0)
    factors: list[float] = []
    for log in (0.0, *logs):
        log = -math.inf if math.isnan(log) else min(log, 0.0)
        total += log
        factors = sorted([*factors, log]) if log else factors
        score = 0 if total < -1000 else int(mpmath.floor(mpmath.exp(total) * weight * ONE))
        yield score, 0, (weight, *factors)


class Judge:
    """Everything that can be said about a call before the answer is seen."""

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self.inputs = inputs
        self.batch = inputs["bonus_ids"].shape[0]
        self.slots, self.draft_len = inputs["draft_ids"].shape
        self.capacity = inputs.get("capacity", self.batch * (self.draft_len + 1))
        self.active = _within(int(inputs["num_reqs"]), 0, self.batch) if "num_reqs" in inputs else self.batch
        self.requests = self._read_requests()
        self.base = sum(r.base for r in self.requests)
        self.lowest = self.base + sum(r.floor for r in self.requests)
        self.highest = max(self.lowest, min(self.base + sum(r.drafts for r in self.requests), self.capacity))
        self.budgets, self.costs = self._table("budgets"), self._table("costs")
        self.optional = [d for r in self.requests for d in r.chain[r.floor : r.drafts]]
        best = sorted((d.score for d in self.optional), reverse=True)
        self.fixed = [d.score for r in self.requests for d in r.chain[: r.floor]]
        if inputs.get("count_bonus", True):
            self.fixed += [int(r.weight * ONE) for r in self.requests if r.active]
        self.best_sums = list(accumulate(best, initial=sum(self.fixed)))

    def _table(self, name: str) -> list:
        table = _list(self.inputs[name])
        return table[min(max(self.active, 1), len(table)) - 1] if self.inputs[name].dim() == 2 else table

    def _column(self, name: str, default: Any) -> list:
        return _list(self.inputs[name]) if name in self.inputs else [default] * self.batch

    def _read_requests(self) -> list[Request]:
        table = _list(self.inputs["confidence"])
        indices = _list(self.inputs["row_index"]) if "row_index" in self.inputs else list(range(self.batch))
        lens = self._column("draft_lens", self.draft_len)
        caps, floors = self._column("max_keep", self.draft_len), self._column("min_keep", 0)
        bases, weights = self._column("base_lens", 1), self._column("weight", 1.0)
        scores = _log_scores if self.inputs.get("log_confidence") else _scores
        requests = []
        for i in range(self.batch):
            slot = indices[i] if 0 <= indices[i] < self.slots else -1
            if i >= self.active:
                requests.append(Request(False, slot, 0))
                continue
            request = Request(True, slot, max(bases[i], 1), weight=_weight(weights[i]))
            if slot >= 0:
                request.drafts = max(min(lens[i], caps[i], self.draft_len), 0)
                request.floor = _within(floors[i], 0, request.drafts)
                steps = list(scores(table[slot], request.weight))
                steps = steps[:-1] if self.inputs.get("score") == "shifted" else steps[1:]
                request.chain = [Draft(i, k + 1, *step) for k, step in enumerate(steps)]
            requests.append(request)
        return requests

    def complaints(self, result: VerifyBatch, before: VerifyBatch | None = None) -> list[str]:
        """Everything that is wrong with a result; `before` is what its buffers held when they were given as `out`."""
        found = list(self._shapes(result))
        if found:
            return found
        keep = result.keep_lens.tolist()
        found = list(self._rows(keep))
        if found:
            return found
        found += self._decision(keep, result.decision.tolist(), result.gains.tolist())
        found += self._order(keep)
        found += self._gains(result.gains.tolist())
        found += self._packed(keep, result, before)
        return found

    def _shapes(self, result: VerifyBatch) -> Iterator[str]:
        ids = self.inputs["draft_ids"].dtype
        sizes = {"keep_lens": self.batch, "cu_seqlens": self.batch + 1, "kv_lens": self.batch, "decision": 4}
        sizes["gains"] = len(self.budgets)
        dtypes = {"token_ids": ids, "positions": torch.int64, "slot_mapping": torch.int64, "gains": torch.int64}
        for name, tensor in result._asdict().items():
            expected = dtypes.get(name, torch.int32), (sizes.get(name, self.capacity),)
            if (tensor.dtype, tuple(tensor.shape)) != expected:
                yield f"{name}: {tensor.dtype} {tuple(tensor.shape)}, expected {expected}"

    def _rows(self, keep: Sequence[int]) -> Iterator[str]:
        for i, (request, kept) in enumerate(zip(self.requests, keep, strict=True)):
            if not request.floor <= kept <= request.drafts:
                yield f"keep_lens[{i}]: {kept} is not within {request.floor} and {request.drafts}"

    def _clamp(self, budget: int) -> int:
        return max(self.lowest, min(budget, self.highest))

    def _enabled(self) -> list[int]:
        pairs = enumerate(zip(self.budgets, self.costs, strict=True))
        return [r for r, (budget, cost) in pairs if budget > 0 and cost > 0 and math.isfinite(cost)]

    def _decision(self, keep: Sequence[int], decision: list[int], gains: Sequence[int]) -> Iterator[str]:
        kept = self.base + sum(keep)
        if "budget" in self.inputs:
            right_bucket, right_tokens = -1, self._clamp(int(self.inputs["budget"]))
            right_padded = min([k for k in self.budgets if k >= right_tokens], default=right_tokens)
        elif not self._enabled():
            right_bucket, right_tokens = -1, self.highest
            right_padded = right_tokens
        else:
            right_bucket = self._right_bucket(decision[0], gains)
            right_tokens = self._clamp(self.budgets[right_bucket])
            right_padded = max(right_tokens, self.budgets[right_bucket])
            if "envelope" not in self.inputs and not self._is_best(right_bucket):
                yield f"gains: bucket {right_bucket} has the largest reported utility, but not in exact arithmetic"
        right = [right_bucket, *(min(n, INT32_MAX) for n in (right_tokens, right_tokens, right_padded))]
        if decision != right:
            yield f"decision: {decision}, expected {right}"
        if kept != right_tokens:
            yield f"keep_lens: {kept} tokens in all, expected {right_tokens}"

    def _right_bucket(self, bucket: int, gains: Sequence[int]) -> int:
        """By the reported gains; of early stop any bucket that takes part is accepted, it has tests of its own."""
        if "envelope" in self.inputs and bucket in self._enabled():
            return bucket
        return max(self._enabled(), key=lambda r: (gains[r] / self.costs[r], -r))

    def _order(self, keep: Sequence[int]) -> Iterator[str]:
        kept = [draft for draft in self.optional if draft.depth <= keep[draft.request]]
        pruned = [draft for draft in self.optional if draft.depth > keep[draft.request]]
        if not kept or not pruned:
            return
        worst, best = min(kept, key=lambda d: d.score), max(pruned, key=lambda d: d.score)
        zero = ZERO + ZERO // CLOSE
        if worst.score * CLOSE < best.score * (CLOSE - 1) and not (worst.score < zero and best.score < zero):
            yield f"order: kept {_place(worst)} in place of the better {_place(best)}"
        last: dict[tuple, tuple] = {}
        for draft in kept:
            for group, rank in _exact_ranks(draft):
                last[group] = max(last.get(group, rank), rank)
        for draft in pruned:
            for group, rank in _exact_ranks(draft):
                if rank < last.get(group, rank):
                    yield f"ties: pruned {_place(draft)} before {_place_of(last[group])}, which ranks after it"
                    return

    def _best_gain(self, budget: int) -> tuple[int, int]:
        """Largest exact gain that a budget allows, and how many positions it sums."""
        drafts = self._clamp(budget) - self.lowest
        return self.best_sums[drafts], drafts + len(self.fixed)

    def _gains(self, gains: Sequence[int]) -> Iterator[str]:
        for r, (budget, gain) in enumerate(zip(self.budgets, gains, strict=True)):
            exact, positions = self._best_gain(budget)
            if abs((gain << (BITS - 30)) - exact) > (exact >> 15) + (positions << (BITS - 30)):
                yield f"gains[{r}]: {gain}, expected {exact / 2 ** (BITS - 30):.2f}"

    def _is_best(self, chosen: int) -> bool:
        """Whether no other bucket is better by more than the promised error of both gains."""
        exact, positions = self._best_gain(self.budgets[chosen])
        upper = (exact + (exact >> 15) + (positions << (BITS - 30))) / Fraction(self.costs[chosen])
        for r in self._enabled():
            exact, positions = self._best_gain(self.budgets[r])
            if (exact - (exact >> 15) - (positions << (BITS - 30))) / Fraction(self.costs[r]) > upper:
                return False
        return True

    def _packed(self, keep: Sequence[int], result: VerifyBatch, before: VerifyBatch | None) -> Iterator[str]:
        for name, right in self._right_packing(keep, before).items():
            got = getattr(result, name).tolist()
            if got != right:
                at = next(j for j, (a, b) in enumerate(zip(got, right, strict=True)) if a != b)
                yield f"{name}[{at}]: {got[at]}, expected {right[at]}"

    def _right_packing(self, keep: Sequence[int], before: VerifyBatch | None) -> dict[str, list[int]]:
        ids, bonus = _list(self.inputs["draft_ids"]), _list(self.inputs["bonus_ids"])
        seq = _list(self.inputs["seq_lens"])
        starts = list(accumulate((r.base + n for r, n in zip(self.requests, keep, strict=True)), initial=0))
        tokens: dict[int, tuple] = {}
        verified = []
        for i, request in enumerate(self.requests):
            first = starts[i + 1] - keep[i] - 1
            for k in range(keep[i] + 1) if request.active else ():
                verified.append(first + k if first + k < self.capacity else 0)
                position = _wrapped(seq[i] + k, 64)
                token = ids[request.slot][k - 1] if k else bonus[i]
                index = request.slot * self.draft_len + k - 1 if k else -1
                tokens[first + k] = token, position, i, self._slot(i, position), index
        tail = (self.inputs.get("pad_token", 0), 0, -1, -1, -1)
        held = [tail] * self.capacity
        if before is not None:
            held = list(zip(*(getattr(before, name).tolist() for name in PACKED), strict=True))
        rows = [tokens.get(at, held[at]) if at < starts[-1] else tail for at in range(self.capacity)]
        columns = list(zip(*rows, strict=True)) or [()] * len(PACKED)
        return {
            "keep_lens": list(keep),
            "cu_seqlens": [min(s, INT32_MAX) for s in starts],
            "kv_lens": [_wrapped(seq[i] + keep[i] + 1, 32) if i < self.active else 0 for i in range(self.batch)],
            **{name: list(column) for name, column in zip(PACKED, columns, strict=True)},
            "logits_indices": (verified + [0] * self.capacity)[: self.capacity],
        }

    def _slot(self, request: int, position: int) -> int:
        if "block_table" not in self.inputs or position < 0:
            return -1
        block, offset = divmod(position, self.inputs["block_size"])
        table = self.inputs["block_table"][request]
        if block >= table.shape[0] or int(table[block]) < 0:
            return -1
        return int(table[block]) * self.inputs["block_size"] + offset


def _wrapped(value: int, bits: int) -> int:
    """What two's complement of that width keeps of a value."""
    value %= 2**bits
    return value - 2**bits if value >= 2 ** (bits - 1) else value


def _exact_ranks(draft: Draft) -> Iterator[tuple[tuple, tuple]]:
    """Groups whose members have a known order, and the rank of the draft in them.

    Factors that are not powers of two have a logarithm that is only promised to be close, so only drafts with the same
    ones compare exactly.
    """
    place = (draft.depth, draft.request)
    if draft.score < ZERO - ZERO // CLOSE or (not draft.factors and draft.score < ZERO):
        yield ("zero",), (NEVER, *place)
    elif draft.score > ZERO + ZERO // CLOSE or not draft.factors:
        yield draft.factors, (draft.exponent, *place)


def _place(draft: Draft) -> str:
    return f"draft {draft.depth} of request {draft.request} (score {draft.score / ONE:.9g})"


def _place_of(rank: tuple) -> str:
    return f"draft {rank[1]} of request {rank[2]}"
