#include "kernels/layout/scale_words.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/layout/block_layout.h"

namespace moechat {

std::uint32_t fit_scale_word(const RowScales& wanted, int bits) {
  constexpr int kLastStep = 255;
  constexpr int kOctave = 8;  // steps from one to its double
  const auto top = static_cast<float>((1 << bits) - 1);
  float scale[2];
  float middle[2];
  for (int half = 0; half < 2; ++half) {
    // Offsets cannot be below 0, so a range that does not hold 0 is extended to it.
    const float low = std::min(0.0f, -wanted.zero[half] * wanted.scale[half]);
    const float high = std::max(0.0f, (top - wanted.zero[half]) * wanted.scale[half]);
    scale[half] = (high - low) / top;
    middle[half] = 0.5f * (low + high);
  }
  // Candidates: the least step whose multiples reach the larger scale, and those up to an octave above it.
  // The one whose multiples are nearest to both scales is best.
  const float lowest = std::max(scale[0], scale[1]) / static_cast<float>(kMostFactor);
  std::uint32_t pattern;
  std::memcpy(&pattern, &lowest, sizeof pattern);
  const std::uint32_t above = pattern + ((1u << kStepShift) - 1u);
  const int first =
      above < kLeastStep ? 0 : std::min(kLastStep, static_cast<int>((above - kLeastStep) >> kStepShift));
  float least = -1.0f;
  std::uint32_t best = 0;
  for (int code = first; code <= std::min(first + kOctave, kLastStep); ++code) {
    std::uint32_t word = static_cast<std::uint32_t>(code) << 24;
    const float step = read_scale_word(word).step;
    float error = 0.0f;
    for (int half = 0; half < 2; ++half) {
      const float nearest = std::nearbyint(scale[half] / step);
      const float factor = std::min(static_cast<float>(kMostFactor), std::max(1.0f, nearest));
      word |= static_cast<std::uint32_t>(factor) << (8 + 4 * half);
      if (scale[half] == 0.0f) continue;
      const float offset = std::nearbyint(0.5f * factor * top - middle[half] / step);
      word |= static_cast<std::uint32_t>(std::min(static_cast<float>(kMostOffset), std::max(0.0f, offset)))
              << (16 * half);
      error += (factor * step - scale[half]) * (factor * step - scale[half]);
    }
    if (least < 0.0f || error < least) {
      least = error;
      best = word;
    }
  }
  return best;
}

ScaleWord read_scale_word(std::uint32_t word) {
  const std::uint32_t pattern = (word >> 24 << kStepShift) + kLeastStep;
  ScaleWord read;
  std::memcpy(&read.step, &pattern, sizeof pattern);
  for (int half = 0; half < 2; ++half) {
    read.factor[half] = static_cast<int>(word >> (8 + 4 * half) & 15u);
    read.offset[half] = static_cast<int>(word >> (16 * half) & 255u);
  }
  return read;
}

}  // namespace moechat
