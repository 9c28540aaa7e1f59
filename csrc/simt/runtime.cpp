#include "runtime.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "machine.h"

namespace dcut::simt {
namespace {

constexpr unsigned kMaxThreads = 1024;

const char* name(BarrierOp op) {
  switch (op) {
    case BarrierOp::kSync: return "__syncthreads";
    case BarrierOp::kCount: return "__syncthreads_count";
    case BarrierOp::kAnd: return "__syncthreads_and";
    case BarrierOp::kOr: return "__syncthreads_or";
    case BarrierOp::kCluster: return "cluster_sync";
  }
  return "";
}

// What CUDA would refuse; empty when nothing.
std::string refusal(const Shape& shape) {
  const auto error = [](const char* name, const char* expected, unsigned got) {
    return std::string(name) + ": expected " + expected + ", got " + std::to_string(got);
  };
  if (shape.threads < 1 || shape.threads > kMaxThreads) return error("threads", "1 to 1024", shape.threads);
  if (shape.cluster < 1 || shape.cluster > 16) return error("cluster", "1 to 16", shape.cluster);
  if (shape.blocks < 1) return error("blocks", "1 or more", shape.blocks);
  if (shape.blocks % shape.cluster != 0) return error("blocks", "whole clusters", shape.blocks);
  return "";
}

}  // namespace

Machine machine;

Result Machine::run(const Config& config, const Shape& launch, void (*invoke)(void*), void* call, size_t bytes) {
  if (const std::string error = refusal(launch); !error.empty()) return {error, {}};
  config_ = config, shape = launch, invoke_ = invoke, call_ = call, call_bytes_ = bytes;
  result_ = {}, stopped_ = false, reports_ = 0;
  ready_.start_launch(config);
  threads_.resize(std::max<size_t>(threads_.size(), launch.cluster * launch.threads));
  blocks_.clear();
  for (unsigned rank = 0; rank < launch.cluster; ++rank) {
    blocks_.emplace_back(launch.shared_bytes, rank, &threads_[rank * launch.threads]);
  }
  racecheck_.start_launch();

  std::vector<unsigned> clusters(launch.blocks / launch.cluster);
  std::iota(clusters.begin(), clusters.end(), 0u);
  if (config.schedule == Schedule::kReverse) std::reverse(clusters.begin(), clusters.end());
  if (config.schedule == Schedule::kShuffled) std::shuffle(clusters.begin(), clusters.end(), ready_.random());
  for (size_t i = 0; i < clusters.size() && !stopped_; ++i) run_cluster(clusters[i] * launch.cluster);
  return std::move(result_);
}

void Machine::run_cluster(unsigned first_block) {
  ready_.start_cluster();
  racecheck_.start_cluster();
  cluster_barriers_ = 0;
  for (Block& block : blocks_) {
    block.index = first_block + block.rank;
    block.shared.fill(config_.fill);
    racecheck_.add_shared(block.shared.begin(), block.shared.bytes());
    block.warps.assign((shape.threads + kLanes - 1) / kLanes, {});
    block.live = shape.threads;
    block.at_barrier = block.predicates = block.barriers = 0;
    block.first_at_barrier = block.first_exited = nullptr;
    for (unsigned i = 0; i < shape.threads; ++i) {
      block.threads[i].block = &block;
      block.threads[i].index = i;
      start_thread(block.threads[i]);
    }
  }
  const auto live = [](const Block& block) { return block.live > 0; };
  while (!stopped_ && std::any_of(blocks_.begin(), blocks_.end(), live)) {
    if (ready_.empty()) {
      stop(deadlock());
      break;
    }
    ++result_.stats.switches;
    const auto [rank, thread] = ready_.take();
    current = &blocks_[rank].threads[thread];
    current->fiber.resume();
    current = nullptr;
  }
  for (const Block& block : blocks_) {
    result_.stats.barriers = std::max<uint64_t>(result_.stats.barriers, block.barriers);
    for (const Warp& warp : block.warps) {
      result_.stats.warp_ops += warp.ops;
      result_.stats.longest_warp = std::max(result_.stats.longest_warp, warp.ops);
    }
  }
}

void Machine::start_thread(Thread& thread) {
  thread.clock = {};
  thread.clock[thread.index % kLanes] = 1;
  thread.executed.clear();
  thread.fiber.start(thread_main);
  warp_of(thread).lanes |= thread.bit();
  ready_.add(thread.block->rank, thread.index / kLanes, thread.bit());
}

void Machine::thread_main() {
  machine.in_kernel = true;
  machine.invoke_(machine.call_);
  machine.in_kernel = false;
  machine.exit_thread();
}

void Machine::exit_thread() {
  Thread& self = *current;
  Block& block = *self.block;
  Warp& warp = warp_of(self);
  warp.exited |= self.bit();
  if (!block.first_exited) block.first_exited = &self;
  for (const Block& other : blocks_) {
    if (other.at_barrier == 0) continue;
    const Thread& first = *other.first_at_barrier;
    if (&other == &block || first.barrier_op == BarrierOp::kCluster) {
      stop(text(self) + " has exited, but " + waiting(first));
    }
  }
  for (unsigned waiting_lanes = warp.collective; waiting_lanes; waiting_lanes &= waiting_lanes - 1) {
    const Thread& other = lanes_of(self)[lowest(waiting_lanes)];
    if (other.part.call.mask & self.bit()) {
      stop(text(self) + " has exited, but the mask of another names it: " + waiting(other));
    }
  }
  if (--block.live == 0) {
    const std::string damage = block.shared.damage();
    if (!damage.empty()) stop("block " + std::to_string(block.index) + ": " + damage);
    block.shared.fill(config_.fill);  // for other blocks, too, it is gone
  }
  self.fiber.suspend();
}

int Machine::barrier(BarrierOp op, bool predicate, Place place) {
  Thread& self = *current;
  Block& block = *self.block;
  self.barrier_op = op;
  self.barrier_place = place;
  if (block.at_barrier == 0) block.first_at_barrier = &self;
  ++block.at_barrier;
  block.predicates += predicate;
  for (const Block& other : blocks_) {
    if (&other != &block && op != BarrierOp::kCluster) continue;
    if (other.first_exited) stop(text(*other.first_exited) + " has exited, but " + waiting(self));
    if (other.at_barrier == 0) continue;
    const Thread& first = *other.first_at_barrier;
    const bool same_barrier = &other == &block || first.barrier_op == BarrierOp::kCluster;
    if (same_barrier && (first.barrier_op != op || !(first.barrier_place == place))) {
      stop("divergent barrier: " + waiting(first) + ", " + waiting(self));
    }
  }
  if (block.at_barrier == shape.threads) {
    if (op != BarrierOp::kCluster) {
      release(block);
    } else if (cluster_arrived()) {
      for (Block& other : blocks_) release(other);
      ++cluster_barriers_;
    }
  }
  self.fiber.suspend();
  if (op == BarrierOp::kCount) return static_cast<int>(block.passed);
  return op == BarrierOp::kAnd ? block.passed == shape.threads : block.passed > 0;
}

bool Machine::cluster_arrived() const {
  return std::all_of(blocks_.begin(), blocks_.end(), [this](const Block& block) {
    return block.at_barrier == shape.threads && block.first_at_barrier->barrier_op == BarrierOp::kCluster;
  });
}

void Machine::release(Block& block) {
  for (unsigned i = 0; i < block.warps.size(); ++i) ready_.add(block.rank, i, block.warps[i].lanes);
  block.passed = std::exchange(block.predicates, 0);
  block.at_barrier = 0;
  ++block.barriers;
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

std::string Machine::text(const Thread& thread) const {
  const std::string text = "thread " + std::to_string(thread.index);
  return shape.blocks == 1 ? text : text + " of block " + std::to_string(thread.block->index);
}

std::string Machine::waiting_at(const Thread& thread) const {
  if (warp_of(thread).collective & thread.bit()) return thread.part.call.text();
  return std::string(name(thread.barrier_op)) + " at " + thread.barrier_place.text();
}

std::string Machine::deadlock() const {
  std::string text = "deadlock: ", last;
  for (const Block& block : blocks_) {
    for (unsigned i = 0; i < shape.threads; ++i) {
      const Thread& thread = block.threads[i];
      if (warp_of(thread).exited & thread.bit()) continue;
      const std::string place = waiting_at(thread);
      if (place != last) text += (last.empty() ? "" : ", ") + waiting(thread);
      last = place;
    }
  }
  return text;
}

Result run(const Config& config, const Shape& shape, void (*invoke)(void*), void* call, size_t bytes) {
  return machine.run(config, shape, invoke, call, bytes);
}

Index thread_index() { return {machine.current->index, 0, 0}; }
Index block_index() { return {machine.current->block->index, 0, 0}; }
Index block_size() { return {machine.shape.threads, 1, 1}; }
Index grid_size() { return {machine.shape.blocks, 1, 1}; }
uint32_t cluster_rank() { return machine.current->block->rank; }
uint32_t cluster_size() { return machine.shape.cluster; }
void* dyn_shared() { return machine.current->block->shared.begin(); }

int barrier(BarrierOp op, bool predicate, Place place) {
  const Entered entered;
  return machine.barrier(op, predicate, place);
}

}  // namespace dcut::simt
