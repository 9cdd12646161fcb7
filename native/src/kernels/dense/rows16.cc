#include "kernels/dense/rows16.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/isa/dispatch.h"
#include "kernels/threads/thread_pool.h"
#include "kernels/threads/work_ranges.h"

namespace moechat {
namespace {

constexpr std::int64_t kStep = 32;  // columns per step of the kernels
constexpr std::int64_t kBytesPerThread =
    1 << 16;                            // of weights; below, waking one more thread costs more than it saves
constexpr std::int64_t kRowGrain = 16;  // rows: a cache line of the output
constexpr int kRanges = 25;
constexpr int kInputs = 24;  // scratch slots of this file; other files use lower numbers

// Arranges inputs as rows16.inc.h needs them; the columns that pad a token to a multiple of 32 are 0.
void arrange(const float* x, std::int64_t cols, std::int64_t padded, bool fp16, float* to) {
  if (fp16) {
    std::copy(x, x + cols, to);
    std::fill(to + cols, to + padded, 0.0f);
    return;
  }
  const std::int64_t whole = cols / kStep * kStep;
  for (std::int64_t c = 0; c < whole; c += kStep) {
    for (std::int64_t i = 0; i < kStep / 2; ++i) {
      to[c + i] = x[c + 2 * i];
      to[c + kStep / 2 + i] = x[c + 2 * i + 1];
    }
  }
  if (whole == cols) return;
  std::fill(to + whole, to + padded, 0.0f);
  for (std::int64_t c = whole; c < cols; ++c) to[whole + (c % 2) * (kStep / 2) + (c - whole) / 2] = x[c];
}

}  // namespace

void rows16_forward(const Rows16Call& call) {
  if (call.tokens > kRows16MaxTokens) {
    throw std::invalid_argument("rows16_forward takes at most " + std::to_string(kRows16MaxTokens) +
                                " tokens, not " + std::to_string(call.tokens));
  }
  if (call.tokens <= 0 || call.rows <= 0) return;
  const KernelTable& kernel = kernels();
  ThreadPool::Session session;
  const std::int64_t padded = (call.cols + kStep - 1) / kStep * kStep;
  auto* inputs = session.scratch<float>(kInputs, std::max<std::int64_t>(1, call.tokens * padded));
  for (std::int64_t t = 0; t < call.tokens; ++t) {
    arrange(call.x + t * call.cols, call.cols, padded, call.fp16, inputs + t * padded);
  }
  const Rows16Task task{call.weights, call.rows,   call.cols, padded,  call.fp16,
                        inputs,       call.tokens, call.bias, call.out};
  const std::int64_t row_bytes = std::max<std::int64_t>(1, call.cols * 2);
  const std::int64_t limit =
      std::clamp<std::int64_t>(call.rows * row_bytes / kBytesPerThread, 1, ThreadPool::num_threads());
  WorkRanges ranges(session.scratch<WorkRanges::Range>(kRanges, limit), limit, call.rows, kRowGrain);
  session.parallel(static_cast<int>(limit), [&](int thread, int) {
    ranges.work(thread, [&](std::int64_t begin, std::int64_t end, bool) { kernel.rows16(task, begin, end); });
  });
}

}  // namespace moechat
