// Products of unsigned codes and signed bytes without VNNI, with pairs summed in 16 bits. Names as in
// dot_portable.h. Included inside the anonymous namespace of isa/avx512_integer.cc.

#define MOECHAT_UNROLL _Pragma("GCC unroll 16")

constexpr bool kWideDot = false;
constexpr int kMostTokens = 4;
constexpr bool kPairDots = false;
constexpr int kMostChains = 16;

MOECHAT_INLINE VecI broadcast4(const std::int8_t* from) {
  std::int32_t word;
  __builtin_memcpy(&word, from, sizeof word);
  return VecI{_mm512_set1_epi32(word)};
}
MOECHAT_INLINE VecI dot(VecI sums, VecI codes, VecI x) {
  return VecI{_mm512_add_epi16(sums.a, _mm512_maddubs_epi16(codes.a, x.a))};
}
MOECHAT_INLINE VecI widen(VecI sums, int factor) {
  return VecI{_mm512_madd_epi16(sums.a, _mm512_set1_epi16(static_cast<short>(factor)))};
}
MOECHAT_INLINE void pin(VecI& sums) { __asm__("" : "+v"(sums.a)); }
