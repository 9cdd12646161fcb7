#include "kernels/decode/short_conv.h"

namespace moechat {

void check_mixer(const ShortConvMixer& mixer) {
  require_fit(mixer.input.rows == 3 * mixer.task.channels, "the first projection");
  require_fit(mixer.output.cols == mixer.task.channels && mixer.output.rows == mixer.input.cols,
              "the last projection");
}

float* mixer_sums(const ShortConvMixer& mixer, const NormTask* norm, const void* hidden, std::int64_t tokens,
                  const MixerStates* states, StepClock& clock) {
  const auto between = [&](const void* row, const MixerStates& given, void* result) {
    ShortConvTask task = mixer.task;
    task.row = row;
    task.before = given.before;
    task.out = result;
    kernels().decode->short_convolve(task, 0, task.channels);
  };
  return sums_of_two_projections(mixer, norm, hidden, tokens, states, clock, between);
}

}  // namespace moechat
