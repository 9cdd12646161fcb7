// Linear attention by the gated delta rule with its projections; see state_step.h.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/decode/decode.h"
#include "kernels/decode/state_step.h"

namespace moechat {

struct DeltaMixer {
  DeltaTask task;                   // without rows and states
  std::vector<StepProduct> inputs;  // of a token's hidden state
  // Of these, those with queries, keys and values; with gates; with betas; with decays.
  int mixed, gate, beta, decay;
  StepProduct output;
};

// Throws std::invalid_argument if the products do not have the sizes of the task.
void check_mixer(const DeltaMixer& mixer);
float* mixer_sums(const DeltaMixer& mixer, const NormTask* norm, const void* hidden, std::int64_t tokens,
                  const MixerStates* states, StepClock& clock);

}  // namespace moechat
