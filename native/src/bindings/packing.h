// Arguments that the functions for packing experts share.
#pragma once

#include <optional>
#include <string>
#include <tuple>

#include "bindings/arrays.h"
#include "kernels/experts/pack.h"
#include "kernels/threads/thread_pool.h"

namespace moechat {

// Those of gate, up (None if the layout is not gated) and down.
using BiasArrays = std::optional<std::tuple<py::array, std::optional<py::array>, py::array>>;

// Refuses up where the layout has none, and its absence where the layout has it.
template <class T>
void require_up(const BlockLayout& layout, const std::optional<T>& up) {
  if (up.has_value() != layout.gated) {
    refuse(layout.gated ? "up is None, but the layout has it" : "the layout has no up projection");
  }
}

inline std::optional<ExpertBiases> checked_biases(const BlockLayout& layout, const BiasArrays& biases) {
  if (biases.has_value() != layout.has_bias) {
    refuse(layout.has_bias ? "the layout has biases, but none were given" : "the layout has no biases");
  }
  if (!biases) return std::nullopt;
  const auto& up = std::get<1>(*biases);
  require_up(layout, up);
  return ExpertBiases{checked<float>("gate bias", std::get<0>(*biases), {layout.intermediate_size}),
                      up ? checked<float>("up bias", *up, {layout.intermediate_size}) : nullptr,
                      checked<float>("down bias", std::get<2>(*biases), {layout.hidden_size})};
}

// The kept encoding of a name.
Encoding kept_encoding_of(const std::string& name);

// Rows of a GGUF file, uint8 [count, bytes], that may be apart.
FileMatrix file_matrix(const char* name, const py::array& rows, Encoding encoding, std::int64_t count,
                       std::int64_t columns);

inline int checked_threads(std::optional<int> threads) {
  if (threads && (*threads < 1 || *threads > kMaxThreads)) {
    refuse("threads is " + std::to_string(*threads) + "; it must be between 1 and " +
           std::to_string(kMaxThreads));
  }
  return threads.value_or(0);
}

}  // namespace moechat
