// Rows of files in kept encodings, 64 columns at a time. The formats are llama.cpp's (ggml-common.h,
// ggml-quants.c), and those of kept_encodings.h.
#pragma once

#include <cstdint>

#include "kernels/layout/kept_encodings.h"

namespace moechat {

// Codes and scales of 64 columns of a row, as kept_encodings.h has them.
struct FileGroup {
  unsigned char codes[kGroupColumns];
  std::uint32_t steps[kMostGridSteps];  // of encodings with grids: what stands in the q field
  std::uint32_t word;
  std::uint16_t super[2];
};

// Bytes of a row of `columns` columns in a file. REQUIRES: whole blocks.
std::int64_t file_row_bytes(Encoding encoding, std::int64_t columns);

// Reads group `group` of a row; columns after the last of the row have codes 0 and sub-blocks without columns
// have scales of 0. Returns false if a scale is not finite.
bool read_file_group(Encoding encoding, const unsigned char* row, std::int64_t columns, std::int64_t group,
                     FileGroup* to);

// Whether all scales of rows `stride` bytes apart are finite.
bool scales_are_finite(Encoding encoding, const unsigned char* rows, std::int64_t stride, std::int64_t count,
                       std::int64_t columns);

// Writes the values of 64 columns.
void file_group_values(Encoding encoding, const FileGroup& from, float* values);

// Writes row `row` (0..15) of a group. q and words are the fields of a (tile, group), super that of the rows
// that share it, or null.
void put_kept_row(Encoding encoding, const FileGroup& from, std::int64_t row, unsigned char* q,
                  unsigned char* words, unsigned char* super);

// Writes the values of one group: matrix[r * stride + c] for r < rows, c < cols.
void unpack_kept_group(Encoding encoding, const unsigned char* q, const unsigned char* words,
                       const unsigned char* super, std::int64_t rows, int cols, float* matrix,
                       std::int64_t stride);

}  // namespace moechat
