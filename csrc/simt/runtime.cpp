#include "runtime.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "collective.h"
#include "fiber.h"
#include "racecheck.h"
#include "ready.h"
#include "shared_memory.h"
#include "sites.h"

namespace dcut::simt {
namespace {

constexpr unsigned kMaxThreads = 1024;
constexpr int kMaxReports = 4;

struct Thread {
  Fiber fiber;
  unsigned index;
  BarrierOp barrier_op;
  Place barrier_place;
  Part part;
  Clock clock;
  std::vector<uint32_t> executed;  // repetitions, by site
};

// A lane that can not run waits at a barrier unless it is in a collective or has exited.
struct Warp {
  unsigned lanes = 0, collective = 0, exited = 0;
  uint64_t ops = 0;
  std::vector<uint32_t> executed;  // repetitions that a lane has reached, by site
};

const char* name(BarrierOp op) {
  switch (op) {
    case BarrierOp::kSync: return "__syncthreads";
    case BarrierOp::kCount: return "__syncthreads_count";
    case BarrierOp::kAnd: return "__syncthreads_and";
    case BarrierOp::kOr: return "__syncthreads_or";
  }
  return "";
}

const char* name(Kind kind) {
  return kind == Kind::kRead ? "read" : kind == Kind::kWrite ? "write" : "atomic operation";
}

unsigned lowest(unsigned bits) { return static_cast<unsigned>(__builtin_ctz(bits)); }

uint32_t& at_site(std::vector<uint32_t>& counts, uint32_t site) {
  if (counts.size() <= site) counts.resize(site + 1);
  return counts[site];
}

class Machine {
 public:
  Result run(const Config& config, const Shape& shape, void (*invoke)(void*), void* call, size_t bytes);
  int barrier(BarrierOp op, bool predicate, Place place);
  void collective(void* operand);
  void atomic(const void* address, size_t bytes, Place place);
  void memory(const void* address, size_t bytes, Kind kind, uint32_t site);
  bool on_own_stack(const void* address) const { return current->fiber.owns(address); }

  Thread* current = nullptr;
  bool in_kernel = false;
  Shape shape;
  unsigned block = 0;
  std::optional<SharedMemory> shared;
  Sites sites;

 private:
  static void thread_main();
  void run_block();
  void exit_thread();
  void meet(Warp& warp);
  void complete(Warp& warp, unsigned mask);
  void order(unsigned mask);
  void count(uint32_t site, bool is_shared);
  void report(const std::string& text);
  void stop(const std::string& text);
  std::string waiting_at(const Thread& thread) const;
  std::string waiting(const Thread& thread) const { return text(thread) + " waits at " + waiting_at(thread); }
  std::string deadlock() const;
  void report(const Race& race, bool is_shared);

  Warp& warp_of(const Thread& thread) { return warps_[thread.index / kLanes]; }
  static unsigned bit_of(const Thread& thread) { return 1u << thread.index % kLanes; }
  static std::string text(const Thread& thread) { return "thread " + std::to_string(thread.index); }

  Config config_;
  void (*invoke_)(void*) = nullptr;
  void* call_ = nullptr;
  size_t call_bytes_ = 0;
  Result result_;
  bool stopped_ = false;
  int reports_ = 0;

  std::vector<Thread> threads_;  // kept between launches for their stacks
  std::vector<Warp> warps_;
  Ready ready_;
  unsigned live_ = 0;

  unsigned at_barrier_ = 0, predicates_ = 0, passed_ = 0;
  const Thread* first_at_barrier_ = nullptr;
  const Thread* first_exited_ = nullptr;
  uint32_t barriers_ = 0;

  Racecheck racecheck_;
} machine;

// While the runtime works for a thread: the linker may have given it library code that is instrumented.
struct Entered {
  Entered() { machine.in_kernel = false; }
  ~Entered() { machine.in_kernel = true; }
};

Result Machine::run(const Config& config, const Shape& launch, void (*invoke)(void*), void* call, size_t bytes) {
  if (launch.blocks < 1) return {"blocks: expected 1 or more, got 0", {}};
  if (launch.threads < 1 || launch.threads > kMaxThreads) {
    return {"threads: expected 1 to 1024, got " + std::to_string(launch.threads), {}};
  }
  config_ = config, shape = launch, invoke_ = invoke, call_ = call, call_bytes_ = bytes;
  result_ = {}, stopped_ = false, reports_ = 0;
  ready_.start_launch(config);
  threads_.resize(std::max<size_t>(threads_.size(), launch.threads));
  shared.emplace(launch.shared_bytes);
  racecheck_.start_launch();

  std::vector<unsigned> blocks(launch.blocks);
  std::iota(blocks.begin(), blocks.end(), 0u);
  if (config.schedule == Schedule::kReverse) std::reverse(blocks.begin(), blocks.end());
  if (config.schedule == Schedule::kShuffled) std::shuffle(blocks.begin(), blocks.end(), ready_.random());
  for (size_t i = 0; i < blocks.size() && !stopped_; ++i) {
    block = blocks[i];
    run_block();
  }
  return std::move(result_);
}

void Machine::run_block() {
  shared->fill(config_.fill);
  racecheck_.start_block(shared->begin(), shared->bytes());
  warps_.assign((shape.threads + kLanes - 1) / kLanes, {});
  live_ = shape.threads, at_barrier_ = predicates_ = barriers_ = 0;
  ready_.start_block();
  first_at_barrier_ = first_exited_ = nullptr;
  for (unsigned i = 0; i < shape.threads; ++i) {
    Thread& thread = threads_[i];
    thread.index = i;
    thread.clock = {};
    thread.clock[i % kLanes] = 1;
    thread.executed.clear();
    thread.fiber.start(thread_main);
    warps_[i / kLanes].lanes |= bit_of(thread);
    ready_.add(i / kLanes, bit_of(thread));
  }
  while (live_ > 0 && !stopped_) {
    if (ready_.empty()) {
      stop(deadlock());
      break;
    }
    ++result_.stats.switches;
    current = &threads_[ready_.take()];
    current->fiber.resume();
    current = nullptr;
  }
  if (const std::string damage = shared->damage(); !damage.empty()) {
    stop("block " + std::to_string(block) + ": " + damage);
  }
  result_.stats.barriers = std::max<uint64_t>(result_.stats.barriers, barriers_);
  for (const Warp& warp : warps_) {
    result_.stats.warp_ops += warp.ops;
    result_.stats.longest_warp = std::max(result_.stats.longest_warp, warp.ops);
  }
}

void Machine::thread_main() {
  machine.in_kernel = true;
  machine.invoke_(machine.call_);
  machine.in_kernel = false;
  machine.exit_thread();
}

void Machine::exit_thread() {
  Thread& self = *current;
  Warp& warp = warp_of(self);
  --live_;
  warp.exited |= bit_of(self);
  if (!first_exited_) first_exited_ = &self;
  if (at_barrier_ > 0) stop(text(self) + " has exited, but " + waiting(*first_at_barrier_));
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    const Thread& other = threads_[self.index / kLanes * kLanes + lane];
    if (warp.collective >> lane & 1 && other.part.call.mask & bit_of(self)) {
      stop(text(self) + " has exited, but the mask of another names it: " + waiting(other));
    }
  }
  self.fiber.suspend();
}

int Machine::barrier(BarrierOp op, bool predicate, Place place) {
  Thread& self = *current;
  self.barrier_op = op;
  self.barrier_place = place;
  if (first_exited_) stop(text(*first_exited_) + " has exited, but " + waiting(self));
  if (at_barrier_ == 0) first_at_barrier_ = &self;
  if (first_at_barrier_->barrier_op != op || !(first_at_barrier_->barrier_place == place)) {
    stop("divergent barrier: " + waiting(*first_at_barrier_) + ", " + waiting(self));
  }
  ++at_barrier_;
  predicates_ += predicate;
  if (at_barrier_ == shape.threads) {
    for (unsigned i = 0; i < warps_.size(); ++i) ready_.add(i, warps_[i].lanes);
    passed_ = std::exchange(predicates_, 0);
    at_barrier_ = 0;
    ++barriers_;
  }
  self.fiber.suspend();
  if (op == BarrierOp::kCount) return static_cast<int>(passed_);
  return op == BarrierOp::kAnd ? passed_ == shape.threads : passed_ > 0;
}

void Machine::collective(void* operand) {
  Thread& self = *current;
  Part& part = self.part;
  const Call& call = part.call;
  Warp& warp = warp_of(self);
  std::memcpy(part.operand, operand, call.size);
  warp.collective |= bit_of(self);
  const unsigned mask = call.mask, missing = mask & ~warp.lanes, gone = mask & warp.exited;
  if (!(mask & bit_of(self))) stop("the mask does not name its own lane: " + waiting(self));
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
  const Thread* lanes = &threads_[self.index / kLanes * kLanes];
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
  const unsigned first = current->index / kLanes * kLanes;
  std::array<Part*, kLanes> parts = {};
  for (unsigned lanes = mask; lanes; lanes &= lanes - 1) parts[lowest(lanes)] = &threads_[first + lowest(lanes)].part;
  perform(parts, config_.fill);
  if (current->part.call.op == WarpOp::kSync) order(mask);
  warp.collective &= ~mask;
  ready_.add(first / kLanes, mask);
  ++warp.ops;
}

// Everything the lanes did so far comes before everything they do from now on.
void Machine::order(unsigned mask) {
  Thread* lanes = &threads_[current->index / kLanes * kLanes];
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

void Machine::atomic(const void* address, size_t bytes, Place place) {
  ++result_.stats.atomics;
  if (instrumented() && !on_own_stack(address)) memory(address, bytes, Kind::kAtomic, sites.of(place));
}

void Machine::memory(const void* address, size_t bytes, Kind kind, uint32_t site) {
  Thread& self = *current;
  const char* at = static_cast<const char*>(address);
  if (at >= call_ && at < static_cast<const char*>(call_) + call_bytes_) return;
  if (shared->in_red_zone(at)) {
    stop(text(self) + ": " + name(kind) + " outside of shared memory at " + sites.text(site));
    self.fiber.suspend();
  }
  const bool is_shared = racecheck_.is_shared(at);
  count(site, is_shared);
  const Access now = {self.index, block, barriers_, self.clock[self.index % kLanes], site};
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

void Machine::report(const std::string& text) {
  if (!result_.error.empty()) result_.error += "\n";
  result_.error += text;
}

// No thread goes on once the running one is suspended.
void Machine::stop(const std::string& text) {
  if (!stopped_) report(text);
  stopped_ = true;
}

std::string Machine::waiting_at(const Thread& thread) const {
  const bool in_collective = warps_[thread.index / kLanes].collective & bit_of(thread);
  return in_collective ? thread.part.call.text()
                       : std::string(name(thread.barrier_op)) + " at " + thread.barrier_place.text();
}

std::string Machine::deadlock() const {
  std::string text = "deadlock", last;
  for (unsigned i = 0; i < shape.threads; ++i) {
    if (warps_[i / kLanes].exited & bit_of(threads_[i])) continue;
    const std::string place = waiting_at(threads_[i]);
    if (place != last) text += (last.empty() ? ": thread " : ", thread ") + std::to_string(i) + " waits at " + place;
    last = place;
  }
  return text;
}

}  // namespace

Result run(const Config& config, const Shape& shape, void (*invoke)(void*), void* call, size_t bytes) {
  return machine.run(config, shape, invoke, call, bytes);
}

Index thread_index() { return {machine.current->index, 0, 0}; }
Index block_index() { return {machine.block, 0, 0}; }
Index block_size() { return {machine.shape.threads, 1, 1}; }
Index grid_size() { return {machine.shape.blocks, 1, 1}; }
void* dyn_shared() { return machine.shared->begin(); }

int barrier(BarrierOp op, bool predicate, Place place) {
  const Entered entered;
  return machine.barrier(op, predicate, place);
}

void collective(WarpOp op, unsigned mask, void* operand, size_t size, int argument, int width, Place place) {
  const Entered entered;
  machine.current->part.call = {op, mask, size, argument, width, place};
  machine.collective(operand);
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

}  // namespace dcut::simt
