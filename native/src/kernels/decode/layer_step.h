// Computes a decoder layer with attention, up to its experts, for decoded tokens: one of each of several
// conversations, or successive ones of one. Norm, projections, norms of heads, rotation, attention cache,
// attention and its gates, output projection, residual, and what feed_step.h has.
//
// A step runs these parts in order and rounds between them to the element type as separate calls would, so
// its results are bitwise equal to theirs, and those of a token do not depend on the others. It saves the
// overhead of a framework between them, which for one token costs more than some of the parts. Weights are
// read once for all tokens.
#pragma once

#include <cstdint>
#include <optional>

#include "kernels/decode/decode.h"
#include "kernels/decode/feed_step.h"
#include "kernels/decode/step_product.h"
#include "kernels/decode/step_times.h"

namespace moechat {

// A product whose results, activated, multiply what attention gives: one for each element, or for each head.
struct AttentionGate {
  StepProduct product;
  bool softplus;  // else sigmoid
};

// Invariants, which check_layer_step() verifies: products match the sizes of the heads, norms those of their
// rows.
struct LayerStep {
  ElementType type;
  std::int64_t hidden;
  NormTask before;  // its x and out are unused, as in all tasks here
  // If `gated`, `query` gives each head its query and then its gates, whose sigmoids multiply the result of
  // attention; keys and values have the same size then.
  StepProduct query, key, value, output;
  bool shares_keys;  // values are what `key` gives, before any norm; `value` is unused
  bool gated;
  std::optional<AttentionGate> gate;  // not if `gated`
  bool norms_heads;  // applies query_norm and key_norm: to each head, or to all heads as one row
  NormTask query_norm, key_norm;
  std::optional<NormTask> value_norm;   // of each head
  std::optional<NormTask> output_norm;  // of what the output projection gives, before it is added
  AttendTask attention;                 // type, kv_heads, group, key_dim, value_dim, scale, sinks
  std::int64_t angles, width;           // as RotateTask; both 0: no rotation
  FeedStep feed;
  StepTimes* times;    // or null: not measured
  float scale = 1.0f;  // multiplies what the output projection gives, before it is added
};

// Where a layer of an attention cache takes the next token. Strides in elements.
struct CachePlace {
  void* keys;  // [kv_heads, capacity, key_dim] by heads' stride; writes position `held`
  std::int64_t key_head;
  void* values;
  std::int64_t value_head;
  std::int64_t held;  // tokens before this one
  bool packed;        // the cache has packed rows, and its strides are bytes
};

// Buffers of some tokens. Those of one attention cache are in order, each with the place behind the one
// before.
struct LayerStepCall {
  std::int64_t tokens;  // 1 to kMostStepTokens
  const void* hidden;   // [tokens, hidden]
  const void* cos;      // [tokens, angles]
  const void* sin;
  const CachePlace* places;  // [tokens]
  void* residual;            // [tokens, hidden], output: hidden plus attention; must not overlap hidden
  FeedRows rows;             // outputs; its residual is unused
};

// Throws std::invalid_argument if the sizes of the parts do not match.
void check_layer_step(const LayerStep& step);
// Throws std::invalid_argument for a wrong number of tokens.
void layer_step(const LayerStep& step, const LayerStepCall& call);

}  // namespace moechat
