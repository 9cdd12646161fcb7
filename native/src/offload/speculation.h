// When experts of later layers are prefetched: the one rule of engine and simulator. The engine calls it
// through ExpertTier (moechat/offload/tier.py), the simulator in Timeline.
#pragma once

#include <cstdint>
#include <vector>

namespace moechat {

enum class Ahead : std::uint8_t {
  kNone,
  kPrompts,    // nothing but the next layer of long passes
  kRanked,     // experts that a predictor ranks highest
  kQueued,     // experts of all later layers, in the order that a predictor gives
  kAdaptive,   // as kRanked, of one layer, whose distance the schedule chooses (adaptive_step.h)
  kWholeLayer  // all of the next layer
};

struct Speculation {
  Ahead ahead = Ahead::kNone;
  std::int32_t lookahead = 1;      // most layers ahead that are predicted
  std::int64_t stream_tokens = 0;  // passes of so many tokens fetch the whole next layer; 0: none do
};

// A layer to fetch ahead, `ahead` layers after the one at work.
struct Prediction {
  std::int32_t ahead;
  std::int32_t layer;
};

struct SpeculationPlan {
  std::int32_t whole = -1;         // fetch all of this layer; -1: of none
  std::vector<Prediction> ranked;  // else the best experts of these layers, by the hidden state of the last
                                   // token
};

// After the router of `layer` of `layers`, in a pass of `tokens` tokens. A long pass needs most of a layer,
// so the next one is streamed whole; its last layer is followed by decoding, which is predicted again.
SpeculationPlan plan_speculation(const Speculation& speculation, std::int32_t layer, std::int32_t layers,
                                 std::int64_t tokens);

}  // namespace moechat
