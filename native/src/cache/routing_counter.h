// Counts the choices of routers: the figures from which plans are made (MoEpic, section 3.4.2).
//
// The rank of an expert just before an access is the least number C of whole cached experts with which it
// would not be there, so an activation is a hit with C of them if its rank is below C, and one count of ranks
// serves every C. As the cache does, a layer that keeps C experts keeps the best C of those that it had and
// those that were just used, by the policy's keys after the access and, of equal keys, the higher number. For
// policies whose keys change only for the experts that are used, this is the rank by key; a policy whose keys
// rise beforehand (a forecast, Belady's rule) would rank experts first that no cache holds yet. The
// experts kept with C are among those kept with C + 1: a stack algorithm (Mattson et al., 1970). A prediction
// is counted at the access that it was made for, with the ranks of that moment. Before a layer's first access
// the order is that of the keys, as if its experts had been there.
//
// An activation of rank `even_share` or more is hard: no cache of so many experts a layer has the expert.
// Their number tells how hard the routing was, whatever the cache at work did; so times can be compared that
// were taken over different tokens.
//
// Only passes of one token count: in a longer one most of a layer is wanted whatever is cached. Longer ones
// change what is kept, and drop the prediction that was made for their layer.
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
  // even_share: experts a layer that an even share of the pages holds. Throws std::invalid_argument: a number
  // below 1 (even_share: 0), or more than 2^28 layers * experts.
  RoutingCounter(std::int32_t layers, std::int32_t experts, std::int32_t top_k, std::int64_t even_share = 0);

  // Places of a prediction that are counted: four times what a token uses, at least 16 and at most 64.
  static std::int32_t depth_of(std::int32_t experts, std::int32_t top_k);
  std::int32_t layers() const { return layers_; }
  std::int32_t experts() const { return experts_; }
  std::int32_t depth() const { return depth_; }

  // A predictor ranks the experts of `layer`, best first, for its next access; the first depth() count. A
  // later call before that access replaces it. Numbers must be those of experts.
  void predict(std::int32_t layer, const std::int32_t* ranked, std::int64_t count);
  // The router of `layer` has chosen these experts, each once. REQUIRES: the policy has not seen this access;
  // keys [experts] are its keys then.
  void access(std::int32_t layer, const double* keys, const std::int32_t* experts, std::int64_t count,
              std::int64_t pass_tokens);
  // The policy has seen this access; keys [experts] are its keys now.
  void keep(std::int32_t layer, const double* keys, const std::int32_t* experts, std::int64_t count);

  const RoutingCounts& counts() const { return counts_; }
  // Hard activations so far; `reset` leaves it.
  std::int64_t hard() const { return hard_; }
  // Sets the counts to 0. Predictions that wait for their access stay.
  void reset();

 private:
  struct Candidate {
    double key;
    std::int32_t expert;
  };
  static std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }
  void begin(std::int32_t layer, const double* keys);

  std::int32_t layers_;
  std::int32_t experts_;
  std::int32_t depth_;
  std::int64_t even_share_;
  std::int64_t hard_ = 0;
  RoutingCounts counts_;
  std::vector<std::int64_t> seen_;         // [layers]: passes of one token
  std::vector<std::int32_t> predictions_;  // [layers, depth]
  std::vector<std::int32_t> waiting_;      // [layers]: places of a prediction that waits for its access
  std::vector<std::uint8_t> begun_;        // [layers]: 1 after the first access
  std::vector<std::int32_t> order_;        // [layers, experts]: by rank
  std::vector<std::int32_t> rank_;         // [layers, experts]: its inverse
  std::vector<std::uint8_t> chosen_;       // [experts]: all 0 between calls
  std::vector<Candidate> pool_;            // [experts], scratch of `keep`
};

}  // namespace moechat
