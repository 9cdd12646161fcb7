// Hits of an eviction policy alone: a cache of whole experts, filled on demand only.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/policy.h"

namespace moechat {

// Routing of tokens one at a time: experts[(token * layers + layer) * top_k + i], distinct for a token.
struct Routing {
  const std::int32_t* experts;
  std::int64_t tokens;
  std::int32_t top_k;
};

// Gives `policy` all accesses and counts, for each capacity C (experts of a layer) and each layer, how many
// of the chosen experts were there before their token: [capacities, layers]. After a token a layer keeps the
// C highest keys of what it held and what was chosen; with `admit` what was chosen stays whatever its key, as
// long as C allows.
std::vector<std::int64_t> demand_hits(EvictionPolicy* policy, const Routing& routing,
                                      const std::vector<std::int32_t>& capacities, bool admit);

}  // namespace moechat
