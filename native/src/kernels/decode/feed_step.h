// The part of a decoder layer behind its mixer, up to its routed experts: norm, router and shared expert; and
// feed-forward parts alone. Results are rounded to the element type between products as separate calls
// would round them, and those of a token do not depend on the others.
#pragma once

#include <cstdint>
#include <optional>

#include "kernels/decode/decode.h"
#include "kernels/decode/step_product.h"
#include "kernels/decode/step_times.h"
#include "kernels/isa/kernel_api.h"

namespace moechat {

// out = down(activation(gate(x)) * up(x)), of kSilu or kGeluTanh; if not gated down(activation(up(x))), of
// kRelu2.
struct Mlp {
  ElementType type;
  bool gated;
  bool joined;                 // the rows of `up` are first those of the gate; only if gated
  StepProduct gate, up, down;  // `gate` is unused if not gated, or joined
  Activation activation;

  std::int64_t inner() const { return joined ? up.rows / 2 : up.rows; }
};

// Throws std::invalid_argument if the products do not have the sizes of each other, or for another
// activation.
void check_mlp(const Mlp& mlp);
// x: [tokens, up.cols], out: [tokens, down.rows]. Throws std::invalid_argument for a wrong number of tokens.
void run_mlp(const Mlp& mlp, const void* x, std::int64_t tokens, void* out);

// Further norms of a layer with a router and a shared expert (Gemma 4).
struct FeedNorms {
  NormTask experts;                        // of the residual: what the routed experts get
  NormTask shared_result, experts_result;  // of both results, before their sum
  NormTask result;                         // of the sum, which is added to the residual then
  const void* scale;                       // [1], of the element type: multiplies what the layer gives
};

// Invariants, which check_feed_step() verifies: all parts have the width and the type of the norm.
struct FeedStep {
  NormTask after;  // its x and out are unused, as in all tasks here
  bool ends;       // the layer ends with its mixer: of `after` only type and width count, the rest is unused
  bool routes;
  RouteTask routing;
  RouterRule rule;
  std::optional<RouterScales> scales;  // the router gets the residual then, else the rows of `after`
  std::optional<FeedNorms> norms;
  float routed_scale = 1.0f;  // multiplies what the routed experts give, rounded before and after
  float scale = 1.0f;         // multiplies the whole result likewise, before it is added to the residual
  bool shares;                // has a shared expert; only with a router
  Mlp shared;
  bool gates;        // the sigmoid of `gate` multiplies the shared expert's result
  StepProduct gate;  // one row
};

// Rows of some tokens behind their mixer, and where the results go.
struct FeedRows {
  const void* residual;  // [tokens, hidden]: hidden state and result of the mixer
  // With a router: the experts' inputs as float32, experts and weights of the tokens, and, of a step with a
  // shared expert, its result.
  float* x;             // [tokens, hidden]
  std::int64_t* index;  // [tokens, chosen]
  float* weights;       // [tokens, chosen]
  void* shared;         // [tokens, hidden]
  void* normed;         // [tokens, hidden], without a router
};

void check_feed_step(const FeedStep& step);
// REQUIRES: 1 to kMostStepTokens tokens.
void feed_step(const FeedStep& step, std::int64_t tokens, const FeedRows& rows, StepClock& clock);

// residual += rounded(rounded(x) + shared), rounded to the type of the step; without a shared expert
// rounded(x). With norms and the scale of routed experts as these say. x: what the routed experts give,
// [tokens, hidden].
void add_experts(const FeedStep& step, std::int64_t tokens, const float* x, const void* shared,
                 void* residual);

// values[i] = rounded(values[i]) * scale, unless that is 1. `narrow` holds `count` elements.
void scale_rounded(ElementType type, float scale, std::int64_t count, float* values, void* narrow);
// values[i] = sigmoid(values[i]), rounded to `type`. `factors` and `narrow` hold `count` elements.
void rounded_sigmoids(ElementType type, std::int64_t count, float* values, float* factors, void* narrow);
// values[i] = log(1 + e^values[i]), likewise.
void rounded_softplus(ElementType type, std::int64_t count, float* values, void* narrow);

}  // namespace moechat
