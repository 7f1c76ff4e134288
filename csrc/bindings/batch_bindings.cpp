#include <pybind11/numpy.h>

#include <cstdint>
#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "plan/id_map.h"

namespace py = pybind11;

namespace prefixpack {

namespace {

using Indices = py::array_t<int64_t, py::array::c_style>;

// Batch indices by request object, told apart by identity. Keeps the requests alive.
class BatchIndices {
 public:
  explicit BatchIndices(py::list requests) : requests_(std::move(requests)) {
    const auto count = static_cast<int32_t>(PyList_GET_SIZE(requests_.ptr()));
    index_of_.reserve(count);
    for (int32_t i = 0; i < count; ++i) index_of_.insert(id_of(requests_, i), i);
  }

  Indices find(const py::list& requests) const {
    const Py_ssize_t count = PyList_GET_SIZE(requests.ptr());
    Indices found(count);
    int64_t* const index = found.mutable_data();
    for (Py_ssize_t i = 0; i < count; ++i) index[i] = index_of_.find(id_of(requests, i));
    return found;
  }

  bool contains_any(const py::list& requests) const {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(requests.ptr()); ++i) {
      if (index_of_.find(id_of(requests, i)) >= 0) return true;
    }
    return false;
  }

 private:
  static int64_t id_of(const py::list& requests, Py_ssize_t i) {
    return reinterpret_cast<intptr_t>(PyList_GET_ITEM(requests.ptr(), i));
  }

  py::list requests_;
  IdMap index_of_;
};

py::list gather(const py::list& values, const Indices& indices) {
  const Py_ssize_t count = indices.size(), size = PyList_GET_SIZE(values.ptr());
  const int64_t* const index = indices.data();
  py::list gathered(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (index[i] >= size) throw py::index_error("index " + std::to_string(index[i]) + " is not in the list");
    PyObject* const value = index[i] < 0 ? Py_None : PyList_GET_ITEM(values.ptr(), index[i]);
    Py_INCREF(value);
    PyList_SET_ITEM(gathered.ptr(), i, value);
  }
  return gathered;
}

}  // namespace

void bind_batch(py::module_& m) {
  py::class_<BatchIndices>(m, "BatchIndices")
      .def(py::init<py::list>(), py::arg("requests"))
      .def("find", &BatchIndices::find, py::arg("requests"))
      .def("contains_any", &BatchIndices::contains_any, py::arg("requests"));
  m.def("gather", &gather, py::arg("values"), py::arg("indices"));
}

}  // namespace prefixpack
