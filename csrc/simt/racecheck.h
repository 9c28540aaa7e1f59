// Finds memory accesses of different threads that nothing orders.  A barrier orders a block or a cluster, __syncwarp
// the lanes it names; shuffles, votes and the order of clusters do not order memory.  Atomics are only safe from each
// other.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "collective.h"

namespace dcut::simt {

// For each lane of a warp, the number of its last __syncwarp that is known to have happened.
using Clock = std::array<uint32_t, kLanes>;

enum class Kind : uint8_t { kRead, kWrite, kAtomic };

struct Access {
  static constexpr uint32_t kNone = ~0u;

  uint32_t thread = kNone;
  uint32_t block = 0;
  uint32_t cluster = 0;
  uint32_t era = 0;       // barriers of the cluster before it
  uint32_t interval = 0;  // barriers of the block before it
  uint32_t clock = 0;     // the thread's own
  uint32_t site = 0;
};

struct Race {
  Kind before_kind, now_kind;
  Access before, now;
};

class Racecheck {
 public:
  void start_launch();
  void start_cluster();  // shared memory of earlier blocks is forgotten
  void add_shared(const void* begin, size_t bytes);

  // Returns a race that no earlier call returned, as far as the two sites and kinds tell.
  const Race* access(const void* address, size_t bytes, Kind kind, const Access& now, const Clock& clock);
  bool is_shared(const void* address) const;

 private:
  // Accesses between two writes: enough of them to meet every later access that races with any.
  class Crowd {
   public:
    void add(const Access& now);
    void clear() { kept_.clear(); }
    const Access* unordered(const Access& now, const Clock& clock) const;

   private:
    std::vector<Access> kept_;
  };

  struct Cell {
    Access write;
    Crowd reads, atomics;
  };

  // Four bytes, told apart once one of them is accessed alone.
  struct Word {
    Cell whole;
    std::unique_ptr<std::array<Cell, 4>> bytes;
  };

  static constexpr uintptr_t kPageWords = 1024;
  using Page = std::array<Word, kPageWords>;

  // The shared memory of a block.
  struct Shared {
    uintptr_t begin, end;
    std::vector<Word> words;
  };

  Word& word(uintptr_t index);
  void touch(Cell& cell, Kind kind, const Access& now, const Clock& clock);
  void report(Kind before_kind, const Access* before, Kind now_kind, const Access& now);

  std::vector<Shared> shared_;
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
  std::set<std::tuple<uint32_t, uint32_t, Kind, Kind>> reported_;
  Race race_;
  bool found_ = false;
};

}  // namespace dcut::simt
