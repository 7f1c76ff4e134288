// The queue model for the tests. Built by them, with csrc/plan/queue_model.cpp.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

#include "plan/queue_model.h"

namespace py = pybind11;
using namespace prefixpack;

namespace {

// works: seconds of each work tile.
WorkTileBins binned(const std::vector<double>& works, double longest) {
  WorkTileBins bins;
  bins.reset(longest);
  for (double work : works) bins.add(work, 1);
  return bins;
}

double finish(int64_t workers, const std::vector<double>& whole, const std::vector<double>& narrow, double longest,
              bool mostly_narrow, double limit) {
  const Workers model{workers, 8, 1.6, 1.9, 1.0 / 3, 4.5e-6, 4e-6};
  return finish_of(model, binned(whole, longest), binned(narrow, longest), mostly_narrow, limit);
}

}  // namespace

PYBIND11_MODULE(queue_model_check, m) {
  m.def("finish", &finish, py::arg("workers"), py::arg("whole"), py::arg("narrow"), py::arg("longest"),
        py::arg("mostly_narrow"), py::arg("limit"));
}
