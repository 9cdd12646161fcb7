#include "kernels/layout/codes.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/layout/block_layout.h"
#include "kernels/layout/half.h"
#include "kernels/layout/scale_words.h"

namespace moechat {
namespace {

// Position of column c (0..63) of a group in its q bytes: byte offset of the word of row 0, and shift in it.
struct CodePlace {
  std::int64_t step;
  int shift;
};

CodePlace place_of(int bits, int column) {
  const int per_word = 32 / bits;
  return {std::int64_t{column / per_word} * kStepBytes, column % per_word * bits};
}

// Codes of 3 and 6 bits are in two planes: the low bits, and after the steps of those the others.
struct Planes {
  int low_bits;
  CodePlace low;
  CodePlace high;
};

bool in_planes(int bits) { return bits == 3 || bits == 6; }

Planes planes_of(int bits, int column) {
  if (bits == 3) {
    const CodePlace high = place_of(1, column);
    return {2, place_of(2, column), {4 * kStepBytes + high.step, high.shift}};
  }
  const int c = column % 16;
  return {
      4, place_of(4, column), {(8 + column / 16) * kStepBytes, 8 * (c % 8 / 2) + 4 * (c / 8) + 2 * (c % 2)}};
}

std::uint32_t load_word(const unsigned char* at) {
  return static_cast<std::uint32_t>(at[0]) | static_cast<std::uint32_t>(at[1]) << 8 |
         static_cast<std::uint32_t>(at[2]) << 16 | static_cast<std::uint32_t>(at[3]) << 24;
}

void or_word(unsigned char* at, std::uint32_t value) {
  const std::uint32_t word = load_word(at) | value;
  for (int i = 0; i < 4; ++i) at[i] = static_cast<unsigned char>(word >> (8 * i));
}

}  // namespace

std::uint16_t load_half(const unsigned char* at) {
  return static_cast<std::uint16_t>(at[0] | static_cast<unsigned>(at[1]) << 8);
}

void refuse_weight(const char* matrix, std::int64_t row, std::int64_t col, float value,
                   const std::string& reason) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", static_cast<double>(value));
  throw std::invalid_argument(std::string(matrix) + " weight at row " + std::to_string(row) + ", column " +
                              std::to_string(col) + " is " + text + ": " + reason);
}

float read_element(const MatrixSource& source, std::int64_t row, std::int64_t col) {
  const unsigned char* at = source.data + row * source.row_stride + col * source.col_stride;
  if (source.type == SourceType::kFloat32) {
    float value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  std::uint16_t pattern;
  std::memcpy(&pattern, at, sizeof pattern);
  return source.type == SourceType::kFloat16 ? half::from_fp16(pattern) : half::from_bf16(pattern);
}

void put_code(unsigned char* group, int bits, std::int64_t row, int column, std::uint32_t code) {
  if (in_planes(bits)) {
    const Planes planes = planes_of(bits, column);
    const std::uint32_t low = code & ((1u << planes.low_bits) - 1u);
    or_word(group + planes.low.step + row * 4, low << planes.low.shift);
    or_word(group + planes.high.step + row * 4, (code >> planes.low_bits) << planes.high.shift);
    return;
  }
  const CodePlace place = place_of(bits, column);
  or_word(group + place.step + row * 4, code << place.shift);
}

std::uint32_t get_code(const unsigned char* group, int bits, std::int64_t row, int column) {
  if (in_planes(bits)) {
    const Planes planes = planes_of(bits, column);
    const auto field = [group, row](const CodePlace& place, int width) {
      return (load_word(group + place.step + row * 4) >> place.shift) & ((1u << width) - 1u);
    };
    return field(planes.low, planes.low_bits) | field(planes.high, bits - planes.low_bits) << planes.low_bits;
  }
  const CodePlace place = place_of(bits, column);
  return (load_word(group + place.step + row * 4) >> place.shift) & ((1u << bits) - 1u);
}

void unpack_group(const unsigned char* group, const unsigned char* sz, int bits, std::int64_t rows, int cols,
                  float* matrix, std::int64_t stride) {
  for (std::int64_t row = 0; row < rows; ++row) {
    if (has_halves(bits)) {
      const ScaleWord scales = read_scale_word(load_word(sz + row * 4));
      for (int c = 0; c < cols; ++c) {
        const int half = c / kHalfColumns;
        const int code = static_cast<int>(get_code(group, bits, row, c));
        matrix[row * stride + c] =
            static_cast<float>(code * scales.factor[half] - scales.offset[half]) * scales.step;
      }
      continue;
    }
    const float scale = half::from_fp16(load_half(sz + row * 2));
    const float zero = half::from_fp16(load_half(sz + 32 + row * 2));
    for (int c = 0; c < cols; ++c) {
      matrix[row * stride + c] = (static_cast<float>(get_code(group, bits, row, c)) - zero) * scale;
    }
  }
}

void report_unquantisable(const char* matrix, const MatrixSource& source, int bits) {
  const float most = max_quantisable(bits);
  for (std::int64_t r = 0; r < source.rows; ++r) {
    for (std::int64_t c = 0; c < source.cols; ++c) {
      const float value = read_element(source, r, c);
      if (!std::isfinite(value)) refuse_weight(matrix, r, c, value, "not finite");
      if (std::fabs(value) > most) {
        refuse_weight(matrix, r, c, value,
                      "magnitudes above " + std::to_string(static_cast<int>(most)) +
                          " cannot be quantised to " + std::to_string(bits) + " bits");
      }
    }
  }
}

}  // namespace moechat
