// Read-only numpy views of vectors that a bound object owns.
#pragma once

#include <pybind11/numpy.h>

#include <utility>
#include <vector>

namespace prefixpack {

// A view of `data` that keeps its owner alive.
template <class T>
pybind11::array view(pybind11::handle owner, const T* data, std::vector<pybind11::ssize_t> shape) {
  auto array = pybind11::array_t<T>(std::move(shape), data, owner);
  array.attr("setflags")(pybind11::arg("write") = false);
  return array;
}

// A property that gives a view of a member.
template <class Owner, class T>
auto column(std::vector<T> Owner::* member) {
  return [member](pybind11::object self) {
    const auto& values = self.cast<const Owner&>().*member;
    return view(self, values.data(), {static_cast<pybind11::ssize_t>(values.size())});
  };
}

}  // namespace prefixpack
