"""The planner in SGLang's DSpark: budget, confidences and drafts in, a ragged verification step out.

SGLang cannot be installed where this package is tested: the adapter is written against the sources of its DSpark worker
and tested against signatures and shapes recorded from them, not in a running engine.  Call `check` first.

In ``DSparkWorkerV2._forward_decode``, `RaggedVerify.select` and `RaggedVerify.layout` stand where ``schedule_layout``
is called, and `RaggedVerify.window` for ``BuildRaggedVerifyWindow`` in ``run_compact``.  `RaggedVerify.token_budget` is
what ``prepare_verify_budget`` writes on the host.  What was accepted (``correct_len``) goes to `Planner.observe`.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..batch import VerifyBatch
from ..planner import Planner

LAYOUT = "sglang.srt.speculative.ragged_verify:RaggedVerifyLayout"
WINDOW = "sglang.kernels.ops.speculative.dspark.dspark_verify_window:RaggedVerifyWindow"
DSPARK = "sglang.srt.speculative.dspark_components"
SIGNATURES = {  # what is relied on: these parameters are there, and no others are demanded
    LAYOUT: "verify_lens graph_num_tokens extend_start_loc qo_indptr_device verify_lens_cpu total_verify_tokens",
    WINDOW: "positions verify_cache_loc verify_ids",
    f"{DSPARK}.dspark_verify:TargetVerifyExecutor._run_ragged": "self batch layout ragged_window sampling_info",
    f"{DSPARK}.dspark_planner:DSparkVerifyPlanner.prepare_verify_budget": "self batch future_map",
    "sglang.srt.speculative.dflash_info_v2:DFlashDraftInputV2":
        "topk_p topk_index bonus_tokens new_seq_lens hidden_states verify_token_budget",
}  # fmt: skip
REMEMBERED = 16  # steps that the host may be behind the device


def check() -> None:
    """Raise a RuntimeError that names what differs if the installed SGLang is not as this adapter expects it."""
    differences = [text for name, wanted in SIGNATURES.items() if (text := _difference(name, wanted.split()))]
    if differences:
        raise RuntimeError("sglang: " + "; ".join(differences))


def _difference(name: str, wanted: list[str]) -> str | None:
    try:
        parameters = inspect.signature(_find(name)).parameters
    except (ImportError, AttributeError) as error:
        return f"expected {name}, got {error}"
    demanded = {key for key, parameter in parameters.items() if parameter.default is parameter.empty}
    if demanded <= set(wanted) <= set(parameters):
        return None
    return f"expected {name.partition(':')[2]} of {', '.join(wanted)}, got {', '.join(parameters)}"


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    found = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


class RaggedVerify:
    """Steps of one DSpark worker.

    Parameters
    ----------
    planner : Planner
        Of policy "history", so that the host knows the size of a step before the device decides.  Its ``draft_len`` is
        DSpark's gamma.
    grid : sequence of int
        Captured graph sizes in tokens, ascending (``capture_num_tokens``).  Without it nothing is padded, and `layout`
        waits for the device, as SGLang does.
    """

    def __init__(self, planner: Planner, grid: Sequence[int] = ()) -> None:
        if planner.policy != "history":
            raise ValueError(f"planner: expected policy 'history', got {planner.policy!r}")
        if list(grid) != sorted(set(grid)):
            raise ValueError(f"grid: expected ascending sizes, got {[*grid]}")
        self.planner, self.grid = planner, tuple(grid)
        self._calls = int(planner.next_budget[1])
        self._rows: dict[int, int] = {}  # by number of the call, for the host hears of it later

    def token_budget(self, rows: int) -> int:
        """Tokens of the next step beyond one for each of its `rows`: DSpark's ``verify_token_budget``.

        It does not wait for the device, so it may be that of an earlier step; tensor-parallel ranks may see different
        ones, so one rank reads it for all.
        """
        calls, tokens = self.planner.read_next()
        most = rows * self.planner.draft_len
        if calls not in self._rows:
            return most
        return min(max(tokens - self._rows[calls], 0), most)

    def graph_tokens(self, rows: int, budget: int) -> int:
        """Size that a step of so many rows is padded to, from numbers that the host has."""
        tokens = rows + min(budget, rows * self.planner.draft_len)
        if not self.grid:
            return tokens
        if rows > self.grid[-1]:
            raise ValueError(f"rows: expected at most {self.grid[-1]}, the largest captured size, got {rows}")
        return self.grid[min(bisect_left(self.grid, tokens), len(self.grid) - 1)]

    def select(
        self, requests: Sequence[Hashable], confidence: Tensor, draft_block_ids: Tensor, draft_tokens: Tensor,
        prefix_lens: Tensor, budget: int,
    ) -> VerifyBatch:  # fmt: skip
        """Decide and pack; however old `budget` is, the step is not larger than `graph_tokens`.

        Takes the names of the ``bs`` requests, confidence float32 [bs, gamma], the drafter's input ids int64 [bs, any],
        whose first column is the anchors (bonus tokens), draft tokens int64 [bs, gamma], the positions of the anchors
        int64 [bs], which are ``batch.seq_lens``, and `token_budget`.
        """
        rows, ids = len(requests), self.planner.ids
        self.planner.begin(requests)
        self._calls = (self._calls + 1) % 2**32
        self._rows[self._calls] = rows
        self._rows.pop((self._calls - REMEMBERED) % 2**32, None)
        return self.planner.select(
            confidence.contiguous(), draft_tokens.to(ids).contiguous(), draft_block_ids[:, 0].to(ids).contiguous(),
            prefix_lens, capacity=self.graph_tokens(rows, budget),
        )  # fmt: skip

    def layout(self, batch: VerifyBatch) -> Any:
        """``RaggedVerifyLayout`` of a batch, good until the planner's next step of its size, as the window is."""
        verify_lens, size, on_host = batch.keep_lens + 1, len(batch.token_ids), {}
        if not self.grid:
            lens = verify_lens.tolist()
            size, on_host = sum(lens), {"verify_lens_cpu": lens, "total_verify_tokens": sum(lens)}
        return _find(LAYOUT)(
            verify_lens=verify_lens, graph_num_tokens=size, extend_start_loc=batch.cu_seqlens[:-1],
            qo_indptr_device=batch.cu_seqlens, **on_host,
        )  # fmt: skip

    def window(self, batch: VerifyBatch, layout: Any, req_pool_indices: Tensor, req_to_token: Tensor) -> Any:
        """``RaggedVerifyWindow`` of a batch and its layout: ids, positions and cache slots, 0 behind the last token.

        Takes the pool row of each request, int64 [bs], and the slots of its positions, int32 [pool, context].
        """
        row, positions = (x[: layout.graph_num_tokens] for x in (batch.request_ids.long(), batch.positions))
        slots = req_to_token[req_pool_indices[row], positions].long()  # those of the tail, row -1, are dropped
        ids = batch.token_ids[: layout.graph_num_tokens].long()
        return _find(WINDOW)(positions=positions, verify_cache_loc=torch.where(row < 0, 0, slots), verify_ids=ids)
