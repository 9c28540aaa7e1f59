# mypy: allow-untyped-defs
"""Ranking on the device: the rows of a step, the keys of their positions, and the threshold of each budget.

Tiles are [ROWS, WIDTH]: one row per request, column 0 its bonus token, column k its k-th draft token.
"""

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max, _sum_combine

from .order import (
    CALIBRATION_CELLS,
    INT32_MAX,
    Q_MAX,
    calibrate,
    clamp,
    float32_bits,
    key_of,
    q_of_confidence,
    q_of_log_confidence,
    score_of,
    w_of_weight,
)

ANYWAY = tl.constexpr(-(1 << 30))  # added to the key of a position that is verified whatever its score
KEY = tl.constexpr((1 << 30) - 1)  # the bits of a rank that are its key
NEVER = INT32_MAX  # the rank of a position that does not exist
FIRST_STEP = tl.constexpr(5**11)  # five ways at a time: twelve rounds cover every key


@triton.jit
def add(x, AXIS: tl.constexpr):
    """Sum along an axis; the combination is Triton's own, for which the interpreter calls NumPy."""
    return tl.reduce(x, AXIS, _sum_combine)


@triton.jit
def scan(x, AXIS: tl.constexpr):
    """Inclusive prefix sums along an axis."""
    return tl.associative_scan(x, AXIS, _sum_combine)


@triton.jit
def highest(x, AXIS: tl.constexpr):
    return tl.reduce(x, AXIS, _elementwise_max)


@triton.jit
def count_active(num_reqs, batch):
    if num_reqs is not None:
        return clamp(tl.load(num_reqs), 0, batch)
    else:
        return batch


@triton.jit
def read_rows(options, i, active, slots, draft_len):
    """Slot, drafts, floor and base tokens [ROWS] of the rows `i`; all but `slot` are 0 in padding rows."""
    draft_lens, min_keep, max_keep, _weight, row_index, base_lens = options
    live = i < active
    slot = i
    drafts = tl.where(live, draft_len, 0)
    if row_index is not None:
        slot = tl.load(row_index + i, mask=live, other=-1)
        exists = (slot >= 0) & (slot < slots)
        slot = tl.where(exists, slot, 0)
        drafts = tl.where(exists, draft_len, 0)
    if draft_lens is not None:
        drafts = tl.minimum(drafts, tl.maximum(tl.load(draft_lens + i, mask=live, other=0), 0))
    if max_keep is not None:
        drafts = tl.minimum(drafts, tl.maximum(tl.load(max_keep + i, mask=live, other=0), 0))
    floor = tl.full(i.shape, 0, tl.int32)
    if min_keep is not None:
        floor = clamp(tl.load(min_keep + i, mask=live, other=0), 0, drafts)
    base = live.to(tl.int32)
    if base_lens is not None:
        base = tl.where(live, tl.maximum(tl.load(base_lens + i, mask=live, other=1), 1), 0)
    return slot, drafts, floor, base


@triton.jit
def sum_confidences(confidence, calibration, slot, drafts, draft_len, SHIFTED: tl.constexpr, LOG: tl.constexpr,
                    WIDTH: tl.constexpr):  # fmt: skip
    """Prefix sums [ROWS, WIDTH] of the first `drafts` positions of each row."""
    k = tl.arange(0, WIDTH)[None, :]
    first: tl.constexpr = 2 if SHIFTED else 1  # the first column that a confidence ranks
    mask = (k >= first) & (k <= drafts[:, None])
    bits = float32_bits(tl.load(confidence + (slot[:, None] * draft_len + (k - first)), mask=mask, other=1.0))
    q = q_of_log_confidence(bits) if LOG else q_of_confidence(bits)
    if calibration is not None:
        q = calibrate(q, calibration + (k - first) * (CALIBRATION_CELLS + 1), mask)
    q = tl.where(mask, q, 0).to(tl.uint32)  # 63 of them fit uint32
    return tl.minimum(scan(q, 1), Q_MAX).to(tl.int32)


@triton.jit
def repair_prefixes(prefix, i, drafts, draft_len, WIDTH: tl.constexpr):
    """Given prefix sums [ROWS, WIDTH], clamped and made non-decreasing, and drafts, none where a row starts below 0."""
    k = tl.arange(0, WIDTH)[None, :]
    live = drafts > 0
    start = prefix + i * draft_len
    drafts = tl.where(tl.load(start, mask=live, other=0) < 0, 0, drafts)
    top = tl.full(i.shape, 0, tl.int32)
    tile = top[:, None] + tl.full([1, WIDTH], 0, tl.int32)
    column = 0
    while column < draft_len:
        top = tl.maximum(top, tl.minimum(tl.load(start + column, mask=live, other=0), Q_MAX))
        column += 1
        tile = tl.where(k == column, top[:, None], tile)
    return tile, drafts


@triton.jit
def read_tile(scores, options, first, sizes, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Ranks [ROWS, WIDTH], drafts, floor, base [ROWS] of the rows from `first` on.

    The rank is the key where a position competes, below 0 where it is verified whatever its score, NEVER elsewhere.
    """
    confidence, calibration, prefix, SHIFTED, LOG = scores
    active, slots, draft_len = sizes
    weight = options[3]
    i = first + tl.arange(0, ROWS)
    slot, drafts, floor, base = read_rows(options, i, active, slots, draft_len)
    if prefix is not None:
        sums, drafts = repair_prefixes(prefix, i, drafts, draft_len, WIDTH)
        floor = tl.minimum(floor, drafts)
    else:
        sums = sum_confidences(confidence, calibration, slot, drafts, draft_len, SHIFTED, LOG, WIDTH)
    w = tl.full([ROWS], 0, tl.int32)
    if weight is not None:
        w = w_of_weight(tl.load(weight + i, mask=i < active, other=1.0).to(tl.int32, bitcast=True))
    key = key_of(sums, w[:, None])
    k = tl.arange(0, WIDTH)[None, :]
    rank = tl.where(k <= floor[:, None], key + ANYWAY, key)
    rank = tl.where((k <= drafts[:, None]) & (i < active)[:, None], rank, NEVER)
    return rank, drafts, floor, base


@triton.jit
def count_tile(drafts, floor, base):
    """Mandatory drafts, candidates, and base tokens of some rows, int64."""
    counts = add((floor.to(tl.int64) << 32) + (drafts - floor), 0)
    return counts >> 32, counts & 0xFFFFFFFF, add(base.to(tl.int64), 0)


@triton.jit
def count_step(scores, options, sizes, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The same of all rows, tile by tile."""
    prefix = scores[2]
    active, slots, draft_len = sizes
    mandatory, candidates, tokens = (tl.full([], 0, tl.int64), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64))
    first = 0
    while first < active:
        i = first + tl.arange(0, ROWS)
        _slot, drafts, floor, base = read_rows(options, i, active, slots, draft_len)
        if prefix is not None:
            start = tl.load(prefix + i * draft_len, mask=drafts > 0, other=0)
            drafts = tl.where(start < 0, 0, drafts)
            floor = tl.minimum(floor, drafts)
        m, c, t = count_tile(drafts, floor, base)
        mandatory += m
        candidates += c
        tokens += t
        first += ROWS
    return mandatory, candidates, tokens


@triton.jit
def against(tile, low):
    """A tile [N] and limits [R] such that comparing them yields [N, R], or [N] for one limit: no change of layout."""
    flat = tl.reshape(tile, [tile.shape[0] * tile.shape[1]])
    if low.shape[0] == 1:
        return flat, add(low, 0)
    else:
        return flat[:, None], low[None, :]


@triton.jit
def count_below(rank, low, step):
    """How many positions of a tile rank below low + step, + 2, 3 and 4 steps: int64 [R] each with two 32-bit fields.

    The first result holds the counts of 1 and 3 steps, the second those of 2 and 4.  A tile has below 2^16 positions.
    """
    flat, limit = against(rank, low)
    limit += step
    near = (flat < limit).to(tl.int32) + ((flat < limit + step).to(tl.int32) << 16)
    limit += 2 * step
    far = (flat < limit).to(tl.int32) + ((flat < limit + step).to(tl.int32) << 16)
    counts = low.to(tl.int64) * 0 + add((far.to(tl.int64) << 32) + near, 0)
    return counts & 0x0000FFFF0000FFFF, (counts >> 16) & 0x0000FFFF0000FFFF


@triton.jit
def advance(count, low, found, wanted, step):
    """Move to the next limit where `count` positions are not too many."""
    fits = count <= wanted
    return tl.where(fits, low + step, low), tl.where(fits, count, found)


@triton.jit
def search(rank, scores, options, sizes, wanted, least, ONE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """For each budget the largest limit below which at most `wanted` [R] positions rank, and how many do.

    `least` positions rank below 0.  When exactly `wanted` rank below a limit, it already tells them from the rest.
    """
    low = wanted * 0
    found = low + least
    step = FIRST_STEP + 0
    pending = add((found < wanted).to(tl.int32), 0)
    while (step > 0) & (pending > 0):
        if ONE:
            odd, even = count_below(rank, low, step)
        else:
            odd, even = low.to(tl.int64) * 0, low.to(tl.int64) * 0
            first = 0
            while first < sizes[0]:
                tile = read_tile(scores, options, first, sizes, ROWS, WIDTH)[0]
                here, there = count_below(tile, low, step)
                odd += here
                even += there
                first += ROWS
        low, found = advance(odd.to(tl.int32), low, found, wanted, step)
        low, found = advance(even.to(tl.int32), low, found, wanted, step)
        low, found = advance((odd >> 32).to(tl.int32), low, found, wanted, step)
        low, found = advance((even >> 32).to(tl.int32), low, found, wanted, step)
        pending = add((found < wanted).to(tl.int32), 0)
        step = step // 5
    return low, found


@triton.jit
def sum_scores(rank, low, zero, COUNT_BONUS: tl.constexpr):
    """Sum of the scores that rank below each limit [R], in units of 2^-30.

    `zero` is 0, unknown to the compiler: it would keep all scores in registers from chunk to chunk of the buckets.
    """
    score = score_of((rank & KEY) + zero)
    if not COUNT_BONUS:
        score = tl.where(tl.arange(0, rank.shape[1])[None, :] == 0, 0, score)
    flat, limit = against(rank, low)
    score = against(score, low)[0]
    return low.to(tl.int64) * 0 + add(tl.where(flat < limit, score, 0), 0)


@triton.jit
def gain(rank, scores, options, sizes, low, ties, zero, COUNT_BONUS: tl.constexpr, ONE: tl.constexpr,
         ROWS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Expected tokens of each budget [R]: what ranks below its limit, and `ties` positions at it."""
    total = ties * score_of(low)
    if ONE:
        total += sum_scores(rank, low, zero, COUNT_BONUS)
    else:
        first = 0
        while first < sizes[0]:
            tile = read_tile(scores, options, first, sizes, ROWS, WIDTH)[0]
            total += sum_scores(tile, low, zero, COUNT_BONUS)
            first += ROWS
    return total
