// Products of a quantised or kept matrix and vectors, for projections and heads, in the format of expert
// weights.
#pragma once

#include <cstdint>

#include "kernels/experts/forward.h"
#include "kernels/experts/pack.h"
#include "kernels/isa/kernel_api.h"
#include "kernels/layout/block_layout.h"
#include "kernels/layout/kept_encodings.h"

namespace moechat {

// Byte map of a matrix [rows, cols]: the q field, then the sz field and that of kept encodings with supers,
// each as those of gate in block_layout.h (tile, then group, then step). Rows are padded to 16 and columns to
// 64 as there. If the data begins on a 64-byte boundary, so do all fields.
struct LinearLayout {
  std::int64_t rows;
  std::int64_t cols;
  Encoding encoding;
  int bits;             // of a code
  std::int64_t tiles;   // of 16 rows
  std::int64_t groups;  // of 64 columns, per tile
  std::int64_t group_bytes;
  std::int64_t sz;     // byte offset; the offset of q is 0
  std::int64_t super;  // byte offset; that of sz if the field is absent
  std::int64_t nbytes;

  bool kept() const { return is_kept(encoding); }
};

// Throws std::invalid_argument for bits other than 2, 3, 4, 6, 8 or sizes outside 1..2^20.
LinearLayout make_linear_layout(std::int64_t rows, std::int64_t cols, int bits);

// Throws std::invalid_argument for sizes outside 1..2^20 and columns that are not whole blocks of the
// encoding. REQUIRES: is_kept(encoding).
LinearLayout make_kept_linear_layout(std::int64_t rows, std::int64_t cols, Encoding encoding);

// Quantises a matrix with the solver of the experts. Writes every byte of data [nbytes]. Throws
// std::invalid_argument naming the first weight that is not finite, or above 65504 (6 and 8 bits) or
// 4096 (2 to 4). `threads` limits the workers; 0: no limit.
void pack_linear(const LinearLayout& layout, const MatrixSource& source, unsigned char* data, int threads,
                 Solver solver = Solver::kLeastSquares);

// Rearranges the rows of a file. Writes every byte of data [nbytes]. Throws std::invalid_argument for a scale
// that is not finite. REQUIRES: layout.kept().
void pack_kept_linear(const LinearLayout& layout, const FileMatrix& source, unsigned char* data, int threads);

// matrix [rows, cols].
void unpack_linear(const LinearLayout& layout, const unsigned char* data, float* matrix);

struct LinearCall {
  const LinearLayout* layout;
  const unsigned char* data;  // [nbytes]
  const float* x;             // [tokens, cols]
  std::int64_t tokens;
  const float* bias;                             // [rows] or null
  float* out;                                    // [tokens, rows], overwritten; may not overlap x
  int activation_bits = kDefaultActivationBits;  // as ForwardCall::activation_bits
};

// out = x W^T + bias, with the numerics of kernel_api.h: bitwise equal for any number of threads and any
// other tokens in the call. Encodings whose codes are floats are computed as with activation_bits 32. Throws
// std::invalid_argument for other activation_bits.
void linear_forward(const LinearCall& call);

// Products of blocks of rows that have inputs of their own: out [blocks, rows] from x [blocks, cols], block b
// of rows [first + b * stride, first + b * stride + rows).
struct LinearBlocksCall {
  const LinearLayout* layout;
  const unsigned char* data;  // [nbytes]
  std::int64_t blocks, first, stride, rows;
  const float* x;
  float* out;  // overwritten; may not overlap x
  int activation_bits = kDefaultActivationBits;
};

// As linear_forward(). REQUIRES: first, stride and rows are multiples of 16; all rows are in the matrix; the
// layout is not kept.
void linear_blocks_forward(const LinearBlocksCall& call);

}  // namespace moechat
