# mypy: allow-untyped-defs
"""The decision on the device: the gain of every bucket, and the bucket that is worth most."""

import triton
import triton.language as tl
from triton.language.standard import _elementwise_min

from .order import INFINITY, INT32_MAX, clamp, stops
from .select import add, count_step, count_tile, gain, highest, read_tile, search

NOT_LISTED = tl.constexpr(1 << 40)  # above every budget


@triton.jit
def table_row(table, rows, buckets, active):
    """Row clamp(active, 1, rows) - 1 of a table [rows, buckets]."""
    return table + (clamp(active, 1, rows) - 1).to(tl.int64) * buckets


@triton.jit
def to_int32(tokens):
    return tl.minimum(tokens, INT32_MAX).to(tl.int32)


@triton.jit
def is_enabled(cost, budget):
    bits = cost.to(tl.int32, bitcast=True)
    return (budget > 0) & (bits > 0) & (bits < INFINITY)


@triton.jit
def utilities(gains, cost, budget):
    """Gain per cost as the bits of a float64, which order like the values; -1 for buckets that are disabled."""
    enabled = is_enabled(cost, budget)
    quotient = gains.to(tl.float64) / tl.where(enabled, cost, 1.0).to(tl.float64)
    return tl.where(enabled, quotient.to(tl.int64, bitcast=True), -1)


@triton.jit
def early_utilities(gains, more, envelope, mask, cost, budget, lowest):
    """The smallest budget that stops has the largest of these, without any the largest; -1 for what is disabled."""
    height, slope = tl.load(envelope, mask=mask, other=0), tl.load(envelope + 1, mask=mask, other=0)
    stop = (budget >= lowest) & stops(gains, more - gains, height, slope)
    wide = budget.to(tl.int64)
    return tl.where(is_enabled(cost, budget), tl.where(stop, (1 << 33) - wide, wide), -1)


@triton.jit
def bounds(mandatory, candidates, base, active, capacity):
    """Least and largest number of tokens of the step, and the base tokens that are not verified."""
    lowest = base + mandatory
    return lowest, tl.maximum(lowest, tl.minimum(lowest + candidates, capacity)), base - active


@triton.jit
def write_next(next_budget, host_budget, budget):
    """What the next step is to use: the budget and a count of the steps, as one word too."""
    if tl.program_id(0) == 0:
        count = (tl.load(next_budget + 1).to(tl.int64) + 1) & 0xFFFFFFFF
        tl.store(next_budget, budget.to(tl.int32))
        tl.store(next_budget + 1, count.to(tl.int32))
        if host_budget is not None:
            tl.store(host_budget, (count << 32) | budget)


@triton.jit
def decide(scores, options, sizes, tables, policy, capacity, COUNT_BONUS: tl.constexpr, ONE: tl.constexpr,
           ROWS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Write decision and gains; return the limit, the ties at it, the tokens of the step, and the rank tile.

    Every program of a launch decides, and takes the same decision; the first one writes it.
    """
    budgets, costs, budget_rows, cost_rows, envelope_rows, buckets, decision, gains = tables
    budget, envelope, next_budget, host_budget = policy
    active = sizes[0]
    rank = active  # read anew, tile by tile, unless one holds all
    if ONE:
        rank, drafts, floor, base = read_tile(scores, options, 0, sizes, ROWS, WIDTH)
        mandatory, candidates, tokens = count_tile(drafts, floor, base)
    else:
        mandatory, candidates, tokens = count_step(scores, options, sizes, ROWS, WIDTH)
    lowest, most, prompt = bounds(mandatory, candidates, tokens, active, capacity)
    least = (lowest - prompt).to(tl.int32)
    raw_row = table_row(budgets, budget_rows, buckets, active)
    cost_row = table_row(costs, cost_rows, buckets, active)
    envelope_row = costs
    if envelope is not None:
        envelope_row = table_row(envelope, envelope_rows, 2 * buckets, active)

    total = most
    if budget is not None:
        total = clamp(tl.load(budget).to(tl.int64), lowest, most)
    padded = tl.full([], NOT_LISTED, tl.int64)
    best = tl.full([], -1, tl.int32)
    worth = tl.full([], -1, tl.int64)
    packed = tl.full([], 0, tl.int64)
    chunk = 0
    while chunk < buckets:
        r = chunk + tl.arange(0, CHUNK)
        raw = tl.load(raw_row + r, mask=r < buckets, other=0)
        cost = tl.load(cost_row + r, mask=r < buckets, other=0.0)
        wanted = (clamp(raw.to(tl.int64), lowest, most) - prompt).to(tl.int32)
        low, found = search(rank, scores, options, sizes, wanted, least, ONE, ROWS, WIDTH)
        ties = (wanted - found).to(tl.int64)
        g = gain(rank, scores, options, sizes, low, ties, tl.minimum(chunk, 0), COUNT_BONUS, ONE, ROWS, WIDTH)
        if tl.program_id(0) == 0:
            tl.store(gains + r, g, mask=r < buckets)
        if budget is not None:
            holds = tl.where((raw >= total) & (r < buckets), raw.to(tl.int64), NOT_LISTED)
            padded = tl.minimum(padded, tl.reduce(holds, 0, _elementwise_min))
        if budget is None or next_budget is not None:
            if envelope is not None:
                one_more = tl.minimum(wanted + 1, (most - prompt).to(tl.int32))
                low_more, found = search(rank, scores, options, sizes, one_more, least, ONE, ROWS, WIDTH)
                ties_more = (one_more - found).to(tl.int64)
                more = gain(rank, scores, options, sizes, low_more, ties_more, tl.minimum(chunk, 0), COUNT_BONUS, ONE,
                            ROWS, WIDTH)  # fmt: skip
                u = early_utilities(g, more, envelope_row + 2 * r, r < buckets, cost, raw, lowest)
            else:
                u = utilities(g, cost, raw)
            top = highest(u, 0)
            first = tl.reduce(tl.where(u == top, r, INT32_MAX), 0, _elementwise_min)
            here = add(tl.where(r == first, (ties << 32) + low, 0), 0)
            best = tl.where(top > worth, first, best)
            packed = tl.where(top > worth, here, packed)
            worth = tl.maximum(worth, top)
        chunk += CHUNK

    raw = tl.load(raw_row + best, mask=best >= 0, other=INT32_MAX).to(tl.int64)
    if next_budget is not None:
        write_next(next_budget, host_budget, raw)
    if budget is not None:
        best = tl.full([], -1, tl.int32)
    if best >= 0:
        total = clamp(raw, lowest, most)
        padded = tl.maximum(total, raw)
    else:
        wanted = tl.full([1], 0, tl.int32) + (total - prompt).to(tl.int32)
        low, found = search(rank, scores, options, sizes, wanted, least, ONE, ROWS, WIDTH)
        packed = add(((wanted - found).to(tl.int64) << 32) + low, 0)
        padded = tl.where(padded < NOT_LISTED, padded, total)
    if tl.program_id(0) == 0:
        tl.store(decision, best)
        tl.store(decision + 1, to_int32(total))
        tl.store(decision + 2, to_int32(total))
        tl.store(decision + 3, to_int32(padded))
    return (packed & 0xFFFFFFFF).to(tl.int32), (packed >> 32).to(tl.int32), total, total - prompt, rank
