// Python bindings of the policies and the split-expert cache, for tests and simulation. Calls are short and
// keep the GIL, except demand_hits.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "bindings/policy_holder.h"
#include "bindings/schedule.h"
#include "cache/demand.h"
#include "cache/policy.h"
#include "cache/split_cache.h"
#include "memory/slab.h"

namespace moechat {
namespace {

constexpr const char* kHitKindNames[] = {"full", "prefetch", "top", "miss"};

void require_index(const char* name, std::int64_t value, std::int64_t count) {
  if (value < 0 || value >= count) {
    throw std::out_of_range(std::string(name) + " is " + std::to_string(value) + "; it must be 0 to " +
                            std::to_string(count - 1));
  }
}

// A list of experts of one layer, int32 [n].
struct Experts {
  const std::int32_t* data;
  std::int64_t count;
};

Experts experts_of(const py::array& array) {
  if (array.ndim() != 1) refuse("experts has shape " + shape_text(shape_of(array)) + "; it must be [n]");
  return {checked<std::int32_t>("experts", array, shape_of(array)), array.shape(0)};
}

py::array_t<double> copy_of_keys(const EvictionPolicy& policy, std::int32_t layer) {
  require_index("layer", layer, policy.layers());
  return py::array_t<double>(policy.experts(), policy.keys(layer));
}

PolicyHolder make_policy_py(const std::string& name, std::int32_t layers, std::int32_t experts, double omega,
                            double rho, double gamma, const std::optional<py::array>& ranks,
                            const std::optional<py::array>& future, bool layer_factor, std::int32_t high_span,
                            bool per_request) {
  PolicySpec spec;
  spec.name = name;
  spec.layers = layers;
  spec.experts = experts;
  spec.omega = omega;
  spec.rho = rho;
  spec.gamma = gamma;
  spec.layer_factor = layer_factor;
  spec.high_span = high_span;
  spec.per_request = per_request;
  if (ranks) {
    const double* values = checked<double>("ranks", *ranks, {layers, experts});
    spec.ranks.assign(values, values + ranks->size());
  }
  if (future) {
    const auto shape = shape_of(*future);
    if (shape.size() != 3 || shape[1] != layers || shape[2] < 1) {
      refuse("future has shape " + shape_text(shape) + "; it must be [tokens, " + std::to_string(layers) +
             ", top_k]");
    }
    const std::int32_t* values = checked<std::int32_t>("future", *future, shape);
    spec.future.assign(values, values + future->size());
    spec.future_tokens = shape[0];
    spec.future_top_k = static_cast<std::int32_t>(shape[2]);
  }
  return PolicyHolder(make_policy(spec));
}

void policy_access(EvictionPolicy& policy, std::int32_t layer, const py::array& experts,
                   const py::array& tokens, std::int64_t pass_tokens) {
  require_index("layer", layer, policy.layers());
  const Experts chosen = experts_of(experts);
  const std::int32_t* counts = checked<std::int32_t>("tokens", tokens, {chosen.count});
  if (pass_tokens < 1) refuse("pass_tokens is " + std::to_string(pass_tokens) + "; it must be at least 1");
  for (std::int64_t i = 0; i < chosen.count; ++i) {
    require_index("expert", chosen.data[i], policy.experts());
    if (counts[i] < 1) refuse("tokens holds " + std::to_string(counts[i]) + "; it must be at least 1");
  }
  policy.access(layer, chosen.data, counts, chosen.count, pass_tokens);
}

void policy_predict(EvictionPolicy& policy, std::int32_t layer, const py::array& experts) {
  require_index("layer", layer, policy.layers());
  const Experts chosen = experts_of(experts);
  for (std::int64_t i = 0; i < chosen.count; ++i) require_index("expert", chosen.data[i], policy.experts());
  policy.predict(layer, chosen.data, chosen.count);
}

void policy_follow(EvictionPolicy& policy, const py::array& experts) {
  const auto shape = shape_of(experts);
  if (shape.size() != 3 || shape[1] != policy.layers() || shape[2] < 1) {
    refuse("experts has shape " + shape_text(shape) + "; it must be [tokens, " +
           std::to_string(policy.layers()) + ", top_k]");
  }
  const std::int32_t* chosen = checked<std::int32_t>("experts", experts, shape);
  for (std::int64_t i = 0; i < experts.size(); ++i) require_index("expert", chosen[i], policy.experts());
  const std::vector<std::int32_t> once(static_cast<std::size_t>(shape[2]), 1);
  for (std::int64_t token = 0; token < shape[0]; ++token) {
    for (std::int32_t layer = 0; layer < policy.layers(); ++layer, chosen += shape[2]) {
      policy.access(layer, chosen, once.data(), shape[2], 1);
    }
  }
}

// Drops the GIL, so it takes ownership of the policy and copies arrays that another thread could change.
py::array_t<std::int64_t> demand_hits_py(PolicyHolder& holder, const py::array& experts,
                                         const std::vector<std::int32_t>& capacities,
                                         const std::string& admit) {
  const auto shape = shape_of(experts);
  const std::int32_t layers = holder.get().layers();
  const std::int32_t most = holder.get().experts();
  if (shape.size() != 3 || shape[1] != layers || shape[2] < 1 || shape[2] > most) {
    refuse("experts has shape " + shape_text(shape) + "; it must be [tokens, " + std::to_string(layers) +
           ", 1 to " + std::to_string(most) + "]");
  }
  const std::int32_t* values = checked<std::int32_t>("experts", experts, shape);
  const std::vector<std::int32_t> chosen(values, values + experts.size());
  for (const std::int32_t expert : chosen) require_index("expert", expert, most);
  for (const std::int32_t capacity : capacities) require_index("capacity", capacity, most + std::int64_t{1});
  const Admission admission = admission_of(admit);
  const std::unique_ptr<EvictionPolicy> policy = holder.take();
  std::vector<std::int64_t> hits;
  {
    const ReleaseGil released;
    const Routing routing{chosen.data(), shape[0], static_cast<std::int32_t>(shape[2])};
    hits = demand_hits(policy.get(), routing, capacities, admission);
  }
  return py::array_t<std::int64_t>(
      {static_cast<py::ssize_t>(capacities.size()), static_cast<py::ssize_t>(layers)}, hits.data());
}

using FetchTuple = std::tuple<std::optional<PageId>, std::int32_t, std::int32_t, std::int32_t>;

std::optional<PageId> page_or_none(PageId page) {
  return page == kNoPage ? std::nullopt : std::optional<PageId>(page);
}

std::vector<FetchTuple> tuples_of(const std::vector<Fetch>& fetches) {
  std::vector<FetchTuple> tuples;
  for (const Fetch& fetch : fetches) {
    tuples.emplace_back(page_or_none(fetch.page), fetch.layer, fetch.expert, fetch.block);
  }
  return tuples;
}

// Owns a cache with its slab and policy.
class OwnedCache {
 public:
  OwnedCache(std::int32_t layers, std::int32_t experts, std::int32_t blocks, std::int64_t pages,
             std::int64_t page_bytes, PolicyHolder& policy, const py::array& targets, std::int64_t reserve,
             const std::string& admit, const std::string& victims)
      : slab_(pages, page_bytes),
        cache_(layers, experts, blocks, &slab_, &policy.get(), targets_of(targets, layers), reserve,
               rules_of(admit, victims)),
        policy_(policy.take()) {}

  const Slab& slab() const { return slab_; }
  SplitExpertCache& cache() { return cache_; }
  EvictionPolicy& policy() { return *policy_; }

  void require_expert(std::int32_t layer, std::int32_t expert) const {
    require_index("layer", layer, cache_.layers());
    require_index("expert", expert, cache_.experts());
  }
  void require_page(std::int64_t page) const { require_index("page", page, slab_.pages()); }

 private:
  Slab slab_;
  SplitExpertCache cache_;
  std::unique_ptr<EvictionPolicy> policy_;  // used by cache_
};

std::vector<std::string> access(OwnedCache& self, std::int32_t layer, const py::array& experts,
                                const std::optional<py::array>& tokens, std::int64_t pass_tokens) {
  const Experts chosen = experts_of(experts);
  const std::vector<std::int32_t> ones(static_cast<std::size_t>(chosen.count), 1);
  const std::int32_t* counts =
      tokens ? checked<std::int32_t>("tokens", *tokens, {chosen.count}) : ones.data();
  std::vector<HitKind> kinds(ones.size());
  self.cache().access(layer, chosen.data, counts, chosen.count, pass_tokens, kinds.data());
  std::vector<std::string> names;
  for (const HitKind kind : kinds) names.emplace_back(kHitKindNames[static_cast<int>(kind)]);
  return names;
}

Plan plan(OwnedCache& self, std::int32_t layer, const py::array& experts, std::optional<std::int32_t> at,
          bool prefetch, std::optional<std::int64_t> max_blocks, bool whole, bool preload) {
  const Experts chosen = experts_of(experts);
  Plan result;
  const auto most = max_blocks.value_or(std::numeric_limits<std::int64_t>::max());
  Want want{layer, at.value_or(layer), chosen.data, chosen.count, prefetch || preload, most, whole};
  want.preload = preload;
  self.cache().plan(want, &result);
  return result;
}

py::dict counters(OwnedCache& self) {
  const CacheCounters& counters = self.cache().counters();
  py::dict flat;
  for (int kind = 0; kind < 4; ++kind) {
    flat[py::str(std::string("hits_") + kHitKindNames[kind])] = counters.hits[kind];
    flat[py::str(std::string("prefill_hits_") + kHitKindNames[kind])] = counters.prefill_hits[kind];
  }
  flat["blocks_wanted"] = counters.blocks_wanted;
  flat["blocks_resident"] = counters.blocks_resident;
  flat["blocks_prefetched"] = counters.blocks_prefetched;
  flat["fetched_demand"] = counters.fetched_demand;
  flat["fetched_prefetch"] = counters.fetched_prefetch;
  flat["prefetch_wasted"] = counters.prefetch_wasted;
  flat["evicted"] = counters.evicted;
  flat["admitted"] = counters.admitted;
  flat["preloaded"] = counters.preloaded;
  return flat;
}

py::array_t<std::int32_t> targets(OwnedCache& self) {
  const std::vector<LayerTarget>& list = self.cache().targets();
  py::array_t<std::int32_t> array({static_cast<py::ssize_t>(list.size()), py::ssize_t{2}});
  for (std::size_t layer = 0; layer < list.size(); ++layer) {
    array.mutable_at(layer, 0) = list[layer].experts;
    array.mutable_at(layer, 1) = list[layer].blocks;
  }
  return array;
}

template <class Value>
auto about_expert(Value (SplitExpertCache::*read)(std::int32_t, std::int32_t) const) {
  return [read](OwnedCache& self, std::int32_t layer, std::int32_t expert) {
    self.require_expert(layer, expert);
    return (self.cache().*read)(layer, expert);
  };
}

void bind_policy(py::module_& m) {
  m.def("policy_names", &policy_names);
  m.def("demand_hits", &demand_hits_py, py::arg("policy"), py::arg("experts"), py::arg("capacities"),
        py::arg("admit") = "key");
  py::class_<PolicyHolder>(m, "EvictionPolicy")
      .def(py::init(&make_policy_py), py::arg("name"), py::arg("layers"), py::arg("experts"),
           py::arg("omega") = 128.0, py::arg("rho") = 0.25, py::arg("gamma") = 0.9,
           py::arg("ranks") = py::none(), py::arg("future") = py::none(), py::arg("layer_factor") = true,
           py::arg("high_span") = 0, py::arg("per_request") = false)
      .def_property_readonly("name", [](const PolicyHolder& self) { return self.get().name(); })
      .def_property_readonly("layers", [](const PolicyHolder& self) { return self.get().layers(); })
      .def_property_readonly("experts", [](const PolicyHolder& self) { return self.get().experts(); })
      .def_property_readonly("comparable", [](const PolicyHolder& self) { return self.get().comparable(); })
      .def(
          "access",
          [](const PolicyHolder& self, std::int32_t layer, const py::array& experts, const py::array& tokens,
             std::int64_t pass_tokens) { policy_access(self.get(), layer, experts, tokens, pass_tokens); },
          py::arg("layer"), py::arg("experts"), py::arg("tokens"), py::arg("pass_tokens") = 1)
      .def(
          "predict",
          [](const PolicyHolder& self, std::int32_t layer, const py::array& experts) {
            policy_predict(self.get(), layer, experts);
          },
          py::arg("layer"), py::arg("experts"))
      .def(
          "predict_ahead",
          [](const PolicyHolder& self, const py::array& layers, const py::array& experts,
             const std::optional<py::array>& scores) {
            const std::vector<AheadExpert> ahead = ahead_experts(layers, experts, scores);
            for (const AheadExpert& each : ahead) {
              require_index("layer", each.layer, self.get().layers());
              require_index("expert", each.expert, self.get().experts());
            }
            self.get().predict_ahead(ahead.data(), static_cast<std::int64_t>(ahead.size()));
          },
          py::arg("layers"), py::arg("experts"), py::arg("scores") = py::none())
      .def(
          "reach",
          [](const PolicyHolder& self, std::int32_t layer, std::int32_t steps) {
            require_index("layer", layer, self.get().layers());
            self.get().reach(layer, steps);
          },
          py::arg("layer"), py::arg("steps"))
      .def("begin_request", [](const PolicyHolder& self) { self.get().begin_request(); })
      .def(
          "keys",
          [](const PolicyHolder& self, std::int32_t layer) { return copy_of_keys(self.get(), layer); },
          py::arg("layer"))
      .def(
          "follow",
          [](const PolicyHolder& self, const py::array& experts) { policy_follow(self.get(), experts); },
          py::arg("experts"))
      .def("copy", [](const PolicyHolder& self) { return PolicyHolder(self.get().copy()); })
      .def("reset", [](const PolicyHolder& self) { self.get().reset(); });
}

void bind_plan(py::module_& m) {
  py::class_<Plan>(m, "CachePlan")
      .def_property_readonly("version", [](const Plan& self) { return self.version; })
      .def_property_readonly("prefetch", [](const Plan& self) { return self.prefetch; })
      .def_property_readonly("satisfied", [](const Plan& self) { return self.satisfied; })
      .def_property_readonly("victims",
                             [](const Plan& self) {
                               std::vector<std::tuple<std::int32_t, std::int32_t, std::int32_t>> victims;
                               for (const Victim& v : self.victims) {
                                 victims.emplace_back(v.layer, v.expert, v.blocks);
                               }
                               return victims;
                             })
      .def_property_readonly("fetches", [](const Plan& self) { return tuples_of(self.fetches); });
}

void bind_split_cache(py::module_& m) {
  using Self = OwnedCache;
  py::class_<Self>(m, "SplitExpertCache")
      .def(py::init<std::int32_t, std::int32_t, std::int32_t, std::int64_t, std::int64_t, PolicyHolder&,
                    const py::array&, std::int64_t, const std::string&, const std::string&>(),
           py::arg("layers"), py::arg("experts"), py::arg("blocks"), py::arg("pages"), py::arg("page_bytes"),
           py::arg("policy"), py::arg("targets"), py::arg("reserve"), py::arg("admit") = "key",
           py::arg("victims") = "farthest")
      .def_property_readonly("layers", [](Self& self) { return self.cache().layers(); })
      .def_property_readonly("experts", [](Self& self) { return self.cache().experts(); })
      .def_property_readonly("blocks", [](Self& self) { return self.cache().blocks(); })
      .def_property_readonly("pages", [](Self& self) { return self.slab().pages(); })
      .def_property_readonly("page_bytes", [](Self& self) { return self.slab().page_bytes(); })
      .def_property_readonly("version", [](Self& self) { return self.cache().version(); })
      .def("resident", about_expert(&SplitExpertCache::resident), py::arg("layer"), py::arg("expert"))
      .def("assigned", about_expert(&SplitExpertCache::assigned), py::arg("layer"), py::arg("expert"))
      .def("is_protected", about_expert(&SplitExpertCache::is_protected), py::arg("layer"), py::arg("expert"))
      .def("pins", about_expert(&SplitExpertCache::pins), py::arg("layer"), py::arg("expert"))
      .def(
          "page",
          [](Self& self, std::int32_t layer, std::int32_t expert, std::int32_t block) {
            self.require_expert(layer, expert);
            require_index("block", block, self.cache().blocks());
            return page_or_none(self.cache().page(layer, expert, block));
          },
          py::arg("layer"), py::arg("expert"), py::arg("block"))
      .def("free_pages", [](Self& self) { return self.slab().free_pages(); })
      .def("available", [](Self& self) { return self.cache().available(); })
      .def("in_flight", [](Self& self) { return self.cache().in_flight(); })
      .def("staging", [](Self& self) { return self.cache().staging(); })
      .def("orphans", [](Self& self) { return self.cache().orphans(); })
      .def("counters", &counters)
      .def("reset_counters", [](Self& self) { self.cache().reset_counters(); })
      .def("targets", &targets)
      .def("check", [](Self& self) { return self.cache().check(); })
      .def(
          "cheapest", [](Self& self, std::int32_t at) { return self.cache().cheapest(at); }, py::arg("at"))
      .def(
          "expect",
          [](Self& self, const py::array& shares) {
            const double* values =
                checked<double>("shares", shares, {self.cache().layers(), self.cache().experts()});
            for (std::int32_t layer = 0; layer < self.cache().layers(); ++layer) {
              self.policy().expect(layer, values + std::int64_t{layer} * self.cache().experts());
            }
            self.cache().keys_changed();
          },
          py::arg("shares"))
      .def(
          "keys", [](Self& self, std::int32_t layer) { return copy_of_keys(self.policy(), layer); },
          py::arg("layer"))
      .def(
          "predict",
          [](Self& self, std::int32_t layer, const py::array& experts) {
            policy_predict(self.policy(), layer, experts);
          },
          py::arg("layer"), py::arg("experts"))
      .def("access", &access, py::arg("layer"), py::arg("experts"), py::arg("tokens") = py::none(),
           py::arg("pass_tokens") = 1)
      .def(
          "release",
          [](Self& self, std::int32_t layer, std::int32_t expert) { self.cache().release(layer, expert); },
          py::arg("layer"), py::arg("expert"))
      .def(
          "give_up",
          [](Self& self, std::int32_t layer, std::int32_t expert, std::int32_t from) {
            return self.cache().give_up(layer, expert, from);
          },
          py::arg("layer"), py::arg("expert"), py::arg("from_block") = 0)
      .def("plan", &plan, py::arg("layer"), py::arg("experts"), py::kw_only(), py::arg("at") = py::none(),
           py::arg("prefetch") = false, py::arg("max_blocks") = py::none(), py::arg("whole") = true,
           py::arg("preload") = false)
      .def(
          "commit",
          [](Self& self, Plan& plan) {
            self.cache().commit(&plan);
            return tuples_of(plan.fetches);
          },
          py::arg("plan"))
      .def(
          "take_staging",
          [](Self& self, std::int32_t at) { return page_or_none(self.cache().take_staging(at)); },
          py::arg("at"))
      .def(
          "give_staging", [](Self& self, PageId page) { self.cache().give_staging(page); }, py::arg("page"))
      .def(
          "landed", [](Self& self, PageId page, int error) { return self.cache().landed(page, error); },
          py::arg("page"), py::arg("error") = 0)
      .def(
          "cancelled", [](Self& self, PageId page) { self.cache().cancelled(page); }, py::arg("page"))
      .def(
          "filling",
          [](Self& self, PageId page) {
            self.require_page(page);
            return self.cache().filling(page);
          },
          py::arg("page"))
      .def(
          "stale_prefetches",
          [](Self& self, std::int32_t layer) {
            std::vector<Fetch> stale;
            self.cache().stale_prefetches(layer, &stale);
            return tuples_of(stale);
          },
          py::arg("layer"))
      .def(
          "set_targets",
          [](Self& self, const py::array& targets) {
            self.cache().set_targets(targets_of(targets, self.cache().layers()));
          },
          py::arg("targets"));
}

}  // namespace

void bind_cache(py::module_& m) {
  bind_policy(m);
  bind_plan(m);
  bind_split_cache(m);
}

}  // namespace moechat
