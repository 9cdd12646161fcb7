#include "kernels/decode/mamba_mixer.h"

namespace moechat {

void check_mixer(const MambaMixer& mixer) {
  require_fit(mixer.input.rows == mamba_cols(mixer.task), "the first projection");
  require_fit(mixer.output.cols == mamba_inner(mixer.task) && mixer.output.rows == mixer.input.cols,
              "the last projection");
}

float* mixer_sums(const MambaMixer& mixer, const NormTask* norm, const void* hidden, std::int64_t tokens,
                  const MixerStates* states, StepClock& clock) {
  const auto between = [&](const void* row, const MixerStates& given, void* result) {
    MambaTask task = mixer.task;
    task.row = row;
    task.before = given.before;
    task.state = given.state;
    task.out = result;
    mamba(task);
  };
  return sums_of_two_projections(mixer, norm, hidden, tokens, states, clock, between);
}

}  // namespace moechat
