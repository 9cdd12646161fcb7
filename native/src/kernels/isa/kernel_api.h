// What the code compiled per instruction set offers to the rest: plain structs and function pointers, nothing
// that could be emitted as a shared inline symbol.
#pragma once

#include <cstdint>

#include "kernels/block_layout.h"
#include "kernels/decode_api.h"

namespace moechat {

enum class Activation : int { kSilu, kGelu, kGeluTanh, kClampedSwiglu };
enum class SourceType : int { kFloat32, kFloat16, kBfloat16 };

struct ActivationSpec {
  Activation kind;
  float alpha;  // clamped_swiglu only
  float limit;  // clamped_swiglu only
};

// A strided matrix of any element type; strides in bytes, of any sign.
struct MatrixSource {
  const unsigned char* data;
  std::int64_t rows;
  std::int64_t cols;
  std::int64_t row_stride;
  std::int64_t col_stride;
  SourceType type;
};

// Largest magnitude that can be quantised: range / (2^bits - 1) must stay a finite fp16.
static constexpr float kMaxQuantisable = 65504.0f;

// Inputs of the integer kernels. They meet weights of 2, 3, 4 and 8 bits; weights of 16 bits, and
// activation_bits 32, take float inputs.
//
// A row (a token, or the activations of a block for one token) is cut into groups of 64 columns. A group is
//   scale = max|x| / range,   i[c] = nearest even integer of x[c] * (range / max|x|),   sum = sum of i[c],
// range 32512 for 16 bits and 127 for 8; all in fp32, the integers and their sum exact. At 16 bits an integer
// is kept as two bytes, i = 256 * hi + lo, hi in [-127, 127], lo in [-128, 127]; at 8 bits hi alone is it. A
// group without a magnitude of kSmallestInput has scale 0 and integers 0; one with a value that is not finite
// has scale NaN and integers 0, so that NaN reaches every output that depends on it.
//
// One row of weights and one group: isum = 256 * sum(q * hi) + sum(q * lo), exact in 32 bits, then
//   acc = fma(scale_w * scale, fnma(zero_w, sum, isum), acc),
// groups ascending, one chain a row. Integers do not care in which order they are added: results are bitwise
// the same for any tiling and any number of tokens, and between instruction sets with a fused multiply-add.
//
// Bytes of a plane lie in the order in which the kernels unpack codes: at place 4 * d + k, d = 0..15, k =
// 0..3, lies column 4d + k (8 bits a code), 8 * (d / 2) + 2k + d % 2 (4 bits) or 16 * (d / 4) + 4k + d % 4
// (2 and 3 bits). A word of weights, shifted and masked to bytes, meets four neighbouring bytes of a plane.
struct QuantisedRows {
  std::int8_t* planes;  // [rows, groups, activation_bits / 8, 64]: hi, then lo
  float* scales;        // [rows, groups]
  float* sums;          // [rows, groups], the exact integers
};

static constexpr float kSmallestInput = 1e-30f;

static constexpr float input_range(int activation_bits) { return activation_bits == 16 ? 32512.0f : 127.0f; }

struct ManyTokens;
struct LinearTask;

// One chunk of a moe_forward call, see forward.cc.
struct ForwardTask {
  const BlockLayout* layout;
  ActivationSpec activation;
  int activation_bits;  // 8, 16: x_quantised and quantised are used; 32: x, x_sums and activation_sums
  const ManyTokens* many;

  const float* x;             // [tokens, Hp], column c multiplied by column_scale(encoding, c), zero padded
  const float* x_sums;        // [tokens, groups], sums of the unscaled columns
  QuantisedRows x_quantised;  // [tokens]
  unsigned char* many_x;      // [items], gathered for `many`; only items of rows of many tokens are filled in
  std::int64_t token_base;

  const std::uint64_t* block_ptr;
  const std::int32_t* block_index;
  const std::int32_t* block_row;
  const std::int32_t* row_start;
  const std::int32_t* row_token;
  const std::int32_t* row_out;
  const float* row_weight;

  // List entries [entry_begin, entry_end); of each, the tokens [part_begin, part_begin + slots of the entry)
  // of its row. slot_start has one value for every entry of the chunk and one more.
  std::int64_t entry_begin;
  std::int64_t entry_end;
  std::int64_t list_end;  // entries after the chunk exist up to here (for prefetching only)
  std::int64_t part_begin;
  const std::int64_t* slot_start;

  float* activations;       // [slots, 64]; at 32 bits neuron n multiplied by column_scale(encoding, n)
  float* activation_sums;   // [slots, 4], sums of the unscaled activations of a tile
  QuantisedRows quantised;  // [slots], one group each: the activations, once all tiles of an entry are done
  // For `many`: entries of one row in succession are a run, their activations a gathered row of as many
  // groups for every token. Entry i of the chunk is in the run [run_begin[i], run_end[i]), whose rows begin
  // where slot_start[run_begin[i]] rows of one group would end.
  const std::int32_t* run_begin;
  const std::int32_t* run_end;
  unsigned char* many_slots;
  std::int32_t* tiles_done;  // [entries of the chunk], 0 at first
  float* out;                // [out rows, hidden]
};

// The many-token path of the integer kernels: weights of a tile are unpacked once for many tokens, which come
// gathered in a form of their own. `neurons`, `outputs` and `linear` of IntegerKernels hand it what has at
// least `threshold` tokens and do all else themselves. Same results, bit by bit.
struct ManyTokens {
  std::int64_t threshold;
  // Readable rows that must follow the last gathered one; their contents do not matter.
  std::int64_t rows_after;
  // Bytes of a gathered row, a multiple of 64.
  std::int64_t (*row_bytes)(int bits, int activation_bits, std::int64_t groups);
  // Rows index[i] - base, i < count, of `from`, or base + i where there is no index, to row i of `to`.
  void (*gather)(int bits, int activation_bits, const QuantisedRows& from, std::int64_t groups,
                 const std::int32_t* index, std::int64_t base, std::int64_t count, unsigned char* to);
  // The quantised activations of entry `local` of the chunk to its run in task.many_slots.
  void (*gather_slots)(const ForwardTask& task, std::int64_t local);
  // Around the calls below on one thread; null where there is nothing to set up.
  void (*enter)();
  void (*leave)();
  // Activations (fp32, natural order) of tiles [begin, end) of the block of list entry `entry`, to the slots
  // of the entry. The caller quantises and gathers them when the block is complete.
  void (*neurons)(const ForwardTask& task, std::int64_t entry, std::int64_t begin, std::int64_t end);
  // Adds output tiles [begin, end) of the run that begins with `entry`, from task.many_slots.
  void (*outputs)(const ForwardTask& task, std::int64_t entry, std::int64_t begin, std::int64_t end);
  // out rows of tiles [begin, end).
  void (*linear)(const LinearTask& task, std::int64_t begin, std::int64_t end);
};

// One linear_forward call.
struct LinearTask {
  int bits;
  int activation_bits;
  std::int64_t rows;
  std::int64_t cols;
  std::int64_t groups;
  const unsigned char* q;   // [tiles, groups] as gate.q
  const unsigned char* sz;  // [tiles, groups] as gate.sz
  const float* bias;        // [rows] or null
  const float* x;           // [tokens, 64 * groups], as ForwardTask::x; at 32 bits
  const float* x_sums;      // [tokens, groups]
  QuantisedRows x_quantised;
  const unsigned char* many_x;  // [tokens] gathered, or null: too few of them for `many`
  const ManyTokens* many;
  std::int64_t tokens;
  float* out;  // [tokens, rows]
};

// Integer kernels: their own table, since some instruction sets differ in nothing else.
struct IntegerKernels {
  // x [count, cols] -> rows of ceil(cols / 64) groups, in the order of codes of `bits`.
  void (*quantise_rows)(int bits, int activation_bits, const float* x, std::int64_t cols, std::int64_t count,
                        const QuantisedRows& to);
  // As the members of KernelTable. Unless -1, `then` is the first output tile that the thread goes on with.
  void (*neurons)(const ForwardTask& task, std::int64_t begin, std::int64_t end, std::int64_t then);
  void (*outputs)(const ForwardTask& task, std::int64_t begin, std::int64_t end);
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

struct KernelTable {
  const char* name;
  // x [count, hidden] -> scaled [count, Hp] and sums [count, groups].
  void (*prepare_tokens)(int bits, const float* x, std::int64_t cols, std::int64_t count, float* scaled,
                         float* sums);
  // Activations of units [begin, end); unit = entry of the chunk * 4 + tile.
  void (*neurons)(const ForwardTask& task, std::int64_t begin, std::int64_t end);
  // Adds all entries of the chunk, in order, to the output rows of tiles [begin, end).
  void (*outputs)(const ForwardTask& task, std::int64_t begin, std::int64_t end);
  // Quantises rows [row, row + 16) x columns [col, col + 64 * groups) into q and sz fields; rows and columns
  // outside the matrix are padding. Returns false when a weight is not finite or above kMaxQuantisable.
  bool (*quantise_tile)(const MatrixSource& source, std::int64_t row, std::int64_t col, std::int64_t groups,
                        int bits, unsigned char* q, unsigned char* sz);
  // out[i] = act(gate[i]) * up[i], count a multiple of 16.
  void (*activate)(const ActivationSpec& spec, const float* gate, const float* up, float* out,
                   std::int64_t count);
  // Float linear: out rows of tiles [begin, end).
  void (*linear)(const LinearTask& task, std::int64_t begin, std::int64_t end);
  // Rows [begin, end) of a product with 16-bit rows.
  void (*rows16)(const Rows16Task& task, std::int64_t begin, std::int64_t end);
  const IntegerKernels* integer;
  const DecodeKernels* decode;
};

// The codes of a column are used where they lie in the word (masked, not shifted), that is multiplied by a
// power of two; the kernels multiply x by its inverse instead. The last column of a word is shifted down,
// because its sign bit would be taken for a sign. All factors are powers of two: nothing is rounded.
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

}  // namespace moechat
