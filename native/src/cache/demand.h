// Caches of whole experts that are filled on demand only: hits of an eviction policy alone, and which rule of
// admission suits a layer.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/policy.h"

namespace moechat {

// Which experts a layer keeps once they were used. kKey: those with the highest keys. kAlways: the one that
// was used, in place of the lowest one that the access did not name, whatever its key (MoEpic, section 3.3,
// and all systems that must load an expert to use it). kBest: as the one of these that has had more hits in
// the layer lately; see AdmissionTrial.
enum class Admission : std::uint8_t { kKey, kAlways, kBest };

// What one layer would keep. Costs per access: as many comparisons as experts are evicted times those held.
class DemandCache {
 public:
  explicit DemandCache(std::int32_t experts);

  // The router has chosen these experts, all different; keys: [experts]. Returns how many of them were held.
  // Then only `room` experts are held: of the old and the chosen ones, those with the highest keys (of equal
  // keys the higher number). With `always`, chosen experts are evicted last, whatever their keys.
  std::int64_t access(const std::int32_t* experts, std::int64_t count, const double* keys, std::int32_t room,
                      bool always);

 private:
  std::vector<std::uint8_t> held_;    // [experts]
  std::vector<std::uint8_t> chosen_;  // [experts]: all 0 between calls
  std::vector<std::int32_t> list_;    // those held
};

// Tries both rules of admission beside each other, without moving anything, as set dueling tries insertion
// policies on a few sets of a cache (Qureshi et al., 2007).
class AdmissionTrial {
 public:
  explicit AdmissionTrial(std::int32_t experts) : by_key_(experts), always_(experts) {}

  // An access of a pass with one token.
  void access(const std::int32_t* experts, std::int64_t count, const double* keys, std::int32_t room);
  // Whether kAlways has had more hits; kKey at first.
  bool always() const { return lead_ > 0; }

 private:
  DemandCache by_key_;
  DemandCache always_;
  double lead_ = 0;  // hits of always_ less those of by_key_; older ones count less
};

// Routing of tokens one at a time: experts[(token * layers + layer) * top_k + i], distinct for a token.
struct Routing {
  const std::int32_t* experts;
  std::int64_t tokens;
  std::int32_t top_k;
};

// Gives `policy` all accesses and counts, for each capacity C (experts of a layer) and each layer, how many
// of the chosen experts were there before their token: [capacities, layers].
std::vector<std::int64_t> demand_hits(EvictionPolicy* policy, const Routing& routing,
                                      const std::vector<std::int32_t>& capacities, Admission admission);

}  // namespace moechat
