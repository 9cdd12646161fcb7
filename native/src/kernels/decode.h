// The small parts of a decoding step, over the thread pool where they are large enough. No result depends on
// the number of threads.
#pragma once

#include <cstdint>

#include "kernels/decode_api.h"

namespace moechat {

void rms_norm(const NormTask& task, std::int64_t rows);
void rotate(const RotateTask& task);
void attend(const AttendTask& task);

enum class RouterScoring : int {
  kSoftmax,        // over all experts, before the choice
  kSigmoid,        // before the choice
  kSoftmaxChosen,  // over the chosen experts alone
};

// What a router makes of its logits.
struct RouterRule {
  RouterScoring scoring;
  std::int64_t chosen;      // experts of a token
  const float* correction;  // [experts], added for the choice alone; or null
  bool normalise;           // the weights of the chosen sum up to 1
  float scale;              // multiplies the weights
  ElementType weight_type;
};

// Logits as route(), then `chosen` experts a token in descending order of what they were chosen by; of equal
// ones the lower index comes first. index [tokens, chosen], weights [tokens, chosen] of weight_type.
void route(const RouteTask& task, const RouterRule& rule, std::int64_t* index, void* weights);

}  // namespace moechat
