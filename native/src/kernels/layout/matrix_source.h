// A matrix of weights in the caller's memory, before packing.
#pragma once

#include <cstdint>

#include "kernels/layout/block_layout.h"

namespace moechat {

enum class SourceType : int { kFloat32, kFloat16, kBfloat16 };

// A strided matrix of any element type; strides in bytes, of any sign.
struct MatrixSource {
  const unsigned char* data;
  std::int64_t rows;
  std::int64_t cols;
  std::int64_t row_stride;
  std::int64_t col_stride;
  SourceType type;
};

// Largest magnitude that can be quantised: at 6 and 8 bits a zero of it must be a finite fp16, below, a range
// of twice it must fit in codes of 2 bits with the largest step and factor.
static constexpr float max_quantisable(int bits) { return has_halves(bits) ? 4096.0f : 65504.0f; }

}  // namespace moechat
