// Products of unsigned codes and signed bytes in plain C++. Included inside the anonymous namespace of
// isa_portable.cc; the dot_*.h files offer the same names.

// How far loops over a group are unrolled.
#define MOECHAT_UNROLL _Pragma("GCC unroll 1")

constexpr bool kWideDot = true;    // products add up in 32 bits at once; else in 16, see integer_kernel.inc.h
constexpr int kMostTokens = 1;     // tokens that share the unpacking: 1, 2 or 4
constexpr bool kPairDots = false;  // two streams of weights at a time?
constexpr int kMostChains = 2;     // registers for sums

typedef std::int16_t I8 __attribute__((vector_size(16)));

// Four bytes of a plane, for every row.
MOECHAT_INLINE VecI broadcast4(const std::int8_t* from) {
  std::uint32_t word;
  __builtin_memcpy(&word, from, sizeof word);
  return seti(word);
}
// Adds to every row its four products; a product fits 16 bits: 255 * 128.
MOECHAT_INLINE VecI dot(VecI sums, VecI codes, VecI x) {
  const U4 low = seti(0x00ff00ffu).v[0];
  const I8 even_x = ((I8)x.v[0] << 8) >> 8;
  const I8 odd_x = (I8)x.v[0] >> 8;
  for (int i = 0; i < 4; ++i) {
    const I4 even = (I4)((I8)(codes.v[i] & low) * even_x);
    const I4 odd = (I4)((I8)((codes.v[i] >> 8) & low) * odd_x);
    const I4 total = (((even << 16) >> 16) + (even >> 16)) + (((odd << 16) >> 16) + (odd >> 16));
    sums.v[i] = sums.v[i] + (U4)total;
  }
  return sums;
}
// factor * the sums of a row; only where pairs add up in 16 bits.
MOECHAT_INLINE VecI widen(const VecI& sums, int) { return sums; }
// Keeps the additions in the order of the source: compilers collect all products first otherwise, more than
// there are registers.
MOECHAT_INLINE void pin(VecI&) {}
