#include "kernels/experts/pack.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/experts/block_fields.h"
#include "kernels/isa/dispatch.h"
#include "kernels/layout/codes.h"
#include "kernels/layout/gguf_blocks.h"
#include "kernels/layout/half.h"
#include "kernels/threads/thread_pool.h"

namespace moechat {
namespace {

// Returns the 16-bit pattern to store. Patterns of the source's own type are copied.
std::uint16_t pattern_of(const MatrixSource& source, bool fp16, std::int64_t row, std::int64_t col) {
  if (source.type == (fp16 ? SourceType::kFloat16 : SourceType::kBfloat16)) {
    std::uint16_t pattern;
    std::memcpy(&pattern, source.data + row * source.row_stride + col * source.col_stride, sizeof pattern);
    return pattern;
  }
  const float value = read_element(source, row, col);
  return fp16 ? half::to_fp16(value) : half::to_bf16(value);
}

// All bits of the exponent are set in infinities and NaN.
bool pattern_is_finite(std::uint16_t pattern, bool fp16) {
  const std::uint16_t exponent = fp16 ? 0x7c00u : 0x7f80u;
  return (pattern & exponent) != exponent;
}

// Whether all of `count` words of two patterns are finite: adding one to the lowest bit of the exponent
// carries into the sign only where all of its bits are set.
bool words_are_finite(const unsigned char* words, std::int64_t count, bool fp16) {
  const std::uint32_t exponents = fp16 ? 0x7c007c00u : 0x7f807f80u;
  const std::uint32_t lowest = fp16 ? 0x04000400u : 0x00800080u;
  std::uint32_t carried = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint32_t word;
    std::memcpy(&word, words + 4 * i, sizeof word);
    carried |= (word & exponents) + lowest;
  }
  return (carried & 0x80008000u) == 0;
}

// Copies words of two columns for 16 rows x `groups` groups; returns false if a value is not finite, or too
// large for its new type.
bool copy_tile(const MatrixSource& source, bool fp16, std::int64_t row, std::int64_t col, std::int64_t groups,
               unsigned char* q) {
  const std::int64_t rows = std::clamp<std::int64_t>(source.rows - row, 0, kTileRows);
  const std::int64_t cols = std::clamp<std::int64_t>(source.cols - col, 0, groups * kGroupColumns);
  if (rows < kTileRows || cols < groups * kGroupColumns) {
    std::memset(q, 0, static_cast<std::size_t>(groups * kGroupColumns * kTileRows * 2));
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      const std::uint16_t pattern = pattern_of(source, fp16, row + r, col + c);
      // Column pairs share a step of 64 bytes; the even column is the low half of the row's word.
      unsigned char* at = q + (c / 2) * kStepBytes + r * 4 + (c % 2) * 2;
      at[0] = static_cast<unsigned char>(pattern & 0xffu);
      at[1] = static_cast<unsigned char>(pattern >> 8);
    }
  }
  return words_are_finite(q, groups * kGroupColumns * kTileRows / 2, fp16);
}

// Throws for the first weight that pack_expert cannot store.
void report_bad_weight(const BlockLayout& layout, const Fields& fields, const ExpertSource& source) {
  const MatrixSource* matrices[kMatrices] = {&source.gate, &source.up, &source.down};
  for (std::size_t m = 0; m < kMatrices; ++m) {
    const char* name = fields.field[m].name;
    if (layout.quantised()) {
      report_unquantisable(name, *matrices[m], layout.bits);
      continue;
    }
    for (std::int64_t r = 0; r < matrices[m]->rows; ++r) {
      for (std::int64_t c = 0; c < matrices[m]->cols; ++c) {
        if (pattern_is_finite(pattern_of(*matrices[m], layout.fp16, r, c), layout.fp16)) continue;
        const float value = read_element(*matrices[m], r, c);
        const char* const large = layout.fp16 ? "too large for fp16" : "too large for bf16";
        refuse_weight(name, r, c, value, std::isfinite(value) ? large : "not finite");
      }
    }
  }
}

void store_half(unsigned char* at, std::uint16_t pattern) {
  at[0] = static_cast<unsigned char>(pattern & 0xffu);
  at[1] = static_cast<unsigned char>(pattern >> 8);
}

void store_word(unsigned char* at, std::uint32_t word) {
  store_half(at, static_cast<std::uint16_t>(word));
  store_half(at + 2, static_cast<std::uint16_t>(word >> 16));
}

bool half_is_finite(std::uint16_t pattern) { return (pattern & 0x7c00u) != 0x7c00u; }

[[noreturn]] void refuse_part(const char* matrix, const char* what, std::int64_t row, std::int64_t col) {
  throw std::invalid_argument(std::string(matrix) + " " + what + " at row " + std::to_string(row) +
                              ", column " + std::to_string(col) + " is out of range");
}

void check_quantised(const Field& field, const QuantisedMatrix& matrix, int bits) {
  const std::int64_t groups = (field.cols + kGroupColumns - 1) / kGroupColumns;
  const int top = (1 << bits) - 1;
  for (std::int64_t r = 0; r < field.rows; ++r) {
    for (std::int64_t c = 0; c < field.cols; ++c) {
      if (matrix.codes[r * field.cols + c] > top) refuse_part(field.name, "code", r, c);
    }
    for (std::int64_t g = 0; g < groups; ++g) {
      if (has_halves(bits)) break;
      const std::uint32_t scales = matrix.scales[r * groups + g];
      if (!half_is_finite(static_cast<std::uint16_t>(scales))) refuse_part(field.name, "scale", r, g);
      if (!half_is_finite(static_cast<std::uint16_t>(scales >> 16))) refuse_part(field.name, "zero", r, g);
    }
  }
}

// Importance of the columns of the down projection for the solver: the expected square of each neuron's
// activation act(g) u, from the weights alone. For inputs that are independent and of equal variance, g and u
// are jointly normal with variances |G|^2 and |U|^2 (rows of gate and up) and covariance G.U, so
//   E[g^2 u^2] = |G|^2 |U|^2 + 2 (G.U)^2.
// SiLU and GELU are proportional to g near 0 and, on the positive half, far from it, so the factor of the
// activation is about the same for all neurons. If not gated, the activation is usually a squared ReLU, and
// E[max(g, 0)^4] is proportional to |G|^4; that is the formula with U = G.
std::vector<float> neuron_importance(const KernelTable& kernel, const ExpertSource& source, int threads) {
  const std::int64_t tiles = (source.gate.rows + kTileRows - 1) / kTileRows;
  const MatrixSource& up = source.up.rows > 0 ? source.up : source.gate;
  std::vector<float> importance(static_cast<std::size_t>(tiles * kTileRows));
  ThreadPool::Session session;
  session.parallel_for(threads > 0 ? threads : kMaxThreads, tiles, 1,
                       [&](std::int64_t begin, std::int64_t end) {
                         for (std::int64_t tile = begin; tile < end; ++tile) {
                           RowProducts sums;
                           kernel.row_products(source.gate, up, tile * kTileRows, &sums);
                           for (std::int64_t lane = 0; lane < kTileRows; ++lane) {
                             importance[static_cast<std::size_t>(tile * kTileRows + lane)] =
                                 sums.aa[lane] * sums.bb[lane] + 2.0f * sums.ab[lane] * sums.ab[lane];
                           }
                         }
                       });
  return importance;
}

constexpr std::uint32_t kHalfOne = 0x3c00;
constexpr std::uint32_t kNoScales =
    0x1100;  // of rows that do not exist: factors 1, offsets 0, the least step

}  // namespace

void pack_expert(const BlockLayout& layout, const ExpertSource& source, unsigned char* records, int threads,
                 Solver solver) {
  const KernelTable& kernel = kernels();
  const Fields fields = fields_of(layout);
  const MatrixSource* matrices[kMatrices] = {&source.gate, &source.up, &source.down};
  const bool weighs = layout.quantised() && has_halves(layout.bits) && solver == Solver::kLeastSquares;
  const std::vector<float> neurons =
      weighs ? neuron_importance(kernel, source, threads) : std::vector<float>();
  std::atomic<bool> fine{true};
  for_each_tile(layout, fields, threads, [&](std::int64_t block, std::size_t m, std::int64_t tile) {
    if (!fine.load(std::memory_order_relaxed)) return;
    const Field& field = fields.field[m];
    unsigned char* record = records + block * layout.record_bytes;
    const std::int64_t at = tile * field.groups;
    const std::int64_t row = field.first_row(block, tile);
    const std::int64_t col = field.first_col(block);
    unsigned char* q = record + field.q + at * layout.group_bytes;
    const float* importance = field.by_rows || neurons.empty() ? nullptr : neurons.data();
    const bool done = layout.quantised()
                          ? kernel.quantise_tile(*matrices[m], importance, row, col, field.groups,
                                                 layout.bits, solver, q, record + field.sz + at * kScaleBytes)
                          : copy_tile(*matrices[m], layout.fp16, row, col, field.groups, q);
    if (!done) fine.store(false, std::memory_order_relaxed);
  });
  if (!fine.load()) report_bad_weight(layout, fields, source);
  write_tails(layout, source.biases, records);
}

void pack_expert_with_feedback(const BlockLayout& layout, const ExpertSource& source,
                               const ExpertFeedback& feedback, unsigned char* records, int threads) {
  const KernelTable& kernel = kernels();
  const Fields fields = fields_of(layout);
  const MatrixSource* matrices[kMatrices] = {&source.gate, &source.up, &source.down};
  const std::int64_t neuron_tiles = layout.blocks * kTilesPerBlock;
  const std::int64_t tiles[kMatrices] = {neuron_tiles, layout.gated ? neuron_tiles : 0,
                                         layout.hidden_padded / kTileRows};
  const auto scratch = static_cast<std::size_t>(std::max(feedback.inputs.width, feedback.neurons.width));
  std::atomic<bool> fine{true};
  // One unit is one tile of rows with all its columns, which depend on each other.
  const auto pack_tile = [&](std::size_t m, std::int64_t tile, float* columns) {
    const Field& field = fields.field[m];
    const std::int64_t block = field.by_rows ? tile / field.tiles : 0;
    const std::int64_t at = (field.by_rows ? tile % field.tiles : tile) * field.groups;
    unsigned char* record = records + block * layout.record_bytes;
    const GroupPlaces places{record + field.q + at * layout.group_bytes,
                             field.by_rows ? layout.group_bytes : layout.record_bytes,
                             record + field.sz + at * kScaleBytes,
                             field.by_rows ? std::int64_t{kScaleBytes} : layout.record_bytes};
    const ColumnFeedback& columns_of = field.by_rows ? feedback.inputs : feedback.neurons;
    if (!kernel.quantise_rows(*matrices[m], columns_of, tile * kTileRows, layout.bits, places, columns)) {
      fine.store(false, std::memory_order_relaxed);
    }
  };
  {
    ThreadPool::Session session;
    session.parallel_for(threads > 0 ? threads : kMaxThreads, tiles[0] + tiles[1] + tiles[2], 1,
                         [&](std::int64_t begin, std::int64_t end) {
                           std::vector<float> columns(scratch * kTileRows);
                           for (std::int64_t unit = begin; unit < end; ++unit) {
                             if (!fine.load(std::memory_order_relaxed)) return;
                             std::int64_t tile = unit;
                             std::size_t m = 0;
                             while (tile >= tiles[m]) tile -= tiles[m++];
                             pack_tile(m, tile, columns.data());
                           }
                         });
  }
  if (!fine.load()) report_bad_weight(layout, fields, source);
  write_tails(layout, source.biases, records);
}

void pack_quantised(const BlockLayout& layout, const QuantisedExpert& source, unsigned char* records,
                    int threads) {
  if (!layout.quantised()) throw std::invalid_argument("a 16-bit layout takes no quantised matrices");
  const Fields fields = fields_of(layout);
  const QuantisedMatrix* matrices[kMatrices] = {&source.gate, &source.up, &source.down};
  for (std::size_t m = 0; m < kMatrices; ++m) check_quantised(fields.field[m], *matrices[m], layout.bits);
  for_each_tile(layout, fields, threads, [&](std::int64_t block, std::size_t m, std::int64_t tile) {
    const Field& field = fields.field[m];
    const QuantisedMatrix& matrix = *matrices[m];
    const std::int64_t matrix_groups = (field.cols + kGroupColumns - 1) / kGroupColumns;
    unsigned char* record = records + block * layout.record_bytes;
    for (std::int64_t g = 0; g < field.groups; ++g) {
      const std::int64_t at = tile * field.groups + g;
      unsigned char* q = record + field.q + at * layout.group_bytes;
      unsigned char* sz = record + field.sz + at * kScaleBytes;
      std::memset(q, 0, static_cast<std::size_t>(layout.group_bytes));
      const std::int64_t col = field.first_col(block) + g * kGroupColumns;
      const int cols = static_cast<int>(std::clamp<std::int64_t>(field.cols - col, 0, kGroupColumns));
      for (std::int64_t lane = 0; lane < kTileRows; ++lane) {
        const std::int64_t row = field.first_row(block, tile) + lane;
        const bool real = row < field.rows && cols > 0;
        const std::int64_t group = row * matrix_groups + col / kGroupColumns;
        if (has_halves(layout.bits)) {
          store_word(sz + lane * 4, real ? matrix.scales[group] : kNoScales);
        } else {
          const std::uint32_t scales = real ? matrix.scales[group] : kHalfOne;
          store_half(sz + lane * 2, static_cast<std::uint16_t>(scales));
          store_half(sz + 32 + lane * 2, static_cast<std::uint16_t>(scales >> 16));
        }
        if (!real) continue;
        for (int c = 0; c < cols; ++c)
          put_code(q, layout.bits, lane, c, matrix.codes[row * field.cols + col + c]);
      }
    }
  });
  write_tails(layout, source.biases, records);
}

void unpack_expert(const BlockLayout& layout, const unsigned char* records, const ExpertTarget& target) {
  const Fields fields = fields_of(layout);
  float* matrices[kMatrices] = {target.gate, target.up, target.down};
  for_each_tile(layout, fields, 0, [&](std::int64_t block, std::size_t m, std::int64_t tile) {
    const Field& field = fields.field[m];
    const unsigned char* record = records + block * layout.record_bytes;
    const std::int64_t row = field.first_row(block, tile);
    const std::int64_t rows = std::clamp<std::int64_t>(field.rows - row, 0, kTileRows);
    for (std::int64_t g = 0; g < field.groups; ++g) {
      const std::int64_t at = tile * field.groups + g;
      const unsigned char* q = record + field.q + at * field.group_bytes;
      const std::int64_t col = field.first_col(block) + g * kGroupColumns;
      const int cols = static_cast<int>(std::clamp<std::int64_t>(field.cols - col, 0, kGroupColumns));
      float* to = matrices[m] + row * field.cols + col;
      if (layout.kept) {
        unpack_kept_group(field.encoding, q, record + field.sz + at * kScaleBytes,
                          record + field.super_place(tile, g), rows, cols, to, field.cols);
        continue;
      }
      if (layout.quantised()) {
        unpack_group(q, record + field.sz + at * kScaleBytes, layout.bits, rows, cols, to, field.cols);
        continue;
      }
      for (std::int64_t lane = 0; lane < rows; ++lane) {
        for (int c = 0; c < cols; ++c) {
          const std::uint16_t pattern = load_half(q + (c / 2) * kStepBytes + lane * 4 + (c % 2) * 2);
          to[lane * field.cols + c] = layout.fp16 ? half::from_fp16(pattern) : half::from_bf16(pattern);
        }
      }
    }
  });
  if (!layout.has_bias) return;
  for (std::int64_t block = 0; block < layout.blocks; ++block) {
    const unsigned char* record = records + block * layout.record_bytes;
    const std::int64_t neuron = block * kBlockNeurons;
    const std::int64_t neurons = std::min<std::int64_t>(kBlockNeurons, layout.intermediate_size - neuron);
    const auto copy = [&](float* to, std::int64_t from, std::int64_t count) {
      std::memcpy(to, record + from, static_cast<std::size_t>(count) * sizeof(float));
    };
    copy(target.gate_bias + neuron, layout.gate_bias, neurons);
    if (layout.gated) copy(target.up_bias + neuron, layout.up_bias, neurons);
    const std::int64_t row = std::min(block * layout.down_bias_rows, layout.hidden_size);
    copy(target.down_bias + row, layout.down_bias, std::min(layout.down_bias_rows, layout.hidden_size - row));
  }
}

}  // namespace moechat
