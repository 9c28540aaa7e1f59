# mypy: allow-untyped-defs
"""Packing on the device: the kept prefixes as one dense ragged batch, and its tail.

Each program of a launch packs a share of the rows and of the tail.
"""

import triton
import triton.language as tl

from .decide import to_int32
from .order import clamp
from .select import add, highest, read_rows, read_tile, scan

TAIL = tl.constexpr(1024)  # entries of the tail that one program writes at once


@triton.jit
def share_ties(equal, left):
    """How many of the ties in each column [WIDTH] are kept: by position, then by request."""
    return clamp(left - (scan(equal, 0) - equal), 0, equal)


@triton.jit
def tied(rank, low, i, end):
    """Positions at the limit in the rows below `end`, by column [WIDTH]."""
    return add(((rank == low) & (i < end)[:, None]).to(tl.int32), 0)


@triton.jit
def select_rows(rank, low, ties, above):
    """The positions [ROWS, WIDTH] below the limit, and the first `ties` [WIDTH] of each column at it.

    `above` [WIDTH] positions at the limit lie in earlier rows.
    """
    equal = (rank == low).to(tl.int32)
    nth = above[None, :] + scan(equal, 0) - equal
    return (rank < low) | ((equal > 0) & (nth < ties[None, :]))


@triton.jit
def rows_before(rank, low, end, scores, options, sizes, ALONE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """What lies in the rows below `end`, and the ties of all rows.

    Ties of all rows, ties before [WIDTH], positions below the limit and base tokens that are not verified, int64.
    """
    active, slots, draft_len = sizes
    every = tl.full([WIDTH], 0, tl.int32)
    before = tl.full([WIDTH], 0, tl.int32)
    positions, prompt = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    if ALONE:
        every = tied(rank, low, tl.arange(0, ROWS), active)
    else:
        first = 0
        while first < active:
            i = first + tl.arange(0, ROWS)
            _slot, _drafts, _floor, base = read_rows(options, i, active, slots, draft_len)
            tile = read_tile(scores, options, first, sizes, ROWS, WIDTH)[0]
            every += tied(tile, low, i, active)
            before += tied(tile, low, i, end)
            inside = i < tl.minimum(end, active)
            positions += add(add(((tile < low) & inside[:, None]).to(tl.int32), 1).to(tl.int64), 0)
            prompt += add(tl.where(inside, base - 1, 0).to(tl.int64), 0)
            first += ROWS
    return every, before, positions, prompt


@triton.jit
def store_entries(packed, at, mask, token, position, row, slot, index):
    """One entry of each packed buffer but `logits_indices`."""
    token_ids, positions, request_ids, slot_mapping, draft_index, _logits_indices = packed
    tl.store(token_ids + at, token, mask=mask)
    tl.store(positions + at, position, mask=mask)
    tl.store(request_ids + at, row, mask=mask)
    tl.store(slot_mapping + at, slot, mask=mask)
    tl.store(draft_index + at, index, mask=mask)


@triton.jit
def map_slots(block_table, max_blocks, block_size, i, start, k, position, mask):
    """KV-cache slots of positions [ROWS, WIDTH], `start` [ROWS] + k; one division a row is enough for the start."""
    if block_table is None:
        return tl.full(position.shape, -1, tl.int64)
    else:
        inside = tl.maximum(start, 0)
        # Rows that start below 0 reach 0 after -start steps; only the last few steps before that matter.
        ahead = k + tl.maximum(tl.minimum(start, 0), -64).to(tl.int32)[:, None]
        within = (inside % block_size).to(tl.uint32)[:, None] + tl.maximum(ahead, 0).to(tl.uint32)
        size = block_size.to(tl.uint32)
        block = (inside // block_size).to(tl.int64)[:, None] + (within // size)
        mask = mask & (position >= 0) & (block < max_blocks)
        id = tl.load(block_table + (i.to(tl.int64)[:, None] * max_blocks + block), mask=mask, other=-1)
        return tl.where(id >= 0, id.to(tl.int64) * block_size + (within % size), -1)


@triton.jit
def pack_tile(tokens, rows, packed, i, slot, base, kept, offset, verified, active, end, draft_len, capacity,
              HAS_BASE: tl.constexpr, FRESH: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Pack the rows `i` [ROWS], whose positions `kept` [ROWS, WIDTH] are verified.

    `offset` tokens and `verified` positions come before them; returns both behind them.
    """
    draft_ids, bonus_ids, seq_lens, block_table, max_blocks, block_size, pad_token = tokens
    keep_lens, cu_seqlens, kv_lens = rows
    k = tl.arange(0, WIDTH)[None, :]
    mine = i < end
    count = add(kept.to(tl.int32), 1)  # 0 in padding rows, the bonus token included elsewhere
    live = i < active
    length = count.to(tl.int64) + tl.where(live, base - 1, 0)
    ends = offset + scan(length, 0)
    first = ends - count  # of the bonus token
    start = tl.load(seq_lens + i, mask=mine, other=0)

    tl.store(keep_lens + i, tl.maximum(count - 1, 0), mask=mine)
    tl.store(kv_lens + i, tl.where(live, start.to(tl.int32) + count, 0), mask=mine)
    tl.store(cu_seqlens + 1 + i, to_int32(ends), mask=mine)

    # From here on in 32 bits: entries from `at`, of which `room` are left.
    room = tl.maximum(capacity - first, 0).to(tl.int32)[:, None]
    at = tl.minimum(first, capacity).to(tl.int32)[:, None] + k
    fits = kept & (k < room)
    index = slot[:, None] * draft_len + (k - 1)
    bonus = tl.load(bonus_ids + i, mask=mine & live, other=0)
    token = tl.where(k > 0, tl.load(draft_ids + index, mask=fits & (k > 0), other=0), bonus[:, None])
    position = start.to(tl.int64)[:, None] + k
    cache = map_slots(block_table, max_blocks, block_size, i, start, k, position, fits)
    store_entries(packed, at, fits, token, position, i[:, None] + k * 0, cache, tl.where(k > 0, index, -1))

    logits_indices = packed[5]
    if HAS_BASE:
        before = tl.minimum(verified + scan(count.to(tl.int64), 0) - count, capacity).to(tl.int32)[:, None]
        entry = tl.where(k < room, at, 0)
        tl.store(logits_indices + (before + k), entry, mask=kept & (k < capacity - before))
        verified += add(count.to(tl.int64), 0)
        if FRESH:
            begin = tl.minimum(ends - length, capacity).to(tl.int32)
            gap = tl.where(live & mine, tl.minimum(first, capacity).to(tl.int32) - begin, 0)
            longest = highest(gap, 0)
            done = longest * 0
            while done < longest:
                clear(packed, begin[:, None] + (done + k), done + k < gap[:, None], pad_token)
                done += WIDTH
    else:
        tl.store(logits_indices + at, at, mask=fits)
    return offset + add(length, 0), verified


@triton.jit
def clear(packed, at, mask, pad_token):
    """Write the tail values."""
    nothing = tl.full(at.shape, -1, tl.int32)
    token = nothing.to(packed[0].dtype.element_ty) * 0 + pad_token.to(packed[0].dtype.element_ty)
    store_entries(packed, at, mask, token, nothing.to(tl.int64) * 0, nothing, nothing.to(tl.int64), nothing)


@triton.jit
def pack_tail(packed, cu_seqlens, total, verified, capacity, pad_token):
    """Write the tail: everything from the total on, and `logits_indices` from the last verified position on."""
    logits_indices = packed[5]
    stride = tl.num_programs(0) * TAIL
    at = tl.minimum(total, capacity) + tl.program_id(0) * TAIL
    while at < capacity:
        entries = at + tl.arange(0, TAIL)
        clear(packed, entries, entries < capacity, pad_token)
        at += stride
    at = tl.minimum(verified, capacity) + tl.program_id(0) * TAIL
    while at < capacity:
        entries = at + tl.arange(0, TAIL)
        tl.store(logits_indices + entries, tl.full([TAIL], 0, tl.int32), mask=entries < capacity)
        at += stride
    if tl.program_id(0) == 0:
        tl.store(cu_seqlens, 0)
