// Python bindings of drawn routing and predictions: check arrays, drop the GIL, call.
#include "simulate/draws.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/gil.h"

namespace moechat {
namespace {

using DrawnExperts = py::array_t<std::int32_t>;

// A copy, since the caller's array may change in another thread.
std::vector<double> positive_copy(const char* name, const py::array& array,
                                  const std::vector<std::int64_t>& shape) {
  const double* data = checked<double>(name, array, shape);
  std::vector<double> copy(data, data + array.size());
  for (const double value : copy) {
    if (!(value > 0) || value > 1e300) refuse(std::string(name) + " must be positive");
  }
  return copy;
}

// Chosen experts [tokens, layers, k]: a checked copy.
std::vector<std::int32_t> drawn_from(const py::array& array, const std::vector<std::int64_t>& shape,
                                     std::int64_t experts) {
  const std::int32_t* data = checked<std::int32_t>("experts", array, shape);
  std::vector<std::int32_t> copy(data, data + array.size());
  const auto k = static_cast<std::size_t>(shape[2]);
  std::vector<std::int64_t> seen(static_cast<std::size_t>(experts), -1);
  for (std::size_t i = 0; i < copy.size(); ++i) {
    const std::int32_t expert = copy[i];
    const auto row = static_cast<std::int64_t>(i / k);
    if (expert < 0 || expert >= experts) {
      refuse("experts names expert " + std::to_string(expert) + "; there are " + std::to_string(experts));
    }
    if (seen[static_cast<std::size_t>(expert)] == row) {
      refuse("experts has expert " + std::to_string(expert) + " twice in one row");
    }
    seen[static_cast<std::size_t>(expert)] = row;
  }
  return copy;
}

std::vector<std::int64_t> weight_table(const char* name, const py::array& array) {
  const auto shape = shape_of(array);
  if (shape.size() != 2 || shape[0] < 1 || shape[1] < 1) {
    refuse(std::string(name) + " has shape " + shape_text(shape) + "; it must be [layers, experts]");
  }
  return shape;
}

DrawnExperts draw_routing_py(const py::array& weights, std::int32_t top_k, std::int64_t tokens,
                             std::uint64_t seed) {
  const auto shape = weight_table("weights", weights);
  if (top_k < 1 || top_k > shape[1]) {
    refuse("top_k is " + std::to_string(top_k) + "; it must be 1 to " + std::to_string(shape[1]));
  }
  if (tokens < 0) refuse("tokens cannot be negative");
  const auto values = positive_copy("weights", weights, shape);
  DrawnExperts out(std::vector<py::ssize_t>{tokens, shape[0], top_k});
  std::int32_t* data = out.mutable_data();
  const ReleaseGil released;
  draw_routing(values.data(), static_cast<std::int32_t>(shape[0]), static_cast<std::int32_t>(shape[1]), top_k,
               tokens, seed, check_signals, data);
  return out;
}

DrawnExperts draw_rankings_py(const py::array& experts, const std::optional<py::array>& weights,
                              const py::array& right, const py::array& popularity, std::int32_t width,
                              std::uint64_t seed, std::uint64_t stream, std::int64_t first_token) {
  const auto table = weight_table("popularity", popularity);
  const auto shape = shape_of(experts);
  if (shape.size() != 3 || shape[1] != table[0] || shape[2] < 1 || shape[2] > table[1]) {
    refuse("experts has shape " + shape_text(shape) + "; it must be [tokens, " + std::to_string(table[0]) +
           ", k], k at most " + std::to_string(table[1]));
  }
  if (width < 1 || width > table[1]) {
    refuse("width is " + std::to_string(width) + "; it must be 1 to " + std::to_string(table[1]));
  }
  if (first_token < 0) refuse("first_token cannot be negative");
  const auto chosen = drawn_from(experts, shape, table[1]);
  const auto popular = positive_copy("popularity", popularity, table);
  const double* likely = checked<double>("right", right, table);
  const std::vector<double> probabilities(likely, likely + right.size());
  std::vector<float> weighted;
  if (weights) {
    const float* data = checked<float>("weights", *weights, shape);
    weighted.assign(data, data + weights->size());
    for (const float weight : weighted) {
      if (!(weight > 0)) refuse("weights must be positive");
    }
  }
  RankingInputs inputs;
  inputs.chosen = chosen.data();
  inputs.weights = weights ? weighted.data() : nullptr;
  inputs.right = probabilities.data();
  inputs.popularity = popular.data();
  inputs.tokens = shape[0];
  inputs.first_token = first_token;
  inputs.layers = static_cast<std::int32_t>(table[0]);
  inputs.experts = static_cast<std::int32_t>(table[1]);
  inputs.k = static_cast<std::int32_t>(shape[2]);
  inputs.width = width;
  DrawnExperts out(std::vector<py::ssize_t>{shape[0], table[0], width});
  std::int32_t* data = out.mutable_data();
  const ReleaseGil released;
  draw_rankings(inputs, seed, stream, check_signals, data);
  return out;
}

}  // namespace

void bind_draws(py::module_& m) {
  m.def("draw_routing", &draw_routing_py, py::arg("weights"), py::arg("top_k"), py::arg("tokens"),
        py::arg("seed"));
  m.def("draw_rankings", &draw_rankings_py, py::arg("experts"), py::arg("weights"), py::arg("right"),
        py::arg("popularity"), py::arg("width"), py::arg("seed"), py::arg("stream"), py::arg("first_token"));
}

}  // namespace moechat
