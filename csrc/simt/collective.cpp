#include "collective.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace dcut::simt {
namespace {

const char* name(WarpOp op) {
  switch (op) {
    case WarpOp::kSync: return "__syncwarp";
    case WarpOp::kShuffle: return "__shfl_sync";
    case WarpOp::kShuffleUp: return "__shfl_up_sync";
    case WarpOp::kShuffleDown: return "__shfl_down_sync";
    case WarpOp::kShuffleXor: return "__shfl_xor_sync";
    case WarpOp::kBallot: return "__ballot_sync";
    case WarpOp::kAny: return "__any_sync";
    case WarpOp::kAll: return "__all_sync";
    case WarpOp::kReduceAdd: return "__reduce_add_sync";
    case WarpOp::kReduceMin:
    case WarpOp::kReduceMinUnsigned: return "__reduce_min_sync";
    case WarpOp::kReduceMax:
    case WarpOp::kReduceMaxUnsigned: return "__reduce_max_sync";
  }
  return "";
}

bool is_shuffle(WarpOp op) {
  return op == WarpOp::kShuffle || op == WarpOp::kShuffleUp || op == WarpOp::kShuffleDown || op == WarpOp::kShuffleXor;
}

// The lane that a shuffle reads: within its segment of `width` lanes, or its own.
unsigned source(const Call& call, int lane) {
  const int first = lane & -call.width, last = first + call.width - 1;
  int from = lane;
  if (call.op == WarpOp::kShuffle) from = first + (call.argument & (call.width - 1));
  if (call.op == WarpOp::kShuffleUp && lane - call.argument >= first) from = lane - call.argument;
  if (call.op == WarpOp::kShuffleDown && lane + call.argument <= last) from = lane + call.argument;
  if (call.op == WarpOp::kShuffleXor && (lane ^ call.argument) <= last) from = lane ^ call.argument;
  return static_cast<unsigned>(from);
}

unsigned reduce(WarpOp op, unsigned a, unsigned b) {
  switch (op) {
    case WarpOp::kReduceAdd: return a + b;
    case WarpOp::kReduceMin: return static_cast<unsigned>(std::min(static_cast<int>(a), static_cast<int>(b)));
    case WarpOp::kReduceMax: return static_cast<unsigned>(std::max(static_cast<int>(a), static_cast<int>(b)));
    case WarpOp::kReduceMinUnsigned: return std::min(a, b);
    default: return std::max(a, b);
  }
}

// Of a ballot, a vote or a reduction: one value for all lanes.
unsigned combined(const std::array<Part*, kLanes>& parts, WarpOp op, unsigned mask) {
  unsigned ballot = 0, reduced = 0;
  bool first = true;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    if (!(mask >> lane & 1)) continue;
    unsigned value;
    std::memcpy(&value, parts[lane]->operand, sizeof value);
    ballot |= (value != 0 ? 1u : 0u) << lane;
    reduced = first ? value : reduce(op, reduced, value);
    first = false;
  }
  if (op == WarpOp::kBallot) return ballot;
  if (op == WarpOp::kAny) return ballot != 0;
  if (op == WarpOp::kAll) return ballot == mask;
  return reduced;
}

}  // namespace

bool Call::same(const Call& other) const {
  return op == other.op && mask == other.mask && size == other.size && place == other.place;
}

std::string Call::text() const {
  char text[64];
  std::snprintf(text, sizeof text, mask == ~0u ? "%s at " : "%s(0x%x) at ", name(op), mask);
  return text + place.text();
}

void perform(const std::array<Part*, kLanes>& parts, unsigned char garbage) {
  const Call& any = (*std::find_if(parts.begin(), parts.end(), [](const Part* part) { return part != nullptr; }))->call;
  const unsigned value = is_shuffle(any.op) ? 0 : combined(parts, any.op, any.mask);
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    if (!(any.mask >> lane & 1)) continue;
    Part& part = *parts[lane];
    if (!is_shuffle(any.op)) {
      std::memcpy(part.result, &value, sizeof value);
    } else if (const unsigned from = source(part.call, static_cast<int>(lane)); any.mask >> from & 1) {
      std::memcpy(part.result, parts[from]->operand, any.size);
    } else {
      std::memset(part.result, garbage, any.size);
    }
  }
}

}  // namespace dcut::simt
