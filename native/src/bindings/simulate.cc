// Python bindings of the simulated timeline: check arrays, drop the GIL, call.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "bindings/policy_holder.h"
#include "bindings/schedule.h"
#include "simulate/timeline.h"

namespace moechat {
namespace {

LaunchPattern launch_of(const std::string& name) {
  if (name == "host") return LaunchPattern::kHost;
  if (name == "card") return LaunchPattern::kCard;
  if (name == "graphs") return LaunchPattern::kGraphs;
  refuse("launch is \"" + name + "\"; it must be host, card or graphs");
}

// A timeline that refuses concurrent calls.
class TimelineObject {
 public:
  TimelineObject(TimelineOptions options, PolicyHolder& policy) {
    policy.get();
    timeline_ = std::make_unique<Timeline>(std::move(options), policy.take());
  }

  template <class Body>
  auto call(const Body& body) {
    if (busy_.exchange(true)) throw std::runtime_error("the timeline is in use by another thread");
    const Release release{&busy_};
    const ReleaseGil released;
    return body(*timeline_);
  }
  const TimelineOptions& options() const { return timeline_->options(); }

 private:
  struct Release {
    std::atomic<bool>* busy;
    ~Release() { busy->store(false); }
  };
  std::unique_ptr<Timeline> timeline_;
  std::atomic<bool> busy_{false};
};

Loading loading_of(const std::string& miss, const std::string& ahead, std::int32_t lookahead,
                   std::int64_t stream_tokens, std::int32_t ahead_experts,
                   std::optional<std::int64_t> ahead_bytes, std::int64_t block_bytes) {
  if (block_bytes < 1) refuse("block_bytes is " + std::to_string(block_bytes) + "; it must be at least 1");
  if (ahead_bytes && *ahead_bytes < 0) refuse("ahead_bytes cannot be negative");
  return {miss_of(miss),
          {ahead_of(ahead), lookahead, stream_tokens},
          ahead_experts,
          ahead_bytes ? *ahead_bytes / block_bytes : std::numeric_limits<std::int64_t>::max()};
}

CallCosts calls_of(std::map<std::string, double> calls, VirtualLinkOptions* link) {
  CallCosts found;
  const std::pair<const char*, double*> fields[] = {
      {"dense", &found.dense},
      {"choice", &found.choice},
      {"clear", &found.clear},
      {"lists", &found.lists},
      {"list_latency", &found.list_latency},
      {"list_copy", &found.list_copy},
      {"launch", &found.launch},
      {"launch_host", &found.launch_host},
      {"event", &found.event},
      {"sum", &found.sum},
      {"sum_gpu", &found.sum_card},
      {"link_call", &link->call},
      {"link_copy", &link->call_copy},
      {"link_wake", &link->wake},
  };
  for (const auto& [name, field] : fields) {
    const auto given = calls.find(name);
    if (given == calls.end()) continue;
    *field = given->second;
    calls.erase(given);
  }
  if (!calls.empty()) refuse("calls has no " + calls.begin()->first);
  return found;
}

std::unique_ptr<TimelineObject> make_timeline(
    std::int32_t layers, std::int32_t experts, std::int32_t blocks, std::int64_t block_bytes,
    std::int64_t pages, const py::array& targets, std::int64_t reserve, PolicyHolder& policy,
    bool whole_experts, const std::string& miss, const std::string& ahead, std::int32_t lookahead,
    std::int32_t ahead_experts, std::optional<std::int64_t> ahead_bytes, std::int64_t stream_tokens,
    std::int64_t group_items, double attention, double head, double call, std::vector<double> compute,
    double far_block, double far_block_shared, std::int64_t far_threads, double far_call,
    double near_slowdown, double latency, std::vector<double> link, std::vector<double> link_shared,
    std::int64_t in_flight_bytes, const std::string& launch, bool counts_hard,
    const std::map<std::string, double>& calls, const std::string& admit, const std::string& victims,
    double adaptive) {
  TimelineOptions options;
  options.layers = layers;
  options.experts = experts;
  options.blocks = blocks;
  options.record_bytes = block_bytes;
  options.pages = pages;
  options.targets = targets_of(targets, layers);
  options.reserve = reserve;
  options.whole_experts = whole_experts;
  options.rules = rules_of(admit, victims);
  options.adaptive = adaptive;
  options.adaptive_most = lookahead;
  options.loading =
      loading_of(miss, ahead, lookahead, stream_tokens, ahead_experts, ahead_bytes, block_bytes);
  options.counts_hard = counts_hard;
  options.launch = launch_of(launch);
  options.group_items = group_items;
  options.attention = attention;
  options.head = head;
  options.costs = {call,        std::move(compute), far_block,     far_block_shared,
                   far_threads, far_call,           near_slowdown, calls_of(calls, &options.link)};
  options.link.block_bytes = block_bytes;
  options.link.latency = latency;
  options.link.seconds = std::move(link);
  options.link.seconds_shared = std::move(link_shared);
  options.link.in_flight_bytes = in_flight_bytes;
  options.link.card = options.launch != LaunchPattern::kHost;
  return std::make_unique<TimelineObject>(std::move(options), policy);
}

std::int64_t preload_py(TimelineObject& self, std::int32_t layer, const py::array& experts,
                        std::int32_t blocks) {
  const auto shape = shape_of(experts);
  if (shape.size() != 1) refuse("experts has shape " + shape_text(shape) + "; it must be [n]");
  const auto* data = checked<std::int32_t>("experts", experts, shape);
  const std::vector<std::int32_t> list(data, data + shape[0]);
  return self.call([&](Timeline& timeline) {
    return timeline.preload(layer, list.data(), static_cast<std::int64_t>(list.size()), blocks);
  });
}

py::dict run_py(TimelineObject& self, const py::array& experts, const py::array& starts,
                const std::optional<py::array>& rankings, std::int64_t from, std::optional<std::int64_t> to,
                bool hurried, const std::optional<py::array>& queues,
                const std::optional<py::array>& queue_scores, const std::optional<py::array>& requests) {
  const TimelineOptions& options = self.options();
  const auto shape = shape_of(experts);
  if (shape.size() != 3 || shape[1] != options.layers) {
    refuse("experts has shape " + shape_text(shape) + "; it must be [tokens, " +
           std::to_string(options.layers) + ", k]");
  }
  Passes passes;
  passes.experts = checked<std::int32_t>("experts", experts, shape);
  passes.tokens = shape[0];
  passes.k = static_cast<std::int32_t>(shape[2]);
  const auto bounds = shape_of(starts);
  if (bounds.size() != 1 || bounds[0] < 1) refuse("starts has shape " + shape_text(bounds));
  passes.starts = checked<std::int64_t>("starts", starts, bounds);
  passes.passes = bounds[0] - 1;
  for (std::int64_t pass = 0; pass < passes.passes; ++pass) {
    if (passes.starts[pass] < 0 || passes.starts[pass + 1] <= passes.starts[pass] ||
        passes.starts[pass + 1] > passes.tokens) {
      refuse("starts does not ascend within " + std::to_string(passes.tokens) + " tokens at pass " +
             std::to_string(pass));
    }
  }
  if (rankings) {
    const auto wide = shape_of(*rankings);
    if (wide.size() != 4 || wide[1] != passes.tokens || wide[2] != options.layers) {
      refuse("rankings has shape " + shape_text(wide) + "; it must be [depths, " +
             std::to_string(passes.tokens) + ", " + std::to_string(options.layers) + ", width]");
    }
    passes.rankings = checked<std::int32_t>("rankings", *rankings, wide);
    passes.depths = static_cast<std::int32_t>(wide[0]);
    passes.width = static_cast<std::int32_t>(wide[3]);
  }
  if (queues) {
    const auto wide = shape_of(*queues);
    if (wide.size() != 3 || wide[0] != passes.tokens || wide[1] != options.layers + std::int64_t{1}) {
      refuse("queues has shape " + shape_text(wide) + "; it must be [" + std::to_string(passes.tokens) +
             ", " + std::to_string(options.layers + std::int64_t{1}) + ", queued]");
    }
    passes.queues = checked<std::int32_t>("queues", *queues, wide);
    if (queue_scores) passes.queue_scores = checked<float>("queue_scores", *queue_scores, wide);
    passes.queued = static_cast<std::int32_t>(wide[2]);
  }
  if (requests) {
    passes.request_count = requests->size();
    passes.requests = checked<std::int64_t>("requests", *requests, {passes.request_count});
  }
  const std::int64_t end = to ? *to : passes.passes;
  if (from < 0 || from > end || end > passes.passes) {
    refuse("passes " + std::to_string(from) + " to " + std::to_string(end) + " of " +
           std::to_string(passes.passes));
  }
  const auto count = static_cast<std::size_t>(end - from);
  std::vector<PassFigures> figures(count);
  self.call(
      [&](Timeline& timeline) { timeline.run(passes, from, end, hurried, figures.data(), check_signals); });
  const auto column = [&](double PassFigures::* field) {
    py::array_t<double> values(static_cast<py::ssize_t>(count));
    double* out = values.mutable_data();
    for (std::size_t i = 0; i < count; ++i) out[i] = figures[i].*field;
    return values;
  };
  py::dict result;
  result["seconds"] = column(&PassFigures::seconds);
  result["stall"] = column(&PassFigures::stall);
  result["demand_bytes"] = column(&PassFigures::demand_bytes);
  result["prefetch_bytes"] = column(&PassFigures::prefetch_bytes);
  result["hard"] = column(&PassFigures::hard);
  return result;
}

void switch_to_py(TimelineObject& self, const py::array& targets, const std::string& miss,
                  const std::string& ahead, std::int32_t lookahead, std::int32_t ahead_experts,
                  std::optional<std::int64_t> ahead_bytes, std::int64_t stream_tokens) {
  const TimelineOptions& options = self.options();
  const Loading loading =
      loading_of(miss, ahead, lookahead, stream_tokens, ahead_experts, ahead_bytes, options.record_bytes);
  const std::vector<LayerTarget> list = targets_of(targets, options.layers);
  self.call([&](Timeline& timeline) { timeline.switch_to(loading, list); });
}

py::dict stats_py(TimelineObject& self) {
  return self.call([](Timeline& timeline) {
    const ScheduleStats stats = timeline.stats();
    const double now = timeline.now();
    const py::gil_scoped_acquire held;
    py::dict flat = schedule_stats(stats);
    flat["now"] = now;
    return flat;
  });
}

py::object residency_py(TimelineObject& self) {
  const auto blocks = self.call([](Timeline& timeline) { return timeline.residency(); });
  return residency_array(blocks, self.options());
}

}  // namespace

void bind_adaptive_step(py::module_& m) {
  using Self = AdaptiveStep;
  py::class_<Self>(m, "AdaptiveStep")
      .def(py::init([](std::int32_t layers, std::int32_t experts, double expert_bytes, double wanted,
                       std::int32_t stalls, std::int32_t ready, std::int32_t most) {
             if (layers < 1 || experts < 1 || stalls < 1 || ready < 1 || most < 1 || !(expert_bytes > 0) ||
                 !(wanted > 0)) {
               refuse("sizes of an adaptive step must be positive");
             }
             return std::make_unique<Self>(layers, experts, expert_bytes, wanted, stalls, ready, most);
           }),
           py::arg("layers"), py::arg("experts"), py::arg("expert_bytes"), py::arg("wanted"),
           py::arg("stalls") = Self::kStalls, py::arg("ready") = Self::kReady, py::arg("most") = Self::kMost)
      .def("want", &Self::want, py::arg("experts"))
      .def("measure", &Self::measure, py::arg("layer_seconds"), py::arg("link_rate"))
      .def(
          "turn",
          [](Self& self, bool late) {
            const std::int32_t expert = 0;
            self.predicted(0, &expert, 1);
            self.needed(0, &expert, 1, [late](std::int32_t) { return !late; });
          },
          py::arg("late"))
      .def_property_readonly("step", &Self::step)
      .def_property_readonly("estimate", &Self::estimate);
}

void bind_simulate(py::module_& m) {
  bind_adaptive_step(m);
  using Self = TimelineObject;
  py::class_<Self>(m, "Timeline")
      .def(py::init(&make_timeline), py::kw_only(), py::arg("layers"), py::arg("experts"), py::arg("blocks"),
           py::arg("block_bytes"), py::arg("pages"), py::arg("targets"), py::arg("reserve"),
           py::arg("policy"), py::arg("whole_experts"), py::arg("miss"), py::arg("ahead"),
           py::arg("lookahead"), py::arg("ahead_experts"), py::arg("ahead_bytes"), py::arg("stream_tokens"),
           py::arg("group_items"), py::arg("attention"), py::arg("head"), py::arg("call"), py::arg("compute"),
           py::arg("far_block"), py::arg("far_block_shared"), py::arg("far_threads") = 1,
           py::arg("far_call") = 0.0, py::arg("near_slowdown") = 1.0, py::arg("latency"), py::arg("link"),
           py::arg("link_shared"), py::arg("in_flight_bytes"), py::arg("launch") = "host",
           py::arg("counts_hard") = false, py::arg("calls") = std::map<std::string, double>{},
           py::arg("admit") = "key", py::arg("victims") = "farthest", py::arg("adaptive") = 0.0)
      .def("switch_to", &switch_to_py, py::kw_only(), py::arg("targets"), py::arg("miss"), py::arg("ahead"),
           py::arg("lookahead"), py::arg("ahead_experts"), py::arg("ahead_bytes"), py::arg("stream_tokens"))
      .def("preload", &preload_py, py::arg("layer"), py::arg("experts"), py::arg("blocks"))
      .def(
          "start_warm",
          [](Self& self, const py::array& shares, const py::array& experts,
             const std::optional<py::array>& replaceable) {
            const auto values = expert_shares(shares);
            const auto pairs = expert_pairs(experts);
            const auto replaced = replaceable ? expert_pairs(*replaceable) : decltype(pairs){};
            self.call([&](Timeline& timeline) { timeline.start_warm(values, pairs, replaced); });
          },
          py::arg("shares"), py::arg("experts"), py::arg("replaceable") = std::nullopt)
      .def(
          "start_like",
          [](Self& self, Self& other) {
            if (&self == &other) refuse("a timeline cannot start like itself");
            other.call([&](Timeline& source) {
              const py::gil_scoped_acquire held;
              self.call([&](Timeline& timeline) { timeline.start_like(source); });
            });
          },
          py::arg("other"))
      .def("copy_policy",
           [](Self& self) {
             return PolicyHolder(self.call([](Timeline& timeline) { return timeline.policy().copy(); }));
           })
      .def("run", &run_py, py::arg("experts"), py::arg("starts"), py::arg("rankings"), py::arg("start") = 0,
           py::arg("stop") = py::none(), py::arg("hurried") = false, py::arg("queues") = py::none(),
           py::arg("queue_scores") = py::none(), py::arg("requests") = py::none())
      .def("drain", [](Self& self) { self.call([](Timeline& timeline) { timeline.drain(); }); })
      .def("stats", &stats_py)
      .def("adaptive_step",
           [](Self& self) { return self.call([](Timeline& timeline) { return timeline.adaptive_step(); }); })
      .def("reset_stats", [](Self& self) { self.call([](Timeline& timeline) { timeline.reset_stats(); }); })
      .def("residency", &residency_py)
      .def("check",
           [](Self& self) { return self.call([](Timeline& timeline) { return timeline.check(); }); });
}

}  // namespace moechat
