// A dense product inside of a step: packed (linear.h), or rows of 16-bit floats (rows16.h).
#pragma once

#include <cstdint>

#include "kernels/dense/linear.h"
#include "kernels/dense/rows16.h"
#include "kernels/isa/decode_api.h"

namespace moechat {

struct StepProduct {
  std::int64_t rows;
  std::int64_t cols;
  const void* weights;
  const float* bias;  // [rows] or null
  bool packed;
  LinearLayout layout;  // if packed
  int activation_bits;  // if packed
  bool fp16;            // format of 16-bit rows: fp16, else bf16
};

// Most tokens of a step: those of a product with 16-bit rows.
constexpr std::int64_t kMostStepTokens = kRows16MaxTokens;

// out [tokens, rows] from x [tokens, cols]; at most kMostStepTokens tokens, whose results do not depend on
// the others.
void multiply(const StepProduct& product, const float* x, std::int64_t tokens, float* out);

// As multiply(), of x [tokens, cols] and for out [tokens, rows] of a type, to which sums are rounded. Throws
// std::invalid_argument for a wrong number of tokens.
void multiply_elements(const StepProduct& product, ElementType type, const void* x, std::int64_t tokens,
                       void* out);

// Throw std::invalid_argument: parts of a step that have other sizes; a number of tokens that it does not
// take.
void require_fit(bool fits, const char* what);
void require_step_tokens(std::int64_t tokens);

}  // namespace moechat
