// One decoded token through what a decoder layer computes before its experts: norm, projections, norms of
// heads, rotation, attention cache, attention, output projection, residual, norm, router.
//
// A step is these parts one after the other, with the roundings to the element type that lie between them
// where each is a call of its own: its results are theirs bit by bit. What it saves is what a framework
// does between them, which for one token costs more than some of the parts.
#pragma once

#include <cstdint>

#include "kernels/decode.h"
#include "kernels/linear.h"

namespace moechat {

// A dense product: packed (linear.h), or rows of 16-bit floats (rows16.h).
struct StepProduct {
  std::int64_t rows;
  std::int64_t cols;
  const void* weights;
  const float* bias;  // [rows] or null
  bool packed;
  LinearLayout layout;  // where packed
  int activation_bits;  // where packed
  bool fp16;            // of 16-bit rows; else bf16
};

// Its invariants, which check_layer_step() verifies: products fit the heads, norms their rows.
struct LayerStep {
  ElementType type;
  std::int64_t hidden;
  NormTask before;  // x and out unused, as in all tasks here
  StepProduct query, key, value, output;
  bool norms_heads;  // query_norm and key_norm take part: of each head, or of all heads as one row
  NormTask query_norm, key_norm;
  AttendTask attention;        // type, kv_heads, group, key_dim, value_dim, scale, sinks
  std::int64_t angles, width;  // as RotateTask
  NormTask after;
  bool routes;
  RouteTask routing;
  RouterRule rule;
};

// Memory of one token. Strides in elements.
struct LayerStepCall {
  const void* hidden;  // [hidden]
  const void* cos;     // [angles]
  const void* sin;
  void* keys;  // [kv_heads, capacity, key_dim] by heads' stride; position `held` is written
  void* values;
  std::int64_t key_head, value_head;
  std::int64_t held;  // tokens before this one
  void* residual;     // [hidden], written: hidden plus attention; may not overlap hidden
  // Written where the step routes: the norm's rows as float32, experts and weights of the token.
  float* x;             // [hidden]
  std::int64_t* index;  // [chosen]
  float* weights;       // [chosen]
  void* normed;         // [hidden], written where it does not
};

// Throws std::invalid_argument if the parts do not fit together.
void check_layer_step(const LayerStep& step);
void layer_step(const LayerStep& step, const LayerStepCall& call);

// out[i] += rounded(x[i]), rounded to `type`.
void add_rounded(ElementType type, const float* x, std::int64_t count, void* out);

}  // namespace moechat
