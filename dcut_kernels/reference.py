"""The oracle: the whole decision in plain Python integers, slow and obvious.

Every other backend is compared with this file, integer by integer.  `csrc/include/dcut/order.h` is the definition of
the number format; the first part of this file restates it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

UNIT = 1 << 20  # q counts -log2(score) in units of 2^-20
Q_MAX = (1 << 26) - 1  # a score of 0, and where prefix sums saturate
WEIGHT_SPAN = 1 << 23  # weights reach from 2^-8 to 2^8, so keys are shifted up by 8 units
ZERO = 56 * UNIT - 1  # scores below 2^-56 count as 0 and tie
INT32_MAX = 2**31 - 1
CALIBRATION_CELLS = 64

# log2(3/2 + y), y in [-1/2, 1/2) as a signed Q32, result Q30.
LOG2 = (628098697, 1032721379, -344239122, 152992897, -76539554, 40853766, -22211244, 12517897, -9529180, 5956685)
LOG2_E = 3098164009  # log2(e), Q31
# 2^-f = T[j] * (1 - ln2 * g * (1 - rho)), f = j/8 + g; T in Q52, corrected for the rounding of S = T * ln2 in Q32.
EXP2_T = (4503599627370496, 4129819067240750, 3787060782364434, 3472750049309270,
          3184525836273106, 2920223067578992, 2677856360014424, 2455605109274073)  # fmt: skip
EXP2_S = (2977044472, 2729961817, 2503386024, 2295615106, 2105088334, 1930374514, 1770161234, 1623245009)
EXP2_RHO = (2977044406, 85979939, 1861222, 31037)  # rho = g * (...), alternating signs, Q33


def float_bits(x: float) -> int:
    """The bits of a float32 value, read as a signed int32."""
    return struct.unpack("<i", struct.pack("<f", x))[0]


def neg_log2(bits: int) -> int:
    """-log2 of a positive finite float32 given by its bits, in units of 2^-20, unclamped."""
    exponent = (bits >> 23) - 127
    y = ((bits & 0x7FFFFF) << 9) - (1 << 31)
    log = LOG2[-1]
    for coefficient in LOG2[-2::-1]:
        log = coefficient + (y * log >> 32)
    return -exponent * UNIT + ((512 - log) >> 10)


def q_of_confidence(c: float) -> int:
    """Confidence to q: NaN and negatives count as 0, values above 1 as 1."""
    bits = float_bits(c)
    if bits <= 0 or c != c:
        return Q_MAX
    if c >= 1.0:
        return 0
    return min(max(neg_log2(bits), 0), Q_MAX)


def q_of_log_confidence(log: float) -> int:
    """Natural logarithm of a confidence to q: NaN and -inf count as 0, values of 0 and above as 1."""
    if log != log:
        return Q_MAX
    if log >= 0.0:
        return 0
    if log <= -64.0:  # below 2^-64
        return Q_MAX
    bits = float_bits(log) & 0x7FFFFFFF
    exponent = (bits >> 23) - 127
    mantissa = bits & 0x7FFFFF | 0x800000
    shift = 34 - exponent  # mantissa Q23, log2(e) Q31, result Q20
    return min((mantissa * LOG2_E + (1 << (shift - 1))) >> shift, Q_MAX)


def w_of_weight(weight: float) -> int:
    """-log2(weight) in units of 2^-20, signed; NaN counts as 1 and weights are clamped to [2^-8, 2^8]."""
    if weight != weight:
        return 0
    if weight <= 2.0**-8:
        return WEIGHT_SPAN
    if weight >= 2.0**8:
        return -WEIGHT_SPAN
    return min(max(neg_log2(float_bits(weight)), -WEIGHT_SPAN), WEIGHT_SPAN)


def key_of(prefix: int, w: int) -> int:
    """The 26-bit integer that ranks a position: smaller is better."""
    return min(prefix + w, ZERO) + WEIGHT_SPAN


def score_of(key: int) -> int:
    """The score of a key in units of 2^-30, rounded half up."""
    f = key & (UNIT - 1)
    j, g = f >> 17, f & 0x1FFFF
    x = g << 15
    rho = 0
    for coefficient in EXP2_RHO[::-1]:
        rho = coefficient - (x * rho >> 32)
    rho = x * rho >> 32
    w = g * EXP2_S[j]
    value = EXP2_T[j] - w + ((w >> 17) * rho >> 19)
    shift = 14 + (key >> 20)
    return (value + (1 << (shift - 1))) >> shift


def calibrate(q: int, table: Sequence[int]) -> int:
    """Look q up in its position's table: entry j is for q = j * 2^17; linear between, of slope 1 beyond; 0 stays 0."""
    cell = min(q >> 17, CALIBRATION_CELLS)
    low, beyond = min(max(table[cell], 0), Q_MAX), q - (cell << 17)
    if cell == CALIBRATION_CELLS:
        return min(low + beyond, Q_MAX) if q < Q_MAX else Q_MAX
    rise = min(max(table[cell + 1], 0), Q_MAX) - low
    return low + (rise * beyond >> 17)


@dataclass
class Row:
    """One request of the step, after all harmless readings."""

    active: bool
    slot: int  # row of the persistent tables, -1 if out of range
    drafts: int  # d, draft tokens that exist and may be kept
    floor: int  # lo, draft tokens that are kept whatever their score
    base: int  # tokens of the step before the drafts, the bonus token included
    w: int  # -log2(weight)


def read_rows(
    batch: int,
    slots: int,
    draft_len: int,
    draft_lens: Sequence[int] | None = None,
    min_keep: Sequence[int] | None = None,
    max_keep: Sequence[int] | None = None,
    weight: Sequence[float] | None = None,
    row_index: Sequence[int] | None = None,
    base_lens: Sequence[int] | None = None,
    num_reqs: Sequence[int] | None = None,
) -> list[Row]:
    active = batch if num_reqs is None else min(max(num_reqs[0], 0), batch)
    rows = []
    for i in range(batch):
        slot = i if row_index is None else row_index[i]
        slot = slot if 0 <= slot < slots else -1
        drafts = draft_len if slot >= 0 and i < active else 0
        if draft_lens is not None:
            drafts = min(drafts, max(draft_lens[i], 0))
        if max_keep is not None:
            drafts = min(drafts, max(max_keep[i], 0))
        floor = 0 if min_keep is None else min(max(min_keep[i], 0), drafts)
        base = 1 if base_lens is None else max(base_lens[i], 1)
        w = 0 if weight is None else w_of_weight(weight[i])
        rows.append(Row(i < active, slot, drafts, floor, base if i < active else 0, w))
    return rows


def prefix_sums(
    confidence: Sequence[Sequence[float]],
    rows: Sequence[Row],
    draft_len: int,
    shifted: bool,
    log: bool,
    calibration: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """Saturating prefix sums of q, [B][D]; a row without a slot holds -1."""
    to_q = q_of_log_confidence if log else q_of_confidence
    result = []
    for row in rows:
        prefix, total = [], 0
        for k in range(draft_len if row.slot >= 0 else 0):
            before = total
            q = to_q(confidence[row.slot][k])
            total = min(total + (q if calibration is None else calibrate(q, calibration[k])), Q_MAX)
            prefix.append(before if shifted else total)
        result.append(prefix if row.slot >= 0 else [-1] * draft_len)
    return result


def harmless_prefix(prefix: Sequence[Sequence[int]], rows: Sequence[Row]) -> list[list[int]]:
    """Make given prefix sums monotone and in range; a row that starts below 0 has no drafts."""
    result = []
    for values, row in zip(prefix, rows, strict=True):
        if values and values[0] < 0:
            row.drafts = row.floor = 0
        running, best = [], 0
        for value in values:
            best = max(best, min(value, Q_MAX))
            running.append(best)
        result.append(running)
    return result


class Step:
    """The ranked draft positions of one step."""

    def __init__(self, rows: Sequence[Row], prefix: Sequence[Sequence[int]], capacity: int) -> None:
        self.rows = rows
        self.keys = [[key_of(p, row.w) for p in values] for values, row in zip(prefix, rows, strict=True)]
        self.lowest = sum(row.base + row.floor for row in rows)
        self.highest = max(self.lowest, min(sum(row.base + row.drafts for row in rows), capacity))
        optional = [
            (self.keys[i][k - 1], k, i) for i, row in enumerate(rows) for k in range(row.floor + 1, row.drafts + 1)
        ]
        self.order = sorted(optional)

    def clamp(self, budget: int) -> int:
        """K: the tokens of the step under a raw budget."""
        return max(self.lowest, min(budget, self.highest))

    def depths(self, tokens: int) -> list[int]:
        """Draft tokens kept per request when the step has `tokens` tokens."""
        keep = [row.floor for row in self.rows]
        for _, k, i in self.order[: tokens - self.lowest]:
            assert k == keep[i] + 1, "a top-K set is a prefix of every row"
            keep[i] = k
        return keep

    def gain(self, tokens: int, count_bonus: bool) -> int:
        """G: the sum of the kept scores in units of 2^-30."""
        total = 0
        for i, (row, kept) in enumerate(zip(self.rows, self.depths(tokens), strict=True)):
            if count_bonus and row.active:
                total += score_of(key_of(0, row.w))
            total += sum(score_of(key) for key in self.keys[i][:kept])
        return total


@dataclass
class Decision:
    bucket: int
    tokens: int
    padded: int
    gains: list[int]
    next_budget: int  # raw budget that the policy chooses, whether or not one is given


def table_row(table: Sequence, active: int, dims: int = 1) -> Sequence:
    """Row clamp(b, 1, M) - 1 of an [M, R] table, or the [R] table itself; `dims`: of the table of one batch."""
    depth, inner = 1, table
    while inner and isinstance(inner[0], list):
        depth, inner = depth + 1, inner[0]
    return table[min(max(active, 1), len(table)) - 1] if depth > dims else table


def argmax(gains: Sequence[int], costs: Sequence[float], candidates: Sequence[int]) -> int:
    """Eq. 5: the bucket with the largest gain per cost, ties to the smallest; -1 without candidates."""
    return max(candidates, key=lambda r: (float(gains[r]) / costs[r], -r), default=-1)


def early_stop(
    step: Step, raw: Sequence[int], gains: Sequence[int], envelope: Sequence, candidates: Sequence[int], bonus: bool
) -> int:
    """The smallest budget after which no position is worth its cost, else the largest; ties to the smallest bucket.

    ``envelope[r]`` is the height of the lower convex envelope of the costs at budget ``r``, and its slope from there
    on.  The gain is concave in the tokens of a step, so gain per envelope rises up to one place and falls from there
    on: asking at each bucket finds the first token at which to stop, rounded up to a bucket.
    """
    stopping = []
    for r in candidates:
        next_score = step.gain(min(step.clamp(raw[r]) + 1, step.highest), bonus) - gains[r]
        height, slope = (max(value, 0) for value in envelope[r])
        if raw[r] >= step.lowest and next_score * height <= gains[r] * slope:
            stopping.append(r)
    if stopping:
        return min(stopping, key=lambda r: (raw[r], r))
    return max(candidates, key=lambda r: (raw[r], -r), default=-1)


def decide(
    step: Step, budgets: Sequence, costs: Sequence, budget: int | None, count_bonus: bool, envelope: Sequence | None
) -> Decision:
    """The bucket of eq. 5, or with an envelope that of early stop; or a given budget."""
    active = sum(row.active for row in step.rows)
    raw, cost = table_row(budgets, active), table_row(costs, active)
    gains = [step.gain(step.clamp(k), count_bonus) for k in raw]
    enabled = [r for r in range(len(raw)) if 0.0 < cost[r] < float("inf") and raw[r] > 0]
    if envelope is None:
        best = argmax(gains, cost, enabled)
    else:
        best = early_stop(step, raw, gains, table_row(envelope, active, 2), enabled, count_bonus)
    next_budget = INT32_MAX if best < 0 else raw[best]
    if budget is not None:
        tokens = step.clamp(budget)
        return Decision(-1, tokens, min((k for k in raw if k >= tokens), default=tokens), gains, next_budget)
    if best < 0:
        return Decision(-1, step.highest, step.highest, gains, next_budget)
    tokens = step.clamp(raw[best])
    return Decision(best, tokens, max(tokens, raw[best]), gains, next_budget)


def wrap(value: int, bits: int) -> int:
    """Two's complement of the given width."""
    return (value + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


def slot_of(table: Sequence[int] | None, block_size: int, position: int) -> int:
    """KV-cache slot of a position, -1 without a table, outside it, or in a block below 0."""
    if table is None or position < 0 or position // block_size >= len(table):
        return -1
    block = table[position // block_size]
    return block * block_size + position % block_size if block >= 0 else -1


@dataclass
class Packed:
    """The packed buffers; what is not written keeps the value it had."""

    keep_lens: list[int]
    cu_seqlens: list[int]
    kv_lens: list[int]
    token_ids: list[int]
    positions: list[int]
    request_ids: list[int]
    slot_mapping: list[int]
    draft_index: list[int]
    logits_indices: list[int]
    total: int


def pack(
    packed: Packed,
    rows: Sequence[Row],
    keep: Sequence[int],
    draft_len: int,
    block_size: int,
    pad_token: int,
    draft_ids: Sequence[Sequence[int]],
    bonus_ids: Sequence[int],
    seq_lens: Sequence[int],
    block_table: Sequence[Sequence[int]] | None,
) -> None:
    """Write the kept prefixes as one dense ragged batch, and its tail, into `packed`."""
    capacity = len(packed.token_ids)
    offset, verified = 0, []
    packed.cu_seqlens[0] = 0
    for i, (row, kept) in enumerate(zip(rows, keep, strict=True)):
        packed.keep_lens[i] = kept
        packed.kv_lens[i] = wrap(seq_lens[i] + kept + 1, 32) if row.active else 0
        for k in range(kept + 1 if row.active else 0):
            at = offset + row.base - 1 + k
            verified.append(at if at < capacity else 0)
            if at >= capacity:
                continue
            position = wrap(seq_lens[i] + k, 64)
            packed.token_ids[at] = bonus_ids[i] if k == 0 else draft_ids[row.slot][k - 1]
            packed.positions[at] = position
            packed.request_ids[at] = i
            table = None if block_table is None else block_table[i]
            packed.slot_mapping[at] = slot_of(table, block_size, position)
            packed.draft_index[at] = -1 if k == 0 else row.slot * draft_len + k - 1
        offset += row.base + kept
        packed.cu_seqlens[i + 1] = min(offset, INT32_MAX)
    packed.total = min(offset, INT32_MAX)
    for at in range(min(offset, capacity), capacity):
        packed.token_ids[at], packed.positions[at], packed.request_ids[at] = pad_token, 0, -1
        packed.slot_mapping[at], packed.draft_index[at] = -1, -1
    packed.logits_indices[:] = (verified + [0] * capacity)[:capacity]
