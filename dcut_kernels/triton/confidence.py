# mypy: allow-untyped-defs
"""Confidences from logits: one program for each row, whose lanes keep sums of their own until the end."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.standard import _elementwise_max, _elementwise_min, _sum_combine
from triton.runtime.interpreter import InterpretedFunction

from .._confidence import FLOAT32_MAX, TEMPERATURES
from .._schema import STATISTICS
from . import ops

BLOCK = 2048  # logits that a program reads at once
WARPS = 8
MOST = tl.constexpr(FLOAT32_MAX)
NONE = tl.constexpr(-float("inf"))
LOWEST = tl.constexpr(-60.0)  # log2 of the smallest ratio to the maximum that counts
COOLEST, HOTTEST = tl.constexpr(TEMPERATURES[0]), tl.constexpr(TEMPERATURES[1])
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def draft_confidence(
    logits, temperature, given, draft_ids, values, rows, draft_len, vocab,
    KINDS: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """KINDS holds the COUNT statistics, two bits each, the first one lowest."""
    row = tl.program_id(0).to(tl.int64)
    mine = logits + row * vocab
    t = tl.full([], 1.0, tl.float64)
    if temperature is not None:
        read = tl.load(temperature + row % draft_len).to(tl.float64)
        t = tl.where(read > 0, tl.minimum(tl.maximum(read, COOLEST), HOTTEST), t)
    scale = (tl.full([], LOG2_E, tl.float64) / t).to(tl.float32)

    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], NONE, tl.float32)
    second = top
    token = lane
    equals = tl.full([BLOCK], 0.0, tl.float32)  # of the lane's maximum: counted apart, so that 1 - q keeps its digits
    others = equals
    squares = equals
    for start in range(0, vocab, BLOCK):
        at = start + lane
        x = tl.load(mine + at, mask=at < vocab, other=NONE).to(tl.float32)
        x = tl.where(x == x, tl.minimum(x, MOST), NONE)
        higher = x > top
        power = (tl.minimum(x, top) - tl.maximum(tl.maximum(x, top), -MOST)) * scale
        ratio = tl.where((power < 0) & (power > LOWEST), tl.exp2(power), 0.0)
        others = tl.where(higher, (others + equals) * ratio, others + ratio)
        squares = tl.where(higher, (squares + equals) * ratio * ratio, squares + ratio * ratio)
        equals = tl.where(higher, 1.0, equals + tl.where((x == top) & (x > NONE), 1.0, 0.0))
        second = tl.where(higher, top, tl.maximum(second, x))
        token = tl.where(higher, at, token)
        top = tl.maximum(top, x)

    found = tl.reduce(top, 0, _elementwise_max)
    highest = tl.maximum(found, -MOST)
    first = tl.reduce(tl.where(top == found, token, 0x7FFFFFFF), 0, _elementwise_min)
    runner_up = tl.reduce(tl.where((top == found) & (token == first), second, top), 0, _elementwise_max)
    power = (top - highest) * scale
    ratio = tl.where((power < 0) & (power > LOWEST), tl.exp2(power), 0.0).to(tl.float64)
    is_top = top == highest
    lane_others = tl.where(is_top, others.to(tl.float64), (others + equals).to(tl.float64) * ratio)
    lane_squares = tl.where(is_top, squares.to(tl.float64), (squares + equals).to(tl.float64) * ratio * ratio)
    tops = tl.maximum(tl.reduce(tl.where(is_top, equals, 0.0).to(tl.float64), 0, _sum_combine), 1.0)
    rest = tl.reduce(lane_others, 0, _sum_combine)
    total = tops + rest

    chosen = first.to(tl.int64)
    if given is not None:
        chosen = tl.load(given + row)
    exists = (chosen >= 0) & (chosen < vocab)
    x = tl.load(mine + chosen, mask=exists, other=NONE).to(tl.float32)
    x = tl.where(x == x, tl.minimum(x, MOST), NONE)
    tl.store(draft_ids + row, chosen)
    for s in tl.static_range(COUNT):
        if (KINDS >> (2 * s)) & 3 == 0:
            value = (x.to(tl.float64) - highest) / t - tl.log(1.0 + (tops - 1.0 + rest))
            value = tl.where(found > NONE, value, NONE)
        else:
            if (KINDS >> (2 * s)) & 3 == 1:
                value = 1.0 / total
            elif (KINDS >> (2 * s)) & 3 == 2:
                value = (tops + tl.reduce(lane_squares, 0, _sum_combine)) / (total * total)
            else:
                value = (1.0 - tl.exp((runner_up.to(tl.float64) - highest) / t)) / total
            value = tl.where(found > NONE, value, 0.0)
        tl.store(values + s * rows + row, value.to(tl.float32))


@cache
def _interpreted() -> InterpretedFunction:
    return InterpretedFunction(draft_confidence.fn)


def launch(args: dict[str, Any], draft_ids: torch.Tensor, values: torch.Tensor) -> ops.Launch:
    """The launch for one call."""
    logits = args["logits"]
    kinds = [STATISTICS.index(name) for name in args["statistics"]]
    arguments = {
        "logits": logits,
        "temperature": args["temperature"],
        "given": args["draft_ids"],
        "draft_ids": draft_ids,
        "values": values,
        "rows": draft_ids.numel(),
        "draft_len": logits.shape[1],
        "vocab": logits.shape[2],
        "KINDS": sum(kind << 2 * s for s, kind in enumerate(kinds)),
        "COUNT": len(kinds),
        "BLOCK": BLOCK,
    }
    return ops.Launch("draft_confidence", draft_ids.numel(), arguments, WARPS)


def run(args: dict[str, Any], draft_ids: torch.Tensor, values: torch.Tensor) -> None:
    """Fill `draft_ids` and `values`."""
    if draft_ids.numel() == 0:
        return
    made = launch(args, draft_ids, values)
    if draft_ids.device.type == "cpu":
        with ops._interpreter:
            _interpreted()[(made.programs,)](**made.arguments)
        return
    with torch.get_device_module(draft_ids.device).device(draft_ids.device):
        draft_confidence[(made.programs,)](**made.arguments, num_warps=made.warps, enable_fp_fusion=False)
