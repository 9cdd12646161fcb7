// A decoder layer with linear attention by the gated delta rule, up to its experts, for one decoded token of
// each of several conversations, and its linear attention alone for one. Both round between products as
// separate calls would; the results of a token do not depend on the others.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/decode/decode.h"
#include "kernels/decode/feed_step.h"
#include "kernels/decode/step_product.h"
#include "kernels/decode/step_times.h"

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

struct DeltaStep {
  NormTask before;  // its x and out are unused
  DeltaMixer mixer;
  FeedStep feed;
  StepTimes* times;  // or null: not measured
};

// States of the conversation that a token belongs to; see DeltaTask.
struct DeltaStates {
  void* before;
  float* state;
};

struct DeltaStepCall {
  std::int64_t tokens;        // 1 to kMostStepTokens
  const void* hidden;         // [tokens, hidden]
  const DeltaStates* states;  // [tokens]; no two of them overlap
  void* residual;  // [tokens, hidden], output: hidden plus linear attention; must not overlap hidden
  FeedRows rows;   // outputs; its residual is unused
};

// Throws std::invalid_argument if the sizes of the parts do not match.
void check_delta_step(const DeltaStep& step);
// Throws std::invalid_argument for a wrong number of tokens.
void delta_step(const DeltaStep& step, const DeltaStepCall& call);

}  // namespace moechat
