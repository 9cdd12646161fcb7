#include "kernels/decode/feed_step.h"

#include "kernels/decode/step_memory.h"
#include "kernels/isa/dispatch.h"

namespace moechat {
namespace {

std::int64_t mlp_bytes(const GatedMlp& mlp, std::int64_t tokens) {
  const std::int64_t inner = tokens * mlp.gate.rows;
  return 3 * Arena::bytes_of(inner * 4) + Arena::bytes_of(inner * element_bytes(mlp.type)) +
         Arena::bytes_of(tokens * mlp.down.rows * 4);
}

// As gated_mlp(), in memory of mlp_bytes().
void mlp_in(Arena& arena, const GatedMlp& mlp, const float* x, std::int64_t tokens, void* out) {
  const DecodeKernels& kernel = *kernels().decode;
  const std::int64_t inner = tokens * mlp.gate.rows, rows = tokens * mlp.down.rows;
  auto* gate = arena.take<float>(inner * 4);
  auto* up = arena.take<float>(inner * 4);
  auto* factors = arena.take<float>(inner * 4);
  void* narrow = arena.take(inner * element_bytes(mlp.type));
  auto* sums = arena.take<float>(rows * 4);
  const auto rounded = [&](float* values) {
    kernel.narrow(mlp.type, values, inner, narrow);
    kernel.widen(mlp.type, narrow, inner, values);
  };
  multiply(mlp.gate, x, tokens, gate);
  multiply(mlp.up, x, tokens, up);
  rounded(gate);
  rounded(up);
  for (std::int64_t i = 0; i < inner; ++i) factors[i] = -gate[i];
  kernel.exponentials(factors, inner, 0.0f);
  for (std::int64_t i = 0; i < inner; ++i) gate[i] /= 1.0f + factors[i];
  rounded(gate);
  for (std::int64_t i = 0; i < inner; ++i) gate[i] *= up[i];
  rounded(gate);
  multiply(mlp.down, gate, tokens, sums);
  kernel.narrow(mlp.type, sums, rows, out);
}

}  // namespace

void rounded_sigmoids(ElementType type, std::int64_t count, float* values, float* factors, void* narrow) {
  const DecodeKernels& kernel = *kernels().decode;
  for (std::int64_t i = 0; i < count; ++i) factors[i] = -values[i];
  kernel.exponentials(factors, count, 0.0f);
  for (std::int64_t i = 0; i < count; ++i) values[i] = 1.0f / (1.0f + factors[i]);
  kernel.narrow(type, values, count, narrow);
  kernel.widen(type, narrow, count, values);
}

void check_gated_mlp(const GatedMlp& mlp) {
  require_fit(mlp.gate.cols == mlp.up.cols && mlp.gate.rows == mlp.up.rows, "gate and up");
  require_fit(mlp.down.cols == mlp.up.rows, "up and down");
}

void gated_mlp(const GatedMlp& mlp, const void* x, std::int64_t tokens, void* out) {
  require_step_tokens(tokens);
  const std::int64_t elements = tokens * mlp.gate.cols;
  Arena arena(Arena::bytes_of(elements * 4) + mlp_bytes(mlp, tokens));
  auto* wide = arena.take<float>(elements * 4);
  kernels().decode->widen(mlp.type, x, elements, wide);
  mlp_in(arena, mlp, wide, tokens, out);
}

void check_feed_step(const FeedStep& step) {
  const ElementType type = step.after.type;
  const std::int64_t hidden = step.after.cols;
  if (step.routes) {
    require_fit(step.routing.type == type && step.routing.hidden == hidden, "router and hidden size");
  }
  if (!step.shares) return;
  require_fit(step.routes, "a shared expert without a router");
  require_fit(step.shared.type == type, "type of the shared expert");
  require_fit(step.shared.gate.cols == hidden && step.shared.down.rows == hidden,
              "shared expert and hidden size");
  if (step.gates) require_fit(step.gate.rows == 1 && step.gate.cols == hidden, "gate of the shared expert");
}

void feed_step(const FeedStep& step, std::int64_t tokens, const FeedRows& given, StepClock& clock) {
  const DecodeKernels& kernel = *kernels().decode;
  const ElementType type = step.after.type;
  const std::int64_t size = element_bytes(type), hidden = tokens * step.after.cols;
  const std::int64_t logits = step.routes ? tokens * step.routing.experts : 0;
  const std::int64_t chosen = step.routes ? tokens * step.rule.chosen : 0;
  std::int64_t bytes = Arena::bytes_of(hidden * size) + Arena::bytes_of(logits * 4) +
                       Arena::bytes_of(chosen * 4) + 2 * Arena::bytes_of(tokens * 4) +
                       Arena::bytes_of(hidden * 4);
  if (step.shares) bytes += mlp_bytes(step.shared, tokens);
  Arena arena(bytes);
  const auto normalise = [&](void* out) {
    NormTask task = step.after;
    task.x = given.residual;
    task.out = out;
    rms_norm(task, tokens);
  };
  if (!step.routes) {
    normalise(given.normed);
    clock.add(&StepTimes::norms);
    return;
  }
  void* rows = arena.take(hidden * size);
  normalise(rows);
  kernel.widen(type, rows, hidden, given.x);
  clock.add(&StepTimes::norms);
  RouteTask choice = step.routing;
  choice.x = rows;
  choice.tokens = tokens;
  choice.logits = arena.take(logits * 4);
  void* weights = arena.take(chosen * 4);
  route(choice, step.rule, given.index, weights);
  kernel.widen(step.rule.weight_type, weights, chosen, given.weights);
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
}

void add_experts(const FeedStep& step, std::int64_t tokens, const float* x, const void* shared,
                 void* residual) {
  const DecodeKernels& kernel = *kernels().decode;
  const ElementType type = step.after.type;
  const std::int64_t elements = tokens * step.after.cols;
  if (!step.shares) {
    kernel.add(type, x, elements, residual);
    return;
  }
  const std::int64_t size = element_bytes(type);
  Arena arena(Arena::bytes_of(elements * size) + Arena::bytes_of(elements * 4));
  void* sums = arena.take(elements * size);
  auto* wide = arena.take<float>(elements * 4);
  kernel.widen(type, shared, elements, wide);
  kernel.narrow(type, x, elements, sums);
  kernel.add(type, wide, elements, sums);
  kernel.widen(type, sums, elements, wide);
  kernel.add(type, wide, elements, residual);
}

}  // namespace moechat
