#include "cache/demand.h"

#include <algorithm>
#include <cstddef>

namespace moechat {
namespace {

std::size_t size_of(std::int64_t value) { return static_cast<std::size_t>(value); }

struct Candidate {
  bool stays;
  double key;
  std::int32_t expert;
};

bool better(const Candidate& a, const Candidate& b) {
  if (a.stays != b.stays) return a.stays;
  return a.key != b.key ? a.key > b.key : a.expert > b.expert;
}

}  // namespace

std::vector<std::int64_t> demand_hits(EvictionPolicy* policy, const Routing& routing,
                                      const std::vector<std::int32_t>& capacities, bool admit) {
  const std::int64_t layers = policy->layers();
  const std::int64_t experts = policy->experts();
  std::vector<std::int64_t> hits(capacities.size() * size_of(layers));
  std::vector<std::uint8_t> held(hits.size() * size_of(experts));
  std::vector<std::uint8_t> chosen(size_of(experts));
  std::vector<Candidate> candidates;
  candidates.reserve(size_of(experts));
  const std::vector<std::int32_t> ones(size_of(routing.top_k), 1);
  for (std::int64_t token = 0; token < routing.tokens; ++token) {
    for (std::int32_t layer = 0; layer < layers; ++layer) {
      const std::int32_t* now = routing.experts + (token * layers + layer) * routing.top_k;
      policy->access(layer, now, ones.data(), routing.top_k, 1);
      const double* keys = policy->keys(layer);
      for (std::int32_t i = 0; i < routing.top_k; ++i) chosen[size_of(now[i])] = 1;
      for (std::size_t size = 0; size < capacities.size(); ++size) {
        const std::size_t where = size * size_of(layers) + size_of(layer);
        std::uint8_t* in = held.data() + where * size_of(experts);
        for (std::int32_t i = 0; i < routing.top_k; ++i) hits[where] += in[now[i]];
        candidates.clear();
        for (std::int32_t expert = 0; expert < experts; ++expert) {
          if ((in[expert] | chosen[size_of(expert)]) == 0) continue;
          candidates.push_back({admit && chosen[size_of(expert)] != 0, keys[expert], expert});
          in[expert] = 1;
        }
        const std::size_t room = size_of(capacities[size]);
        if (candidates.size() <= room) continue;
        std::nth_element(candidates.begin(), candidates.begin() + capacities[size], candidates.end(), better);
        for (std::size_t i = room; i < candidates.size(); ++i) in[candidates[i].expert] = 0;
      }
      for (std::int32_t i = 0; i < routing.top_k; ++i) chosen[size_of(now[i])] = 0;
    }
  }
  return hits;
}

}  // namespace moechat
