// The threads of a block that can run, and which of them runs next.
#pragma once

#include <array>
#include <cstdint>
#include <random>

#include "runtime.h"

namespace dcut::simt {

class Ready {
 public:
  void start_launch(const Config& config);
  void start_block();
  std::mt19937_64& random() { return random_; }

  void add(unsigned warp, unsigned lanes);
  bool empty() const { return warps_ == 0; }
  unsigned take();  // the index of a thread, which is no longer ready

 private:
  unsigned random_bit(unsigned bits);

  Schedule schedule_ = Schedule::kForward;
  std::mt19937_64 random_;
  unsigned warps_ = 0;  // with a lane that is ready
  std::array<unsigned, 32> lanes_ = {};
  unsigned warp_ = 0, stay_ = 0;  // shuffled: the warp that runs, and for how many turns
};

}  // namespace dcut::simt
