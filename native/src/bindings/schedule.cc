#include "bindings/schedule.h"

#include <pybind11/numpy.h>

#include <algorithm>

#include "bindings/arrays.h"

namespace moechat {

Miss miss_of(const std::string& name) {
  if (name == "fetch") return Miss::kFetch;
  if (name == "compute") return Miss::kCompute;
  if (name == "both") return Miss::kBoth;
  if (name == "cpu") return Miss::kCpu;
  if (name == "seldom") return Miss::kSeldom;
  if (name == "stay") return Miss::kStay;
  refuse("miss is '" + name + "'; it must be 'fetch', 'compute', 'both', 'cpu', 'seldom' or 'stay'");
}

Ahead ahead_of(const std::string& name) {
  if (name == "none") return Ahead::kNone;
  if (name == "prompts") return Ahead::kPrompts;
  if (name == "ranked") return Ahead::kRanked;
  if (name == "queued") return Ahead::kQueued;
  if (name == "adaptive") return Ahead::kAdaptive;
  if (name == "whole-layer") return Ahead::kWholeLayer;
  refuse("ahead is \"" + name + "\"; it must be none, prompts, ranked, queued, adaptive or whole-layer");
}

Admission admission_of(const std::string& admit) {
  if (admit == "key") return Admission::kKey;
  if (admit == "always") return Admission::kAlways;
  if (admit == "best") return Admission::kBest;
  refuse("admit is '" + admit + "'; it must be 'key', 'always' or 'best'");
}

CacheRules rules_of(const std::string& admit, const std::string& victims) {
  const Admission admission = admission_of(admit);
  if (victims != "farthest" && victims != "lowest") {
    refuse("victims is '" + victims + "'; it must be 'farthest' or 'lowest'");
  }
  return {admission, victims == "lowest"};
}

std::vector<AheadExpert> ahead_experts(const py::array& layers, const py::array& experts,
                                       const std::optional<py::array>& scores) {
  const auto shape = shape_of(layers);
  if (shape.size() != 1) refuse("layers has shape " + shape_text(shape) + "; it must be [n]");
  const auto* const of_layer = checked<std::int32_t>("layers", layers, shape);
  const auto* const named = checked<std::int32_t>("experts", experts, shape);
  const float* const score = scores ? checked<float>("scores", *scores, shape) : nullptr;
  std::vector<AheadExpert> found;
  found.reserve(static_cast<std::size_t>(shape[0]));
  for (std::int64_t i = 0; i < shape[0]; ++i) {
    found.push_back({of_layer[i], named[i], score == nullptr ? 0 : score[i]});
  }
  return found;
}

py::tuple plan_speculation_py(const std::string& ahead, std::int32_t lookahead, std::int64_t stream_tokens,
                              std::int32_t layer, std::int32_t layers, std::int64_t tokens) {
  if (layer < 0 || layer >= layers) {
    refuse("layer is " + std::to_string(layer) + "; it must be 0 to " + std::to_string(layers - 1));
  }
  const SpeculationPlan plan =
      plan_speculation({ahead_of(ahead), lookahead, stream_tokens}, layer, layers, tokens);
  py::list ranked;
  for (const Prediction& next : plan.ranked) ranked.append(py::make_tuple(next.ahead, next.layer));
  return py::make_tuple(plan.whole < 0 ? py::object(py::none()) : py::object(py::int_(plan.whole)), ranked);
}

std::vector<std::pair<std::int32_t, std::int32_t>> expert_pairs(const py::array& experts) {
  if (experts.ndim() != 2)
    refuse("experts has shape " + shape_text(shape_of(experts)) + "; it must be [n, 2]");
  const std::int32_t* values = checked<std::int32_t>("experts", experts, {experts.shape(0), 2});
  std::vector<std::pair<std::int32_t, std::int32_t>> pairs;
  for (py::ssize_t i = 0; i < experts.shape(0); ++i) pairs.emplace_back(values[2 * i], values[2 * i + 1]);
  return pairs;
}

std::vector<double> expert_shares(const py::array& shares) {
  if (shares.ndim() != 2) {
    refuse("shares has shape " + shape_text(shape_of(shares)) + "; it must be [layers, experts]");
  }
  const double* values = checked<double>("shares", shares, shape_of(shares));
  return {values, values + shares.size()};
}

py::dict schedule_stats(const ScheduleStats& stats) {
  py::dict flat;
  constexpr const char* kHitNames[] = {"full", "prefetch", "top", "miss"};
  for (int kind = 0; kind < 4; ++kind) {
    flat[py::str(std::string("hits_") + kHitNames[kind])] = stats.cache.hits[kind];
    flat[py::str(std::string("prefill_hits_") + kHitNames[kind])] = stats.cache.prefill_hits[kind];
  }
  flat["blocks_wanted"] = stats.cache.blocks_wanted;
  flat["blocks_resident"] = stats.cache.blocks_resident;
  flat["blocks_prefetched"] = stats.cache.blocks_prefetched;
  flat["fetched_demand"] = stats.cache.fetched_demand;
  flat["fetched_prefetch"] = stats.cache.fetched_prefetch;
  flat["prefetch_wasted"] = stats.cache.prefetch_wasted;
  flat["evicted"] = stats.cache.evicted;
  flat["admitted"] = stats.cache.admitted;
  flat["preloaded"] = stats.cache.preloaded;

  constexpr const char* kPriorityNames[kPriorities] = {"demand", "next", "later"};
  std::int64_t bytes = 0;
  for (int priority = 0; priority < kPriorities; ++priority) {
    const std::string name = kPriorityNames[priority];
    flat[py::str("link_bytes_" + name)] = stats.link.bytes[priority];
    flat[py::str("link_transfers_" + name)] = stats.link.transfers[priority];
    bytes += stats.link.bytes[priority];
  }
  flat["link_bytes"] = bytes;
  flat["link_operations"] = stats.link.operations;
  flat["link_errors"] = stats.link.errors;
  flat["link_cancelled"] = stats.link.cancelled;
  flat["link_queued"] = stats.link.queued;
  flat["link_in_flight"] = stats.link.in_flight;
  flat["link_busy_seconds"] = stats.link.busy_seconds;
  flat["link_bandwidth"] = stats.link.bandwidth;

  flat["compute_seconds"] = stats.compute_seconds;
  flat["stall_seconds"] = stats.stall_seconds;
  flat["begin_seconds"] = stats.begin_seconds;
  flat["layers_run"] = stats.layers_run;
  flat["activations"] = stats.activations;
  flat["bytes_computed"] = stats.bytes_computed;
  flat["kernel_calls"] = stats.kernel_calls;
  flat["blocks_staged"] = stats.blocks_staged;
  flat["blocks_far"] = stats.blocks_far;
  flat["far_seconds"] = stats.far_seconds;
  flat["pages"] = stats.pages;
  flat["pages_peak"] = stats.pages_peak;
  flat["page_bytes"] = stats.page_bytes;
  return flat;
}

py::object residency_array(const std::vector<std::int16_t>& blocks, const ScheduleOptions& options) {
  py::array_t<std::int16_t> array({py::ssize_t{options.layers}, py::ssize_t{options.experts}});
  std::copy(blocks.begin(), blocks.end(), array.mutable_data());
  return std::move(array);
}

}  // namespace moechat
