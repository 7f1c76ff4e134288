#include <pybind11/numpy.h>

#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/views.h"
#include "offline/prefix_tree.h"

namespace py = pybind11;

namespace prefixpack {

namespace {

// No conversion: a converted copy of a batch of prompts could be gigabytes.
using Tokens = py::array_t<int32_t, py::array::c_style>;
using Offsets = py::array_t<int64_t, py::array::c_style>;

Prompts checked(const Tokens& tokens, const Offsets& offsets) {
  if (tokens.ndim() != 1) throw std::invalid_argument("tokens must be one-dimensional");
  if (offsets.ndim() != 1 || offsets.shape(0) < 1) {
    throw std::invalid_argument("offsets must be one-dimensional with one entry more than there are prompts");
  }
  const py::ssize_t count = offsets.shape(0) - 1;
  if (count >= std::numeric_limits<int32_t>::max()) throw std::invalid_argument("more than 2^31 - 2 prompts");
  const int64_t* bounds = offsets.data();
  if (bounds[0] != 0) throw std::invalid_argument("offsets[0] is " + std::to_string(bounds[0]) + ", expected 0");
  for (py::ssize_t i = 0; i < count; ++i) {
    // What comes before is not negative, so that the difference does not overflow.
    if (bounds[i + 1] < bounds[i] || bounds[i + 1] - bounds[i] > std::numeric_limits<int32_t>::max()) {
      throw std::invalid_argument("prompt " + std::to_string(i) + " lies in [" + std::to_string(bounds[i]) + ", " +
                                  std::to_string(bounds[i + 1]) + "); expected 0 to 2^31 - 1 tokens");
    }
  }
  if (bounds[count] != tokens.shape(0)) {
    throw std::invalid_argument("offsets end at " + std::to_string(bounds[count]) + ", but there are " +
                                std::to_string(tokens.shape(0)) + " tokens");
  }
  return {tokens.data(), bounds, static_cast<int32_t>(count)};
}

}  // namespace

void bind_offline(py::module_& m) {
  py::class_<PrefixTree>(m, "PrefixTree")
      .def(py::init([](const Tokens& tokens, const Offsets& offsets) {
             const Prompts prompts = checked(tokens, offsets);
             py::gil_scoped_release unlocked;
             return build_prefix_tree(prompts);
           }),
           py::arg("tokens").noconvert(), py::arg("offsets").noconvert())
      .def_property_readonly("num_nodes", &PrefixTree::num_nodes)
      .def_property_readonly("order", column(&PrefixTree::order))
      .def_property_readonly("shared", column(&PrefixTree::shared))
      .def_property_readonly("parent", column(&PrefixTree::parent))
      .def_property_readonly("begin", column(&PrefixTree::begin))
      .def_property_readonly("end", column(&PrefixTree::end))
      .def_property_readonly("first", column(&PrefixTree::first))
      .def_property_readonly("last", column(&PrefixTree::last))
      .def_property_readonly("tail_node", column(&PrefixTree::tail_node))
      .def(
          "restricted",
          [](const PrefixTree& tree, const py::array_t<bool, py::array::c_style>& in_tree) {
            if (in_tree.ndim() != 1 || in_tree.shape(0) != static_cast<py::ssize_t>(tree.tail_node.size())) {
              throw std::invalid_argument("in_tree must have one entry for each of the " +
                                          std::to_string(tree.tail_node.size()) + " prompts");
            }
            return restricted(tree, reinterpret_cast<const uint8_t*>(in_tree.data()));
          },
          py::arg("in_tree"))
      .def("enlarged_first_level", [](const PrefixTree& tree) {
        std::vector<int32_t> nodes = enlarged_first_level(tree);
        return py::array_t<int32_t>(static_cast<py::ssize_t>(nodes.size()), nodes.data());
      });

  m.def(
      "common_prefix_lengths",
      [](const Tokens& tokens, const Offsets& offsets, const py::array_t<int64_t, py::array::c_style>& sequence) {
        const Prompts prompts = checked(tokens, offsets);
        if (sequence.ndim() != 1) throw std::invalid_argument("sequence must be one-dimensional");
        const int64_t* numbers = sequence.data();
        py::array_t<int32_t> lengths(sequence.shape(0));
        for (py::ssize_t i = 0; i < sequence.shape(0); ++i) {
          if (numbers[i] < 0 || numbers[i] >= prompts.num_prompts) {
            throw std::invalid_argument("sequence[" + std::to_string(i) + "] is " + std::to_string(numbers[i]) +
                                        "; expected a prompt from 0 to " + std::to_string(prompts.num_prompts - 1));
          }
          lengths.mutable_at(i) =
              i == 0 ? 0
                     : static_cast<int32_t>(common_prefix(prompts, static_cast<int32_t>(numbers[i - 1]),
                                                          static_cast<int32_t>(numbers[i])));
        }
        return lengths;
      },
      py::arg("tokens").noconvert(), py::arg("offsets").noconvert(), py::arg("sequence"),
      "Tokens that each prompt of `sequence` has in common with the one before it; 0 for the first.");
}

}  // namespace prefixpack
