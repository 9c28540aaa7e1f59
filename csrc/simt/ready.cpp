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

void Ready::start_block() {
  warps_ = stay_ = 0;
  lanes_ = {};
}

void Ready::add(unsigned warp, unsigned lanes) {
  warps_ |= 1u << warp;
  lanes_[warp] |= lanes;
}

unsigned Ready::take() {
  unsigned lane;
  if (schedule_ == Schedule::kShuffled) {
    if (stay_ == 0 || lanes_[warp_] == 0) {
      warp_ = random_bit(warps_);
      stay_ = 1 + static_cast<unsigned>(random_() % kLongestStay);
    }
    --stay_;
    lane = random_bit(lanes_[warp_]);
  } else {
    const auto pick = schedule_ == Schedule::kForward ? lowest : highest;
    warp_ = pick(warps_);
    lane = pick(lanes_[warp_]);
  }
  lanes_[warp_] &= ~(1u << lane);
  if (lanes_[warp_] == 0) warps_ &= ~(1u << warp_);
  return warp_ * 32 + lane;
}

unsigned Ready::random_bit(unsigned bits) {
  for (uint64_t skip = random_() % static_cast<unsigned>(__builtin_popcount(bits)); skip > 0; --skip) bits &= bits - 1;
  return lowest(bits);
}

}  // namespace dcut::simt
