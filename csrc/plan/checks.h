// Refuses shapes and figures that the planner cannot compute with: std::invalid_argument says which.
#pragma once

#include <string>

#include "plan/cost_model.h"

namespace prefixpack {

constexpr int32_t kMostHeads = 1 << 16;  // query heads of a model

void require(bool condition, const std::string& message);

const ModelShape& checked(const ModelShape& shape);
const DeviceModel& checked(const DeviceModel& device);

}  // namespace prefixpack
