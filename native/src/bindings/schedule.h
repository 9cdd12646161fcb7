// Bindings shared by runner and timeline: names of choices, statistics, residency.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "offload/layer_schedule.h"
#include "offload/speculation.h"

namespace moechat {

namespace py = pybind11;

// Throws std::invalid_argument.
Miss miss_of(const std::string& name);

// Throws std::invalid_argument. admit: "key", "always" or "best".
Admission admission_of(const std::string& admit);
// The same; victims: "farthest" or "lowest".
CacheRules rules_of(const std::string& admit, const std::string& victims);

// Experts of later layers from int32 [n] each and float32 [n], which may be missing. Throws
// std::invalid_argument.
std::vector<AheadExpert> ahead_experts(const py::array& layers, const py::array& experts,
                                       const std::optional<py::array>& scores);

// Throws std::invalid_argument.
Ahead ahead_of(const std::string& name);

// See moechat/_native.pyi, plan_speculation.
py::tuple plan_speculation_py(const std::string& ahead, std::int32_t lookahead, std::int64_t stream_tokens,
                              std::int32_t layer, std::int32_t layers, std::int64_t tokens);

// Pairs of layer and expert from int32 [n, 2]; shares from float64 [layers, experts]. Both throw
// std::invalid_argument.
std::vector<std::pair<std::int32_t, std::int32_t>> expert_pairs(const py::array& experts);
std::vector<double> expert_shares(const py::array& shares);

// Keys: see moechat/_native.pyi, ExpertRunner.stats.
py::dict schedule_stats(const ScheduleStats& stats);

// Returns int16 [layers, experts].
py::object residency_array(const std::vector<std::int16_t>& blocks, const ScheduleOptions& options);

}  // namespace moechat
