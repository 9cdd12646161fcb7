// Python bindings of the expert runner: check arrays, drop the GIL, call.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "bindings/link_holder.h"
#include "bindings/pass_parts.h"
#include "bindings/policy_holder.h"
#include "bindings/routing_counts.h"
#include "bindings/runner_object.h"
#include "bindings/schedule.h"
#include "memory/read_ahead.h"
#include "offload/device_lists.h"
#include "offload/expert_sum.h"
#include "offload/runner.h"

namespace moechat {
namespace {

// A copy of the router's choice, so that it stays as checked: the caller's arrays may change in another
// thread while the GIL is released. Reused between calls of a thread, so that decoding does not allocate.
struct Choice {
  std::int64_t tokens;
  std::int64_t k;
  const std::int64_t* index;
  const float* weight;
};

Choice copied_choice(const std::int64_t* index, const float* weights, std::int64_t tokens, std::int64_t k) {
  static thread_local std::vector<std::int64_t> index_copy;
  static thread_local std::vector<float> weight_copy;
  index_copy.assign(index, index + tokens * k);
  weight_copy.assign(weights, weights + tokens * k);
  return {tokens, k, index_copy.data(), weight_copy.data()};
}

Choice copied_choice(const py::array& index, const py::array& weights) {
  if (index.ndim() != 2) {
    refuse("top_k_index has " + std::to_string(index.ndim()) + " dimensions; it must be [tokens, k]");
  }
  const std::int64_t tokens = index.shape(0);
  const std::int64_t k = index.shape(1);
  const auto* indices = checked<std::int64_t>("top_k_index", index, {tokens, k});
  const auto* values = checked<float>("top_k_weights", weights, {tokens, k});
  return copied_choice(indices, values, tokens, k);
}

struct Matrices {
  std::int64_t tokens;
  const float* x;
  float* out;
};

Matrices checked_matrices(const BlockLayout& layout, const py::array& x, py::array& out) {
  if (x.ndim() != 2) refuse("x has " + std::to_string(x.ndim()) + " dimensions; it must be [tokens, hidden]");
  Matrices matrices{};
  matrices.tokens = x.shape(0);
  matrices.x = checked<float>("x", x, {matrices.tokens, layout.hidden_size});
  matrices.out = checked_writable<float>("out", out, {matrices.tokens, layout.hidden_size});
  const std::int64_t values = matrices.tokens * layout.hidden_size;
  if (values > 0 && matrices.x < matrices.out + values && matrices.out < matrices.x + values) {
    refuse("out overlaps x");
  }
  return matrices;
}

struct Records {
  const std::uint8_t* bytes;
  std::int32_t experts;
};

Records checked_records(const BlockLayout& layout, const py::array& records) {
  if (records.ndim() != 3) {
    refuse("records has " + std::to_string(records.ndim()) +
           " dimensions; it must be [experts, blocks, record_bytes]");
  }
  const std::int64_t experts = records.shape(0);
  if (experts > std::numeric_limits<std::int32_t>::max()) refuse("records has too many experts");
  return {checked<std::uint8_t>("records", records, {experts, layout.blocks, layout.record_bytes}),
          static_cast<std::int32_t>(experts)};
}

std::int64_t resident_forward_py(const BlockLayout& layout, const GateSpec& gate, const py::array& records,
                                 const py::array& x, const py::array& index, const py::array& weights,
                                 py::array out, int activation_bits) {
  check_activation_bits(activation_bits);
  const Records held = checked_records(layout, records);
  const Matrices matrices = checked_matrices(layout, x, out);
  const Choice choice = copied_choice(index, weights);
  if (choice.tokens != matrices.tokens) {
    refuse("top_k_index has " + std::to_string(choice.tokens) + " rows for " +
           std::to_string(matrices.tokens) + " tokens");
  }
  const ReleaseGil released;
  return resident_forward(layout, gate, held.bytes, held.experts, matrices.x, choice.index, choice.weight,
                          choice.tokens, choice.k, matrices.out, activation_bits);
}

// The experts of a layer, checked once. Calls take unchecked addresses, since array arguments cost tens of
// microseconds a layer when the CPU caches are full of weights.
class ResidentExperts : public PassExperts {
 public:
  ResidentExperts(const BlockLayout& layout, const GateSpec& gate, py::array records, int activation_bits,
                  bool reads_ahead)
      : layout_(layout),
        gate_(gate),
        activation_bits_(activation_bits),
        records_(std::move(records)),
        held_(checked_records(layout, records_)),
        used_(reads_ahead ? static_cast<std::size_t>(held_.experts) : 0) {
    check_activation_bits(activation_bits);
  }

  std::int64_t forward(std::uintptr_t x, std::uintptr_t index, std::uintptr_t weights, std::uintptr_t out,
                       std::int64_t tokens, std::int64_t k) {
    const Choice choice = copied_choice(reinterpret_cast<const std::int64_t*>(index),
                                        reinterpret_cast<const float*>(weights), tokens, k);
    const ReleaseGil released;
    return run(reinterpret_cast<const float*>(x), choice.index, choice.weight, reinterpret_cast<float*>(out),
               tokens, k);
  }

  // Reads those experts from the disk that were not used before, as wholes: the kernels would fault them in
  // page by page. Returns their numbers.
  std::vector<std::int64_t> read_unused(const std::int64_t* index, std::int64_t count) {
    std::vector<std::int64_t> first;
    if (used_.empty()) return first;
    for (std::int64_t i = 0; i < count; ++i) {
      if (index[i] < 0 || index[i] >= held_.experts) continue;
      if (used_.first_use(static_cast<std::size_t>(index[i]))) first.push_back(index[i]);
    }
    std::sort(first.begin(), first.end());
    const std::int64_t bytes = layout_.blocks * layout_.record_bytes;
    for (const std::int64_t expert : first) {
      read_ahead(held_.bytes + expert * bytes, static_cast<std::size_t>(bytes));
    }
    return first;
  }

  std::int64_t hidden_size() const override { return layout_.hidden_size; }
  std::int64_t run(const float* x, const std::int64_t* index, const float* weights, float* out,
                   std::int64_t tokens, std::int64_t k) override {
    used_.begin();
    read_unused(index, tokens * k);
    return resident_forward(layout_, gate_, held_.bytes, held_.experts, x, index, weights, tokens, k, out,
                            activation_bits_);
  }

 private:
  BlockLayout layout_;
  GateSpec gate_;
  int activation_bits_;
  py::array records_;
  Records held_;
  PartsInUse used_;  // experts; none: nothing is read ahead
};

void begin_py(const RunnerObject& self, std::int32_t layer, const py::array& index, const py::array& weights,
              const std::string& miss) {
  const Miss kind = miss_of(miss);
  const Choice choice = copied_choice(index, weights);
  self.call([&](ExpertRunner& runner) {
    runner.begin(layer, choice.index, choice.weight, choice.tokens, choice.k, kind);
  });
}

std::int64_t prefetch_py(const RunnerObject& self, std::int32_t layer, const std::optional<py::array>& scores,
                         std::int64_t experts, std::optional<std::int64_t> max_bytes, bool later) {
  const RunnerOptions& options = self.parts()->runner->options();
  std::vector<float> copy;
  if (scores) {
    const float* values = checked<float>("scores", *scores, {options.experts});
    copy.assign(values, values + options.experts);
  }
  if (experts < 0) refuse("experts is " + std::to_string(experts) + "; it cannot be negative");
  if (max_bytes && *max_bytes < 0) {
    refuse("max_bytes is " + std::to_string(*max_bytes) + "; it cannot be negative");
  }
  const std::int64_t page_bytes = options.layout.record_bytes;
  const std::int64_t most = max_bytes ? *max_bytes / page_bytes : std::numeric_limits<std::int64_t>::max();
  const auto limit = static_cast<std::int32_t>(experts < options.experts ? experts : options.experts);
  return page_bytes * self.call([&](ExpertRunner& runner) {
    return runner.prefetch(layer, scores ? copy.data() : nullptr, limit, most,
                           later ? Priority::kLater : Priority::kNext);
  });
}

std::int64_t prefetch_ahead_py(const RunnerObject& self, const py::array& layers, const py::array& experts,
                               const std::optional<py::array>& scores, std::optional<std::int64_t> max_bytes,
                               bool stays) {
  const std::vector<AheadExpert> ahead = ahead_experts(layers, experts, scores);
  if (max_bytes && *max_bytes < 0) {
    refuse("max_bytes is " + std::to_string(*max_bytes) + "; it cannot be negative");
  }
  const std::int64_t page_bytes = self.parts()->runner->options().layout.record_bytes;
  const std::int64_t most = max_bytes ? *max_bytes / page_bytes : std::numeric_limits<std::int64_t>::max();
  return page_bytes *
         self.call([&](ExpertRunner& runner) { return runner.prefetch_ahead(ahead, most, stays); });
}

py::list adaptive_layers_py(const RunnerObject& self) {
  const auto found = self.call([](ExpertRunner& runner) { return runner.adaptive_layers(); });
  py::list layers;
  for (const Prediction& each : found) layers.append(py::make_tuple(each.ahead, each.layer));
  return layers;
}

std::int64_t preload_py(const RunnerObject& self, const py::array& experts, std::int64_t most_bytes,
                        const std::optional<py::array>& replaceable, bool to_targets) {
  const RunnerOptions& options = self.parts()->runner->options();
  const auto pairs = expert_pairs(experts);
  const auto replaced = replaceable ? expert_pairs(*replaceable) : decltype(pairs){};
  const std::int64_t most = std::max<std::int64_t>(1, most_bytes / options.layout.record_bytes);
  return self.call([&](ExpertRunner& runner) { return runner.preload(pairs, most, replaced, to_targets); });
}

py::array_t<double> keys_py(const RunnerObject& self) {
  const std::vector<double> keys = self.call([](ExpertRunner& runner) { return runner.keys(); });
  const RunnerOptions& options = self.parts()->runner->options();
  py::array_t<double> array({options.layers, options.experts});
  std::copy(keys.begin(), keys.end(), array.mutable_data());
  return array;
}

std::int64_t finish_py(const RunnerObject& self, const py::array& x, py::array out) {
  const Matrices matrices = checked_matrices(self.parts()->runner->options().layout, x, out);
  return self.call([&](ExpertRunner& runner) {
    return runner.finish(matrices.x, matrices.tokens, matrices.out, check_signals);
  });
}

template <class T>
py::array_t<T> array_of(const T* values, std::int64_t count) {
  py::array_t<T> array(static_cast<py::ssize_t>(count));
  std::copy(values, values + count, array.mutable_data());
  return array;
}

template <class T>
py::array_t<T> array_of(const std::vector<T>& values) {
  return array_of(values.data(), static_cast<std::int64_t>(values.size()));
}

py::tuple rows_py(const RunnerObject& self) {
  const Grouped rows = self.call([](ExpertRunner& runner) { return runner.rows(); });
  return py::make_tuple(array_of(rows.experts), array_of(rows.start), array_of(rows.token),
                        array_of(rows.weight));
}

struct ListMemory {
  std::int32_t* data;
  std::int64_t size;
};

ListMemory checked_lists(py::array& lists) {
  if (lists.ndim() != 1) refuse("lists has " + std::to_string(lists.ndim()) + " dimensions; it must be [n]");
  const std::int64_t size = lists.shape(0);
  return {checked_writable<std::int32_t>("lists", lists, {size}), size};
}

py::tuple item_lists_py(const RunnerObject& self, py::array lists) {
  const ListMemory memory = checked_lists(lists);
  ItemLists written{};
  self.call([&](ExpertRunner& runner) {
    runner.with_rows([&](const Grouped& rows, std::int64_t tokens) {
      written = write_items(rows, tokens, memory.data, memory.size);
    });
  });
  return py::make_tuple(written.used, written.rows, written.items, written.picks, written.most);
}

std::int64_t finish_on_device_py(const RunnerObject& self, std::uintptr_t stream, std::int64_t tokens,
                                 std::int64_t work, py::array lists, std::int64_t first,
                                 const py::function& launch, const std::optional<py::array>& x,
                                 std::optional<py::array> out) {
  FarPart far;
  if (x && out) {
    const Matrices matrices = checked_matrices(self.parts()->runner->options().layout, *x, *out);
    if (matrices.tokens != tokens) {
      refuse("x has " + std::to_string(matrices.tokens) + " rows for " + std::to_string(tokens) + " tokens");
    }
    far = {matrices.x, matrices.out};
  }
  const ListMemory memory = checked_lists(lists);
  std::int64_t begin = first;
  const auto call = [&](const DeviceLaunch& blocks) {
    if (begin < 0 || begin > memory.size)
      refuse("lists cannot begin at " + std::to_string(begin) + " of " + std::to_string(memory.size));
    const BlockLists written = write_blocks(blocks, *blocks.items, memory.data + begin, memory.size - begin);
    const py::gil_scoped_acquire held;
    begin = py::cast<std::int64_t>(
        launch(begin, begin + written.used, blocks.entries, blocks.rows, written.slots));
  };
  return self.call([&](ExpertRunner& runner) {
    return runner.finish_on_device(reinterpret_cast<void*>(stream), tokens, work, call, check_signals, far);
  });
}

struct Changes {
  std::int32_t* index;
  std::int32_t* page;
  std::int64_t capacity;
};

Changes checked_changes(py::array& changes) {
  if (changes.ndim() != 2)
    refuse("changes has " + std::to_string(changes.ndim()) + " dimensions, not [2, n]");
  const std::int64_t capacity = changes.shape(1);
  std::int32_t* const data = checked_writable<std::int32_t>("changes", changes, {2, capacity});
  return {data, data + capacity, capacity};
}

std::int64_t page_changes_py(const RunnerObject& self, py::array changes) {
  const Changes to = checked_changes(changes);
  return self.call([&](ExpertRunner& runner) { return runner.page_changes(to.index, to.page, to.capacity); });
}

std::int64_t look_ahead_py(const RunnerObject& self, std::int32_t layer, std::uintptr_t stream,
                           py::array changes) {
  const Changes to = checked_changes(changes);
  return self.call([&](ExpertRunner& runner) {
    return runner.look_ahead(layer, reinterpret_cast<void*>(stream), to.index, to.page, to.capacity);
  });
}

std::int64_t account_py(const RunnerObject& self, const py::array& reports, std::int64_t first,
                        std::int64_t count, std::int64_t picks, const py::array& places,
                        std::int32_t predicted, std::int32_t experts, std::optional<std::int64_t> max_bytes,
                        const std::string& ahead, std::int32_t lookahead, std::int64_t stream_tokens,
                        const std::string& miss) {
  const RunnerOptions& options = self.parts()->runner->options();
  if (reports.ndim() != 2 || places.ndim() != 3) refuse("reports must be [layers, n], places [layers, p, 2]");
  const std::int64_t stride = reports.shape(1);
  const std::int64_t scored = places.shape(1);
  if (picks < 0 || stride < 2 * picks + scored * options.experts) {
    refuse("a report of " + std::to_string(stride) + " words has no room for " + std::to_string(picks) +
           " picks and " + std::to_string(scored) + " places");
  }
  static_assert(sizeof(Prediction) == 2 * sizeof(std::int32_t));
  const ComputedPass pass{
      first,
      count,
      checked<std::int32_t>("reports", reports, {options.layers, stride}),
      stride,
      picks,
      reinterpret_cast<const Prediction*>(
          checked<std::int32_t>("places", places, {options.layers, scored, 2})),
      scored,
      prefetching(options, predicted, experts, max_bytes, ahead, lookahead, stream_tokens),
      miss_of(miss),
  };
  return self.call([&](ExpertRunner& runner) { return runner.account(pass); });
}

py::dict stats_py(const RunnerObject& self) {
  return schedule_stats(self.call([](ExpertRunner& runner) { return runner.stats(); }));
}

py::tuple routing_counts_py(const RunnerObject& self) {
  const auto parts = self.parts();
  const RunnerOptions& options = parts->runner->options();
  const RoutingCounts counts = self.call([](ExpertRunner& runner) { return runner.routing_counts(); });
  return counts_tuple(counts, options.layers, options.experts,
                      RoutingCounter::depth_of(options.experts, options.top_k));
}

py::object residency_py(const RunnerObject& self) {
  const auto parts = self.parts();  // keeps the options alive if another thread calls close()
  const auto blocks = self.call([](ExpertRunner& runner) { return runner.residency(); });
  return residency_array(blocks, parts->runner->options());
}

py::tuple places_py(const RunnerObject& self) {
  const auto parts = self.parts();
  const RunnerOptions& options = parts->runner->options();
  const ExpertPlaces found = self.call([](ExpertRunner& runner) { return runner.places(); });
  py::array_t<std::uint8_t> far({py::ssize_t{options.layers}, py::ssize_t{options.experts}});
  std::copy(found.far.begin(), found.far.end(), far.mutable_data());
  return py::make_tuple(residency_array(found.resident, options), residency_array(found.assigned, options),
                        std::move(far));
}

py::tuple activations_py(const RunnerObject& self) {
  const auto parts = self.parts();
  const RunnerOptions& options = parts->runner->options();
  const auto [tokens, counts] = self.call([](ExpertRunner& runner) { return runner.activations(); });
  py::array_t<std::int64_t> array({py::ssize_t{options.layers}, py::ssize_t{options.experts}});
  std::copy(counts.begin(), counts.end(), array.mutable_data());
  return py::make_tuple(tokens, std::move(array));
}

}  // namespace

void bind_offload(py::module_& m) {
  const auto& link_error = py::register_exception<LinkError>(m, "LinkError", PyExc_RuntimeError);
  // Never released: exceptions can be raised until the process ends.
  static py::handle damaged_type =
      py::exception<DamagedRecordError>(m, "DamagedRecordError", link_error).release();
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const DamagedRecordError& error) {
      py::object raised = damaged_type(error.what());
      raised.attr("layer") = error.layer;
      raised.attr("expert") = error.expert;
      raised.attr("block") = error.block;
      PyErr_SetObject(damaged_type.ptr(), raised.ptr());
    }
  });
  py::register_exception<DeviceLostError>(m, "DeviceLostError", PyExc_RuntimeError);
  m.def("plan_speculation", &plan_speculation_py, py::arg("ahead"), py::arg("lookahead"),
        py::arg("stream_tokens"), py::arg("layer"), py::arg("layers"), py::arg("tokens"));
  m.def("resident_forward", &resident_forward_py, py::arg("layout"), py::arg("gate"), py::arg("records"),
        py::arg("x"), py::arg("top_k_index"), py::arg("top_k_weights"), py::arg("out"),
        py::arg("activation_bits") = kDefaultActivationBits);

  py::class_<PassExperts>(m, "PassExperts");
  py::class_<ResidentExperts, PassExperts>(m, "ResidentExperts")
      .def(py::init<const BlockLayout&, const GateSpec&, py::array, int, bool>(), py::arg("layout"),
           py::arg("gate"), py::arg("records"), py::arg("activation_bits") = kDefaultActivationBits,
           py::arg("reads_ahead") = false)
      .def(
          "read_unused",
          [](ResidentExperts& own, const std::vector<std::int64_t>& index) {
            return own.read_unused(index.data(), static_cast<std::int64_t>(index.size()));
          },
          py::arg("index"))
      .def("forward", &ResidentExperts::forward, py::arg("x"), py::arg("top_k_index"),
           py::arg("top_k_weights"), py::arg("out"), py::arg("tokens"), py::arg("k"));

  using Self = RunnerObject;
  py::class_<Self>(m, "ExpertRunner")
      .def(py::init<const BlockLayout&, const GateSpec&, std::int32_t, std::int32_t, std::int64_t,
                    const py::array&, std::int64_t, PolicyHolder&, LinkHolder&, double, bool, bool,
                    std::int32_t, int, std::uintptr_t, const std::vector<py::array>&,
                    const std::vector<py::array>&, std::vector<BlockLayout>, std::vector<GateSpec>,
                    const std::string&, const std::string&, double, std::int32_t,
                    const std::vector<py::array>&, const std::vector<py::array>&>(),
           py::arg("layout"), py::arg("gate"), py::kw_only(), py::arg("layers"), py::arg("experts"),
           py::arg("pages"), py::arg("targets"), py::arg("reserve"), py::arg("policy"), py::arg("link"),
           py::arg("stall_seconds") = 30.0, py::arg("whole_experts") = false, py::arg("populate") = false,
           py::arg("top_k") = 1, py::arg("activation_bits") = kDefaultActivationBits,
           py::arg("near_memory") = 0, py::arg("far_records") = std::vector<py::array>(),
           py::arg("far_experts") = std::vector<py::array>(),
           py::arg("layer_layouts") = std::vector<BlockLayout>(),
           py::arg("layer_gates") = std::vector<GateSpec>(), py::arg("admit") = "key",
           py::arg("victims") = "farthest", py::arg("adaptive") = 0.0,
           py::arg("adaptive_most") = AdaptiveStep::kMost,
           py::arg("mapped_records") = std::vector<py::array>(),
           py::arg("mapped_experts") = std::vector<py::array>())
      .def("begin", &begin_py, py::arg("layer"), py::arg("top_k_index"), py::arg("top_k_weights"),
           py::arg("miss") = "fetch")
      .def("prefetch", &prefetch_py, py::arg("layer"), py::arg("scores"), py::arg("experts"),
           py::arg("max_bytes"), py::arg("later") = false)
      .def("prefetch_ahead", &prefetch_ahead_py, py::arg("layers"), py::arg("experts"),
           py::arg("scores") = py::none(), py::arg("max_bytes") = py::none(), py::arg("stays") = false)
      .def("begin_request",
           [](const Self& self) { self.call([](ExpertRunner& runner) { runner.begin_request(); }); })
      .def("adaptive_layers", &adaptive_layers_py)
      .def("adaptive_step",
           [](const Self& self) {
             return self.call([](ExpertRunner& runner) { return runner.adaptive_step(); });
           })
      .def(
          "expect",
          [](const Self& self, const py::array& shares) {
            const auto values = expert_shares(shares);
            self.call([&](ExpertRunner& runner) { runner.expect(values); });
          },
          py::arg("shares"))
      .def("preload", &preload_py, py::arg("experts"), py::arg("most_bytes"),
           py::arg("replaceable") = std::nullopt, py::arg("to_targets") = false)
      .def("keys", &keys_py)
      .def("stop_preload",
           [](const Self& self) { self.call([](ExpertRunner& runner) { runner.stop_preload(); }); })
      .def("finish", &finish_py, py::arg("x"), py::arg("out"))
      .def("rows", &rows_py)
      .def("item_lists", &item_lists_py, py::arg("lists"))
      .def("finish_on_device", &finish_on_device_py, py::arg("stream"), py::arg("tokens"), py::arg("work"),
           py::arg("lists"), py::arg("first"), py::arg("launch"), py::arg("x") = py::none(),
           py::arg("out") = py::none())
      .def("far_blocks",
           [](const Self& self) {
             return self.call([](const ExpertRunner& runner) { return runner.far_blocks(); });
           })
      .def(
          "keep_page_table",
          [](const Self& self, double least_share) {
            return self.call([&](ExpertRunner& runner) { return runner.keep_page_table(least_share); });
          },
          py::arg("least_share"))
      .def("page_changes", &page_changes_py, py::arg("changes"))
      .def("complete",
           [](const Self& self) {
             return self.call([](const ExpertRunner& runner) { return runner.complete(); });
           })
      .def("look_ahead", &look_ahead_py, py::arg("layer"), py::arg("stream"), py::arg("changes"))
      .def("end_ahead", [](const Self& self) { self.call([](ExpertRunner& runner) { runner.end_ahead(); }); })
      .def("account", &account_py, py::arg("reports"), py::arg("first"), py::arg("count"), py::arg("picks"),
           py::arg("places"), py::kw_only(), py::arg("predicted"), py::arg("experts"), py::arg("max_bytes"),
           py::arg("ahead"), py::arg("lookahead"), py::arg("stream_tokens"), py::arg("miss"))
      .def("abort", [](const Self& self) { self.call([](ExpertRunner& runner) { runner.abort(); }); })
      .def(
          "set_targets",
          [](const Self& self, const py::array& targets) {
            const auto list = targets_of(targets, self.parts()->runner->options().layers);
            self.call([&](ExpertRunner& runner) { runner.set_targets(list); });
          },
          py::arg("targets"))
      .def(
          "withhold",
          [](const Self& self, std::int64_t pages) {
            return self.call([&](ExpertRunner& runner) { return runner.withhold(pages); });
          },
          py::arg("pages"))
      .def("stats", &stats_py)
      .def("reset_stats",
           [](const Self& self) { self.call([](ExpertRunner& runner) { runner.reset_stats(); }); })
      .def("routing_counts", &routing_counts_py)
      .def("hard_activations",
           [](const Self& self) {
             return self.call([](ExpertRunner& runner) { return runner.hard_activations(); });
           })
      .def("reset_routing_counts",
           [](const Self& self) { self.call([](ExpertRunner& runner) { runner.reset_routing_counts(); }); })
      .def("drain",
           [](const Self& self) { self.call([](ExpertRunner& runner) { runner.drain(check_signals); }); })
      .def(
          "hurry_link",
          [](const Self& self, bool on) { self.call([&](ExpertRunner& runner) { runner.hurry_link(on); }); },
          py::arg("on"))
      .def("residency", &residency_py)
      .def("places", &places_py)
      .def("activations", &activations_py)
      .def("check",
           [](const Self& self) { return self.call([](ExpertRunner& runner) { return runner.check(); }); })
      .def("close", &Self::close)
      .def_property_readonly("huge_bytes",
                             [](const Self& self) {
                               return self.call([](ExpertRunner& runner) { return runner.huge_bytes(); });
                             })
      .def_property_readonly("resident_bytes",
                             [](const Self& self) {
                               return self.call([](ExpertRunner& runner) { return runner.resident_bytes(); });
                             })
      .def_property_readonly("pages", [](const Self& self) { return self.parts()->runner->options().pages; })
      .def_property_readonly(
          "page_bytes", [](const Self& self) { return self.parts()->runner->options().layout.record_bytes; });
}

}  // namespace moechat
