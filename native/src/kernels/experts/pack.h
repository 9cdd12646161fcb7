// Experts to block records and back.
#pragma once

#include <cstdint>

#include "kernels/block_layout.h"
#include "kernels/kernel_api.h"

namespace moechat {

// fp32 vectors of intermediate_size, intermediate_size and hidden_size elements.
struct ExpertBiases {
  const float* gate;
  const float* up;
  const float* down;
};

// gate, up [intermediate, hidden] and down [hidden, intermediate], any strides.
struct ExpertSource {
  MatrixSource gate;
  MatrixSource up;
  MatrixSource down;
  const ExpertBiases* biases;  // exactly when the layout has them
};

// Already quantised matrices: codes [rows, cols] of bytes, C order; scales and zeros [rows, ceil(cols / 64)]
// of fp16 patterns, C order.
struct QuantisedMatrix {
  const unsigned char* codes;
  const std::uint16_t* scales;
  const std::uint16_t* zeros;
};
struct QuantisedExpert {
  QuantisedMatrix gate;
  QuantisedMatrix up;
  QuantisedMatrix down;
  const ExpertBiases* biases;
};

// Writes every byte of records [blocks, record_bytes]. Shapes are the caller's promise; the values are
// checked: std::invalid_argument names the first weight that is not finite or too large (quantised) or that
// turns infinite (rounding to 16 bits). `threads` limits the workers, 0 does not.
void pack_expert(const BlockLayout& layout, const ExpertSource& source, unsigned char* records, int threads);

// std::invalid_argument for a code above 2^bits - 1 or a scale or zero that is not finite.
void pack_quantised(const BlockLayout& layout, const QuantisedExpert& source, unsigned char* records,
                    int threads);

// gate, up [intermediate, hidden] and down [hidden, intermediate], C order; biases as in ExpertBiases or
// null.
struct ExpertTarget {
  float* gate;
  float* up;
  float* down;
  float* gate_bias;
  float* up_bias;
  float* down_bias;
};
void unpack_expert(const BlockLayout& layout, const unsigned char* records, const ExpertTarget& target);

}  // namespace moechat
