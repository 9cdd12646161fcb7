// Products of unsigned codes and signed bytes with AVX-VNNI. Names as in dot_portable.h. Included inside the
// anonymous namespace of isa/avx2_vnni_integer.cc.

#define MOECHAT_UNROLL _Pragma("GCC unroll 16")

constexpr bool kWideDot = true;
constexpr int kMostTokens = 2;
constexpr bool kPairDots = false;
constexpr int kMostChains = 4;

MOECHAT_INLINE VecI broadcast4(const std::int8_t* from) {
  std::int32_t word;
  __builtin_memcpy(&word, from, sizeof word);
  const __m256i all = _mm256_set1_epi32(word);
  return VecI{all, all};
}
MOECHAT_INLINE VecI dot(VecI sums, VecI codes, VecI x) {
  return VecI{_mm256_dpbusd_avx_epi32(sums.a, codes.a, x.a), _mm256_dpbusd_avx_epi32(sums.b, codes.b, x.b)};
}
MOECHAT_INLINE VecI widen(VecI sums, int) { return sums; }
MOECHAT_INLINE void pin(VecI&) {}
