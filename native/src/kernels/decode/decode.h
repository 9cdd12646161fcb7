// The small parts of a decoding step. Large ones are shared by the thread pool. No result depends on the
// number of threads.
#pragma once

#include <cstdint>

#include "kernels/isa/decode_api.h"

namespace moechat {

void copy_bytes(const void* from, std::int64_t count, void* to);
void rms_norm(const NormTask& task, std::int64_t rows);
void rotate(const RotateTask& task);
void attend(const AttendTask& task);
void delta(const DeltaTask& task);
// Any number of tokens; its mixed and made are unused.
void mamba(const MambaTask& task);
// Returns false, and computes nothing, if a token's visible keys are not one range, or a key head has too
// many query heads. Without `visible` each token sees the keys up to its own, the last token being that of
// the last key.
bool attend_prompt(const AttendTask& task);
void pack_rows(const PackTask& task);
void unpack_rows(const PackTask& task);

enum class RouterScoring : int {
  kSoftmax,        // over all experts, before top-k
  kSigmoid,        // before top-k
  kSoftmaxChosen,  // over the chosen experts only
};

// How a router selects experts and computes their weights from logits.
struct RouterRule {
  RouterScoring scoring;
  std::int64_t chosen;      // top-k: experts per token
  const float* correction;  // [experts], added for the selection only; or null
  bool normalise;           // scales the weights of the chosen experts to the sum 1
  bool rounds_scores;       // rounds the scores to the type of the logits
  float scale;              // multiplies the weights
  ElementType weight_type;
};

// Computes the logits of a router, a product with float32 sums.
void router_logits(const RouteTask& task);
// Computes logits, then selects `chosen` experts per token in descending order of their selection
// score; ties go to the lower index. index [tokens, chosen], weights [tokens, chosen] of weight_type.
void route(const RouteTask& task, const RouterRule& rule, std::int64_t* index, void* weights);

// What a router makes of hidden states before its product, rounded to the element type after each step, and
// of the weights of the chosen experts (Gemma 4).
struct RouterScales {
  NormTask norm;         // its x and out are unused
  const void* inputs;    // [hidden], of the element type: factors of the normalised elements
  float input;           // multiplies all of them
  const float* experts;  // [experts]: factors of the weights
};

// As route(), with float32 weights.
void route_scaled(const RouteTask& task, const RouterRule& rule, const RouterScales& scales,
                  std::int64_t* index, float* weights);

}  // namespace moechat
