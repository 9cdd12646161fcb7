// Computes a decoder layer with latent attention (DeepSeek-V3, GLM-4.7-Flash), up to its experts, for one
// decoded token of each of several conversations, as layer_step.h does for other attention.
#pragma once

#include <cstdint>

#include "kernels/decode/decode.h"
#include "kernels/decode/feed_step.h"
#include "kernels/decode/latent.h"
#include "kernels/decode/layer_step.h"
#include "kernels/decode/step_product.h"
#include "kernels/decode/step_times.h"

namespace moechat {

// Invariants, which check_latent_step() verifies: products and norms match the sizes of the heads.
struct LatentStep {
  std::int64_t hidden;
  NormTask before;
  // Queries are projected at once, or to a shorter vector that is normed and projected again.
  bool shortens;
  StepProduct short_query;
  NormTask short_norm;
  StepProduct query;
  StepProduct latent;    // a latent, which is normed, and then the rotated part of a key
  NormTask latent_norm;  // of rank elements
  LatentAttention attention;
  std::int64_t angles;  // of the rotated part, or half as many
  // Pairs are neighbours before they are rotated, each by one angle: the first ones, if there are as many as
  // elements. Behind the rotation the first elements of all pairs come first.
  bool neighbours;
  StepProduct output;
  FeedStep feed;
  StepTimes* times;  // or null: not measured
};

// Throws std::invalid_argument if the sizes of the parts do not match.
void check_latent_step(const LatentStep& step);
// As layer_step(). Keys of a place are latents, [capacity, rank], its values rotated parts of keys; they are
// not packed, and strides of heads are not used. Throws std::invalid_argument for a wrong number of tokens.
void latent_step(const LatentStep& step, const LayerStepCall& call);

}  // namespace moechat
