// Products of unsigned codes and signed bytes with AVX-512 VNNI. Names as in dot_portable.h. Included inside
// the anonymous namespace of isa/avx512_vnni_integer.cc.

constexpr bool kWideDot = true;
constexpr bool kPairDots = true;

MOECHAT_INLINE VecI dot(VecI sums, VecI codes, VecI x) {
  return VecI{_mm512_dpbusd_epi32(sums.a, codes.a, x.a)};
}
MOECHAT_INLINE void pin(VecI&) {}
