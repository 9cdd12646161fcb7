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

namespace {

// Products with one matrix: prepares inputs as its kernels take them, and calls these.
class Products {
 public:
  Products(const LinearLayout& layout, const unsigned char* data, int activation_bits)
      : layout_(layout),
        kernel_(kernels()),
        integers_(layout.kept() ? *kernel_.kept : *kernel_.integer),
        integer_(activation_bits != kFloatActivations && !(layout.kept() && needs_floats(layout.encoding))),
        activation_bits_(activation_bits),
        data_(data) {
    check_activation_bits(activation_bits);
  }

  std::int64_t row_bytes() const {
    return integer_ ? layout_.groups * 8 * activation_bits_
                    : layout_.groups * kGroupColumns * static_cast<std::int64_t>(sizeof(float));
  }

  // A task for x [count, cols], without bias and out.
  LinearTask prepare(ThreadPool::Session& session, const float* x, std::int64_t count) const {
    LinearTask task{};
    task.encoding = layout_.encoding;
    task.activation_bits = activation_bits_;
    task.rows = layout_.rows;
    task.cols = layout_.cols;
    task.groups = layout_.groups;
    task.group_bytes = layout_.group_bytes;
    task.q = data_;
    task.sz = data_ + layout_.sz;
    task.super = data_ + layout_.super;
    task.reading = weight_reading();
    task.tokens = count;
    if (integer_) {
      task.x_quantised = {session.scratch<std::int8_t>(kPlanes, count * row_bytes()),
                          session.scratch<float>(kScales, count * layout_.groups),
                          session.scratch<InputSums>(kSums, count * layout_.groups)};
      each_row(session, count, [&](std::int64_t begin, std::int64_t end) {
        const LinearTask own = from_row(task, begin);
        integers_.quantise_rows(layout_.encoding, activation_bits_, x + begin * layout_.cols, layout_.cols,
                                end - begin, own.x_quantised);
      });
    } else {
      auto* inputs = session.scratch<float>(kInputs, count * layout_.groups * kGroupColumns);
      auto* sums = session.scratch<float>(kSums, count * layout_.groups * 2);
      each_row(session, count, [&](std::int64_t begin, std::int64_t end) {
        kernel_.prepare_tokens(layout_.kept() ? 16 : layout_.bits, x + begin * layout_.cols, layout_.cols,
                               end - begin, inputs + begin * layout_.groups * kGroupColumns,
                               sums + begin * layout_.groups * 2);
      });
      task.x = inputs;
      task.x_sums = sums;
    }
    return task;
  }

  // Lets a task for many tokens be computed as such.
  void gather_many(ThreadPool::Session& session, LinearTask& task) const {
    if (!integer_ || integers_.many == nullptr || task.tokens < integers_.many->threshold) return;
    const ManyTokens& many = *integers_.many;
    const std::int64_t bytes = many.row_bytes(layout_.encoding, activation_bits_, layout_.groups);
    auto* gathered = session.scratch<unsigned char>(kManyInputs, (task.tokens + many.rows_after) * bytes);
    each_row(session, task.tokens, [&](std::int64_t begin, std::int64_t end) {
      many.gather(layout_.encoding, activation_bits_, task.x_quantised, layout_.groups, nullptr, begin,
                  end - begin, gathered + begin * bytes);
    });
    task.many = &many;
    task.many_x = gathered;
  }

  // The task with its inputs from row `row` on.
  LinearTask from_row(LinearTask task, std::int64_t row) const {
    const std::int64_t at = row * layout_.groups;
    if (integer_) {
      task.x_quantised.planes += row * row_bytes();
      task.x_quantised.scales += at;
      task.x_quantised.sums += at;
    } else {
      task.x += at * kGroupColumns;
      task.x_sums += at * 2;
    }
    return task;
  }

  // Calls run(begin, end) for parts of `tiles` tiles of `nbytes` bytes.
  template <class Run>
  void each_tile(ThreadPool::Session& session, std::int64_t tiles, std::int64_t nbytes,
                 const Run& run) const {
    const std::int64_t threads = ThreadPool::num_threads();
    const std::int64_t limit = std::clamp<std::int64_t>(nbytes / kBytesPerThread, 1, threads);
    WorkRanges ranges(session.scratch<WorkRanges::Range>(kRanges, limit), limit, tiles, kTileGrain);
    session.parallel(static_cast<int>(limit), [&](int thread, int) {
      ranges.work(thread, [&](std::int64_t begin, std::int64_t end, bool) { run(begin, end); });
    });
  }

  void multiply(const LinearTask& task, std::int64_t begin, std::int64_t end) const {
    integer_ ? integers_.linear(task, begin, end) : kernel_.linear(task, begin, end);
  }

 private:
  // The caller alone prepares few rows, which is faster than waking another thread.
  template <class Run>
  void each_row(ThreadPool::Session& session, std::int64_t count, const Run& run) const {
    const std::int64_t grain = std::max<std::int64_t>(1, kBytesPerThread / row_bytes());
    session.parallel_for(ThreadPool::num_threads(), count, grain, run);
  }

  const LinearLayout& layout_;
  const KernelTable& kernel_;
  const IntegerKernels& integers_;
  const bool integer_;
  const int activation_bits_;
  const unsigned char* const data_;
};

}  // namespace

void linear_forward(const LinearCall& call) {
  const LinearLayout& layout = *call.layout;
  const Products products(layout, call.data, call.activation_bits);
  const std::int64_t step = std::max<std::int64_t>(1, kTokenBytes / products.row_bytes());
  ThreadPool::Session session;
  for (std::int64_t first = 0; first < call.tokens; first += step) {
    const std::int64_t count = std::min(step, call.tokens - first);
    LinearTask task = products.prepare(session, call.x + first * layout.cols, count);
    products.gather_many(session, task);
    task.bias = call.bias;
    task.out = call.out + first * layout.rows;
    products.each_tile(session, layout.tiles, layout.nbytes,
                       [&](std::int64_t begin, std::int64_t end) { products.multiply(task, begin, end); });
  }
}

void linear_blocks_forward(const LinearBlocksCall& call) {
  const LinearLayout& layout = *call.layout;
  const Products products(layout, call.data, call.activation_bits);
  ThreadPool::Session session;
  LinearTask all = products.prepare(session, call.x, call.blocks);
  all.tokens = 1;
  all.rows = call.rows;
  const std::int64_t each = call.rows / kTileRows, tiles = call.blocks * each;
  const std::int64_t nbytes = tiles * layout.groups * (layout.group_bytes + kScaleBytes);
  products.each_tile(session, tiles, nbytes, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin / each; block * each < end; ++block) {
      LinearTask task = products.from_row(all, block);
      const std::int64_t at = (call.first + block * call.stride) / kTileRows * layout.groups;
      task.q += at * layout.group_bytes;
      task.sz += at * kScaleBytes;
      task.out = call.out + block * call.rows;
      products.multiply(task, std::max<std::int64_t>(0, begin - block * each),
                        std::min(each, end - block * each));
    }
  });
}

}  // namespace moechat
