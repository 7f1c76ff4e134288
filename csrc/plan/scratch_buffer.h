// Memory for plain data that is written before it is read.
#pragma once

#include <cstddef>
#include <memory>

namespace prefixpack {

// Unlike a vector's, its elements are not initialised, and it does not grow while it is filled.
template <class T>
class ScratchBuffer {
 public:
  // What was in it is lost.
  void make_room(size_t size) {
    if (size <= capacity_) return;
    data_.reset(new T[size]);
    capacity_ = size;
  }

  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }

 private:
  std::unique_ptr<T[]> data_;
  size_t capacity_ = 0;
};

}  // namespace prefixpack
