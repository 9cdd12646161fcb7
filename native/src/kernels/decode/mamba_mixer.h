// A Mamba-2 mixer with its projections, for one token. It rounds between products as separate calls would.
#pragma once

#include "kernels/decode/decode.h"
#include "kernels/decode/step_product.h"

namespace moechat {

struct MambaMixer {
  MambaTask task;  // without row and states
  StepProduct input;
  StepProduct output;
};

// Throws std::invalid_argument if the products do not have the sizes of the task.
void check_mamba_mixer(const MambaMixer& mixer);
// hidden and out: [output.rows] of the task's type. before and state: see MambaTask.
void mamba_mixer(const MambaMixer& mixer, const void* hidden, void* before, float* state, void* out);

}  // namespace moechat
