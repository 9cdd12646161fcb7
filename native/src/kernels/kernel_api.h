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

// One chunk of a moe_forward call, see forward.cc.
struct ForwardTask {
  const BlockLayout* layout;
  ActivationSpec activation;

  const float* x;       // [tokens, Hp], column c multiplied by column_scale(encoding, c), zero padded
  const float* x_sums;  // [tokens, groups], sums of the unscaled columns
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

  float* activations;      // [slots, 64], neuron n multiplied by column_scale(encoding, n)
  float* activation_sums;  // [slots, 4], sums of the unscaled activations of a tile
  float* out;              // [out rows, hidden]
};

struct KernelTable {
  const char* name;
  // x [count, hidden] -> scaled [count, Hp] and sums [count, groups].
  void (*prepare_tokens)(const BlockLayout& layout, const float* x, std::int64_t count, float* scaled,
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
  const DecodeKernels* decode;
};

// The codes of a column are used where they lie in the word (masked, not shifted), that is multiplied by a
// power of two; the kernels multiply x by its inverse instead. The last column of a word is shifted down,
// because its sign bit would be taken for a sign. All factors are powers of two: nothing is rounded.
static constexpr int column_shift(Encoding encoding, int column) {
  switch (encoding) {
    case Encoding::kBits2:
    case Encoding::kBits3:
      return column % 16 == 15 ? 0 : 2 * (column % 16);
    case Encoding::kBits4:
      return column % 8 == 7 ? 0 : 4 * (column % 8);
    case Encoding::kBits8:
      return column % 4 == 3 ? 0 : 8 * (column % 4);
    default:
      return 0;
  }
}

}  // namespace moechat
