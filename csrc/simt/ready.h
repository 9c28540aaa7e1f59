// The threads of a cluster that can run, and which of them runs next.
#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <utility>

#include "runtime.h"

namespace dcut::simt {

class Ready {
 public:
  void start_launch(const Config& config);
  void start_cluster();
  std::mt19937_64& random() { return random_; }

  void add(unsigned block, unsigned warp, unsigned lanes);
  bool empty() const { return blocks_ == 0; }
  std::pair<unsigned, unsigned> take();  // block and index of a thread, which is no longer ready

 private:
  unsigned random_bit(unsigned bits);

  Schedule schedule_ = Schedule::kForward;
  std::mt19937_64 random_;
  unsigned blocks_ = 0;  // with a lane that is ready
  std::array<unsigned, 16> warps_ = {};
  std::array<std::array<unsigned, 32>, 16> lanes_ = {};
  unsigned block_ = 0, warp_ = 0, stay_ = 0;  // shuffled: the warp that runs, and for how many turns
};

}  // namespace dcut::simt
