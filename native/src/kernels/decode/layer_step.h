// Computes the part of a decoder layer before its experts for one decoded token of each of several
// conversations: norm, projections, norms of heads, rotation, attention cache, attention, output projection,
// residual, norm, router.
//
// A step runs these parts in order and rounds between them to the element type as separate calls would, so
// its results are bitwise equal to theirs, and those of a token do not depend on the others. It saves the
// overhead of a framework between them, which for one token costs more than some of the parts. Weights are
// read once for all tokens.
#pragma once

#include <cstdint>

#include "kernels/decode/decode.h"
#include "kernels/dense/linear.h"
#include "kernels/dense/rows16.h"

namespace moechat {

// A dense product: packed (linear.h), or rows of 16-bit floats (rows16.h).
struct StepProduct {
  std::int64_t rows;
  std::int64_t cols;
  const void* weights;
  const float* bias;  // [rows] or null
  bool packed;
  LinearLayout layout;  // if packed
  int activation_bits;  // if packed
  bool fp16;            // format of 16-bit rows: fp16, else bf16
};

// Nanoseconds in each part, summed over steps, for measurements. `cache`: rotary embedding, and appending
// keys and values.
struct StepTimes {
  std::int64_t norms, projections, cache, attention, router;
};

// Invariants, which check_layer_step() verifies: products match the sizes of the heads, norms those of their
// rows.
struct LayerStep {
  ElementType type;
  std::int64_t hidden;
  NormTask before;  // its x and out are unused, as in all tasks here
  StepProduct query, key, value, output;
  bool norms_heads;  // applies query_norm and key_norm: to each head, or to all heads as one row
  NormTask query_norm, key_norm;
  AttendTask attention;        // type, kv_heads, group, key_dim, value_dim, scale, sinks
  std::int64_t angles, width;  // as RotateTask
  NormTask after;
  bool routes;
  RouteTask routing;
  RouterRule rule;
  StepTimes* times;  // or null: not measured
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

// Buffers of some tokens, one for each attention cache.
struct LayerStepCall {
  std::int64_t tokens;  // 1 to kMostStepTokens
  const void* hidden;   // [tokens, hidden]
  const void* cos;      // [tokens, angles]
  const void* sin;
  const CachePlace* places;  // [tokens]; no two of them overlap
  void* residual;            // [tokens, hidden], output: hidden plus attention; must not overlap hidden
  // Outputs of a step with a router: the rows of the norm as float32, experts and weights of the tokens.
  float* x;             // [tokens, hidden]
  std::int64_t* index;  // [tokens, chosen]
  float* weights;       // [tokens, chosen]
  void* normed;         // [tokens, hidden], output of a step without a router
};

// Most tokens of a step: those of a product with 16-bit rows.
constexpr std::int64_t kMostStepTokens = kRows16MaxTokens;

// Throws std::invalid_argument if the sizes of the parts do not match.
void check_layer_step(const LayerStep& step);
// Throws std::invalid_argument for a wrong number of tokens.
void layer_step(const LayerStep& step, const LayerStepCall& call);

// out [tokens, rows] from x [tokens, cols]; at most kMostStepTokens tokens.
void multiply(const StepProduct& product, const float* x, std::int64_t tokens, float* out);

// out[i] += rounded(x[i]), rounded to `type`.
void add_rounded(ElementType type, const float* x, std::int64_t count, void* out);

}  // namespace moechat
