// Parts of a decoder layer for one token, each with its dense products: linear attention by the gated delta
// rule, and gated feed-forward parts. They round between products as separate calls would, so their results
// are bitwise equal to theirs.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/decode/decode.h"
#include "kernels/decode/layer_step.h"

namespace moechat {

// Linear attention with its projections.
struct DeltaMixer {
  DeltaTask task;                   // without rows and states
  std::vector<StepProduct> inputs;  // of a token's hidden state
  // Of these, those with queries, keys and values; with gates; with betas; with decays.
  int mixed, gate, beta, decay;
  StepProduct output;
};

// Throws std::invalid_argument if the products do not have the sizes of the task.
void check_delta_mixer(const DeltaMixer& mixer);
// hidden and out: [output.rows] of the task's type.
void delta_mixer(const DeltaMixer& mixer, const void* hidden, void* before, float* state, void* out);

// out = down(silu(gate(x)) * up(x)).
struct GatedMlp {
  ElementType type;
  StepProduct gate, up, down;
};

void check_gated_mlp(const GatedMlp& mlp);
// x: [gate.cols], out: [down.rows].
void gated_mlp(const GatedMlp& mlp, const void* x, void* out);

}  // namespace moechat
