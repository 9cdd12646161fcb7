// Dense products with 16-bit weights in the format of a checkpoint: contiguous rows of bf16 or fp16.
#pragma once

#include <cstdint>

namespace moechat {

// Most tokens of one call. For more tokens a blocked product is faster.
constexpr std::int64_t kRows16MaxTokens = 16;

struct Rows16Call {
  const std::uint16_t* weights;  // [rows, cols], read in place
  std::int64_t rows;
  std::int64_t cols;
  bool fp16;            // else bf16
  const float* x;       // [tokens, cols]
  std::int64_t tokens;  // at most kRows16MaxTokens
  const float* bias;    // [rows] or null
  float* out;           // [tokens, rows]; must not overlap x
};

// out[t, r] = sum over c of weights[r, c] * x[t, c], plus bias[r]; products and sums in fp32, in an order
// that depends neither on the threads nor on the number of tokens. Throws std::invalid_argument for too many
// tokens.
void rows16_forward(const Rows16Call& call);

}  // namespace moechat
