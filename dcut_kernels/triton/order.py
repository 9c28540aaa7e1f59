# mypy: allow-untyped-defs
"""The number format and the tie rule on the device: `order.h`, restated for Triton tensors.

Widening multiplies take the high halves, so a compiler may use 32-bit multipliers.
"""

import triton
import triton.language as tl

UNIT = tl.constexpr(1 << 20)
Q_MAX = tl.constexpr((1 << 26) - 1)  # a score of 0, and where prefix sums saturate
WEIGHT_SPAN = tl.constexpr(1 << 23)
ZERO = tl.constexpr(56 * (1 << 20) - 1)  # scores below 2^-56 count as 0 and tie
INT32_MAX = tl.constexpr(2**31 - 1)
CALIBRATION_CELLS = tl.constexpr(64)
INFINITY = tl.constexpr(0x7F800000)  # as float32 bits
LOG2_E = tl.constexpr(3098164009)  # Q31


@triton.jit
def mul_high(a, b):
    return ((a.to(tl.int64) * b) >> 32).to(tl.int32)


@triton.jit
def neg_log2(bits):
    """-log2 of positive finite float32 values given by their bits, in units of 2^-20, unclamped."""
    y = (bits << 9) ^ -(2**31)
    log = -9529180 + mul_high(y, 5956685)
    log = 12517897 + mul_high(y, log)
    log = -22211244 + mul_high(y, log)
    log = 40853766 + mul_high(y, log)
    log = -76539554 + mul_high(y, log)
    log = 152992897 + mul_high(y, log)
    log = -344239122 + mul_high(y, log)
    log = 1032721379 + mul_high(y, log)
    log = 628098697 + mul_high(y, log)
    return (127 - (bits >> 23)) * UNIT + ((512 - log) >> 10)


@triton.jit
def clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def q_of_confidence(bits):
    """Bits of confidences to q: NaN and negatives count as 0, values above 1 as 1."""
    q = tl.where(bits >= 0x3F800000, 0, clamp(neg_log2(bits), 0, Q_MAX))
    return tl.where((bits <= 0) | (bits > INFINITY), Q_MAX, q)


@triton.jit
def q_of_log_confidence(bits):
    """Bits of natural logarithms of confidences to q: NaN and -inf count as 0, values of 0 and above as 1."""
    magnitude = bits & 0x7FFFFFFF
    mantissa = ((magnitude & 0x7FFFFF) | 0x800000).to(tl.int64)
    shift = clamp(161 - (magnitude >> 23), 1, 57).to(tl.int64)  # the product has 56 bits: by 57 it becomes 0
    q = tl.minimum((mantissa * LOG2_E + (tl.full([1], 1, tl.int64) << (shift - 1))) >> shift, Q_MAX).to(tl.int32)
    q = tl.where(magnitude >= 0x42800000, Q_MAX, q)  # -64 and below
    q = tl.where((bits >= 0) | (magnitude == 0), 0, q)
    return tl.where(magnitude > INFINITY, Q_MAX, q)


@triton.jit
def calibrate(q, table, mask):
    """Look q up in the table at `table`, one for each draft position; linear between entries, of slope 1 beyond."""
    cell = tl.minimum(q >> 17, CALIBRATION_CELLS)
    low = clamp(tl.load(table + cell, mask=mask, other=0), 0, Q_MAX)
    beyond = q - (cell << 17)
    inside = cell < CALIBRATION_CELLS
    rise = clamp(tl.load(table + cell + 1, mask=mask & inside, other=0), 0, Q_MAX) - low
    between = ((rise.to(tl.int64) * beyond) >> 17).to(tl.int32)
    return tl.where(q < Q_MAX, tl.minimum(low + tl.where(inside, between, beyond), Q_MAX), Q_MAX)


@triton.jit
def w_of_weight(bits):
    """Bits of weights to -log2(weight): NaN counts as 1, weights are clamped to [2^-8, 2^8]."""
    w = clamp(neg_log2(bits), -WEIGHT_SPAN, WEIGHT_SPAN)
    w = tl.where(bits >= 0x43800000, -WEIGHT_SPAN, w)
    w = tl.where(bits <= 0x3B800000, WEIGHT_SPAN, w)
    return tl.where((bits & 0x7FFFFFFF) > INFINITY, 0, w)


@triton.jit
def key_of(prefix, w):
    """The 26-bit integer that ranks a position: smaller is better."""
    return tl.minimum(prefix + w, ZERO) + WEIGHT_SPAN


@triton.jit
def pick(j, a, b, c, d):
    """Entry `j` of four, by the two low bits of `j`."""
    odd = (j & 1) != 0
    return tl.where((j & 2) != 0, tl.where(odd, d, c), tl.where(odd, b, a))


@triton.jit
def score_of(key):
    """Scores of keys in units of 2^-30, rounded half up."""
    f = key & (UNIT - 1)
    j = f >> 17
    g = (f & 0x1FFFF).to(tl.uint64)
    x = g << 15
    rho = 1861222 - ((x * 31037) >> 32)
    rho = 85979939 - ((x * rho) >> 32)
    rho = 2977044406 - ((x * rho) >> 32)
    rho = (x * rho) >> 32
    low, high = (
        pick(j, 4503599627370496, 4129819067240750, 3787060782364434, 3472750049309270),
        pick(j, 3184525836273106, 2920223067578992, 2677856360014424, 2455605109274073),
    )
    t = tl.where(j < 4, low, high).to(tl.uint64)
    low, high = (
        pick(j, 2977044472, 2729961817, 2503386024, 2295615106),
        pick(j, 2105088334, 1930374514, 1770161234, 1623245009),
    )
    w = g * tl.where(j < 4, low, high).to(tl.uint64)
    value = t - w + (((w >> 17) * rho) >> 19)
    shift = tl.minimum(13 + (key >> 20), 63).to(tl.uint64)
    return (((value >> shift) + 1) >> 1).to(tl.int64)


@triton.jit
def stops(gain, next_score, height, slope):
    """Whether next_score * height <= gain * slope, exactly; factors of 63 and 31 bits."""
    height, slope = tl.maximum(height, 0).to(tl.int64), tl.maximum(slope, 0).to(tl.int64)
    low_cost, low_worth = (next_score & 0xFFFFFFFF) * height, (gain & 0xFFFFFFFF) * slope
    cost, worth = (next_score >> 32) * height + (low_cost >> 32), (gain >> 32) * slope + (low_worth >> 32)
    return (cost < worth) | ((cost == worth) & ((low_cost & 0xFFFFFFFF) <= (low_worth & 0xFFFFFFFF)))


@triton.jit
def float32_bits(x):
    """Bits of float32, float16 or bfloat16 values as float32."""
    if x.dtype == tl.bfloat16:
        return x.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        return x.to(tl.float32).to(tl.int32, bitcast=True)
