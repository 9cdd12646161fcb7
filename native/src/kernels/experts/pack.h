// Packs experts into block records, and unpacks them.
#pragma once

#include <cstdint>

#include "kernels/isa/kernel_api.h"
#include "kernels/layout/block_layout.h"

namespace moechat {

// fp32 vectors of intermediate_size, intermediate_size and hidden_size elements.
struct ExpertBiases {
  const float* gate;
  const float* up;
  const float* down;
};

// gate, up [intermediate, hidden] and down [hidden, intermediate], any strides. Here and below, members
// for up are not read if the layout is not gated, and may be null or empty.
struct ExpertSource {
  MatrixSource gate;
  MatrixSource up;
  MatrixSource down;
  const ExpertBiases* biases;  // null exactly if the layout has no biases
};

// Already quantised matrices: codes [rows, cols] of bytes, C order; scales [rows, ceil(cols / 64)], C order:
// at 2 to 4 bits the scale words of block_layout.h, at 6 and 8 bits the fp16 pattern of the scale in the low
// half and that of the zero in the high one.
struct QuantisedMatrix {
  const unsigned char* codes;
  const std::uint32_t* scales;
};
struct QuantisedExpert {
  QuantisedMatrix gate;
  QuantisedMatrix up;
  QuantisedMatrix down;
  const ExpertBiases* biases;
};

// Measured feedback for the columns of gate and up, and for those of down; see ColumnFeedback.
struct ExpertFeedback {
  ColumnFeedback inputs;
  ColumnFeedback neurons;
};

// Writes every byte of records [blocks, record_bytes]. REQUIRES: shapes match the layout. Throws
// std::invalid_argument naming the first weight that is not finite or too large (quantised) or that becomes
// infinite (rounding to 16 bits). `threads` limits the workers; 0: no limit.
void pack_expert(const BlockLayout& layout, const ExpertSource& source, unsigned char* records, int threads,
                 Solver solver = Solver::kLeastSquares);

// The same by least squares with feedback. REQUIRES: a layout below 16 bits.
void pack_expert_with_feedback(const BlockLayout& layout, const ExpertSource& source,
                               const ExpertFeedback& feedback, unsigned char* records, int threads);

// Throws std::invalid_argument for a code above 2^bits - 1, or at 6 and 8 bits for a scale or zero that is
// not finite.
void pack_quantised(const BlockLayout& layout, const QuantisedExpert& source, unsigned char* records,
                    int threads);

// Rows of a matrix as a GGUF file has them, in the encoding of the layout; `row_stride` in bytes.
struct FileMatrix {
  const unsigned char* rows;
  std::int64_t row_stride;
};
struct FileExpert {
  FileMatrix gate;
  FileMatrix up;
  FileMatrix down;
  const ExpertBiases* biases;
};

// `groups` groups of 16 rows of a file's matrix of `rows` rows and `cols` columns, from `row` on, and where
// they are written. Rows and columns outside the matrix are padding.
struct KeptTile {
  Encoding encoding;
  FileMatrix source;
  std::int64_t rows;
  std::int64_t cols;
  std::int64_t row;
  std::int64_t groups;
  KeptPlaces to;
};
// Returns false if a scale is not finite.
bool pack_kept_tile(const KeptTile& tile);
// Throws std::invalid_argument that states where.
[[noreturn]] void refuse_scale(const char* name, Encoding encoding, const FileMatrix& source,
                               std::int64_t rows, std::int64_t cols);

// Rearranges an expert into a layout with kept encodings. Writes every byte of records [blocks,
// record_bytes]. Throws std::invalid_argument for a scale that is not finite, or another layout.
void pack_kept(const BlockLayout& layout, const FileExpert& source, unsigned char* records, int threads);

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
