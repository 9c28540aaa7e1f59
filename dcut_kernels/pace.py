"""How long steps take now, relative to the table that was measured before."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

SOONEST = 16  # drafted steps from one trial to the next, and plain steps from one probe to the next
SETTLE, TRIAL = 5, 10  # of so many plain steps after drafted ones, the first ones do not count: they find other caches
WINDOW = 16  # drafted steps before them that they are compared with
TRIALS = 8  # that count
DRAFTED = 6  # drafted steps of a trial where plain decoding pays; the first one does not count
MOST = 4  # times as many steps as it needs are the most that a trial takes


class Pace:
    """Compares plain steps with the drafted ones before them, each by its time over its cost in the table.

    Where one way pays, a few steps now and then go the other way, so rarely that they cost a small share of the speed.

    Parameters
    ----------
    share : float
        Of the speed, that trials of each kind may cost once `TRIALS` were made; before, they come sooner.
    ratios : sequence of float
        Of trials: how much longer plain steps took than drafted ones.
    """

    def __init__(self, share: float, ratios: Sequence[float] = ()) -> None:
        self.share = share
        self.ratios: deque[float] = deque(ratios, maxlen=TRIALS)
        self._drafted: deque[float] = deque(maxlen=WINDOW)
        self._plain: list[float] = []
        self._last: bool | None = None
        self._run = 0  # steps of the last kind in a row
        self._idle = 0  # steps in which drafting did not pay, since the last trial
        self._left = 0  # timed drafted steps that the present trial still needs
        self._since = 0  # drafted steps since the last trial
        self._trying, self._taken = False, 0  # whether this is a trial of plain steps, and how many it has taken
        self._made = len(self.ratios)  # trials

    def correction(self) -> float:
        """Factor of the gain of drafting, from 0.5 to 2: the median of trials and of the table's 1."""
        return min(max(median([1.0, *self.ratios]), 0.5), 2.0)

    def tries(self, gain: float, timeable: bool = True) -> bool:
        """Whether the coming step is to be plain and timed, although drafting has such a gain over it.

        A trial begins with a step that will be timed, and is given up if too few of its steps are.
        """
        lost = TRIAL * (1 - 1 / gain) + 1  # steps' worth of time; the first drafted step after it is slow
        if self._trying and self._taken == MOST * TRIAL:
            self._trying, self._since = False, 0
        if not self._trying and timeable and self._since >= self._wait(lost):
            self._trying, self._taken, self._made = True, 0, self._made + 1
        self._taken += 1
        self._left = self._idle = 0
        return self._trying

    def tries_drafting(self, gain: float, plain_steps: float, timeable: bool = True) -> bool:
        """Whether the coming step is to draft and be timed, although that does not pay; it takes `plain_steps`.

        Only steps that will be timed do: drafted ones cost much.
        """
        if timeable or self._left == 0:
            self._idle += 1
        if self._left > 0 and self._idle == MOST * DRAFTED:
            self._left = 0
        lost = DRAFTED * (1 - gain) * plain_steps + 1
        if self._left == 0 and self._last is not None and self._idle >= self._wait(lost):
            self._left, self._idle, self._made = DRAFTED, 0, self._made + 1
        return timeable and self._left > 0

    def _wait(self, lost: float) -> float:
        """Steps between trials that cost so many steps' worth of time."""
        return max(SOONEST, lost / self.share * (min(self._made, TRIALS) + 2) / (TRIALS + 2))

    @property
    def listens(self) -> bool:
        """Whether a plain step would say anything: the first ones after drafted ones do."""
        return self._last is True or self._run < TRIAL

    def add(self, drafted: bool, ratio: float) -> bool:
        """Count a step that was timed; whether the correction has changed.

        Parameters
        ----------
        drafted : bool
            Whether its requests drafted.
        ratio : float
            Its time over its cost.
        """
        self._run, self._last = self._run + 1 if drafted == self._last else 1, drafted
        if drafted:
            self._since, self._left = self._since + 1, max(0, self._left - 1)
            self._plain.clear()
            self._drafted.extend([ratio] if self._run > 1 else [])
            return False
        self._plain.extend([ratio] if SETTLE < self._run <= TRIAL else [])
        return self._finish() if self._run == TRIAL else False

    def _finish(self) -> bool:
        """Compare, if there were as many drafted steps."""
        known = len(self._drafted) >= len(self._plain)
        if known:
            self.ratios.append(median(self._plain) / median(self._drafted))
        self._drafted.clear()
        self._trying, self._since = False, 0
        return known
