// Reading the boxed argument stack of an operator, in the order of its schema.
//
// Every argument is owned by the reader from the start, so an error leaks nothing.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <string>
#include <utility>
#include <vector>

namespace dcut::binding {

// A tensor handle and what the kernels need to know of it; empty for an optional argument that was not given.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {
    aoti_torch_get_data_ptr(handle_, &data);
    aoti_torch_get_dim(handle_, &dim);
    aoti_torch_get_sizes(handle_, &sizes);
    aoti_torch_get_strides(handle_, &strides);
    aoti_torch_get_dtype(handle_, &dtype);
    aoti_torch_get_device_type(handle_, &device_type);
    aoti_torch_get_device_index(handle_, &device_index);
  }
  Tensor(Tensor&& other) noexcept { *this = std::move(other); }
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    data = other.data, dim = other.dim, sizes = other.sizes, strides = other.strides;
    dtype = other.dtype, device_type = other.device_type, device_index = other.device_index;
    return *this;
  }
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  explicit operator bool() const { return handle_ != nullptr; }
  bool is_defined() const {
    bool defined = false;
    aoti_torch_is_defined(handle_, &defined);
    return defined;
  }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

  template <class T>
  T* as() const {
    return handle_ ? static_cast<T*>(data) : nullptr;
  }

  void* data = nullptr;
  int64_t dim = 0;
  int64_t *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0, device_type = 0, device_index = 0;

 private:
  AtenTensorHandle handle_ = nullptr;
};

class Reader {
 public:
  explicit Reader(StableIValue* stack) : next_(stack) {}

  Tensor tensor() { return Tensor(to<AtenTensorHandle>(*next_++)); }

  Tensor optional_tensor() {
    StableIValue value;
    return unwrap(value) ? Tensor(to<AtenTensorHandle>(value)) : Tensor();
  }

  int64_t integer() { return to<int64_t>(*next_++); }

  // Returns whether the integer was given.
  bool optional_integer(int64_t& value) {
    StableIValue inner;
    const bool given = unwrap(inner);
    if (given) value = to<int64_t>(inner);
    return given;
  }

  bool boolean() { return to<bool>(*next_++); }

  std::string word() { return word(*next_++); }

  std::vector<std::string> words() {
    const StableListHandle list = to<StableListHandle>(*next_++);
    size_t size = 0;
    torch_list_size(list, &size);
    std::vector<std::string> words(size);
    for (size_t j = 0; j < size; ++j) {
      StableIValue value;
      torch_list_get_item(list, j, &value);
      words[j] = word(value);
    }
    torch_delete_list(list);
    return words;
  }

 private:
  // Not to<std::string>: that leaks a string per call in the headers of torch 2.13.
  static std::string word(StableIValue value) {
    StringHandle handle = to<StringHandle>(value);
    size_t length = 0;
    const char* text = nullptr;
    torch_string_length(handle, &length);
    torch_string_c_str(handle, &text);
    std::string word(text, length);
    torch_delete_string(handle);
    return word;
  }

  template <class T>
  static T to(StableIValue value) {
    return torch::stable::detail::to<T>(value);
  }

  bool unwrap(StableIValue& value) {
    StableIValue* inner = to<StableIValue*>(*next_++);
    if (!inner) return false;
    value = *inner;
    delete inner;
    return true;
  }

  StableIValue* next_;
};

}  // namespace dcut::binding
