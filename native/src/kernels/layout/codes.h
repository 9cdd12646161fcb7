// Access to single codes, scales and bit patterns of the packed forms; see block_layout.h.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/layout/matrix_source.h"

namespace moechat {

std::uint16_t load_half(const unsigned char* at);
float read_element(const MatrixSource& source, std::int64_t row, std::int64_t col);

// Writes the code of a row (0..15) and column (0..63) of a group.
void put_code(unsigned char* group, int bits, std::int64_t row, int column, std::uint32_t code);
std::uint32_t get_code(const unsigned char* group, int bits, std::int64_t row, int column);

// Writes the values of one group: matrix[r * stride + c] for r < rows, c < cols.
void unpack_group(const unsigned char* group, const unsigned char* sz, int bits, std::int64_t rows, int cols,
                  float* matrix, std::int64_t stride);

// Throws std::invalid_argument.
[[noreturn]] void refuse_weight(const char* matrix, std::int64_t row, std::int64_t col, float value,
                                const std::string& reason);
// Throws std::invalid_argument naming the first weight that cannot be quantised; returns if there is none.
void report_unquantisable(const char* matrix, const MatrixSource& source, int bits);

}  // namespace moechat
