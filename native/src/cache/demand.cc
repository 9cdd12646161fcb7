#include "cache/demand.h"

#include <cmath>
#include <cstddef>

namespace moechat {
namespace {

std::size_t size_of(std::int64_t value) { return static_cast<std::size_t>(value); }

constexpr double kLeadHalfLife = 256;  // tokens

}  // namespace

DemandCache::DemandCache(std::int32_t experts) : held_(size_of(experts)), chosen_(size_of(experts)) {
  list_.reserve(size_of(experts));
}

std::int64_t DemandCache::access(const std::int32_t* experts, std::int64_t count, const double* keys,
                                 std::int32_t room, bool always) {
  std::int64_t hits = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::size_t expert = size_of(experts[i]);
    chosen_[expert] = 1;
    hits += held_[expert];
    if (held_[expert] != 0) continue;
    held_[expert] = 1;
    list_.push_back(experts[i]);
  }
  const auto below = [&](std::int32_t one, std::int32_t other) {
    if (always && chosen_[size_of(one)] != chosen_[size_of(other)]) return chosen_[size_of(other)] != 0;
    return keys[one] != keys[other] ? keys[one] < keys[other] : one < other;
  };
  while (list_.size() > size_of(room)) {
    std::size_t lowest = 0;
    for (std::size_t i = 1; i < list_.size(); ++i) {
      if (below(list_[i], list_[lowest])) lowest = i;
    }
    held_[size_of(list_[lowest])] = 0;
    list_[lowest] = list_.back();
    list_.pop_back();
  }
  for (std::int64_t i = 0; i < count; ++i) chosen_[size_of(experts[i])] = 0;
  return hits;
}

void AdmissionTrial::access(const std::int32_t* experts, std::int64_t count, const double* keys,
                            std::int32_t room) {
  static const double left = std::exp2(-1 / kLeadHalfLife);
  const std::int64_t more =
      always_.access(experts, count, keys, room, true) - by_key_.access(experts, count, keys, room, false);
  lead_ = left * lead_ + static_cast<double>(more);
}

std::vector<std::int64_t> demand_hits(EvictionPolicy* policy, const Routing& routing,
                                      const std::vector<std::int32_t>& capacities, Admission admission) {
  const std::int32_t layers = policy->layers();
  const std::size_t caches = capacities.size() * size_of(layers);
  std::vector<std::int64_t> hits(caches);
  std::vector<DemandCache> held(caches, DemandCache(policy->experts()));
  std::vector<AdmissionTrial> trials;
  if (admission == Admission::kBest) trials.assign(caches, AdmissionTrial(policy->experts()));
  const std::vector<std::int32_t> ones(size_of(routing.top_k), 1);
  for (std::int64_t token = 0; token < routing.tokens; ++token) {
    for (std::int32_t layer = 0; layer < layers; ++layer) {
      const std::int32_t* now = routing.experts + (token * layers + layer) * routing.top_k;
      policy->access(layer, now, ones.data(), routing.top_k, 1);
      const double* keys = policy->keys(layer);
      for (std::size_t size = 0; size < capacities.size(); ++size) {
        const std::size_t where = size * size_of(layers) + size_of(layer);
        bool always = admission == Admission::kAlways;
        if (admission == Admission::kBest) {
          trials[where].access(now, routing.top_k, keys, capacities[size]);
          always = trials[where].always();
        }
        hits[where] += held[where].access(now, routing.top_k, keys, capacities[size], always);
      }
    }
  }
  return hits;
}

}  // namespace moechat
