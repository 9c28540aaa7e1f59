// Numbers for the places of a kernel that touch memory.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime.h"

namespace dcut::simt {

class Sites {
 public:
  uint32_t of(const void* code);  // the address after an instrumented access
  uint32_t of(const Place& place);
  std::string text(uint32_t site) const;  // file:line, as far as debug information tells

 private:
  struct Site {
    const void* code;  // null: `place` is known
    Place place;
  };

  std::vector<Site> sites_;
  std::unordered_map<const void*, uint32_t> by_code_;
  std::map<std::pair<const char*, int>, uint32_t> by_place_;
};

}  // namespace dcut::simt
