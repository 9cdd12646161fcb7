// Products of unsigned codes and signed bytes without VNNI, with pairs summed in 16 bits. Names as in
// dot_portable.h. Included inside the anonymous namespace of isa/avx512_integer.cc.

constexpr bool kWideDot = false;
constexpr bool kPairDots = false;

MOECHAT_INLINE VecI dot(VecI sums, VecI codes, VecI x) {
  return VecI{_mm512_add_epi16(sums.a, _mm512_maddubs_epi16(codes.a, x.a))};
}
MOECHAT_INLINE void pin(VecI& sums) { __asm__("" : "+v"(sums.a)); }
