// A Mamba-2 mixer with its projections; see state_step.h.
#pragma once

#include "kernels/decode/decode.h"
#include "kernels/decode/state_step.h"

namespace moechat {

struct MambaMixer {
  MambaTask task;  // without row and states
  StepProduct input;
  StepProduct output;
};

// Throws std::invalid_argument if the products do not have the sizes of the task.
void check_mixer(const MambaMixer& mixer);
float* mixer_sums(const MambaMixer& mixer, const NormTask* norm, const void* hidden, std::int64_t tokens,
                  const MixerStates* states, StepClock& clock);

}  // namespace moechat
