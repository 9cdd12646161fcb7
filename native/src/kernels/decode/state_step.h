// A decoder layer whose mixer keeps states of its own for each conversation, up to its experts, for one
// decoded token of each of several. It rounds between products as separate calls would; the results of a
// token do not depend on the others.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/decode/decode.h"
#include "kernels/decode/feed_step.h"
#include "kernels/decode/step_memory.h"
#include "kernels/decode/step_product.h"
#include "kernels/decode/step_times.h"
#include "kernels/isa/dispatch.h"

namespace moechat {

// States of the conversation that a token belongs to: the last elements of a convolution, and what else the
// mixer keeps, or null. Both can be copied before the token is computed, so that the token can be rolled
// back.
struct MixerStates {
  void* before;
  float* state;
  void* before_copy = nullptr;  // or null: no copies
  float* state_copy = nullptr;
  std::int64_t before_bytes = 0, state_bytes = 0;
};

inline void copy_states(const MixerStates& states) {
  if (states.before_copy == nullptr) return;
  copy_bytes(states.before, states.before_bytes, states.before_copy);
  if (states.state != nullptr) copy_bytes(states.state, states.state_bytes, states.state_copy);
}

// Mixer has `task.type` and `output`, and for it there are check_mixer(), and mixer_sums(): its result as
// float32 sums [tokens, output.rows], behind a norm unless that is null. They stay until the next step of
// this thread.
template <class Mixer>
struct StateStep {
  NormTask before;  // its x and out are unused
  Mixer mixer;
  FeedStep feed;
  StepTimes* times;    // or null: not measured
  float scale = 1.0f;  // multiplies what the mixer gives, before it is added
};

struct StateStepCall {
  std::int64_t tokens;        // 1 to kMostStepTokens
  const void* hidden;         // [tokens, hidden]
  const MixerStates* states;  // [tokens]; those of two tokens are the same, or do not overlap
  void* residual;             // [tokens, hidden], output: hidden plus the mixer's; must not overlap hidden
  FeedRows rows;              // outputs; its residual is unused
};

// mixer_sums() of a mixer between two projections, mixer.input and mixer.output: between(row, states, result)
// computes a token there.
template <class Mixer, class Between>
float* sums_of_two_projections(const Mixer& mixer, const NormTask* norm, const void* hidden,
                               std::int64_t tokens, const MixerStates* states, StepClock& clock,
                               const Between& between) {
  const DecodeKernels& kernel = *kernels().decode;
  const ElementType type = mixer.task.type;
  const std::int64_t size = element_bytes(type);
  // Elements of a token, and of all tokens.
  const std::int64_t row_cols = mixer.input.rows, made_cols = mixer.output.cols;
  const std::int64_t width = tokens * mixer.input.cols, rows = tokens * row_cols, made = tokens * made_cols;
  const std::int64_t widest = width > made ? width : made, most = rows > width ? rows : width;
  Arena arena(Arena::bytes_of(widest * 4) + Arena::bytes_of(most * 4) + Arena::bytes_of(width * size) +
              Arena::bytes_of(rows * size) + Arena::bytes_of(made * size));
  auto* wide = arena.take<float>(widest * 4);
  auto* sums = arena.take<float>(most * 4);
  void* normed = arena.take(width * size);
  auto* row = arena.take<unsigned char>(rows * size);
  auto* results = arena.take<unsigned char>(made * size);
  if (norm != nullptr) {
    NormTask task = *norm;
    task.x = hidden;
    task.out = normed;
    rms_norm(task, tokens);
    hidden = normed;
  }
  kernel.widen(type, hidden, width, wide);
  clock.add(&StepTimes::norms);
  multiply(mixer.input, wide, tokens, sums);
  kernel.narrow(type, sums, rows, row);
  clock.add(&StepTimes::projections);
  for (std::int64_t t = 0; t < tokens; ++t) {
    copy_states(states[t]);
    between(row + t * row_cols * size, states[t], results + t * made_cols * size);
  }
  clock.add(&StepTimes::attention);
  kernel.widen(type, results, made, wide);
  multiply(mixer.output, wide, tokens, sums);
  return sums;
}

// Throws std::invalid_argument if the sizes of the parts do not match.
template <class Mixer>
void check_state_step(const StateStep<Mixer>& step) {
  check_mixer(step.mixer);
  for (const NormTask& norm : {step.before, step.feed.after}) {
    require_fit(norm.type == step.mixer.task.type, "types of the norms");
    require_fit(norm.cols == step.mixer.output.rows, "norms and hidden size");
  }
  check_feed_step(step.feed);
}

// Throws std::invalid_argument for a wrong number of tokens.
template <class Mixer>
void state_step(const StateStep<Mixer>& step, const StateStepCall& call) {
  require_step_tokens(call.tokens);
  StepClock clock(step.times);
  const ElementType type = step.mixer.task.type;
  const std::int64_t elements = call.tokens * step.mixer.output.rows;
  float* sums = mixer_sums(step.mixer, &step.before, call.hidden, call.tokens, call.states, clock);
  scale_rounded(type, step.scale, elements, sums, call.residual);
  std::memcpy(call.residual, call.hidden, static_cast<std::size_t>(elements * element_bytes(type)));
  kernels().decode->add(type, sums, elements, call.residual);
  clock.add(&StepTimes::projections);
  FeedRows rows = call.rows;
  rows.residual = call.residual;
  feed_step(step.feed, call.tokens, rows, clock);
}

// The result of a mixer alone for one token, of its type.
template <class Mixer>
void mixer_alone(const Mixer& mixer, const void* hidden, const MixerStates& states, void* out) {
  StepClock clock(nullptr);
  const float* sums = mixer_sums(mixer, nullptr, hidden, 1, &states, clock);
  kernels().decode->narrow(mixer.task.type, sums, mixer.output.rows, out);
}

}  // namespace moechat
