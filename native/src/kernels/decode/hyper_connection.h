// Weights that mix the residual streams of a token with a part of a layer, and the input of that part:
// manifold-constrained hyper-connections (Xie et al., arXiv:2512.24880, section 4), as of DeepSeek-V4.
#pragma once

#include <cstdint>

#include "kernels/decode/decode.h"

namespace moechat {

constexpr std::int64_t kMostStreams = 8;

// The normed streams give, by one product, logits of `streams` weights before the part, as many behind it,
// and of a matrix of both, which rounds of Sinkhorn and Knopp make doubly stochastic.
struct HyperConnection {
  ElementType type;      // of the streams
  std::int64_t streams;  // at most kMostStreams
  std::int64_t hidden;
  const float* weight;  // [logits, streams * hidden], where logits = (2 + streams) * streams
  const float* base;    // [logits]
  const float* scale;   // [3]: of the logits before, behind, and of the matrix
  float norm_eps;
  float eps;
  std::int64_t rounds;
};

// x: [streams, hidden]. post: [streams]. comb: [streams, streams]. collapsed: [hidden], the input of the
// part.
void hyper_connection(const HyperConnection& task, const void* x, float* post, float* comb, void* collapsed);

}  // namespace moechat
