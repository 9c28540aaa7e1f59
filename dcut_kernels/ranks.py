"""What several ranks say to each other: nothing, one message from rank 0, or a sum of integers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .batch import VerifyBatch
from .ops import Backend

PACK_OPTIONS = ("row_index", "base_lens", "num_reqs", "block_table", "block_size", "pad_token")


class Ranks:
    """The ranks of a group, for a planner.

    Parameters
    ----------
    group : ProcessGroup, optional
        The default group without it.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self._sums: tuple[Tensor, Tensor] | None = None  # gains of all ranks [R], and their largest batch [1]
        self._tables: tuple[Tensor, Tensor] | None = None
        self._work: list[Any] = []

    def lead(self, batch: VerifyBatch) -> None:
        """Rank 0: send what it has decided."""
        self._send(torch.cat((batch.keep_lens, batch.decision)))

    def follow(
        self, backend: Backend, rows: int, draft_ids: Tensor, bonus_ids: Tensor, seq_lens: Tensor, capacity: int,
        options: dict[str, Any],
    ) -> VerifyBatch:  # fmt: skip
        """The others: pack what rank 0 has decided; there are no gains."""
        message = torch.empty(rows + 4, dtype=torch.int32, device=bonus_ids.device)
        self._send(message)
        packing = {name: options[name] for name in PACK_OPTIONS if name in options}
        keep_lens = message[:rows].clone()
        packed = backend.pack_prefixes(keep_lens, draft_ids, bonus_ids, seq_lens, capacity=capacity, **packing)
        return packed._replace(decision=message[rows:])

    def say(self, yes: bool, device: torch.device) -> None:
        """Rank 0: send an answer."""
        self._send(torch.tensor([yes], dtype=torch.int32, device=device))

    def hear(self, device: torch.device) -> bool:
        """The others: the answer of rank 0."""
        self._send(message := torch.empty(1, dtype=torch.int32, device=device))
        return bool(message)

    def _send(self, message: Tensor) -> None:
        source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        dist.broadcast(message, source, self.group)

    def start(self, gains: Tensor, budgets: Tensor, costs: Tensor, batch: int) -> None:
        """Begin to sum the gains of all ranks, next to whatever the device does."""
        self._sums = gains.clone(), torch.full((1,), batch, device=gains.device)
        self._tables = budgets, costs
        operations = (dist.ReduceOp.SUM, dist.ReduceOp.MAX)
        self._work = [
            dist.all_reduce(values, operation, self.group, async_op=True)
            for values, operation in zip(self._sums, operations, strict=True)
        ]

    def finish(self, next_budget: Tensor) -> None:
        """Put the bucket with the largest sum of gains per cost into ``next_budget[0]``, on every rank the same.

        The row of the tables is that of the largest batch.  Sums of integers do not depend on an order, and the
        division is that of `select_and_pack`.
        """
        if self._sums is None or self._tables is None:
            return
        for work in self._work:
            work.wait()
        gains, batch = self._sums
        budgets, costs = (
            table if table.dim() == 1 else table[(batch.clamp(1, len(table)) - 1)][0] for table in self._tables
        )
        enabled = (costs > 0) & torch.isfinite(costs) & (budgets > 0)
        utility = torch.where(enabled, gains.double() / costs.double(), -1.0)
        best = budgets[utility.argmax()]  # of equals the first, which is the smallest bucket
        next_budget[:1] = torch.where(enabled.any(), best, 2**31 - 1)
        self._sums = None
