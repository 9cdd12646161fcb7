// Python bindings of the routing counter, for recorded routing.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "bindings/policy_holder.h"
#include "bindings/routing_counts.h"
#include "cache/policy.h"
#include "cache/routing_counter.h"

namespace moechat {
namespace {

constexpr std::int64_t kTokensBetweenSignals = 1024;

// Expert numbers [tokens, layers, width].
struct Table {
  const std::int32_t* data = nullptr;
  std::int64_t tokens = 0;
  std::int64_t width = 0;
};

Table table_of(const char* name, const py::array& array, std::int64_t layers) {
  const auto shape = shape_of(array);
  if (shape.size() != 3 || shape[1] != layers) {
    refuse(std::string(name) + " has shape " + shape_text(shape) + "; it must be [tokens, " +
           std::to_string(layers) + ", n]");
  }
  return {checked<std::int32_t>(name, array, shape), shape[0], shape[2]};
}

// A policy and a counter that ranks by its keys. Calls are serialised.
class TraceCounter {
 public:
  TraceCounter(PolicyHolder& policy, std::int32_t top_k)
      : counter_(policy.get().layers(), policy.get().experts(), top_k),
        policy_(policy.take()),
        top_k_(top_k),
        tokens_of_(static_cast<std::size_t>(policy_->experts())) {}

  std::int32_t layers() const { return policy_->layers(); }
  std::int32_t experts() const { return policy_->experts(); }
  std::int32_t depth() const { return counter_.depth(); }
  std::int32_t top_k() const { return top_k_; }
  const std::string& policy() const { return policy_->name(); }

  // Counts passes, layer by layer. Rows are copied before they are checked, since the caller's arrays may
  // change in another thread. Calls check(), which may throw, now and then.
  template <class Check>
  void run(const Table& chosen, const Table& ranked, const std::vector<std::int64_t>& passes,
           const Check& check) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::int64_t token = 0, checked_at = 0;
    for (std::size_t pass = 0; token < chosen.tokens; ++pass) {
      const std::int64_t tokens = passes.empty() ? 1 : passes[pass];
      for (std::int32_t layer = 0; layer < layers(); ++layer) {
        if (ranked.data != nullptr && tokens == 1) predict(ranked, token, layer);
        access(chosen, token, layer, tokens);
      }
      token += tokens;
      if (token - checked_at >= kTokensBetweenSignals) {
        checked_at = token;
        check();
      }
    }
  }

  RoutingCounts counts() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return counter_.counts();
  }
  void reset() {
    const std::lock_guard<std::mutex> lock(mutex_);
    counter_.reset();
  }

 private:
  const std::vector<std::int32_t>& row(const Table& table, std::int64_t token, std::int32_t layer) {
    const std::int32_t* from = table.data + (token * layers() + layer) * table.width;
    row_.assign(from, from + table.width);
    for (const std::int32_t expert : row_) {
      if (expert >= 0 && expert < experts()) continue;
      throw std::invalid_argument("token " + std::to_string(token) + " names expert " +
                                  std::to_string(expert) + " in layer " + std::to_string(layer) +
                                  "; there are " + std::to_string(experts()));
    }
    return row_;
  }

  void predict(const Table& ranked, std::int64_t token, std::int32_t layer) {
    const std::vector<std::int32_t>& places = row(ranked, token, layer);
    const auto count = static_cast<std::int64_t>(places.size());
    counter_.predict(layer, places.data(), count);
    policy_->predict(layer, places.data(), std::min<std::int64_t>(count, top_k_));
  }

  void access(const Table& chosen, std::int64_t token, std::int32_t layer, std::int64_t tokens) {
    for (const std::int32_t expert : named_) tokens_of_[static_cast<std::size_t>(expert)] = 0;
    named_.clear();
    for (std::int64_t i = token; i < token + tokens; ++i) {
      for (const std::int32_t expert : row(chosen, i, layer)) {
        if (tokens_of_[static_cast<std::size_t>(expert)]++ == 0) named_.push_back(expert);
      }
    }
    std::sort(named_.begin(), named_.end());
    counts_.clear();
    for (const std::int32_t expert : named_) counts_.push_back(tokens_of_[static_cast<std::size_t>(expert)]);
    const auto count = static_cast<std::int64_t>(named_.size());
    counter_.access(layer, policy_->keys(layer), named_.data(), count, tokens);
    policy_->access(layer, named_.data(), counts_.data(), count, tokens);
    counter_.keep(layer, policy_->keys(layer), named_.data(), count);
  }

  mutable std::mutex mutex_;
  RoutingCounter counter_;
  std::unique_ptr<EvictionPolicy> policy_;
  std::int32_t top_k_;
  std::vector<std::int32_t> row_, named_, counts_;
  std::vector<std::int32_t> tokens_of_;  // [experts], 0 except for those in named_
};

std::vector<std::int64_t> passes_of(const std::optional<py::array>& passes, std::int64_t tokens) {
  if (!passes) return {};
  if (passes->ndim() != 1) refuse("passes has shape " + shape_text(shape_of(*passes)) + "; it must be [n]");
  const auto* values = checked<std::int64_t>("passes", *passes, shape_of(*passes));
  std::vector<std::int64_t> list(values, values + passes->size());
  std::int64_t left = tokens;
  for (const std::int64_t count : list) {
    if (count < 1 || count > left) refuse("passes must be at least 1 each and add up to the tokens");
    left -= count;
  }
  if (left != 0) refuse("passes must be at least 1 each and add up to the tokens");
  return list;
}

void run(TraceCounter& self, const py::array& experts, const std::optional<py::array>& predictions,
         const std::optional<py::array>& passes) {
  const Table chosen = table_of("experts", experts, self.layers());
  const Table ranked = predictions ? table_of("predictions", *predictions, self.layers()) : Table{};
  if (predictions && ranked.tokens != chosen.tokens) {
    refuse("predictions are for " + std::to_string(ranked.tokens) + " tokens; experts has " +
           std::to_string(chosen.tokens));
  }
  const std::vector<std::int64_t> list = passes_of(passes, chosen.tokens);
  const ReleaseGil released;
  self.run(chosen, ranked, list, check_signals);
}

RoutingCounts copied_counts(const TraceCounter& self) {
  const ReleaseGil released;
  return self.counts();
}

}  // namespace

void bind_routing(py::module_& m) {
  m.def("prediction_depth", &RoutingCounter::depth_of, py::arg("experts"), py::arg("top_k"));
  using Self = TraceCounter;
  py::class_<Self>(m, "RoutingCounter")
      .def(py::init<PolicyHolder&, std::int32_t>(), py::arg("policy"), py::arg("top_k"))
      .def_property_readonly("layers", &Self::layers)
      .def_property_readonly("experts", &Self::experts)
      .def_property_readonly("depth", &Self::depth)
      .def_property_readonly("top_k", &Self::top_k)
      .def_property_readonly("policy", &Self::policy)
      .def("run", &run, py::arg("experts"), py::arg("predictions") = py::none(),
           py::arg("passes") = py::none())
      .def("counts",
           [](const Self& self) {
             return counts_tuple(copied_counts(self), self.layers(), self.experts(), self.depth());
           })
      .def("reset", [](Self& self) {
        const ReleaseGil released;
        self.reset();
      });
}

}  // namespace moechat
