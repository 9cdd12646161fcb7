// Conversion of routing counts to Python.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "bindings/arrays.h"
#include "cache/routing_counter.h"

namespace moechat {

template <class From>
py::array_t<std::int64_t> counts_array(const std::vector<From>& values,
                                       const std::vector<py::ssize_t>& shape) {
  py::array_t<std::int64_t> array(shape);
  std::copy(values.begin(), values.end(), array.mutable_data());
  return array;
}

// Returns (tokens, predicted, activations, ranks, hits_of_prediction, ranks_of_prediction); int64 arrays.
inline py::tuple counts_tuple(const RoutingCounts& counts, py::ssize_t layers, py::ssize_t experts,
                              py::ssize_t depth) {
  return py::make_tuple(counts.tokens, counts_array(counts.predicted, {layers}),
                        counts_array(counts.activations, {layers, experts}),
                        counts_array(counts.ranks, {layers, experts}),
                        counts_array(counts.hits_of_prediction, {layers, depth}),
                        counts_array(counts.ranks_of_prediction, {layers, depth, experts}));
}

}  // namespace moechat
