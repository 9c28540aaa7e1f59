"""Requests and the blocks that they own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(eq=False)
class Request:
    """One request: its prompt, its text so far, and where it stands.

    ``seed`` fixes the sampling noise of every position, so that its text depends on nothing else.
    """

    prompt: list[int]
    max_tokens: int
    seed: int = 0
    output: list[int] = field(default_factory=list)
    cached: int = 0  # prompt tokens in the cache
    blocks: list[int] = field(default_factory=list)
    finished: bool = False
    stand_in: bool = False  # fills a profiled step

    @property
    def in_prompt(self) -> bool:
        return not self.output

    @property
    def last_position(self) -> int:
        """Position of the last generated token, the bonus token of the next step."""
        return len(self.prompt) + len(self.output) - 1

    def commit(self, tokens: list[int], eos: int) -> int:
        """Append tokens up to the first <eos> and the limit; returns how many."""
        kept = tokens[: self.max_tokens - len(self.output)]
        if eos in kept:
            kept = kept[: kept.index(eos) + 1]
        self.output += kept
        self.finished = len(self.output) == self.max_tokens or self.output[-1] == eos
        return len(kept)


class Scheduler:
    """Who runs: requests join as rows and blocks come free, and leave as soon as they are finished.

    A request gets all blocks that it may ever need when it joins, so nothing is preempted.
    """

    def __init__(self, max_batch: int, blocks: int, block_size: int, draft_len: int) -> None:
        self.max_batch, self.block_size, self.draft_len = max_batch, block_size, draft_len
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.free = list(range(blocks))[::-1]

    def blocks_of(self, request: Request) -> int:
        """Blocks of the longest text of a request and the drafts after it."""
        return -(-(len(request.prompt) + request.max_tokens + self.draft_len) // self.block_size)

    def update(self) -> None:
        """Let finished requests leave and waiting ones join."""
        for request in self.running:
            if request.finished:
                self.free += request.blocks
                request.blocks = []
        self.running = [request for request in self.running if not request.finished]
        while self.waiting and len(self.running) < self.max_batch:
            needed = self.blocks_of(self.waiting[0])
            if needed > len(self.free):
                break
            request = self.waiting.popleft()
            request.blocks = [self.free.pop() for _ in range(needed)]
            self.running.append(request)

    def clear(self) -> None:
        """Let all requests leave, whether finished or not."""
        self.waiting.clear()
        for request in self.running:
            request.finished = True
        self.update()
