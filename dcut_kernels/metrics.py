"""What a planner counts, on the host, from steps that are over."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

UNIT = 1 << 30  # of gains


@dataclass
class RequestStats:
    """One request, since it joined.

    Attributes
    ----------
    drafts, kept, accepted : int
        Draft tokens that existed, that were verified, and that the target accepted.
    without, longest_without : int
        Steps in a row, up to now and at most, with drafts of which none was kept.
    """

    drafts: int = 0
    kept: int = 0
    accepted: int = 0
    without: int = 0
    longest_without: int = 0

    @property
    def kept_share(self) -> float:
        """Share of its drafts that were verified; 1 if it had none."""
        return self.kept / self.drafts if self.drafts else 1.0

    def add(self, drafts: int, kept: int, accepted: int) -> None:
        self.drafts, self.kept, self.accepted = self.drafts + drafts, self.kept + kept, self.accepted + accepted
        self.without = self.without + 1 if drafts > 0 and kept == 0 else 0
        self.longest_without = max(self.longest_without, self.without)


@dataclass
class Metrics:
    """All steps that were observed.

    Attributes
    ----------
    steps, probes, plain : int
        Steps that were observed; of all steps those that drafted only to see whether it pays, and those that did not
        draft.
    buckets : list of int [R + 1]
        How often each bucket was used; the last entry counts steps whose budget is no bucket.
    drafts, kept, accepted : int
        Draft tokens that existed, were verified, were accepted.
    tokens : int
        Tokens that were committed: accepted drafts and one more for each row.
    expected : float
        What the scores promised of `tokens`.
    requests : dict
        `RequestStats` of each request that is there, by the name that the engine gave it.
    """

    buckets: list[int]
    steps: int = 0
    probes: int = 0
    plain: int = 0
    drafts: int = 0
    kept: int = 0
    accepted: int = 0
    tokens: int = 0
    expected: float = 0.0
    requests: dict[Hashable, RequestStats] = field(default_factory=dict)

    @property
    def pruned(self) -> int:
        """Draft tokens that existed and were not verified."""
        return self.drafts - self.kept

    def add(
        self,
        requests: Sequence[Hashable],
        drafts: Sequence[int],
        kept: Sequence[int],
        accepted: Sequence[int],
        bucket: int,
        expected: float,
    ) -> None:
        """Count one step, row by row."""
        self.steps += 1
        self.buckets[bucket] += 1
        self.expected += expected
        self.drafts += sum(drafts)
        self.kept += sum(kept)
        self.accepted += sum(accepted)
        self.tokens += sum(accepted) + len(accepted)
        for request, *row in zip(requests, drafts, kept, accepted, strict=True):
            if request in self.requests:
                self.requests[request].add(*row)

    def state(self) -> dict[str, Any]:
        """Everything, as plain Python values."""
        return asdict(self)

    @classmethod
    def of(cls, state: dict[str, Any]) -> Metrics:
        """What `state` returned, once more."""
        requests = {name: RequestStats(**values) for name, values in state["requests"].items()}
        return cls(**{**state, "requests": requests})
