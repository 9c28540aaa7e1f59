"""Host side of the Triton backend: which kernel runs, on which tiles, with which arguments."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from .._check import ROW_OPTIONS, Sizes
from .._schema import OUTPUTS

try:
    import triton
except ImportError as error:
    raise ImportError("triton: expected version 3.6 or newer, got none; pip install 'dcut_kernels[triton]'") from error

from triton.language import constexpr
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from . import decide, kernels, order, pack, select

TILE = 4096  # positions that one program holds in registers
PACK_TILE = 1024  # positions that one program packs at once
PROGRAMS = {"cpu": 2}  # at most; the interpreter takes turns at a decision that each of them repeats
MOST_PROGRAMS = 32
_interpreter = threading.Lock()  # the interpreter has one grid at a time


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n` and 1."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel."""

    kernel: str
    programs: int
    arguments: dict[str, Any]
    warps: int


@dataclass(frozen=True)
class Tiles:
    """How a step is cut into tiles: [rows, width] to rank it and [pack, width] to pack it, all powers of two."""

    width: int
    rows: int
    pack: int
    one: bool  # a single tile holds the step

    @classmethod
    def of(cls, batch: int, draft_len: int) -> Tiles:
        width = max(2, power_of_two(draft_len + 1))
        rows = max(2, power_of_two(batch))
        one = rows * width <= TILE
        rows = rows if one else max(2, TILE // width)
        return cls(width, rows, min(rows, max(2, PACK_TILE // width)), one)

    @property
    def warps(self) -> int:
        return _warps(self.rows * self.width)

    def chunk(self, buckets: int) -> int:
        """Buckets that are ranked at once: as many as leave each thread 32 comparisons, or 16 in large tiles."""
        positions = self.rows * self.width
        most = (32 if positions <= 1024 else 16) * 32 * self.warps
        return min(power_of_two(buckets), max(1, most // positions))

    def share(self, batch: int, device: torch.device) -> tuple[int, int]:
        """Programs that pack, and the rows of each."""
        tiles = -(-batch // self.pack)
        share = max(1, -(-tiles // PROGRAMS.get(device.type, MOST_PROGRAMS))) * self.pack
        return max(1, -(-batch // share)), share


def _warps(positions: int) -> int:
    return 4 if positions <= 1024 else 16


@cache
def _interpreted() -> dict[str, Any]:
    """Every kernel and helper once more, for the interpreter, whatever `TRITON_INTERPRET` says.

    Helpers are rewritten functions: an `InterpretedFunction` would patch the language again at each of their calls.
    """
    names: dict[str, Any] = {}
    for module in (order, select, decide, pack, kernels):
        for name, value in vars(module).items():
            if isinstance(value, JITFunction | InterpretedFunction) and value.fn.__module__ == module.__name__:
                function = InterpretedFunction(FunctionType(value.fn.__code__, names, name))
                names[name] = function if module is kernels else function.rewrite()
            elif isinstance(value, constexpr | JITFunction | InterpretedFunction) or value is triton.language:
                names.setdefault(name, value)
    return names


def run(launch: Launch, device: torch.device) -> None:
    """Launch a kernel on a GPU, or interpret it for tensors on the CPU."""
    if device.type == "cpu":
        with _interpreter:
            _interpreted()[launch.kernel][(launch.programs,)](**launch.arguments)
        return
    kernel = getattr(kernels, launch.kernel)
    with torch.get_device_module(device).device(device):
        kernel[(launch.programs,)](**launch.arguments, num_warps=launch.warps, enable_fp_fusion=False)


def _rows_of(table: Tensor | None, dims: int = 1) -> int:
    return table.shape[0] if table is not None and table.dim() > dims else 1


def _tables(args: dict[str, Any]) -> dict[str, Any]:
    names = ("budgets", "costs", "budget", "envelope", "next_budget", "host_budget")
    return {name: args[name] for name in names} | {
        "budget_rows": _rows_of(args["budgets"]),
        "cost_rows": _rows_of(args["costs"]),
        "envelope_rows": _rows_of(args["envelope"], 2),
    }


def _overlap(budget: Tensor | None, next_budget: Tensor | None) -> bool:
    """Whether a program could write the next budget before another one has read this one's."""
    if budget is None or next_budget is None:
        return False
    return 0 <= budget.data_ptr() - next_budget.data_ptr() < 8


def _paging(args: dict[str, Any]) -> dict[str, Any]:
    table = args["block_table"]
    return {
        "block_table": table,
        "max_blocks": 0 if table is None else table.shape[1],
        "block_size": 1 if table is None else args["block_size"],
        "pad_token": args["pad_token"],
    }


def fused(args: dict[str, Any], sizes: Sizes, out: dict[str, Tensor], fresh: bool) -> Launch:
    """The launch of the fused operator."""
    tiles = Tiles.of(sizes.batch, sizes.draft_len)
    programs, share = tiles.share(sizes.batch, args["draft_ids"].device)
    if _overlap(args["budget"], args["next_budget"]):
        programs, share = 1, max(sizes.batch, 1)
    arguments = {
        name: args[name] for name in ("confidence", "calibration", "draft_ids", "bonus_ids", "seq_lens", *ROW_OPTIONS)
    }
    arguments |= _tables(args) | _paging(args) | {name: out[name] for name in OUTPUTS}
    arguments |= {name: getattr(sizes, name) for name in ("batch", "slots", "draft_len", "buckets", "capacity")}
    arguments |= {"row_index": args["row_index"], "share": share}
    arguments |= {"SHIFTED": args["score"] == "shifted", "LOG": args["log_confidence"], "FRESH": fresh}
    arguments |= {"COUNT_BONUS": args["count_bonus"], "ONE": tiles.one}
    arguments |= {"ROWS": tiles.rows, "WIDTH": tiles.width, "CHUNK": tiles.chunk(sizes.buckets), "PACK": tiles.pack}
    return Launch("select_and_pack", programs, arguments, tiles.warps)


def prefixes(args: dict[str, Any], sizes: Sizes, prefix: Tensor) -> Launch:
    """The launch of the first part."""
    width = max(2, power_of_two(sizes.draft_len + 1))
    rows = max(2, min(power_of_two(sizes.batch), PACK_TILE // width))
    arguments = {name: args[name] for name in ("confidence", "calibration", "row_index")} | {"prefix": prefix}
    arguments |= {name: getattr(sizes, name) for name in ("batch", "slots", "draft_len")}
    arguments |= {"SHIFTED": args["score"] == "shifted", "LOG": args["log_confidence"], "ROWS": rows, "WIDTH": width}
    return Launch("log_prefix_sum", -(-sizes.batch // rows), arguments, _warps(rows * width))


def _ranked(args: dict[str, Any], sizes: Sizes) -> tuple[dict[str, Any], Tiles]:
    tiles = Tiles.of(sizes.batch, sizes.draft_len)
    arguments = {name: args[name] for name in ("prefix", *ROW_OPTIONS)}
    arguments |= {name: getattr(sizes, name) for name in ("batch", "draft_len", "buckets", "capacity")}
    return arguments | {"ONE": tiles.one, "ROWS": tiles.rows, "WIDTH": tiles.width}, tiles


def depths(args: dict[str, Any], sizes: Sizes, keep: Tensor) -> Launch:
    """The launch of the second part: one program for each bucket."""
    arguments, tiles = _ranked(args, sizes)
    arguments |= {"budgets": args["budgets"], "budget_rows": _rows_of(args["budgets"])}
    return Launch("segmented_topk", sizes.buckets, arguments | {"keep": keep, "PACK": tiles.pack}, tiles.warps)


def decision_of(args: dict[str, Any], sizes: Sizes, decision: Tensor, gains: Tensor) -> Launch:
    """The launch of the third part."""
    arguments, tiles = _ranked(args, sizes)
    arguments |= _tables(args) | {"decision": decision, "gains": gains, "COUNT_BONUS": args["count_bonus"]}
    return Launch("bucket_argmax", 1, arguments | {"CHUNK": tiles.chunk(sizes.buckets)}, tiles.warps)


def packing(args: dict[str, Any], sizes: Sizes, out: dict[str, Tensor]) -> Launch:
    """The launch of the fourth part."""
    tiles = Tiles.of(sizes.batch, sizes.draft_len)
    programs, share = tiles.share(sizes.batch, args["draft_ids"].device)
    names = ("draft_ids", "bonus_ids", "seq_lens", "row_index", "base_lens", "num_reqs")
    arguments = {name: args[name] for name in names}
    arguments |= _paging(args) | {name: out[name] for name in OUTPUTS[:10]} | {"keep": args["keep_lens"]}
    arguments |= {name: getattr(sizes, name) for name in ("batch", "slots", "draft_len", "capacity")}
    arguments |= {"share": share, "WIDTH": tiles.width, "PACK": tiles.pack}
    return Launch("pack_prefixes", programs, arguments, _warps(tiles.pack * tiles.width))


def select_and_pack(args: dict[str, Any], sizes: Sizes, out: dict[str, Tensor], fresh: bool) -> None:
    run(fused(args, sizes, out, fresh), args["confidence"].device)


def log_prefix_sum(args: dict[str, Any], sizes: Sizes, prefix: Tensor) -> None:
    if prefix.numel():
        run(prefixes(args, sizes, prefix), prefix.device)


def segmented_topk(args: dict[str, Any], sizes: Sizes, keep: Tensor) -> None:
    if keep.numel():
        run(depths(args, sizes, keep), keep.device)


def bucket_argmax(args: dict[str, Any], sizes: Sizes, decision: Tensor, gains: Tensor) -> None:
    run(decision_of(args, sizes, decision, gains), decision.device)


def pack_prefixes(args: dict[str, Any], sizes: Sizes, out: dict[str, Tensor]) -> None:
    run(packing(args, sizes, out), out["token_ids"].device)
