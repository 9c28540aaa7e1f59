"""How long steps take now, relative to the table that was measured before."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

SOONEST = 16  # drafted steps from one trial to the next, and plain steps from one probe to the next
TRIAL = 5  # plain steps of a trial; the first one finds the caches of drafted ones
WINDOW = 8  # drafted steps before a trial that it is compared with
TRIALS = 8  # that count
FORGET = 512  # plain steps after which one trial less does: a machine does not stay as it was


class Pace:
    """Compares plain steps with drafted ones, each by its time over its cost in the table.

    It does so only while drafting pays: a few plain steps then cost little, and next to nothing where both ways are
    close.

    Parameters
    ----------
    share : float
        Of the speed, that trials may cost.
    ratios : sequence of float
        Of trials: how much longer plain steps took than drafted ones.
    """

    def __init__(self, share: float, ratios: Sequence[float] = ()) -> None:
        self.share = share
        self.ratios: deque[float] = deque(ratios, maxlen=TRIALS)
        self._drafted: deque[float] = deque(maxlen=WINDOW)
        self._plain: list[float] = []
        self._last: bool | None = None
        self._trying = False
        self._since = 0  # drafted steps since the last trial
        self._idle = 0  # plain steps since the last drafted one

    def correction(self) -> float:
        """Factor of the gain of drafting, from 0.5 to 2: the median of trials and of the table's 1."""
        return min(max(median([1.0, *self.ratios]), 0.5), 2.0)

    def tries(self, gain: float) -> bool:
        """Whether the coming step is to be plain and timed, although drafting has such a gain over it."""
        lost = TRIAL * (1 - 1 / gain)  # steps' worth of time
        self._trying |= self._since >= max(SOONEST, lost / self.share)
        return self._trying

    def add(self, drafted: bool, ratio: float) -> bool:
        """Count a step that was timed; whether the correction has changed.

        Parameters
        ----------
        drafted : bool
            Whether its requests drafted.
        ratio : float
            Its time over its cost.
        """
        first, self._last = drafted != self._last, drafted
        if drafted:
            self._since, self._idle = self._since + 1, 0
            self._drafted.extend([] if first else [ratio])
            return False
        if self._trying:
            self._plain.extend([] if first else [ratio])
            return self._finish() if len(self._plain) >= TRIAL - 1 else False
        self._idle += 1
        self._drafted.clear()
        forgets = self._idle % FORGET == 0 and len(self.ratios) > 0
        if forgets:
            self.ratios.popleft()
        return forgets

    def _finish(self) -> bool:
        """End a trial."""
        known = len(self._drafted) > 0
        if known:
            self.ratios.append(median(self._plain) / median(self._drafted))
        self._plain.clear()
        self._drafted.clear()
        self._trying, self._since = False, 0
        return known
