#include "kernels/decode/feed_step.h"

#include <algorithm>
#include <cmath>

#include "kernels/decode/step_memory.h"
#include "kernels/isa/dispatch.h"

namespace moechat {
namespace {

std::int64_t mlp_bytes(const Mlp& mlp, std::int64_t tokens) {
  const std::int64_t inner = tokens * mlp.inner();
  return (mlp.joined ? Arena::bytes_of(2 * inner * 4) : 0) + 3 * Arena::bytes_of(inner * 4) +
         Arena::bytes_of(inner * element_bytes(mlp.type)) + Arena::bytes_of(tokens * mlp.down.rows * 4);
}

// Both activations are x times the sigmoid of this: tanh(y) = 2 * sigmoid(2 * y) - 1.
float logit_of(Activation activation, float x) {
  if (activation == Activation::kSilu) return x;
  constexpr float kTwiceRoot = 1.5957691216057308f;  // 2 * sqrt(2 / pi)
  return kTwiceRoot * (x + 0.044715f * x * x * x);
}

// As run_mlp(), in memory of mlp_bytes().
void mlp_in(Arena& arena, const Mlp& mlp, const float* x, std::int64_t tokens, void* out) {
  const DecodeKernels& kernel = *kernels().decode;
  const std::int64_t inner = tokens * mlp.inner(), rows = tokens * mlp.down.rows;
  auto* gate = arena.take<float>(inner * 4);
  auto* up = arena.take<float>(inner * 4);
  auto* factors = arena.take<float>(inner * 4);
  void* narrow = arena.take(inner * element_bytes(mlp.type));
  auto* sums = arena.take<float>(rows * 4);
  const auto rounded = [&](float* values) {
    kernel.narrow(mlp.type, values, inner, narrow);
    kernel.widen(mlp.type, narrow, inner, values);
  };
  if (mlp.joined) {
    auto* both = arena.take<float>(2 * inner * 4);
    multiply(mlp.up, x, tokens, both);
    for (std::int64_t t = 0; t < tokens; ++t) {
      const float* from = both + 2 * t * mlp.inner();
      std::copy(from, from + mlp.inner(), gate + t * mlp.inner());
      std::copy(from + mlp.inner(), from + 2 * mlp.inner(), up + t * mlp.inner());
    }
  } else {
    multiply(mlp.up, x, tokens, up);
    if (mlp.gated) multiply(mlp.gate, x, tokens, gate);
  }
  rounded(up);
  if (!mlp.gated) {
    for (std::int64_t i = 0; i < inner; ++i) {
      const float positive = up[i] < 0.0f ? 0.0f : up[i];  // NaN stays NaN
      up[i] = positive * positive;
    }
    rounded(up);
    multiply(mlp.down, up, tokens, sums);
    kernel.narrow(mlp.type, sums, rows, out);
    return;
  }
  rounded(gate);
  for (std::int64_t i = 0; i < inner; ++i) factors[i] = -logit_of(mlp.activation, gate[i]);
  kernel.exponentials(factors, inner, 0.0f);
  for (std::int64_t i = 0; i < inner; ++i) gate[i] /= 1.0f + factors[i];
  rounded(gate);
  for (std::int64_t i = 0; i < inner; ++i) gate[i] *= up[i];
  rounded(gate);
  multiply(mlp.down, gate, tokens, sums);
  kernel.narrow(mlp.type, sums, rows, out);
}

}  // namespace

void scale_rounded(ElementType type, float scale, std::int64_t count, float* values, void* narrow) {
  if (scale == 1.0f) return;
  kernels().decode->narrow(type, values, count, narrow);
  kernels().decode->widen(type, narrow, count, values);
  for (std::int64_t i = 0; i < count; ++i) values[i] *= scale;
}

void rounded_sigmoids(ElementType type, std::int64_t count, float* values, float* factors, void* narrow) {
  const DecodeKernels& kernel = *kernels().decode;
  for (std::int64_t i = 0; i < count; ++i) factors[i] = -values[i];
  kernel.exponentials(factors, count, 0.0f);
  for (std::int64_t i = 0; i < count; ++i) values[i] = 1.0f / (1.0f + factors[i]);
  kernel.narrow(type, values, count, narrow);
  kernel.widen(type, narrow, count, values);
}

void rounded_softplus(ElementType type, std::int64_t count, float* values, void* narrow) {
  // Beyond 20 the difference is less than float32 resolves.
  for (std::int64_t i = 0; i < count; ++i) {
    values[i] = values[i] > 20.0f ? values[i] : std::log1p(std::exp(values[i]));
  }
  kernels().decode->narrow(type, values, count, narrow);
  kernels().decode->widen(type, narrow, count, values);
}

void check_mlp(const Mlp& mlp) {
  if (mlp.joined) {
    require_fit(mlp.gated && mlp.up.rows % 2 == 0, "gate and up");
  } else if (mlp.gated) {
    require_fit(mlp.gate.cols == mlp.up.cols && mlp.gate.rows == mlp.up.rows, "gate and up");
  }
  require_fit(mlp.down.cols == mlp.inner(), "up and down");
  require_fit(mlp.gated ? mlp.activation == Activation::kSilu || mlp.activation == Activation::kGeluTanh
                        : mlp.activation == Activation::kRelu2,
              "activation");
}

void run_mlp(const Mlp& mlp, const void* x, std::int64_t tokens, void* out) {
  require_step_tokens(tokens);
  const std::int64_t elements = tokens * mlp.up.cols;
  Arena arena(Arena::bytes_of(elements * 4) + mlp_bytes(mlp, tokens));
  auto* wide = arena.take<float>(elements * 4);
  kernels().decode->widen(mlp.type, x, elements, wide);
  mlp_in(arena, mlp, wide, tokens, out);
}

void check_feed_step(const FeedStep& step) {
  const ElementType type = step.after.type;
  const std::int64_t hidden = step.after.cols;
  if (step.ends) {
    require_fit(!step.routes && !step.shares, "parts behind the end of a layer");
    return;
  }
  if (step.routes) {
    require_fit(step.routing.type == type && step.routing.hidden == hidden, "router and hidden size");
  }
  require_fit(step.routed_scale == 1.0f || step.shares, "a scale without a shared expert");
  require_fit(!step.scales || step.routes, "scales without a router");
  require_fit(!step.norms || step.shares, "norms of results without a shared expert");
  const auto fits = [&](const NormTask& norm) {
    require_fit(norm.type == type && norm.cols == hidden, "norms and hidden size");
  };
  if (step.scales) {
    fits(step.scales->norm);
    require_fit(step.rule.weight_type == ElementType::kFloat32, "type of scaled weights");
  }
  if (step.norms) {
    for (const NormTask& norm :
         {step.norms->experts, step.norms->shared_result, step.norms->experts_result, step.norms->result}) {
      fits(norm);
    }
  }
  if (!step.shares) return;
  require_fit(step.routes, "a shared expert without a router");
  require_fit(step.shared.type == type, "type of the shared expert");
  require_fit(step.shared.up.cols == hidden && step.shared.down.rows == hidden,
              "shared expert and hidden size");
  if (step.gates) require_fit(step.gate.rows == 1 && step.gate.cols == hidden, "gate of the shared expert");
}

void feed_step(const FeedStep& step, std::int64_t tokens, const FeedRows& given, StepClock& clock) {
  if (step.ends) return;
  const DecodeKernels& kernel = *kernels().decode;
  const ElementType type = step.after.type;
  const std::int64_t size = element_bytes(type), hidden = tokens * step.after.cols;
  const std::int64_t logits = step.routes ? tokens * step.routing.experts : 0;
  const std::int64_t chosen = step.routes ? tokens * step.rule.chosen : 0;
  std::int64_t bytes = Arena::bytes_of(hidden * size) + Arena::bytes_of(logits * 4) +
                       Arena::bytes_of(chosen * 4) + 2 * Arena::bytes_of(tokens * 4) +
                       Arena::bytes_of(hidden * 4);
  if (step.norms) bytes += Arena::bytes_of(hidden * size);
  if (step.shares) bytes += mlp_bytes(step.shared, tokens);
  Arena arena(bytes);
  const auto normalise = [&](const NormTask& norm, const void* x, void* out) {
    NormTask task = norm;
    task.x = x;
    task.out = out;
    rms_norm(task, tokens);
  };
  if (!step.routes) {
    normalise(step.after, given.residual, given.normed);
    clock.add(&StepTimes::norms);
    return;
  }
  void* rows = arena.take(hidden * size);
  normalise(step.after, given.residual, rows);
  kernel.widen(type, rows, hidden, given.x);
  clock.add(&StepTimes::norms);
  RouteTask choice = step.routing;
  choice.x = step.scales ? given.residual : rows;
  choice.tokens = tokens;
  choice.logits = arena.take(logits * 4);
  void* weights = arena.take(chosen * 4);
  if (step.scales) {
    route_scaled(choice, step.rule, *step.scales, given.index, given.weights);
  } else {
    route(choice, step.rule, given.index, weights);
    kernel.widen(step.rule.weight_type, weights, chosen, given.weights);
  }
  clock.add(&StepTimes::router);
  if (!step.shares) return;
  mlp_in(arena, step.shared, given.x, tokens, given.shared);
  if (step.gates) {
    auto* gates = arena.take<float>(tokens * 4);
    auto* factors = arena.take<float>(tokens * 4);
    auto* results = arena.take<float>(hidden * 4);
    multiply(step.gate, given.x, tokens, gates);
    kernel.narrow(type, gates, tokens, rows);
    kernel.widen(type, rows, tokens, gates);
    rounded_sigmoids(type, tokens, gates, factors, rows);
    kernel.widen(type, given.shared, hidden, results);
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t i = t * step.after.cols; i < (t + 1) * step.after.cols; ++i) results[i] *= gates[t];
    }
    kernel.narrow(type, results, hidden, given.shared);
  }
  clock.add(&StepTimes::shared);
  if (!step.norms) return;
  void* experts = arena.take(hidden * size);
  normalise(step.norms->experts, given.residual, experts);
  kernel.widen(type, experts, hidden, given.x);
  normalise(step.norms->shared_result, given.shared, given.shared);  // it may overwrite its input
  clock.add(&StepTimes::norms);
}

void add_experts(const FeedStep& step, std::int64_t tokens, const float* x, const void* shared,
                 void* residual) {
  const DecodeKernels& kernel = *kernels().decode;
  const ElementType type = step.after.type;
  const std::int64_t elements = tokens * step.after.cols;
  const std::int64_t size = element_bytes(type);
  if (!step.shares) {
    if (step.scale == 1.0f) return kernel.add(type, x, elements, residual);
    Arena arena(Arena::bytes_of(elements * size) + Arena::bytes_of(elements * 4));
    void* narrow = arena.take(elements * size);
    auto* own = arena.take<float>(elements * 4);
    std::copy(x, x + elements, own);
    scale_rounded(type, step.scale, elements, own, narrow);
    return kernel.add(type, own, elements, residual);
  }
  Arena arena(Arena::bytes_of(elements * size) + 2 * Arena::bytes_of(elements * 4));
  void* sums = arena.take(elements * size);
  auto* wide = arena.take<float>(elements * 4);
  const auto normalise = [&](const NormTask& norm) {
    NormTask task = norm;
    task.x = task.out = sums;
    rms_norm(task, tokens);
  };
  kernel.widen(type, shared, elements, wide);
  kernel.narrow(type, x, elements, sums);
  if (step.routed_scale != 1.0f) {
    auto* scaled = arena.take<float>(elements * 4);
    kernel.widen(type, sums, elements, scaled);
    for (std::int64_t i = 0; i < elements; ++i) scaled[i] *= step.routed_scale;
    kernel.narrow(type, scaled, elements, sums);
  }
  if (step.norms) normalise(step.norms->experts_result);
  kernel.add(type, wide, elements, sums);
  if (step.norms) normalise(step.norms->result);
  kernel.widen(type, sums, elements, wide);
  scale_rounded(type, step.scale, elements, wide, sums);
  kernel.add(type, wide, elements, residual);
  if (!step.norms) return;
  float scale;
  kernel.widen(type, step.norms->scale, 1, &scale);
  kernel.widen(type, residual, elements, wide);
  for (std::int64_t i = 0; i < elements; ++i) wide[i] *= scale;
  kernel.narrow(type, wide, elements, residual);
}

}  // namespace moechat
