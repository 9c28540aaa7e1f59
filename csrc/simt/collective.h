// What the lanes of a warp exchange.
#pragma once

#include <array>

#include "runtime.h"

namespace dcut::simt {

constexpr unsigned kLanes = 32;

// How one lane calls a collective.
struct Call {
  WarpOp op;
  unsigned mask;
  size_t size;
  int argument;  // of a shuffle: the lane, distance or mask
  int width;
  Place place;

  bool same(const Call& other) const;  // but for the argument
  std::string text() const;
};

// Its part in it.
struct Part {
  Call call;
  unsigned char operand[16];
  unsigned char result[16];
};

// Fills in the results of the lanes in their common mask; what a shuffle reads from elsewhere is `garbage`.
void perform(const std::array<Part*, kLanes>& parts, unsigned char garbage);

}  // namespace dcut::simt
