// Products of unsigned codes and signed bytes with AVX-512 VNNI. Names as in dot_portable.h. Included inside
// the anonymous namespace of isa/avx512_vnni_integer.cc.

#define MOECHAT_UNROLL _Pragma("GCC unroll 16")

constexpr bool kWideDot = true;
constexpr int kMostTokens = 4;
constexpr bool kPairDots = true;
constexpr int kMostChains = 16;

MOECHAT_INLINE VecI broadcast4(const std::int8_t* from) {
  std::int32_t word;
  __builtin_memcpy(&word, from, sizeof word);
  return VecI{_mm512_set1_epi32(word)};
}
MOECHAT_INLINE VecI dot(VecI sums, VecI codes, VecI x) {
  return VecI{_mm512_dpbusd_epi32(sums.a, codes.a, x.a)};
}
MOECHAT_INLINE VecI widen(VecI sums, int) { return sums; }
MOECHAT_INLINE void pin(VecI&) {}
