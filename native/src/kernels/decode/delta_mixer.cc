#include "kernels/decode/delta_mixer.h"

#include <cstddef>

namespace moechat {
namespace {

// Whether all heads of something, `each` elements for a head of keys, lie in a row of so many.
bool holds(const DeltaTask& task, const DeltaTask::Place& place, std::int64_t each, std::int64_t rows) {
  return place.start >= 0 && place.stride >= 0 &&
         place.start + (task.k_heads - 1) * place.stride + each <= rows;
}

const unsigned char* row_of(const void* rows, std::int64_t token, std::int64_t bytes) {
  return static_cast<const unsigned char*>(rows) + token * bytes;
}

}  // namespace

void check_mixer(const DeltaMixer& mixer) {
  const DeltaTask& task = mixer.task;
  const auto count = static_cast<int>(mixer.inputs.size());
  for (const int source : {mixer.mixed, mixer.gate, mixer.beta, mixer.decay}) {
    require_fit(source >= 0 && source < count, "a source that there is not");
  }
  for (const StepProduct& input : mixer.inputs) {
    require_fit(input.cols == mixer.output.rows, "projections and hidden size");
  }
  const std::int64_t values = task.group * task.v_dim;
  const auto rows = [&](int source) { return mixer.inputs[static_cast<std::size_t>(source)].rows; };
  require_fit(holds(task, task.q, task.k_dim, rows(mixer.mixed)), "queries");
  require_fit(holds(task, task.k, task.k_dim, rows(mixer.mixed)), "keys");
  require_fit(holds(task, task.v, values, rows(mixer.mixed)), "values");
  require_fit(holds(task, task.gate, values, rows(mixer.gate)), "gates");
  require_fit(holds(task, task.beta, task.group, rows(mixer.beta)), "betas");
  require_fit(!task.by_channel, "decays of channels");
  require_fit(holds(task, task.decay, task.group, rows(mixer.decay)), "decays");
  require_fit(mixer.output.cols == task.k_heads * values, "the last projection");
}

float* mixer_sums(const DeltaMixer& mixer, const NormTask* norm, const void* hidden, std::int64_t tokens,
                  const MixerStates* states, StepClock& clock) {
  const DecodeKernels& kernel = *kernels().decode;
  const ElementType type = mixer.task.type;
  const std::int64_t size = element_bytes(type);
  // Elements of a token, and of all tokens.
  const std::int64_t mixed_cols = mixer.output.cols;
  const std::int64_t width = tokens * mixer.output.rows, mixes = tokens * mixed_cols;
  const std::int64_t widest = width > mixes ? width : mixes;
  std::int64_t most = width;
  std::int64_t bytes =
      Arena::bytes_of(widest * 4) + Arena::bytes_of(mixes * size) + Arena::bytes_of(width * size);
  for (const StepProduct& input : mixer.inputs) {
    most = tokens * input.rows > most ? tokens * input.rows : most;
    bytes += Arena::bytes_of(tokens * input.rows * size);
  }
  Arena arena(bytes + Arena::bytes_of(most * 4));
  auto* wide = arena.take<float>(widest * 4);
  auto* sums = arena.take<float>(most * 4);
  auto* mixed = arena.take<unsigned char>(mixes * size);
  void* normed = arena.take(width * size);
  if (norm != nullptr) {
    NormTask task = *norm;
    task.x = hidden;
    task.out = normed;
    rms_norm(task, tokens);
    hidden = normed;
  }
  kernel.widen(type, hidden, width, wide);
  clock.add(&StepTimes::norms);
  DeltaTask task = mixer.task;
  const void** const wanted[] = {&task.mixed, &task.gate_row, &task.beta_row, &task.decay_row};
  const int sources[] = {mixer.mixed, mixer.gate, mixer.beta, mixer.decay};
  const void* first[4] = {};
  std::int64_t row_bytes[4] = {};
  for (std::size_t i = 0; i < mixer.inputs.size(); ++i) {
    const StepProduct& input = mixer.inputs[i];
    void* rows = arena.take(tokens * input.rows * size);
    multiply(input, wide, tokens, sums);
    kernel.narrow(type, sums, tokens * input.rows, rows);
    for (int part = 0; part < 4; ++part) {
      if (sources[part] != static_cast<int>(i)) continue;
      first[part] = rows;
      row_bytes[part] = input.rows * size;
    }
  }
  clock.add(&StepTimes::projections);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (int part = 0; part < 4; ++part) *wanted[part] = row_of(first[part], t, row_bytes[part]);
    copy_states(states[t]);
    task.before = states[t].before;
    task.state = states[t].state;
    task.out = mixed + t * mixed_cols * size;
    delta(task);
  }
  clock.add(&StepTimes::attention);
  kernel.widen(type, mixed, mixes, wide);
  multiply(mixer.output, wide, tokens, sums);
  return sums;
}

}  // namespace moechat
