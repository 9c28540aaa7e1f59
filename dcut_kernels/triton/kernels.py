# mypy: allow-untyped-defs
"""The kernels: one launch for the whole step, and one for each part.

ROWS and WIDTH are the tile in which a step is ranked, CHUNK the buckets that are ranked at once, PACK the rows that are
packed at once.  ONE says that a single tile holds the batch, in registers; it is packed from there if PACK equals ROWS.
Sizes are plain arguments, so one binary serves every batch that fits its tiles.
"""

import triton
import triton.language as tl

from .decide import bounds, decide, table_row
from .order import clamp
from .pack import pack_tail, pack_tile, rows_before, select_rows, share_ties, tied
from .select import add, count_active, count_step, count_tile, read_rows, read_tile, search, sum_confidences

# Not specialized on: neither on the values of sizes nor on the alignment of tensors.
SIZES = [
    "batch", "slots", "draft_len", "buckets", "capacity", "budget_rows", "cost_rows", "envelope_rows", "max_blocks",
    "block_size", "pad_token", "share",
]  # fmt: skip
TENSORS = [
    "confidence", "calibration", "prefix", "keep", "draft_ids", "bonus_ids", "seq_lens", "budgets", "costs", "budget",
    "envelope", "next_budget", "host_budget", "draft_lens", "min_keep", "max_keep", "weight", "row_index", "base_lens",
    "num_reqs", "block_table", "keep_lens", "cu_seqlens", "kv_lens", "token_ids", "positions", "request_ids",
    "slot_mapping", "draft_index", "logits_indices", "decision", "gains",
]  # fmt: skip
kernel = triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=TENSORS)


@kernel
def select_and_pack(
    confidence, calibration, draft_ids, bonus_ids, seq_lens, budgets, costs, budget, envelope, next_budget, host_budget,
    draft_lens, min_keep, max_keep, weight, row_index, base_lens, num_reqs, block_table,
    keep_lens, cu_seqlens, kv_lens, token_ids, positions, request_ids, slot_mapping, draft_index, logits_indices,
    decision, gains,
    batch, slots, draft_len, buckets, capacity, budget_rows, cost_rows, envelope_rows, max_blocks, block_size,
    pad_token: tl.int64, share,
    SHIFTED: tl.constexpr, LOG: tl.constexpr, COUNT_BONUS: tl.constexpr, FRESH: tl.constexpr,
    ONE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    active = count_active(num_reqs, batch)
    options = (draft_lens, min_keep, max_keep, weight, row_index, base_lens)
    scores = (confidence, calibration, None, SHIFTED, LOG)
    sizes = (active, slots, draft_len)
    tables = (budgets, costs, budget_rows, cost_rows, envelope_rows, buckets, decision, gains)
    policy = (budget, envelope, next_budget, host_budget)
    low, left, total, verified, rank = decide(
        scores, options, sizes, tables, policy, capacity, COUNT_BONUS, ONE, ROWS, WIDTH, CHUNK
    )
    tokens = (draft_ids, bonus_ids, seq_lens, block_table, max_blocks, block_size, pad_token)
    rows = (keep_lens, cu_seqlens, kv_lens)
    packed = (token_ids, positions, request_ids, slot_mapping, draft_index, logits_indices)
    ALONE: tl.constexpr = ONE and PACK == ROWS  # a single program packs all
    first = tl.program_id(0) * share
    end = tl.minimum(first + share, batch)
    all_ties, above, positions_before, prompt_before = rows_before(
        rank, low, first, scores, options, sizes, ALONE, PACK, WIDTH
    )
    ties = share_ties(all_ties, left)
    nth = positions_before + add(tl.minimum(above, ties), 0)
    offset = nth + prompt_before
    while first < end:
        i = first + tl.arange(0, PACK)
        slot, _drafts, _floor, base = read_rows(options, i, active, slots, draft_len)
        tile = rank if ALONE else read_tile(scores, options, first, sizes, PACK, WIDTH)[0]
        kept = select_rows(tile, low, ties, above)
        above += tied(tile, low, i, end)
        offset, nth = pack_tile(tokens, rows, packed, i, slot, base, kept, offset, nth, active, end, draft_len,
                                capacity, base_lens is not None, FRESH, WIDTH)  # fmt: skip
        first += PACK
    pack_tail(packed, cu_seqlens, total, verified, capacity, pad_token)


@kernel
def log_prefix_sum(
    confidence, calibration, prefix, row_index, batch, slots, draft_len,
    SHIFTED: tl.constexpr, LOG: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    options = (None, None, None, None, row_index, None)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot, drafts, _floor, _base = read_rows(options, i, batch, slots, draft_len)
    sums = sum_confidences(confidence, calibration, slot, drafts, draft_len, SHIFTED, LOG, WIDTH)
    k = tl.arange(0, WIDTH)[None, :]
    sums = tl.where(drafts[:, None] > 0, sums, -1)
    mask = (i < batch)[:, None] & (k > 0) & (k <= draft_len)
    tl.store(prefix + (i[:, None] * draft_len + (k - 1)), sums, mask=mask)


@kernel
def segmented_topk(
    prefix, budgets, draft_lens, min_keep, max_keep, weight, base_lens, num_reqs, keep,
    batch, draft_len, buckets, capacity, budget_rows,
    ONE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """One program for each bucket."""
    active = count_active(num_reqs, batch)
    options = (draft_lens, min_keep, max_keep, weight, None, base_lens)
    scores = (None, None, prefix, False, False)
    sizes = (active, batch, draft_len)
    rank = active  # read anew, tile by tile, unless one holds all
    if ONE:
        rank, drafts, floor, base = read_tile(scores, options, 0, sizes, ROWS, WIDTH)
        mandatory, candidates, tokens = count_tile(drafts, floor, base)
    else:
        mandatory, candidates, tokens = count_step(scores, options, sizes, ROWS, WIDTH)
    lowest, highest, prompt = bounds(mandatory, candidates, tokens, active, capacity)
    r = tl.program_id(0)
    budget = tl.load(table_row(budgets, budget_rows, buckets, active) + r).to(tl.int64)
    wanted = tl.full([1], 0, tl.int32) + (clamp(budget, lowest, highest) - prompt).to(tl.int32)
    lows, found = search(rank, scores, options, sizes, wanted, (lowest - prompt).to(tl.int32), ONE, ROWS, WIDTH)
    low = add(lows, 0)
    all_ties, above, _positions, _prompt = rows_before(rank, low, 0, scores, options, sizes, False, PACK, WIDTH)
    ties = share_ties(all_ties, add(wanted - found, 0))
    first = 0
    while first < batch:
        i = first + tl.arange(0, PACK)
        tile = read_tile(scores, options, first, sizes, PACK, WIDTH)[0]
        kept = select_rows(tile, low, ties, above)
        above += tied(tile, low, i, batch)
        tl.store(keep + r * batch + i, tl.maximum(add(kept.to(tl.int32), 1) - 1, 0), mask=i < batch)
        first += PACK


@kernel
def bucket_argmax(
    prefix, budgets, costs, budget, envelope, next_budget, host_budget, draft_lens, min_keep, max_keep, weight,
    base_lens, num_reqs, decision, gains, batch, draft_len, buckets, capacity, budget_rows, cost_rows, envelope_rows,
    COUNT_BONUS: tl.constexpr, ONE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    active = count_active(num_reqs, batch)
    options = (draft_lens, min_keep, max_keep, weight, None, base_lens)
    tables = (budgets, costs, budget_rows, cost_rows, envelope_rows, buckets, decision, gains)
    policy = (budget, envelope, next_budget, host_budget)
    scores = (None, None, prefix, False, False)
    decide(scores, options, (active, batch, draft_len), tables, policy, capacity, COUNT_BONUS, ONE, ROWS, WIDTH, CHUNK)


@kernel
def pack_prefixes(
    keep, draft_ids, bonus_ids, seq_lens, row_index, base_lens, num_reqs, block_table,
    keep_lens, cu_seqlens, kv_lens, token_ids, positions, request_ids, slot_mapping, draft_index, logits_indices,
    decision, batch, slots, draft_len, capacity, max_blocks, block_size, pad_token: tl.int64, share,
    WIDTH: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    active = count_active(num_reqs, batch)
    options = (None, None, None, None, row_index, base_lens)
    tokens = (draft_ids, bonus_ids, seq_lens, block_table, max_blocks, block_size, pad_token)
    rows = (keep_lens, cu_seqlens, kv_lens)
    packed = (token_ids, positions, request_ids, slot_mapping, draft_index, logits_indices)
    k = tl.arange(0, WIDTH)[None, :]
    mine = tl.program_id(0) * share
    end = tl.minimum(mine + share, batch)
    total, verified, offset, nth = (tl.full([], 0, tl.int64), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64),
                                    tl.full([], 0, tl.int64))  # fmt: skip
    first = 0
    while first < batch:
        i = first + tl.arange(0, PACK)
        _slot, drafts, _floor, base = read_rows(options, i, active, slots, draft_len)
        kept = clamp(tl.load(keep + i, mask=i < active, other=0), 0, drafts)
        count = tl.where(i < active, kept + 1, 0).to(tl.int64)
        length = tl.where(i < active, base + kept, 0).to(tl.int64)
        total += add(length, 0)
        verified += add(count, 0)
        offset += add(tl.where(i < mine, length, 0), 0)
        nth += add(tl.where(i < mine, count, 0), 0)
        first += PACK
    first = mine
    while first < end:
        i = first + tl.arange(0, PACK)
        slot, drafts, _floor, base = read_rows(options, i, active, slots, draft_len)
        keeps = clamp(tl.load(keep + i, mask=i < active, other=0), 0, drafts)
        kept = (k <= keeps[:, None]) & (i < active)[:, None]
        offset, nth = pack_tile(tokens, rows, packed, i, slot, base, kept, offset, nth, active, end, draft_len,
                                capacity, base_lens is not None, True, WIDTH)  # fmt: skip
        first += PACK
    pack_tail(packed, cu_seqlens, total, verified, capacity, pad_token)
    if tl.program_id(0) == 0:
        tl.store(decision, -1)
        at = 1 + tl.arange(0, 4)
        tl.store(decision + at, tl.minimum(total, 2**31 - 1).to(tl.int32) + at * 0, mask=at < 4)
