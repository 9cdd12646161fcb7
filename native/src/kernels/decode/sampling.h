// Draws a token from logits in a few passes over them, without sorting the vocabulary.
#pragma once

#include <cstdint>

namespace moechat {

struct SampleCuts {
  float temperature;   // above 0
  std::int64_t top_k;  // 0: all; keeps all tokens equal to the last one of the k
  double top_p;        // keeps the likeliest tokens whose probabilities first sum to this; 1: all
  double min_p;        // least probability relative to the likeliest token; 0: no limit
};

// Returns the index of the first of the largest logits; -1 if any is NaN, or if that is infinite, or if
// all are minus infinity.
std::int64_t largest_logit(const float* logits, std::int64_t count);

// Returns the token at which the probabilities, summed in a fixed order, first exceed the fraction `where` in
// [0, 1) of the sum that top_k, top_p and min_p leave. Returns -1 if a logit is NaN or +infinity, or if no
// token is left.
std::int64_t sample(const float* logits, std::int64_t count, const SampleCuts& cuts, double where);

}  // namespace moechat
