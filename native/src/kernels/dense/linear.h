// A quantised matrix times vectors: projections and heads in the form of expert weights.
#pragma once

#include <cstdint>

#include "kernels/block_layout.h"
#include "kernels/forward.h"
#include "kernels/kernel_api.h"

namespace moechat {

// Byte map of a matrix [rows, cols]: the q field, then the sz field, each as those of gate in block_layout.h
// (tile, then group, then step). Rows are padded to 16 and columns to 64 as there; both fields begin on
// 64-byte boundaries where the data does.
struct LinearLayout {
  std::int64_t rows;
  std::int64_t cols;
  int bits;
  std::int64_t tiles;   // of 16 rows
  std::int64_t groups;  // of 64 columns, of one tile
  std::int64_t group_bytes;
  std::int64_t sz;  // byte offset; q lies at 0
  std::int64_t nbytes;
};

// Throws std::invalid_argument for bits other than 2, 3, 4, 8 or sizes outside 1..2^20.
LinearLayout make_linear_layout(std::int64_t rows, std::int64_t cols, int bits);

// Quantises a matrix with the solver of the experts. Writes every byte of data [nbytes]. Throws
// std::invalid_argument naming the first weight that is not finite or above 65504. `threads` limits the
// workers, 0 does not.
void pack_linear(const LinearLayout& layout, const MatrixSource& source, unsigned char* data, int threads);

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
// other tokens in the call. Throws std::invalid_argument for other activation_bits.
void linear_forward(const LinearCall& call);

}  // namespace moechat
