// Scalar conversions of 16-bit floats. Internal linkage, because this header is included by files compiled
// for different instruction sets, and a shared inline symbol could resolve to the wrong one.
#pragma once

#include <cstdint>
#include <cstring>

namespace moechat {
namespace half {

static inline float bits_to_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline std::uint32_t float_to_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

[[maybe_unused]] static inline float from_bf16(std::uint16_t pattern) {
  return bits_to_float(static_cast<std::uint32_t>(pattern) << 16);
}

// Rounds to nearest even. A NaN keeps its sign and upper payload and becomes quiet, so that rounding never
// makes it infinite.
[[maybe_unused]] static inline std::uint16_t to_bf16(float value) {
  const std::uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

[[maybe_unused]] static inline float from_fp16(std::uint16_t pattern) {
  const std::uint32_t sign = static_cast<std::uint32_t>(pattern & 0x8000u) << 16;
  const std::uint32_t magnitude = pattern & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  if (magnitude >= 0x0400u) return bits_to_float(sign | ((magnitude << 13) + 0x38000000u));
  // Subnormal: magnitude * 2^-24 is exact in fp32.
  return bits_to_float(sign | float_to_bits(static_cast<float>(magnitude) * 5.9604644775390625e-8f));
}

// Rounds to nearest even; overflow gives infinity. NaN as in to_bf16.
[[maybe_unused]] static inline std::uint16_t to_fp16(float value) {
  const std::uint32_t bits = float_to_bits(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds to 65536 or more
  if (magnitude >= 0x38800000u) {
    const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u;
    return static_cast<std::uint16_t>(sign | (rounded >> 13));
  }
  // Subnormal result: adding 0.5 rounds to nearest even and leaves the steps of 2^-24 in the low mantissa
  // bits.
  const float shifted = bits_to_float(magnitude) + 0.5f;
  return static_cast<std::uint16_t>(sign | (float_to_bits(shifted) - 0x3f000000u));
}

}  // namespace half
}  // namespace moechat
