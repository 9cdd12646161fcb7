// Products of unsigned codes and signed bytes with AVX-VNNI. Names as in dot_portable.h. Included inside the
// anonymous namespace of isa/avx2_vnni_integer.cc.

constexpr bool kWideDot = true;
constexpr bool kPairDots = false;

MOECHAT_INLINE VecI dot(VecI sums, VecI codes, VecI x) {
  return VecI{_mm256_dpbusd_avx_epi32(sums.a, codes.a, x.a), _mm256_dpbusd_avx_epi32(sums.b, codes.b, x.b)};
}
MOECHAT_INLINE void pin(VecI&) {}
