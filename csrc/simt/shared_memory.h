// The dynamic shared memory of a block between two red zones.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace dcut::simt {

class SharedMemory {
 public:
  explicit SharedMemory(size_t bytes);

  void fill(unsigned char value);  // and renews the red zones
  unsigned char* begin() const { return memory_.get() + kZone; }
  size_t bytes() const { return bytes_; }
  bool contains(const void* address) const;
  bool in_red_zone(const void* address) const;
  std::string damage() const;  // of the red zones, empty when there is none

 private:
  static constexpr size_t kZone = 1024;

  size_t bytes_;
  std::unique_ptr<unsigned char[]> memory_;
};

}  // namespace dcut::simt
