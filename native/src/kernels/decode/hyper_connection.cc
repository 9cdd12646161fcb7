#include "kernels/decode/hyper_connection.h"

#include <cmath>

#include "kernels/decode/step_memory.h"
#include "kernels/isa/dispatch.h"

namespace moechat {
namespace {

float sigmoid_of(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Divides rows, `step` apart with elements `stride` apart, by their sums.
void divide(float* comb, std::int64_t streams, std::int64_t step, std::int64_t stride, float eps) {
  for (std::int64_t row = 0; row < streams; ++row) {
    float sum = 0.0f;
    for (std::int64_t i = 0; i < streams; ++i) sum += comb[row * step + i * stride];
    for (std::int64_t i = 0; i < streams; ++i) comb[row * step + i * stride] /= sum + eps;
  }
}

}  // namespace

void hyper_connection(const HyperConnection& task, const void* x, float* post, float* comb, void* collapsed) {
  const DecodeKernels& kernel = *kernels().decode;
  const std::int64_t n = task.streams, elements = n * task.hidden, logits = (2 + n) * n;
  Arena arena(2 * Arena::bytes_of(elements * 4) + Arena::bytes_of(task.hidden * 4) +
              Arena::bytes_of(logits * 4));
  auto* wide = arena.take<float>(elements * 4);
  auto* normed = arena.take<float>(elements * 4);
  auto* sums = arena.take<float>(task.hidden * 4);
  auto* mixes = arena.take<float>(logits * 4);
  kernel.widen(task.type, x, elements, wide);
  for (std::int64_t i = 0; i < elements; ++i) normed[i] = 1.0f;
  NormTask norm{ElementType::kFloat32, wide, normed, normed, elements, task.norm_eps, 0.0f, false};
  rms_norm(norm, 1);  // it reads a weight before it writes the element in its place
  RouteTask product{};
  product.type = product.weight_type = product.logits_type = ElementType::kFloat32;
  product.x = normed;
  product.weight = task.weight;
  product.tokens = 1;
  product.experts = logits;
  product.hidden = elements;
  product.logits = mixes;
  router_logits(product);
  float before[kMostStreams];
  for (std::int64_t i = 0; i < n; ++i) {
    before[i] = sigmoid_of(mixes[i] * task.scale[0] + task.base[i]) + task.eps;
    post[i] = 2.0f * sigmoid_of(mixes[n + i] * task.scale[1] + task.base[n + i]);
  }
  for (std::int64_t row = 0; row < n; ++row) {
    float* weights = comb + row * n;
    float most = -HUGE_VALF, sum = 0.0f;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t at = 2 * n + row * n + i;
      weights[i] = mixes[at] * task.scale[2] + task.base[at];
      most = weights[i] > most ? weights[i] : most;
    }
    for (std::int64_t i = 0; i < n; ++i) {
      weights[i] = std::exp(weights[i] - most);
      sum += weights[i];
    }
    for (std::int64_t i = 0; i < n; ++i) weights[i] = weights[i] / sum + task.eps;
  }
  divide(comb, n, 1, n, task.eps);
  for (std::int64_t round = 1; round < task.rounds; ++round) {
    divide(comb, n, n, 1, task.eps);
    divide(comb, n, 1, n, task.eps);
  }
  for (std::int64_t i = 0; i < task.hidden; ++i) sums[i] = 0.0f;
  for (std::int64_t stream = 0; stream < n; ++stream) {
    const float weight = before[stream];
    const float* row = wide + stream * task.hidden;
    for (std::int64_t i = 0; i < task.hidden; ++i) sums[i] += weight * row[i];
  }
  kernel.narrow(task.type, sums, task.hidden, collapsed);
}

}  // namespace moechat
