#include "ready.h"

namespace dcut::simt {
namespace {

constexpr unsigned kLongestStay = 256;

unsigned lowest(unsigned bits) { return static_cast<unsigned>(__builtin_ctz(bits)); }
unsigned highest(unsigned bits) { return 31 - static_cast<unsigned>(__builtin_clz(bits)); }

}  // namespace

void Ready::start_launch(const Config& config) {
  schedule_ = config.schedule;
  random_.seed(config.seed);
}

void Ready::start_cluster() {
  blocks_ = stay_ = 0;
  warps_ = {};
  lanes_ = {};
}

void Ready::add(unsigned block, unsigned warp, unsigned lanes) {
  blocks_ |= 1u << block;
  warps_[block] |= 1u << warp;
  lanes_[block][warp] |= lanes;
}

std::pair<unsigned, unsigned> Ready::take() {
  unsigned lane;
  if (schedule_ == Schedule::kShuffled) {
    if (stay_ == 0 || lanes_[block_][warp_] == 0) {
      block_ = random_bit(blocks_);
      warp_ = random_bit(warps_[block_]);
      stay_ = 1 + static_cast<unsigned>(random_() % kLongestStay);
    }
    --stay_;
    lane = random_bit(lanes_[block_][warp_]);
  } else {
    const auto pick = schedule_ == Schedule::kForward ? lowest : highest;
    block_ = pick(blocks_);
    warp_ = pick(warps_[block_]);
    lane = pick(lanes_[block_][warp_]);
  }
  lanes_[block_][warp_] &= ~(1u << lane);
  if (lanes_[block_][warp_] == 0) warps_[block_] &= ~(1u << warp_);
  if (warps_[block_] == 0) blocks_ &= ~(1u << block_);
  return {block_, warp_ * 32 + lane};
}

unsigned Ready::random_bit(unsigned bits) {
  for (uint64_t skip = random_() % static_cast<unsigned>(__builtin_popcount(bits)); skip > 0; --skip) bits &= bits - 1;
  return lowest(bits);
}

}  // namespace dcut::simt
