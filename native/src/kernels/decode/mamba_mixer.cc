#include "kernels/decode/mamba_mixer.h"

#include "kernels/decode/step_memory.h"
#include "kernels/isa/dispatch.h"

namespace moechat {

void check_mamba_mixer(const MambaMixer& mixer) {
  const MambaTask& task = mixer.task;
  const std::int64_t inner = task.heads * task.head_dim;
  require_fit(mixer.input.rows == 2 * inner + 2 * task.groups * task.state_size + task.heads,
              "the first projection");
  require_fit(mixer.output.cols == inner && mixer.output.rows == mixer.input.cols, "the last projection");
}

void mamba_mixer(const MambaMixer& mixer, const void* hidden, void* before, float* state, void* out) {
  const DecodeKernels& kernel = *kernels().decode;
  const ElementType type = mixer.task.type;
  const std::int64_t size = element_bytes(type), width = mixer.input.cols, rows = mixer.input.rows;
  const std::int64_t inner = mixer.output.cols;
  const std::int64_t widest = width > inner ? width : inner, most = rows > width ? rows : width;
  Arena arena(Arena::bytes_of(widest * 4) + Arena::bytes_of(most * 4) + Arena::bytes_of(rows * size) +
              Arena::bytes_of(inner * size));
  auto* wide = arena.take<float>(widest * 4);
  auto* sums = arena.take<float>(most * 4);
  void* row = arena.take(rows * size);
  void* made = arena.take(inner * size);
  kernel.widen(type, hidden, width, wide);
  multiply(mixer.input, wide, 1, sums);
  kernel.narrow(type, sums, rows, row);
  MambaTask task = mixer.task;
  task.row = row;
  task.before = before;
  task.state = state;
  task.out = made;
  mamba(task);
  kernel.widen(type, made, inner, wide);
  multiply(mixer.output, wide, 1, sums);
  kernel.narrow(type, sums, width, out);
}

}  // namespace moechat
