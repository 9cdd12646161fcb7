#include "offload/speculation.h"

#include <algorithm>

namespace moechat {

SpeculationPlan plan_speculation(const Speculation& speculation, std::int32_t layer, std::int32_t layers,
                                 std::int64_t tokens) {
  SpeculationPlan plan;
  const std::int32_t depth = std::min(speculation.lookahead, layers - 1);
  if (speculation.ahead == Ahead::kNone || depth < 1) return plan;
  const bool last = layer == layers - 1;
  const bool stream = speculation.stream_tokens > 0 && tokens >= speculation.stream_tokens && !last;
  if (speculation.ahead == Ahead::kWholeLayer || stream) {
    plan.whole = (layer + 1) % layers;
  } else if (speculation.ahead == Ahead::kRanked && (tokens == 1 || last)) {
    for (std::int32_t ahead = 1; ahead <= depth; ++ahead)
      plan.ranked.push_back({ahead, (layer + ahead) % layers});
  }
  return plan;
}

}  // namespace moechat
