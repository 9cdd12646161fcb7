// Arguments that the functions for packing experts share.
#pragma once

#include <optional>
#include <string>
#include <tuple>

#include "bindings/arrays.h"
#include "kernels/experts/pack.h"
#include "kernels/threads/thread_pool.h"

namespace moechat {

using BiasArrays = std::optional<std::tuple<py::array, py::array, py::array>>;

inline std::optional<ExpertBiases> checked_biases(const BlockLayout& layout, const BiasArrays& biases) {
  if (biases.has_value() != layout.has_bias) {
    refuse(layout.has_bias ? "the layout has biases, but none were given" : "the layout has no biases");
  }
  if (!biases) return std::nullopt;
  return ExpertBiases{checked<float>("gate bias", std::get<0>(*biases), {layout.intermediate_size}),
                      checked<float>("up bias", std::get<1>(*biases), {layout.intermediate_size}),
                      checked<float>("down bias", std::get<2>(*biases), {layout.hidden_size})};
}

inline int checked_threads(std::optional<int> threads) {
  if (threads && (*threads < 1 || *threads > kMaxThreads)) {
    refuse("threads is " + std::to_string(*threads) + "; it must be between 1 and " +
           std::to_string(kMaxThreads));
  }
  return threads.value_or(0);
}

}  // namespace moechat
