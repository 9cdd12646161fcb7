#include "kernels/decode/step_product.h"

#include <stdexcept>
#include <string>

#include "kernels/decode/step_memory.h"
#include "kernels/isa/dispatch.h"

namespace moechat {

void multiply(const StepProduct& product, const float* x, std::int64_t tokens, float* out) {
  if (product.packed) {
    LinearCall call{};
    call.layout = &product.layout;
    call.data = static_cast<const unsigned char*>(product.weights);
    call.x = x;
    call.tokens = tokens;
    call.bias = product.bias;
    call.out = out;
    call.activation_bits = product.activation_bits;
    linear_forward(call);
    return;
  }
  Rows16Call call{};
  call.weights = static_cast<const std::uint16_t*>(product.weights);
  call.rows = product.rows;
  call.cols = product.cols;
  call.fp16 = product.fp16;
  call.x = x;
  call.tokens = tokens;
  call.bias = product.bias;
  call.out = out;
  rows16_forward(call);
}

void multiply_elements(const StepProduct& product, ElementType type, const void* x, std::int64_t tokens,
                       void* out) {
  require_step_tokens(tokens);
  if (type == ElementType::kFloat32) {
    return multiply(product, static_cast<const float*>(x), tokens, static_cast<float*>(out));
  }
  const DecodeKernels& kernel = *kernels().decode;
  const std::int64_t inputs = tokens * product.cols, outputs = tokens * product.rows;
  Arena arena(Arena::bytes_of(inputs * 4) + Arena::bytes_of(outputs * 4));
  auto* wide = arena.take<float>(inputs * 4);
  auto* sums = arena.take<float>(outputs * 4);
  kernel.widen(type, x, inputs, wide);
  multiply(product, wide, tokens, sums);
  kernel.narrow(type, sums, outputs, out);
}

void require_fit(bool fits, const char* what) {
  if (!fits)
    throw std::invalid_argument(std::string("the parts of a layer's step do not fit together: ") + what);
}

void require_step_tokens(std::int64_t tokens) {
  if (tokens >= 1 && tokens <= kMostStepTokens) return;
  throw std::invalid_argument("a layer's step takes 1 to " + std::to_string(kMostStepTokens) +
                              " tokens, not " + std::to_string(tokens));
}

}  // namespace moechat
