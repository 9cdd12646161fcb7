// Parts of a decoder layer for one token, each with its dense products: linear attention by the gated delta
// rule, alone or with the norms around it, and gated feed-forward parts. They round between products as
// separate calls would.
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

// The part of a decoder layer before its feed-forward part: norm, linear attention, residual, norm.
struct DeltaStep {
  NormTask before;  // its x and out are unused
  DeltaMixer mixer;
  NormTask after;
};

// Throws std::invalid_argument if the norms do not have the sizes of the mixer.
void check_delta_step(const DeltaStep& step);
// All [output.rows]. residual: hidden plus linear attention; must not overlap hidden. normed: its norm.
void delta_step(const DeltaStep& step, const void* hidden, void* before, float* state, void* residual,
                void* normed);

// out = down(silu(gate(x)) * up(x)).
struct GatedMlp {
  ElementType type;
  StepProduct gate, up, down;
};

void check_gated_mlp(const GatedMlp& mlp);
// x: [tokens, gate.cols], out: [tokens, down.rows]; at most kMostStepTokens tokens, whose results do not
// depend on the others.
void gated_mlp(const GatedMlp& mlp, const void* x, std::int64_t tokens, void* out);

}  // namespace moechat
