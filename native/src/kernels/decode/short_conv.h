// A gated short convolution with its projections (LFM2); see state_step.h. Its states are those of the
// convolution only.
#pragma once

#include "kernels/decode/decode.h"
#include "kernels/decode/state_step.h"

namespace moechat {

struct ShortConvMixer {
  ShortConvTask task;  // without row, states and result
  StepProduct input;
  StepProduct output;
};

// Throws std::invalid_argument if the products do not have the sizes of the task.
void check_mixer(const ShortConvMixer& mixer);
float* mixer_sums(const ShortConvMixer& mixer, const NormTask* norm, const void* hidden, std::int64_t tokens,
                  const MixerStates* states, StepClock& clock);

}  // namespace moechat
