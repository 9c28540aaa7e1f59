#include "racecheck.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace dcut::simt {
namespace {

constexpr uintptr_t kWordBytes = 4;

bool same_warp(const Access& a, const Access& b) { return a.thread / kLanes == b.thread / kLanes; }

// Whether `before` is known to come before `now`, an access by a thread with this clock.
bool ordered(const Access& before, const Access& now, const Clock& clock) {
  if (before.thread == Access::kNone) return true;
  if (before.cluster != now.cluster) return false;
  if (before.era != now.era) return true;
  if (before.block != now.block) return false;
  if (before.interval != now.interval || before.thread == now.thread) return true;
  return same_warp(before, now) && clock[before.thread % kLanes] >= before.clock;
}

}  // namespace

void Racecheck::Crowd::add(const Access& now) {
  // Whoever races with an access that came before a barrier, or with one of the same thread, races with this one too,
  // or came in between.  One access of another cluster, block and warp each race with all but their own kind.
  bool other_cluster = false, other_block = false, other_warp = false;
  const auto superseded = [&](const Access& before) {
    if (before.cluster != now.cluster) return std::exchange(other_cluster, true);
    if (before.era != now.era) return true;
    if (before.block != now.block) return std::exchange(other_block, true);
    if (before.interval != now.interval || before.thread == now.thread) return true;
    return !same_warp(before, now) && std::exchange(other_warp, true);
  };
  kept_.erase(std::remove_if(kept_.begin(), kept_.end(), std::ref(superseded)), kept_.end());
  kept_.push_back(now);
}

const Access* Racecheck::Crowd::unordered(const Access& now, const Clock& clock) const {
  const auto found =
      std::find_if(kept_.begin(), kept_.end(), [&](const Access& before) { return !ordered(before, now, clock); });
  return found == kept_.end() ? nullptr : &*found;
}

void Racecheck::start_launch() {
  pages_.clear();
  reported_.clear();
}

void Racecheck::start_cluster() { shared_.clear(); }

void Racecheck::add_shared(const void* begin, size_t bytes) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(begin);
  shared_.push_back({at, at + bytes, std::vector<Word>((bytes + kWordBytes - 1) / kWordBytes)});
}

bool Racecheck::is_shared(const void* address) const {
  const uintptr_t at = reinterpret_cast<uintptr_t>(address);
  return std::any_of(shared_.begin(), shared_.end(), [at](const Shared& s) { return at >= s.begin && at < s.end; });
}

Racecheck::Word& Racecheck::word(uintptr_t index) {
  const uintptr_t at = index * kWordBytes;
  for (Shared& shared : shared_) {
    if (at >= shared.begin && at < shared.end) return shared.words[(at - shared.begin) / kWordBytes];
  }
  std::unique_ptr<Page>& page = pages_[index / kPageWords];
  if (!page) page = std::make_unique<Page>();
  return (*page)[index % kPageWords];
}

const Race* Racecheck::access(const void* address, size_t bytes, Kind kind, const Access& now, const Clock& clock) {
  found_ = false;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address), end = begin + bytes;
  for (uintptr_t index = begin / kWordBytes; index * kWordBytes < end; ++index) {
    Word& at = word(index);
    const uintptr_t first = std::max(begin, index * kWordBytes) % kWordBytes;
    const uintptr_t last = std::min(end - 1, index * kWordBytes + kWordBytes - 1) % kWordBytes;
    if (!at.bytes && last - first + 1 < kWordBytes) {
      at.bytes = std::make_unique<std::array<Cell, 4>>();
      at.bytes->fill(at.whole);
    }
    if (!at.bytes) {
      touch(at.whole, kind, now, clock);
    } else {
      for (uintptr_t byte = first; byte <= last; ++byte) touch((*at.bytes)[byte], kind, now, clock);
    }
  }
  return found_ ? &race_ : nullptr;
}

void Racecheck::touch(Cell& cell, Kind kind, const Access& now, const Clock& clock) {
  if (!ordered(cell.write, now, clock)) report(Kind::kWrite, &cell.write, kind, now);
  if (kind != Kind::kRead) report(Kind::kRead, cell.reads.unordered(now, clock), kind, now);
  if (kind != Kind::kAtomic) report(Kind::kAtomic, cell.atomics.unordered(now, clock), kind, now);
  if (kind == Kind::kRead) cell.reads.add(now);
  if (kind == Kind::kAtomic) cell.atomics.add(now);
  if (kind == Kind::kWrite) {
    cell.write = now;
    cell.reads.clear();
    cell.atomics.clear();
  }
}

void Racecheck::report(Kind before_kind, const Access* before, Kind now_kind, const Access& now) {
  if (!before || !reported_.emplace(before->site, now.site, before_kind, now_kind).second) return;
  race_ = {before_kind, now_kind, *before, now};
  found_ = true;
}

}  // namespace dcut::simt
