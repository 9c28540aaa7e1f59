"""Recorded drafts, served one step at a time."""

from __future__ import annotations

import functools
from importlib import resources
from typing import NamedTuple, Protocol

import numpy as np

CLOSED_LOOP = "anchors_tiny_a"


class Step(NamedTuple):
    """What a drafter proposed for every request of one step, and what the target says to it."""

    confidence: np.ndarray  # float32 [B, D]
    draft_ids: np.ndarray  # int32 [B, D]
    bonus_ids: np.ndarray  # int32 [B]
    seq_lens: np.ndarray  # int32 [B], position of the bonus token
    target_ids: np.ndarray  # int32 [B, D+1], the target's greedy tokens after the bonus; -1 where not recorded
    request: np.ndarray  # int64 [B], number of the request, counted from the start of the replay


class Source(Protocol):
    """A recording that can be replayed.

    ``exact`` says whether a policy that verifies less still sees the steps that it would see in a live engine.
    """

    name: str
    exact: bool
    batch: int
    draft_len: int

    def step(self) -> Step:
        """Drafts of the current step."""
        ...

    def advance(self, accepted: np.ndarray) -> None:
        """Go on to the next step, given the accepted draft tokens [B] of the current one."""
        ...

    def greedy_text(self, request: int) -> np.ndarray | None:
        """Tokens that plain greedy decoding gives this request, from its first bonus token on; None if not recorded."""
        ...


class ClosedLoop:
    """Drafts at every position of a set of greedy texts, decoded by ``batch`` requests at a time.

    A request that reaches the end of its recorded positions is replaced by the next text.  What the drafter says at a
    position depends only on the text before it, so the replay is exact for every policy.
    """

    exact = True

    def __init__(self, batch: int) -> None:
        self.name = CLOSED_LOOP
        self._data = load(self.name)
        self.batch = batch
        self.texts, self.anchors, self.draft_len = self._data["draft_ids"].shape
        self._prompt_len = int(self._data["prompt_len"])
        self._request = np.arange(batch)
        self._anchor = np.zeros(batch, dtype=np.int64)
        self._started = batch

    def step(self) -> Step:
        text = self._request % self.texts
        position = self._prompt_len + self._anchor
        after = position[:, None] + 1 + np.arange(self.draft_len + 1)  # [B, D+1]
        tokens = np.pad(self._data["token_ids"], ((0, 0), (0, 1)), constant_values=-1)
        return Step(
            confidence=self._data["confidence"][text, self._anchor],
            draft_ids=self._data["draft_ids"][text, self._anchor],
            bonus_ids=tokens[text, position],
            seq_lens=position.astype(np.int32),
            target_ids=tokens[text[:, None], after],
            request=self._request.copy(),
        )

    def advance(self, accepted: np.ndarray) -> None:
        self._anchor += accepted + 1
        for row in np.flatnonzero(self._anchor >= self.anchors):
            self._anchor[row], self._request[row] = 0, self._started
            self._started += 1

    def greedy_text(self, request: int) -> np.ndarray | None:
        return self._data["token_ids"][request % self.texts, self._prompt_len :]


class RecordedTrace:
    """Steps of a batch decoded under full verification, in their recorded order whatever is accepted.

    Exact for full verification.  Another policy is applied to the same steps: what it keeps of each is exact, but a
    live engine would then have gone on to other positions.
    """

    exact = False

    def __init__(self, trace: str, batch: int) -> None:
        self.name = f"trace_{trace}"
        data = load(self.name)
        self._data = {key: data[key][:, :batch] for key in data if data[key].ndim >= 2}
        self.steps, self.batch, self.draft_len = self._data["draft_ids"].shape
        self._index = 0

    def step(self) -> Step:
        data = {key: values[self._index] for key, values in self._data.items()}
        return Step(
            confidence=data["confidence"],
            draft_ids=data["draft_ids"],
            bonus_ids=data["bonus_ids"],
            seq_lens=data["seq_lens"],
            target_ids=_target_ids(data["draft_ids"], data["accepted"], data["next_bonus_ids"]),
            request=data["request_uid"].astype(np.int64),
        )

    def advance(self, accepted: np.ndarray) -> None:
        self._index += 1

    def greedy_text(self, request: int) -> np.ndarray | None:
        return None


def _target_ids(draft_ids: np.ndarray, accepted: np.ndarray, next_bonus_ids: np.ndarray) -> np.ndarray:
    """Target tokens [B, D+1] that a trace implies: the accepted drafts, the next bonus token, then unknown (-1)."""
    target = np.full((len(draft_ids), draft_ids.shape[1] + 1), -1, dtype=draft_ids.dtype)
    known = np.arange(draft_ids.shape[1]) < accepted[:, None]
    target[:, :-1][known] = draft_ids[known]
    target[np.arange(len(target)), accepted] = next_bonus_ids
    return target


@functools.cache
def load(name: str) -> dict[str, np.ndarray]:
    """Arrays of one recording."""
    with resources.as_file(resources.files(__package__) / "data" / f"{name}.npz") as path, np.load(path) as data:
        return {key: data[key] for key in data.files}
