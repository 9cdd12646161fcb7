// Scale words: the scales of a row of a group at 2 to 4 bits; see block_layout.h. Also for files compiled for
// one instruction set.
#pragma once

#include <cstdint>

namespace moechat {

// Scales and zeros of the halves of one row of a group: a value is (q - zero) * scale.
struct RowScales {
  float scale[2];
  float zero[2];
};

// The scale word (see block_layout.h) nearest to wanted scales, with offsets that keep the middle of the
// values of each half where it is. A half whose range does not hold 0 gets one that does; a half with scale 0
// gets offset 0, so that code 0 is 0. REQUIRES: finite, scales >= 0, 2 to 4 bits.
std::uint32_t fit_scale_word(const RowScales& wanted, int bits);

// The largest scale that a word can hold.
constexpr float kMostScale = 15.0f * 240.0f;

// What a scale word stands for. A value is computed as (q * factor - offset) * step.
struct ScaleWord {
  float step;
  int factor[2];
  int offset[2];
};
ScaleWord read_scale_word(std::uint32_t word);

}  // namespace moechat
