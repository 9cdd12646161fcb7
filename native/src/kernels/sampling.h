// Draws a token from logits in a few passes over them, without sorting the vocabulary.
#pragma once

#include <cstdint>

namespace moechat {

struct SampleCuts {
  float temperature;   // above 0
  std::int64_t top_k;  // 0: all; tokens equal to the last one taken are taken too
  double top_p;        // the likeliest tokens whose probabilities first sum up to this; 1: all
  double min_p;        // least probability relative to the likeliest token; 0: none
};

// The first of the largest logits; -1 where one is not a number.
std::int64_t largest_logit(const float* logits, std::int64_t count);

// The token where the summed probabilities, in a fixed order, first exceed `where` in [0, 1) of what the cuts
// leave. -1 where logits are not finite (minus infinity is allowed) or there is none.
std::int64_t sample(const float* logits, std::int64_t count, const SampleCuts& cuts, double where);

}  // namespace moechat
