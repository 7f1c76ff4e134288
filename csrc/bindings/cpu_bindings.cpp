#include "bindings/bindings.h"
namespace prefixpack { void bind_cpu(pybind11::module_&) {} }
