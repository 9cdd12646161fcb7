#include "kernels/decode/token_parts.h"

#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/decode/step_memory.h"
#include "kernels/isa/dispatch.h"

namespace moechat {
namespace {

void require(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(std::string("the parts do not fit together: ") + what);
}

// Whether all heads of something, `each` elements for a head of keys, lie in a row of so many.
bool holds(const DeltaTask& task, const DeltaTask::Place& place, std::int64_t each, std::int64_t rows) {
  return place.start >= 0 && place.stride >= 0 &&
         place.start + (task.k_heads - 1) * place.stride + each <= rows;
}

}  // namespace

void check_delta_mixer(const DeltaMixer& mixer) {
  const DeltaTask& task = mixer.task;
  const auto count = static_cast<int>(mixer.inputs.size());
  for (const int source : {mixer.mixed, mixer.gate, mixer.beta, mixer.decay}) {
    require(source >= 0 && source < count, "a source that there is not");
  }
  for (const StepProduct& input : mixer.inputs) {
    require(input.cols == mixer.output.rows, "projections and hidden size");
  }
  const std::int64_t values = task.group * task.v_dim;
  const auto rows = [&](int source) { return mixer.inputs[static_cast<std::size_t>(source)].rows; };
  require(holds(task, task.q, task.k_dim, rows(mixer.mixed)), "queries");
  require(holds(task, task.k, task.k_dim, rows(mixer.mixed)), "keys");
  require(holds(task, task.v, values, rows(mixer.mixed)), "values");
  require(holds(task, task.gate, values, rows(mixer.gate)), "gates");
  require(holds(task, task.beta, task.group, rows(mixer.beta)), "betas");
  require(holds(task, task.decay, task.group, rows(mixer.decay)), "decays");
  require(mixer.output.cols == task.k_heads * values, "the last projection");
}

namespace {

// The result of a mixer as float32 sums, which stay until the next step of this thread.
const float* mixed_sums(const DeltaMixer& mixer, const NormTask* norm, const void* hidden, void* before,
                        float* state) {
  const DecodeKernels& kernel = *kernels().decode;
  const ElementType type = mixer.task.type;
  const std::int64_t size = element_bytes(type), width = mixer.output.rows, mixes = mixer.output.cols;
  const std::int64_t widest = width > mixes ? width : mixes;
  std::int64_t most = width;
  std::int64_t bytes =
      Arena::bytes_of(widest * 4) + Arena::bytes_of(mixes * size) + Arena::bytes_of(width * size);
  for (const StepProduct& input : mixer.inputs) {
    most = input.rows > most ? input.rows : most;
    bytes += Arena::bytes_of(input.rows * size);
  }
  Arena arena(bytes + Arena::bytes_of(most * 4));
  auto* wide = arena.take<float>(widest * 4);
  auto* sums = arena.take<float>(most * 4);
  void* mixed = arena.take(mixes * size);
  void* normed = arena.take(width * size);
  if (norm != nullptr) {
    NormTask task = *norm;
    task.x = hidden;
    task.out = normed;
    rms_norm(task, 1);
    hidden = normed;
  }
  kernel.widen(type, hidden, width, wide);
  DeltaTask task = mixer.task;
  const void** const wanted[] = {&task.mixed, &task.gate_row, &task.beta_row, &task.decay_row};
  const int sources[] = {mixer.mixed, mixer.gate, mixer.beta, mixer.decay};
  for (std::size_t i = 0; i < mixer.inputs.size(); ++i) {
    const StepProduct& input = mixer.inputs[i];
    void* row = arena.take(input.rows * size);
    multiply(input, wide, 1, sums);
    kernel.narrow(type, sums, input.rows, row);
    for (int part = 0; part < 4; ++part) {
      if (sources[part] == static_cast<int>(i)) *wanted[part] = row;
    }
  }
  task.before = before;
  task.state = state;
  task.out = mixed;
  delta(task);
  kernel.widen(type, mixed, mixes, wide);
  multiply(mixer.output, wide, 1, sums);
  return sums;
}

}  // namespace

void delta_mixer(const DeltaMixer& mixer, const void* hidden, void* before, float* state, void* out) {
  const float* sums = mixed_sums(mixer, nullptr, hidden, before, state);
  kernels().decode->narrow(mixer.task.type, sums, mixer.output.rows, out);
}

void check_delta_step(const DeltaStep& step) {
  check_delta_mixer(step.mixer);
  for (const NormTask& norm : {step.before, step.after}) {
    require(norm.type == step.mixer.task.type, "types of the norms");
    require(norm.cols == step.mixer.output.rows, "norms and hidden size");
  }
}

void delta_step(const DeltaStep& step, const void* hidden, void* before, float* state, void* residual,
                void* normed) {
  const ElementType type = step.mixer.task.type;
  const std::int64_t width = step.mixer.output.rows;
  const float* sums = mixed_sums(step.mixer, &step.before, hidden, before, state);
  std::memcpy(residual, hidden, static_cast<std::size_t>(width * element_bytes(type)));
  kernels().decode->add(type, sums, width, residual);
  NormTask after = step.after;
  after.x = residual;
  after.out = normed;
  rms_norm(after, 1);
}

void check_gated_mlp(const GatedMlp& mlp) {
  require(mlp.gate.cols == mlp.up.cols && mlp.gate.rows == mlp.up.rows, "gate and up");
  require(mlp.down.cols == mlp.up.rows, "up and down");
}

void gated_mlp(const GatedMlp& mlp, const void* x, std::int64_t tokens, void* out) {
  if (tokens < 1 || tokens > kMostStepTokens) {
    throw std::invalid_argument("a feed-forward part takes 1 to " + std::to_string(kMostStepTokens) +
                                " tokens, not " + std::to_string(tokens));
  }
  const DecodeKernels& kernel = *kernels().decode;
  // Elements of all tokens.
  const std::int64_t cols = tokens * mlp.gate.cols, inner = tokens * mlp.gate.rows,
                     rows = tokens * mlp.down.rows;
  const std::int64_t size = element_bytes(mlp.type);
  Arena arena(Arena::bytes_of(cols * 4) + 3 * Arena::bytes_of(inner * 4) + Arena::bytes_of(inner * size) +
              Arena::bytes_of(rows * 4));
  auto* wide = arena.take<float>(cols * 4);
  auto* gate = arena.take<float>(inner * 4);
  auto* up = arena.take<float>(inner * 4);
  auto* factors = arena.take<float>(inner * 4);
  void* narrow = arena.take(inner * size);
  auto* sums = arena.take<float>(rows * 4);
  const auto rounded = [&](float* values) {
    kernel.narrow(mlp.type, values, inner, narrow);
    kernel.widen(mlp.type, narrow, inner, values);
  };
  kernel.widen(mlp.type, x, cols, wide);
  multiply(mlp.gate, wide, tokens, gate);
  multiply(mlp.up, wide, tokens, up);
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

}  // namespace moechat
