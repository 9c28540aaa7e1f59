#include "shared_memory.h"

#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
// What the red zones hold.
static unsigned char pattern(size_t i) { return static_cast<unsigned char>(0xa5 ^ i * 31); }
#endif

namespace dcut::simt {

SharedMemory::SharedMemory(size_t bytes) : bytes_(bytes), memory_(new unsigned char[bytes + 2 * kZone]) {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_POISON_MEMORY_REGION(memory_.get(), kZone);
  ASAN_POISON_MEMORY_REGION(begin() + bytes_, kZone);
#endif
}

void SharedMemory::fill(unsigned char value) {
  std::memset(begin(), value, bytes_);
#if !defined(__SANITIZE_ADDRESS__)
  for (size_t i = 0; i < kZone; ++i) memory_[i] = begin()[bytes_ + i] = pattern(i);
#endif
}

bool SharedMemory::contains(const void* address) const {
  const unsigned char* at = static_cast<const unsigned char*>(address);
  return at >= begin() && at < begin() + bytes_;
}

bool SharedMemory::in_red_zone(const void* address) const {
  const unsigned char* at = static_cast<const unsigned char*>(address);
  const bool before = at >= memory_.get() && at < begin();
  return before || (at >= begin() + bytes_ && at < begin() + bytes_ + kZone);
}

std::string SharedMemory::damage() const {
#if !defined(__SANITIZE_ADDRESS__)
  for (size_t i = 0; i < kZone; ++i) {
    if (begin()[bytes_ + i] != pattern(i)) {
      return "shared memory: expected " + std::to_string(bytes_) + " bytes, byte " + std::to_string(bytes_ + i) +
             " was written";
    }
    const size_t distance = i + 1;
    if (memory_[kZone - distance] != pattern(kZone - distance)) {
      return "shared memory: byte " + std::to_string(distance) + " before its start was written";
    }
  }
#endif
  return "";
}

}  // namespace dcut::simt
