// Scratch memory that is kept from call to call, one per thread.
#pragma once

#include <stdlib.h>

#include <memory>
#include <new>

namespace dcut::cpu {

template <class T>
class Buffer {
 public:
  // At least n entries on a cache line; the old contents are lost.
  T* get(size_t n) {
    if (n > size_) {
      const size_t bytes = (n * sizeof(T) + 4095) / 4096 * 4096;
      data_.reset(static_cast<T*>(aligned_alloc(64, bytes)));
      if (!data_) {
        size_ = 0;
        throw std::bad_alloc();
      }
      size_ = bytes / sizeof(T);
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(T* p) const { free(p); }
  };
  std::unique_ptr<T, Free> data_;
  size_t size_ = 0;
};

}  // namespace dcut::cpu
