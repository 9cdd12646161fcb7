#include "kernels/dense/linear.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "kernels/isa/dispatch.h"
#include "kernels/layout/codes.h"
#include "kernels/layout/gguf_blocks.h"
#include "kernels/threads/thread_pool.h"
#include "kernels/threads/work_ranges.h"

namespace moechat {
namespace {

constexpr std::int64_t kBytesPerThread =
    1 << 16;                            // of weights; below, waking one more thread costs more than it saves
constexpr std::int64_t kTileGrain = 2;  // least tiles per thread
constexpr std::int64_t kTokenBytes = std::int64_t{14} << 20;  // of inputs that are prepared at a time

enum Scratch : int { kInputs, kSums, kPlanes, kScales, kManyInputs, kRanges };

LinearLayout layout_of(std::int64_t rows, std::int64_t cols, Encoding encoding, int bits,
                       std::int64_t group_bytes) {
  check_dimension("rows", rows);
  check_dimension("cols", cols);
  LinearLayout layout{};
  layout.rows = rows;
  layout.cols = cols;
  layout.encoding = encoding;
  layout.bits = bits;
  layout.tiles = (rows + kTileRows - 1) / kTileRows;
  layout.groups = (cols + kGroupColumns - 1) / kGroupColumns;
  layout.group_bytes = group_bytes;
  layout.sz = layout.tiles * layout.groups * layout.group_bytes;
  layout.super = layout.sz + layout.tiles * layout.groups * kScaleBytes;
  layout.nbytes = layout.super;
  if (layout.kept()) layout.nbytes += layout.tiles * super_bytes(encoding, layout.groups, true);
  return layout;
}

// The supers of a tile.
std::int64_t super_at(const LinearLayout& layout, std::int64_t tile) {
  return layout.kept() ? layout.super + tile * super_bytes(layout.encoding, layout.groups, true)
                       : layout.super;
}

}  // namespace

LinearLayout make_linear_layout(std::int64_t rows, std::int64_t cols, int bits) {
  if (bits != 2 && bits != 3 && bits != 4 && bits != 6 && bits != 8) {
    throw std::invalid_argument(std::to_string(bits) +
                                " bits are not supported here; choose 2, 3, 4, 6 or 8");
  }
  return layout_of(rows, cols, plain_encoding(bits), bits,
                   std::int64_t{kTileRows} * kGroupColumns * bits / 8);
}

LinearLayout make_kept_linear_layout(std::int64_t rows, std::int64_t cols, Encoding encoding) {
  check_columns("cols", cols, encoding);
  return layout_of(rows, cols, encoding, kept_form(encoding).code_bits, kept_group_bytes(encoding));
}

void pack_linear(const LinearLayout& layout, const MatrixSource& source, unsigned char* data, int threads,
                 Solver solver) {
  const KernelTable& kernel = kernels();
  std::atomic<bool> fine{true};
  {
    ThreadPool::Session session;
    session.parallel_for(threads > 0 ? threads : kMaxThreads, layout.tiles, 1,
                         [&](std::int64_t begin, std::int64_t end) {
                           for (std::int64_t tile = begin; tile < end; ++tile) {
                             if (!fine.load(std::memory_order_relaxed)) return;
                             const std::int64_t at = tile * layout.groups;
                             if (!kernel.quantise_tile(source, nullptr, tile * kTileRows, 0, layout.groups,
                                                       layout.bits, solver, data + at * layout.group_bytes,
                                                       data + layout.sz + at * kScaleBytes)) {
                               fine.store(false, std::memory_order_relaxed);
                             }
                           }
                         });
  }
  if (!fine.load()) report_unquantisable("matrix", source, layout.bits);
}

void pack_kept_linear(const LinearLayout& layout, const FileMatrix& source, unsigned char* data,
                      int threads) {
  const KeptForm form = kept_form(layout.encoding);
  const std::int64_t super_stride = std::int64_t{kTileRows} * 2 * form.super_halves;
  std::atomic<bool> fine{true};
  {
    ThreadPool::Session session;
    session.parallel_for(threads > 0 ? threads : kMaxThreads, layout.tiles, 1,
                         [&](std::int64_t begin, std::int64_t end) {
                           for (std::int64_t tile = begin; tile < end; ++tile) {
                             if (!fine.load(std::memory_order_relaxed)) return;
                             const std::int64_t at = tile * layout.groups;
                             const KeptPlaces to{data + at * layout.group_bytes,
                                                 layout.group_bytes,
                                                 data + layout.sz + at * kScaleBytes,
                                                 kScaleBytes,
                                                 data + super_at(layout, tile),
                                                 super_stride,
                                                 form.super_groups};
                             if (!pack_kept_tile({layout.encoding, source, layout.rows, layout.cols,
                                                  tile * kTileRows, layout.groups, to})) {
                               fine.store(false, std::memory_order_relaxed);
                             }
                           }
                         });
  }
  if (!fine.load()) refuse_scale("matrix", layout.encoding, source, layout.rows, layout.cols);
}

void unpack_linear(const LinearLayout& layout, const unsigned char* data, float* matrix) {
  ThreadPool::Session session;
  session.parallel_for(kMaxThreads, layout.tiles, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t tile = begin; tile < end; ++tile) {
      const std::int64_t rows = std::min<std::int64_t>(kTileRows, layout.rows - tile * kTileRows);
      for (std::int64_t g = 0; g < layout.groups; ++g) {
        const std::int64_t at = tile * layout.groups + g;
        const unsigned char* q = data + at * layout.group_bytes;
        const unsigned char* sz = data + layout.sz + at * kScaleBytes;
        const int cols =
            static_cast<int>(std::min<std::int64_t>(kGroupColumns, layout.cols - g * kGroupColumns));
        float* const to = matrix + tile * kTileRows * layout.cols + g * kGroupColumns;
        if (layout.kept()) {
          const KeptForm form = kept_form(layout.encoding);
          const std::int64_t super = g / form.super_groups * kTileRows * 2 * form.super_halves;
          unpack_kept_group(layout.encoding, q, sz, data + super_at(layout, tile) + super, rows, cols, to,
                            layout.cols);
        } else {
          unpack_group(q, sz, layout.bits, rows, cols, to, layout.cols);
        }
      }
    }
  });
}

void linear_forward(const LinearCall& call) {
  check_activation_bits(call.activation_bits);
  const KernelTable& kernel = kernels();
  const LinearLayout& layout = *call.layout;
  const IntegerKernels& integers = layout.kept() ? *kernel.kept : *kernel.integer;
  const bool floats = layout.kept() && needs_floats(layout.encoding);
  const bool integer = call.activation_bits != kFloatActivations && !floats;
  const std::int64_t padded = layout.groups * kGroupColumns;
  const std::int64_t row_bytes =
      integer ? layout.groups * 8 * call.activation_bits : padded * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t step = std::max<std::int64_t>(1, kTokenBytes / row_bytes);

  ThreadPool::Session session;
  const std::int64_t threads = ThreadPool::num_threads();
  for (std::int64_t first = 0; first < call.tokens; first += step) {
    const std::int64_t count = std::min(step, call.tokens - first);
    LinearTask task{};
    task.encoding = layout.encoding;
    task.activation_bits = call.activation_bits;
    task.rows = layout.rows;
    task.cols = layout.cols;
    task.groups = layout.groups;
    task.group_bytes = layout.group_bytes;
    task.q = call.data;
    task.sz = call.data + layout.sz;
    task.super = call.data + layout.super;
    task.bias = call.bias;
    task.reading = weight_reading();
    task.tokens = count;
    task.out = call.out + first * layout.rows;
    const float* from = call.x + first * layout.cols;
    // The caller alone prepares few tokens, which is faster than waking another thread.
    const std::int64_t grain = std::max<std::int64_t>(1, kBytesPerThread / row_bytes);
    if (integer) {
      task.x_quantised = {session.scratch<std::int8_t>(kPlanes, count * row_bytes),
                          session.scratch<float>(kScales, count * layout.groups),
                          session.scratch<InputSums>(kSums, count * layout.groups)};
      session.parallel_for(
          static_cast<int>(threads), count, grain, [&](std::int64_t begin, std::int64_t end) {
            const QuantisedRows& rows = task.x_quantised;
            const std::int64_t at = begin * layout.groups;
            integers.quantise_rows(layout.encoding, call.activation_bits, from + begin * layout.cols,
                                   layout.cols, end - begin,
                                   {rows.planes + begin * row_bytes, rows.scales + at, rows.sums + at});
          });
    } else {
      auto* inputs = session.scratch<float>(kInputs, count * padded);
      auto* sums = session.scratch<float>(kSums, count * layout.groups * 2);
      session.parallel_for(
          static_cast<int>(threads), count, grain, [&](std::int64_t begin, std::int64_t end) {
            kernel.prepare_tokens(layout.kept() ? 16 : layout.bits, from + begin * layout.cols, layout.cols,
                                  end - begin, inputs + begin * padded, sums + begin * layout.groups * 2);
          });
      task.x = inputs;
      task.x_sums = sums;
    }
    if (integer && integers.many != nullptr && count >= integers.many->threshold) {
      const ManyTokens& many = *integers.many;
      const std::int64_t bytes = many.row_bytes(layout.encoding, call.activation_bits, layout.groups);
      auto* gathered = session.scratch<unsigned char>(kManyInputs, (count + many.rows_after) * bytes);
      session.parallel_for(
          static_cast<int>(threads), count, grain, [&](std::int64_t begin, std::int64_t end) {
            many.gather(layout.encoding, call.activation_bits, task.x_quantised, layout.groups, nullptr,
                        begin, end - begin, gathered + begin * bytes);
          });
      task.many = &many;
      task.many_x = gathered;
    }
    const std::int64_t limit = std::clamp<std::int64_t>(layout.nbytes / kBytesPerThread, 1, threads);
    WorkRanges ranges(session.scratch<WorkRanges::Range>(kRanges, limit), limit, layout.tiles, kTileGrain);
    session.parallel(static_cast<int>(limit), [&](int thread, int) {
      ranges.work(thread, [&](std::int64_t begin, std::int64_t end, bool) {
        integer ? integers.linear(task, begin, end) : kernel.linear(task, begin, end);
      });
    });
  }
}

}  // namespace moechat
