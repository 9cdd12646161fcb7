// Interface between the code compiled per instruction set and the rest: plain structs and function pointers,
// because a shared inline symbol could be compiled with instructions that a processor lacks.
#pragma once

#include <cstdint>

#include "kernels/isa/decode_api.h"
#include "kernels/layout/block_layout.h"
#include "kernels/layout/kept_encodings.h"
#include "kernels/layout/matrix_source.h"

namespace moechat {

enum class Activation : int { kSilu, kGelu, kGeluTanh, kRelu2 };

// The computation between the projections of an expert, elementwise:
//   act(min(gate, limit)) * (clamp(up, -limit, limit) + offset), or
//   min(act(gate), limit) * (clamp(up, -limit, limit) + offset) if clamps_result.
// If not gated, it is the first factor alone.
struct GateSpec {
  Activation kind = Activation::kSilu;
  float alpha = 1.0f;  // kSilu: x * sigmoid(alpha * x)
  float limit = __builtin_inff();
  float offset = 0.0f;
  bool clamps_result = false;
  bool gated = true;
};

// How scale and zero of a group of weights are found, see least_squares.inc.h and hqq_solver.inc.h.
enum class Solver : int { kLeastSquares, kHalfQuadratic };

// Inputs of the integer kernels, which take weights of 2 to 8 bits. Weights of 16 bits, and all
// weights at activation_bits 32, take float inputs.
//
// A row (a token, or the activations of a block for one token) is divided into groups of 64 columns. A group
// is
//   scale = max|x| / range,   i[c] = nearest even integer of x[c] * (range / max|x|),
// range 32512 for 16 bits and 127 for 8, in fp32; and the sums of i over the group and its halves, exact. At
// 16 bits an integer is kept as two bytes, i = 256 * hi + lo, hi in [-127, 127], lo in [-128, 127]; at 8 bits
// it is hi alone. A group whose magnitudes are all below kSmallestInput has scale 0 and integers 0. A group
// with a value that is not finite has scale NaN and integers 0, so that NaN reaches every output that depends
// on it.
//
// One row of weights and one group, at 6 and 8 bits a code: isum = 256 * sum(q * hi) + sum(q * lo), exact in
// 32 bits, then
//   acc = fma(scale_w * scale, fnma(zero_w, sum, isum), acc).
// At 2 to 4 bits, with isum_h and sum_h over half h: isum = sum over h of factor_h * isum_h - offset_h *
// sum_h, exact in 32 bits, then
//   acc = fma(step_w * scale, isum, acc).
// Groups ascending, one chain a row. Integer sums do not depend on the order of additions, so results are
// bitwise equal for any tiling and any number of tokens, and between instruction sets with a fused
// multiply-add.
//
// Kept weights (kept_encodings.h), with isum_s and sum_s over sub-block s of a group, ascending:
//   u = fnma(min_0, sum_0, step_0 * isum_0), then u = fnma(min_s, sum_s, fma(step_s, isum_s, u)),
//   acc = fma(scale, u, acc).
//
// Bytes of a plane are in the order in which the kernels unpack codes: position 4 * d + k, d = 0..15, k =
// 0..3, holds column 4d + k (8 bits a code, and kept weights), 8 * (d / 2) + 2k + d % 2 (4 and 6 bits) or 16
// * (d / 4) + 4k + d % 4 (2 and 3 bits). A word of weights, shifted and masked to bytes, is multiplied by
// four adjacent bytes of a plane.
struct InputSums {
  std::int32_t half[2];
  std::uint32_t pair;  // at 8 bits: those of the halves in 16 bits each, the first in the low ones
  float total;
  float quarter[4];  // exact
};
struct QuantisedRows {
  std::int8_t* planes;  // [rows, groups, activation_bits / 8, 64]: hi, then lo
  float* scales;        // [rows, groups]
  InputSums* sums;      // [rows, groups]
};

static constexpr float kSmallestInput = 1e-30f;

static constexpr float input_range(int activation_bits) { return activation_bits == 16 ? 32512.0f : 127.0f; }

struct ManyTokens;
struct LinearTask;

// How the integer kernels for few tokens read weights: how many bytes of codes ahead they prefetch, and
// whether they read one stream of weights after the other, or two side by side.
struct Reading {
  std::int64_t ahead;
  bool one_stream;
};

// One chunk of a moe_forward call, see forward.cc.
struct ForwardTask {
  const BlockLayout* layout;
  GateSpec gate;
  int activation_bits;  // 8, 16: x_quantised and quantised are used; 32: x, x_sums and activation_sums
  Reading reading;
  const ManyTokens* many;

  const float* x;             // [tokens, Hp], column c multiplied by column_scale(encoding, c), zero padded
  const float* x_sums;        // [tokens, groups, 2], sums of the unscaled columns of each half
  QuantisedRows x_quantised;  // [tokens]
  unsigned char*
      many_x;  // [items], gathered for `many`; filled in only for rows of at least `threshold` tokens
  std::int64_t token_base;

  const std::uint64_t* block_ptr;
  const std::int32_t* block_index;
  const std::int32_t* block_row;
  const std::int32_t* row_start;
  const std::int32_t* row_token;
  const std::int32_t* row_out;
  const float* row_weight;

  // List entries [entry_begin, entry_end), and of the row of each the tokens [part_begin, part_begin + slots
  // of the entry). slot_start has one value more than the chunk has entries.
  std::int64_t entry_begin;
  std::int64_t entry_end;
  std::int64_t list_end;  // end of the entries after the chunk, which are only prefetched
  std::int64_t part_begin;
  const std::int64_t* slot_start;

  float* activations;      // [slots, 64]; at 32 bits neuron n multiplied by column_scale(encoding, n)
  float* activation_sums;  // [slots, 4], sums of the unscaled activations of a tile
  QuantisedRows
      quantised;  // [slots], one group each: the activations, written once all tiles of an entry are done
  // For `many`: consecutive entries of one row form a run. For every token their activations are one gathered
  // row with a group per entry. Entry i of the chunk is in the run [run_begin[i], run_end[i]), whose rows
  // begin after the space of slot_start[run_begin[i]] rows of one group.
  const std::int32_t* run_begin;
  const std::int32_t* run_end;
  unsigned char* many_slots;
  std::int32_t* tiles_done;  // [entries of the chunk], initially 0
  float* out;                // [out rows, hidden]
  // Outputs of single blocks for single tokens, without weights: [slots from partial_slot on, Hp].
  float* partials;
  std::int64_t partial_slot;
};

// The many-token path of the integer kernels: unpacks the weights of a tile once for many tokens, which are
// gathered into a layout of their own. `neurons`, `outputs` and `linear` of IntegerKernels use it for work
// with at least `threshold` tokens. Results are bitwise the same.
struct ManyTokens {
  std::int64_t threshold;
  // Readable rows that must follow the last gathered one; their contents do not matter.
  std::int64_t rows_after;
  // Bytes of a gathered row, a multiple of 64.
  std::int64_t (*row_bytes)(Encoding encoding, int activation_bits, std::int64_t groups);
  // Copies rows index[i] - base (base + i if index is null), i < count, of `from` to row i of `to`.
  void (*gather)(Encoding encoding, int activation_bits, const QuantisedRows& from, std::int64_t groups,
                 const std::int32_t* index, std::int64_t base, std::int64_t count, unsigned char* to);
  // Copies the quantised activations of entry `local` of the chunk to its run in task.many_slots.
  void (*gather_slots)(const ForwardTask& task, std::int64_t local);
  // Called before and after the functions below on one thread; null if they need no preparation.
  void (*enter)();
  void (*leave)();
  // Writes the activations (fp32, natural order) of tiles [begin, end) of the block of list entry `entry` to
  // the slots of the entry. The caller quantises and gathers them when the block is complete.
  void (*neurons)(const ForwardTask& task, std::int64_t entry, std::int64_t begin, std::int64_t end);
  // Adds output tiles [begin, end) of the run that begins with `entry`, from task.many_slots.
  void (*outputs)(const ForwardTask& task, std::int64_t entry, std::int64_t begin, std::int64_t end);
  // out rows of tiles [begin, end).
  void (*linear)(const LinearTask& task, std::int64_t begin, std::int64_t end);
};

// One linear_forward call.
struct LinearTask {
  Encoding encoding;
  int activation_bits;
  std::int64_t rows;
  std::int64_t cols;
  std::int64_t groups;
  std::int64_t group_bytes;
  const unsigned char* q;      // [tiles, groups] as gate.q
  const unsigned char* sz;     // [tiles, groups] as gate.sz
  const unsigned char* super;  // [tiles] as gate.super; not read if the encoding has none
  const float* bias;           // [rows] or null
  const float* x;              // [tokens, 64 * groups], as ForwardTask::x; at 32 bits
  const float* x_sums;         // [tokens, groups, 2], as ForwardTask::x_sums
  QuantisedRows x_quantised;
  const unsigned char* many_x;  // [tokens] gathered, or null: fewer than `threshold`
  Reading reading;
  const ManyTokens* many;
  std::int64_t tokens;
  float* out;  // [tokens, rows]
};

// Integer kernels. A table of their own, because some instruction sets differ only in these.
struct IntegerKernels {
  // Quantises x [count, cols] to rows of ceil(cols / 64) groups, in the byte order for codes of `encoding`.
  void (*quantise_rows)(Encoding encoding, int activation_bits, const float* x, std::int64_t cols,
                        std::int64_t count, const QuantisedRows& to);
  // As in KernelTable. `then` is the first output tile that the thread computes next, or -1.
  void (*neurons)(const ForwardTask& task, std::int64_t begin, std::int64_t end, std::int64_t then);
  void (*outputs)(const ForwardTask& task, std::int64_t begin, std::int64_t end);
  void (*block)(const ForwardTask& task, std::int64_t local, bool stored, const unsigned char* next);
  // out rows of tiles [begin, end).
  void (*linear)(const LinearTask& task, std::int64_t begin, std::int64_t end);
  const ManyTokens* many;  // or null
};

// One call of rows16_forward, see rows16.h and rows16.inc.h.
struct Rows16Task {
  const std::uint16_t* weights;  // [rows, cols]
  std::int64_t rows;
  std::int64_t cols;
  std::int64_t padded;  // cols rounded up to a multiple of 32
  bool fp16;
  const float* x;  // [tokens, padded], arranged
  std::int64_t tokens;
  const float* bias;  // [rows] or null
  float* out;         // [tokens, rows]
};

// Of 16 rows of matrices a and b.
struct RowProducts {
  float aa[16];  // sums of squares
  float bb[16];
  float ab[16];  // of products
};

// What the columns of a matrix mean for its products, measured: the error of quantised weights costs
// importance[j] times its square, and part of what column i got wrong is made good in columns after it.
// Blocks of `width` columns, a multiple of 64, are independent of each other; the last may be narrower.
struct ColumnFeedback {
  const float* importance = nullptr;  // [cols], or null: all are equal
  const float* factors = nullptr;     // [blocks, width, width], or null: no feedback; column j > i of a block
                                      // is lessened by factors[i][j] times the error of column i
  std::int64_t width = 0;
};

// Where the groups of a tile are written: group g at q + g * q_stride and sz + g * sz_stride.
struct GroupPlaces {
  unsigned char* q;
  std::int64_t q_stride;
  unsigned char* sz;
  std::int64_t sz_stride;
};

// The first `groups` groups of 64 columns of 16 rows of a GGUF file, `row_stride` bytes apart.
struct KeptRows {
  const unsigned char* rows;
  std::int64_t row_stride;
  std::int64_t groups;
};

// Where the groups of a tile of kept weights are written: group g, from 0, at q + g * q_stride and sz + g *
// sz_stride, and its super, if the encoding has one, at super + g / share * super_stride.
struct KeptPlaces {
  unsigned char* q;
  std::int64_t q_stride;
  unsigned char* sz;
  std::int64_t sz_stride;
  unsigned char* super;
  std::int64_t super_stride;
  std::int64_t share;
};

struct KernelTable {
  const char* name;
  // Writes scaled [count, Hp] and sums [count, groups, 2] of x [count, hidden].
  void (*prepare_tokens)(int bits, const float* x, std::int64_t cols, std::int64_t count, float* scaled,
                         float* sums);
  // Activations of units [begin, end); unit = entry of the chunk * 4 + tile.
  void (*neurons)(const ForwardTask& task, std::int64_t begin, std::int64_t end);
  // Adds all entries of the chunk, in order, to the output rows of tiles [begin, end).
  void (*outputs)(const ForwardTask& task, std::int64_t begin, std::int64_t end);
  // Both phases of entry `local` of the chunk. Its outputs are added to the output rows, or with `stored`
  // kept in task.partials. `next` is the record that the thread reads afterwards.
  void (*block)(const ForwardTask& task, std::int64_t local, bool stored, const unsigned char* next);
  // Adds the kept outputs of entry `local` to the output rows of tiles [begin, end): the same operations as
  // without `stored`.
  void (*add_partials)(const ForwardTask& task, std::int64_t local, std::int64_t begin, std::int64_t end);
  // Quantises rows [row, row + 16) x columns [col, col + 64 * groups) into q and sz fields; rows and columns
  // outside the matrix are padding. `importance` has a factor of the squared errors for each column of the
  // matrix, or is null: all are equal; only the least-squares solver uses it, at 2 to 4 bits. Returns false
  // when a weight is not finite or above max_quantisable().
  bool (*quantise_tile)(const MatrixSource& source, const float* importance, std::int64_t row,
                        std::int64_t col, std::int64_t groups, int bits, Solver solver, unsigned char* q,
                        unsigned char* sz);
  // Quantises all columns of rows [row, row + 16) by least squares, with feedback, which must have
  // importances and factors (GPTQ: Frantar et al., arXiv:2210.17323, section 3). Rows outside the matrix are
  // padding; groups that lie wholly outside it are not written. `columns` is scratch for 16 * width floats.
  // Returns false as quantise_tile.
  bool (*quantise_rows)(const MatrixSource& source, const ColumnFeedback& feedback, std::int64_t row,
                        int bits, const GroupPlaces& to, float* columns);
  // Rearranges groups of which all 64 columns are in the file. Returns false if a scale is not finite.
  bool (*pack_kept_rows)(Encoding encoding, const KeptRows& from, const KeptPlaces& to);
  // Sums over the columns of rows [row, row + 16) of two matrices of one shape; see RowProducts.
  void (*row_products)(const MatrixSource& a, const MatrixSource& b, std::int64_t row, RowProducts* out);
  // The gate over count values, a multiple of 16.
  void (*activate)(const GateSpec& spec, const float* gate, const float* up, float* out, std::int64_t count);
  // Float linear: out rows of tiles [begin, end).
  void (*linear)(const LinearTask& task, std::int64_t begin, std::int64_t end);
  // Rows [begin, end) of a product with 16-bit rows.
  void (*rows16)(const Rows16Task& task, std::int64_t begin, std::int64_t end);
  const IntegerKernels* integer;
  const IntegerKernels* kept;  // for kept encodings
  const DecodeKernels* decode;
};

// Kernels use the codes of a column at their place in the word (masked, not shifted), multiplied by a power
// of two, and multiply x by its inverse. The last column of a word is shifted down, because conversion to
// float would take its top bit for a sign. All factors are powers of two, so nothing is rounded.
static constexpr int column_shift(int bits, int column) {
  switch (bits) {
    case 2:
    case 3:
      return column % 16 == 15 ? 0 : 2 * (column % 16);
    case 4:
      return column % 8 == 7 ? 0 : 4 * (column % 8);
    case 8:
      return column % 4 == 3 ? 0 : 8 * (column % 4);
    default:
      return 0;
  }
}

// Whether the processor looks up bytes in registers, by AVX-512 VBMI. In dispatch.cc.
bool looks_up_bytes();

}  // namespace moechat
