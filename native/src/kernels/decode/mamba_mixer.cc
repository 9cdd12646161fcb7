#include "kernels/decode/mamba_mixer.h"

namespace moechat {

void check_mixer(const MambaMixer& mixer) {
  require_fit(mixer.input.rows == mamba_cols(mixer.task), "the first projection");
  require_fit(mixer.output.cols == mamba_inner(mixer.task) && mixer.output.rows == mixer.input.cols,
              "the last projection");
}

const float* mixer_sums(const MambaMixer& mixer, const NormTask* norm, const void* hidden,
                        std::int64_t tokens, const MixerStates* states, StepClock& clock) {
  const DecodeKernels& kernel = *kernels().decode;
  const ElementType type = mixer.task.type;
  const std::int64_t size = element_bytes(type);
  // Elements of a token, and of all tokens.
  const std::int64_t row_cols = mixer.input.rows, made_cols = mixer.output.cols;
  const std::int64_t width = tokens * mixer.input.cols, rows = tokens * row_cols, made = tokens * made_cols;
  const std::int64_t widest = width > made ? width : made, most = rows > width ? rows : width;
  Arena arena(Arena::bytes_of(widest * 4) + Arena::bytes_of(most * 4) + Arena::bytes_of(width * size) +
              Arena::bytes_of(rows * size) + Arena::bytes_of(made * size));
  auto* wide = arena.take<float>(widest * 4);
  auto* sums = arena.take<float>(most * 4);
  void* normed = arena.take(width * size);
  auto* row = arena.take<unsigned char>(rows * size);
  auto* results = arena.take<unsigned char>(made * size);
  if (norm != nullptr) {
    NormTask task = *norm;
    task.x = hidden;
    task.out = normed;
    rms_norm(task, tokens);
    hidden = normed;
  }
  kernel.widen(type, hidden, width, wide);
  clock.add(&StepTimes::norms);
  multiply(mixer.input, wide, tokens, sums);
  kernel.narrow(type, sums, rows, row);
  clock.add(&StepTimes::projections);
  for (std::int64_t t = 0; t < tokens; ++t) {
    MambaTask task = mixer.task;
    task.row = row + t * row_cols * size;
    task.before = states[t].before;
    task.state = states[t].state;
    task.out = results + t * made_cols * size;
    mamba(task);
  }
  clock.add(&StepTimes::attention);
  kernel.widen(type, results, made, wide);
  multiply(mixer.output, wide, tokens, sums);
  return sums;
}

}  // namespace moechat
