// Collectives: which lanes of a warp meet in one, and what follows.
#include <algorithm>
#include <cstring>

#include "machine.h"

namespace dcut::simt {

void Machine::collective(void* operand) {
  Thread& self = *current;
  Part& part = self.part;
  const Call& call = part.call;
  Warp& warp = warp_of(self);
  std::memcpy(part.operand, operand, call.size);
  warp.collective |= self.bit();
  const unsigned mask = call.mask, missing = mask & ~warp.lanes, gone = mask & warp.exited;
  if (!(mask & self.bit())) stop("the mask does not name its own lane: " + waiting(self));
  if (missing)
    stop("the mask names lane " + std::to_string(lowest(missing)) + ", which does not exist: " + waiting(self));
  if (gone) stop("the mask names lane " + std::to_string(lowest(gone)) + ", which has exited: " + waiting(self));
  if (call.width < 1 || call.width > static_cast<int>(kLanes) || (call.width & (call.width - 1))) {
    stop("width: expected a power of two up to 32, got " + std::to_string(call.width) + ": " + waiting(self));
  }
  if ((mask & ~warp.collective) == 0 && !stopped_) meet(warp);
  self.fiber.suspend();
  std::memcpy(operand, part.result, call.size);
}

// All lanes that the running one names are in collectives: in this one, in another one first, or in a wrong one.
void Machine::meet(Warp& warp) {
  const Thread& self = *current;
  const Thread* lanes = lanes_of(self);
  const unsigned mask = self.part.call.mask;
  unsigned together = 0;
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    if (lanes[lowest(rest)].part.call.same(self.part.call)) together |= 1u << lowest(rest);
  }
  for (unsigned rest = mask & ~together; rest; rest &= rest - 1) {
    const Thread& other = lanes[lowest(rest)];
    if (other.part.call.mask & together) {
      stop("lanes of one mask in different collectives: " + waiting(other) + ", " + waiting(self));
    }
  }
  if (together == mask) complete(warp, mask);
}

void Machine::complete(Warp& warp, unsigned mask) {
  Thread* lanes = lanes_of(*current);
  std::array<Part*, kLanes> parts = {};
  for (unsigned rest = mask; rest; rest &= rest - 1) parts[lowest(rest)] = &lanes[lowest(rest)].part;
  perform(parts, config_.fill);
  if (current->part.call.op == WarpOp::kSync) order(mask);
  warp.collective &= ~mask;
  ready_.add(current->block->rank, current->index / kLanes, mask);
  ++warp.ops;
}

// Everything the lanes did so far comes before everything they do from now on.
void Machine::order(unsigned mask) {
  Thread* lanes = lanes_of(*current);
  Clock joined = {};
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    const Clock& clock = lanes[lowest(rest)].clock;
    for (unsigned lane = 0; lane < kLanes; ++lane) joined[lane] = std::max(joined[lane], clock[lane]);
  }
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    lanes[lowest(rest)].clock = joined;
    ++lanes[lowest(rest)].clock[lowest(rest)];
  }
}

void collective(WarpOp op, unsigned mask, void* operand, size_t size, int argument, int width, Place place) {
  const Entered entered;
  machine.current->part.call = {op, mask, size, argument, width, place};
  machine.collective(operand);
}

}  // namespace dcut::simt
