// Counts what routing has been like: the figures from which plans are made (MoEpic, section 3.4.2).
//
// Experts of a layer are ranked by the policy's keys just before an access: the rank of an expert is the
// number of experts that the cache would rather keep, those with a higher key and, of equal keys, a higher
// number (as the cache chooses its victims). With C whole experts cached an activation is a hit if its rank
// is below C, so one count of ranks serves every C. A prediction is counted at the access that it was made
// for, with the ranks of that moment.
//
// Only passes of one token count: in a longer one most of a layer is wanted whatever is cached. They drop
// the prediction that was made for their layer.
//
// Pure bookkeeping, without allocation after the constructor. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moechat {

struct RoutingCounts {
  std::int64_t tokens = 0;                         // the most that any layer has seen
  std::vector<std::int64_t> predicted;             // [layers]: accesses that had been predicted
  std::vector<std::int64_t> activations;           // [layers, experts]
  std::vector<std::int64_t> ranks;                 // [layers, experts]: activations of an expert of rank r
  std::vector<std::int64_t> hits_of_prediction;    // [layers, depth]: the expert at place y was chosen
  std::vector<std::uint32_t> ranks_of_prediction;  // [layers, depth, experts]: it had rank r
};

class RoutingCounter {
 public:
  // Throws std::invalid_argument: a number below 1, or more than 2^28 layers * experts.
  RoutingCounter(std::int32_t layers, std::int32_t experts, std::int32_t top_k);

  // Places of a prediction that are counted: four times what a token uses, at least 16 and at most 64.
  static std::int32_t depth_of(std::int32_t experts, std::int32_t top_k);
  std::int32_t layers() const { return layers_; }
  std::int32_t experts() const { return experts_; }
  std::int32_t depth() const { return depth_; }

  // A predictor ranks the experts of `layer`, best first, for its next access; the first depth() count. A
  // later call before that access replaces it. Numbers must be those of experts.
  void predict(std::int32_t layer, const std::int32_t* ranked, std::int64_t count);
  // The router of `layer` has chosen these experts, no one twice; keys [experts] are the policy's, before it
  // is told of this access.
  void access(std::int32_t layer, const double* keys, const std::int32_t* experts, std::int64_t count,
              std::int64_t pass_tokens);

  const RoutingCounts& counts() const { return counts_; }
  // Sets the counts to 0. Predictions that wait for their access stay.
  void reset();

 private:
  static std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

  std::int32_t layers_;
  std::int32_t experts_;
  std::int32_t depth_;
  RoutingCounts counts_;
  std::vector<std::int64_t> seen_;         // [layers]: passes of one token
  std::vector<std::int32_t> predictions_;  // [layers, depth]
  std::vector<std::int32_t> waiting_;      // [layers]: places of a prediction that waits for its access

  // Of the access under way.
  std::vector<std::uint8_t> chosen_;   // [experts]: 1 for the chosen ones; all 0 between calls
  std::vector<std::int32_t> wanted_;   // experts whose ranks are needed
  std::vector<std::int32_t> ranks_;    // theirs
  std::vector<std::int32_t> rank_of_;  // [experts]: the same by expert
};

}  // namespace moechat
