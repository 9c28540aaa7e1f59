// Memory accesses: which are allowed, what they count, and whether they race.
#include "machine.h"

namespace dcut::simt {
namespace {

constexpr int kMaxReports = 4;

const char* name(Kind kind) {
  return kind == Kind::kRead ? "read" : kind == Kind::kWrite ? "write" : "atomic operation";
}

uint32_t& at_site(std::vector<uint32_t>& counts, uint32_t site) {
  if (counts.size() <= site) counts.resize(site + 1);
  return counts[site];
}

}  // namespace

void Machine::atomic(const void* address, size_t bytes, Place place) {
  ++result_.stats.atomics;
  if (instrumented() && !on_own_stack(address)) memory(address, bytes, Kind::kAtomic, sites.of(place));
}

void Machine::memory(const void* address, size_t bytes, Kind kind, uint32_t site) {
  Thread& self = *current;
  const char* at = static_cast<const char*>(address);
  if (at >= call_ && at < static_cast<const char*>(call_) + call_bytes_) return;
  for (const Block& block : blocks_) {
    const bool foreign = &block != self.block && block.shared.contains(at);
    const bool outside = block.shared.in_red_zone(at);
    if (outside) stop(text(self) + ": " + name(kind) + " outside of shared memory at " + sites.text(site));
    if (foreign && (cluster_barriers_ == 0 || block.live == 0)) {
      stop(text(self) + ": " + name(kind) +
           " of shared memory of a block that may not have started or has "
           "exited at " +
           sites.text(site));
    }
  }
  if (stopped_) self.fiber.suspend();
  const bool is_shared = racecheck_.is_shared(at);
  count(site, is_shared);
  const Access now = {self.index,
                      self.block->index,
                      self.block->index / shape.cluster,
                      cluster_barriers_,
                      self.block->barriers,
                      self.clock[self.index % kLanes],
                      site};
  if (const Race* race = racecheck_.access(at, bytes, kind, now, self.clock)) report(*race, is_shared);
}

void Machine::count(uint32_t site, bool is_shared) {
  Warp& warp = warp_of(*current);
  const uint32_t repetition = ++at_site(current->executed, site);
  uint32_t& reached = at_site(warp.executed, site);
  if (repetition <= reached) return;
  reached = repetition;
  ++warp.ops;
  result_.stats.shared_requests += is_shared;
}

void Machine::report(const Race& race, bool is_shared) {
  if (++reports_ > kMaxReports) return;
  const auto describe = [&](Kind kind, const Access& access) {
    return std::string(name(kind)) + " by thread " + std::to_string(access.thread) + " of block " +
           std::to_string(access.block) + " at " + sites.text(access.site);
  };
  report(std::string("race on ") + (is_shared ? "shared" : "global") +
         " memory: " + describe(race.before_kind, race.before) + ", " + describe(race.now_kind, race.now));
}

const void* Machine::in_block(const void* address, unsigned rank, Place place) {
  Thread& self = *current;
  const SharedMemory& own = self.block->shared;
  if (rank >= shape.cluster || !own.contains(address)) {
    stop(text(self) + ": expected a place in its shared memory and a rank below " + std::to_string(shape.cluster) +
         " at " + place.text());
    self.fiber.suspend();
  }
  return blocks_[rank].shared.begin() + (static_cast<const unsigned char*>(address) - own.begin());
}

void atomic_access(const void* address, size_t size, Place place) {
  const Entered entered;
  machine.atomic(address, size, place);
}

void memory_access(const void* address, size_t size, bool write, const void* code) {
  if (!machine.in_kernel || machine.on_own_stack(address)) return;
  const Entered entered;
  machine.memory(address, size, write ? Kind::kWrite : Kind::kRead, machine.sites.of(code));
}

const void* in_block(const void* address, uint32_t rank, Place place) {
  const Entered entered;
  return machine.in_block(address, rank, place);
}

}  // namespace dcut::simt
