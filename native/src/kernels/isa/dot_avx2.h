// Products of unsigned codes and signed bytes in AVX2, with pairs summed in 16 bits. Names as in
// dot_portable.h. Included inside the anonymous namespace of isa/avx2_integer.cc.

constexpr bool kWideDot = false;
constexpr bool kPairDots = false;

MOECHAT_INLINE VecI dot(VecI sums, VecI codes, VecI x) {
  return VecI{_mm256_add_epi16(sums.a, _mm256_maddubs_epi16(codes.a, x.a)),
              _mm256_add_epi16(sums.b, _mm256_maddubs_epi16(codes.b, x.b))};
}
MOECHAT_INLINE void pin(VecI& sums) { __asm__("" : "+x"(sums.a), "+x"(sums.b)); }
