"""Whether drafting pays, by what the planner has learned of its gains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .expectation import Expectation
from .pace import SOONEST, Pace

LEAD = 1.02  # of the other way over the present one, before it takes its place: what is learned is noisy
DOUBT = 1.0  # of what a request's step brings: its deviation; drafting has the benefit of it while it is little known
SETTLING = 0.5  # plain steps' worth of time that a change of the way costs: each leaves the other's data in the caches
SHARE = 0.0025  # of the speed, that probes and trials may cost each: so there are more where both ways are close
ENOUGH = 128  # requests' drafted steps before anything is decided: at the start of a text, little is accepted
PROBED = 8  # requests' steps of a probe, in one step where there are as many requests
SKIPPED = 3  # drafted steps after one that is learned from, once much is known: learning takes its time too


class Gate:
    """Decides before each step between drafting and plain decoding.

    Parameters
    ----------
    draft_len : int
        ``D``.
    probe_every : int
        Where plain decoding wins, most steps from one probe to the next.
    min_gain : float
        How much more than plain decoding drafting has to promise.

    Attributes
    ----------
    expectation : Expectation
        Tokens that drafting promises.
    idle : int
        Steps since the last drafted one.
    drafting : bool, optional
        Which way was the last; None before the first decision.
    """

    def __init__(self, draft_len: int, probe_every: int, min_gain: float) -> None:
        self.expectation, self.probe_every, self.min_gain, self.idle = Expectation(draft_len), probe_every, min_gain, 0
        self.drafting: bool | None = None
        self._paces: dict[int, Pace] = {}  # by the next power of two: a table may be wrong at one size alone
        self._every: float = probe_every  # steps from one probe to the next
        self._more = 0  # steps of the present probe that are left
        self._share = self._stands = 1  # steps that each of them stands for, and that what is learned next does
        self._skipped = 0  # drafted steps since the last one that was learned from
        self._gain = 1.0  # of drafting, at the last decision
        self._best: dict[int, tuple[float, float]] = {}  # gain of drafting and its cost in plain steps, by rows

    def pace(self, rows: int) -> Pace:
        """What timed steps of about so many requests say of costs."""
        size = max(0, rows - 1).bit_length()
        if size not in self._paces:
            self._paces[size] = Pace(SHARE)
        return self._paces[size]

    def choose(
        self, rows: int, budgets: Sequence[int], costs: Sequence[float], plain: float, timeable: bool = True
    ) -> tuple[bool, bool]:
        """Whether to draft, and whether only to see if it pays; arguments as of `pays` and `Planner.should_draft`."""
        if self.expectation.seen < ENOUGH:
            return True, True
        if self.pays(rows, budgets, costs, plain):
            return not self.pace(rows).tries(self._gain, timeable), False
        if self.pace(rows).tries_drafting(self._gain, self._best[rows][1], timeable):
            return True, False
        probe = self.probes(rows)
        return probe, probe

    def pays(self, rows: int, budgets: Sequence[int], costs: Sequence[float], plain: float) -> bool:
        """Whether the best bucket promises enough more tokens per time than plain decoding.

        Parameters
        ----------
        rows : int
            Requests that would draft.
        budgets, costs : sequence of int and float [R]
            Buckets of such a step.
        plain : float
            Cost of plain decoding.
        """
        if rows not in self._best:
            rate, cost = self.expectation.best(rows, budgets, costs)
            self._best[rows] = rate * plain / rows * self.pace(rows).correction(), cost / plain
        gain, plain_steps = self._best[rows]
        lost = (1 - gain) * plain_steps * _steps_of_a_probe(rows) + SETTLING
        self._every = min(self.probe_every, max(SOONEST, lost / SHARE))
        seen, memory = self.expectation.seen, self.expectation.memory
        gain *= 1 + DOUBT * max(0.0, seen**-0.5 - memory**-0.5)
        self._gain = gain
        lead = 1.0 if self.drafting is None else 1 / LEAD if self.drafting else LEAD
        self.drafting = gain >= (1 + self.min_gain) * lead
        if self.drafting:
            self.idle = self._more = 0
        return self.drafting

    def probes(self, rows: int) -> bool:
        """Count a step in which drafting does not pay; whether it is one to draft all the same."""
        if self._more == 0:
            self.idle += 1
            if self.idle < self._every:
                return False
            self._more = _steps_of_a_probe(rows)
            self._share, self.idle = max(1, self.idle // self._more), 0
        self._more -= 1
        self._stands = self._share
        return True

    def learn(
        self,
        drafts: Sequence[int],
        accepted: Sequence[int],
        budgets: Sequence[int],
        gains: Sequence[float],
        promised: float | None,
    ) -> None:
        """Learn from a step of which some rows had drafts.

        Parameters
        ----------
        drafts, accepted : sequence of int [B]
            Draft tokens that existed, and those that the target accepted.
        budgets : sequence of int [R]
            Tokens of each bucket that are no prompt's.
        gains : sequence of float [R]
            Expected tokens of each bucket.
        promised : float, optional
            Expected tokens of what was verified, where a bucket says so.
        """
        known = self.expectation.seen >= self.expectation.memory and self._stands == 1
        if known and self._skipped < SKIPPED:
            self._skipped += 1
            return
        self._skipped = 0
        rows = sum(n > 0 for n in drafts)
        idle, most = len(drafts) - rows, rows + sum(drafts)
        tokens = [min(max(budget - idle, rows), most) for budget in budgets]
        committed = sum(n + 1 for n, had in zip(accepted, drafts, strict=True) if had > 0)
        gains = [gain - idle for gain in gains]
        net = None if promised is None else promised - idle
        self.expectation.update(rows, tokens, gains, net, committed, self._stands)
        self._stands = 1
        self.forget_rates()

    def time(self, rows: int, drafted: bool, ratio: float) -> None:
        """Count a step of so many requests that was timed; other arguments as of `Pace.add`."""
        if self.pace(rows).add(drafted, ratio):
            self.forget_rates()

    def forget_rates(self) -> None:
        """Something that rates depend on has changed: what is known of tokens, or costs."""
        self._best.clear()

    def state(self) -> dict[str, Any]:
        """Everything that was learned, as plain Python values."""
        return {
            "expectation": self.expectation.state(),
            "ratios": {size: list(pace.ratios) for size, pace in self._paces.items() if pace.ratios},
            "idle": self.idle,
            "drafting": self.drafting,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """What `state` returned, once more."""
        self.expectation = Expectation(**state["expectation"])
        self._paces = {size: Pace(SHARE, ratios) for size, ratios in state["ratios"].items()}
        self.idle, self.drafting = state["idle"], state["drafting"]
        self.forget_rates()


def _steps_of_a_probe(rows: int) -> int:
    return -(-PROBED // max(1, rows))
