// Grids of IQ1 to IQ3: tables of the codes of 8 or 4 neighbouring columns; see kept_encodings.h. Also for
// files compiled for one instruction set.
#pragma once

#include <cstdint>

#include "kernels/layout/kept_encodings.h"

namespace moechat {

struct Grid {
  // Codes without signs and deltas: dwords() for each number, byte k of dword d is that of column 4d + k.
  const std::uint32_t* codes;
  int numbers;
  int columns;  // 8 or 4
  // The same in bytes, for processors that look up bytes in registers. A byte of a grid of 8 columns has the
  // levels of 4 columns, of 2 bits each; of one of 4 columns those of 2, of 3 bits each. The code of a column
  // is that of its level, and of its sign or delta in the bit above, in a table that repeats up to 64 codes.
  const unsigned char* low;
  const unsigned char* high;
  const unsigned char* levels;

  int dwords() const { return columns / 4; }
};

// REQUIRES: a table of kGrid.
Grid grid_of(Encoding encoding);

// Where `odd` scales are in words, and what they are multiplied with.
struct OddScales {
  int first;   // bit of the first sub-block
  int apart;   // bits from one to the next; 0: words of their own, see kept_encodings.h
  int bits;    // of a scale
  bool own_d;  // d is in the scale word
  float unit;
};

// REQUIRES: a table of kGrid.
static constexpr OddScales odd_scales(Encoding encoding) {
  switch (encoding) {
    case Encoding::kIq2Xxs:
      return {28, 0, 4, false, 0.125f};
    case Encoding::kIq2Xs:
      return {0, 4, 4, true, 0.125f};
    case Encoding::kIq2S:
      return {16, 4, 4, false, 0.125f};
    case Encoding::kIq3Xxs:
      return {28, 0, 4, false, 0.25f};
    case Encoding::kIq3S:
      return {16, 4, 4, false, 1.0f};
    case Encoding::kIq1S:
      return {12, 16, 3, false, 0.125f};
    default:
      return {0, 3, 3, true, 0.125f};
  }
}

// The word that has the scale of a sub-block. `steps`: those of a row.
static constexpr std::uint32_t odd_word(Encoding encoding, const std::uint32_t* steps, std::uint32_t word,
                                        int sub) {
  return odd_scales(encoding).apart == 0 && sub == 0 ? steps[kept_form(encoding).grid_steps - 1] : word;
}

// Writes the 64 codes of a row of a group. `steps`: its words of the q field.
void grid_codes(Encoding encoding, const std::uint32_t* steps, std::uint32_t word, unsigned char* codes);

}  // namespace moechat
