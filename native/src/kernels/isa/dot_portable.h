// Products of unsigned codes and signed bytes in plain C++. Included inside the anonymous namespace of
// isa/portable_integer.cc; the dot_*.h files define the same names.

constexpr bool kWideDot = true;    // sums have 32 bits; else pairs are summed in 16, see integer_kernel.inc.h
constexpr int kMostTokens = 1;     // tokens that share the unpacking: 1, 2 or 4
constexpr bool kPairDots = false;  // processes two weight streams at a time
constexpr int kMostChains = 2;     // registers available for sums

typedef std::int16_t I8 __attribute__((vector_size(16)));

// Copies four bytes of a plane to every row.
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
// Keeps the additions in the order of the source. Otherwise compilers collect all products first, which needs
// more registers than there are.
MOECHAT_INLINE void pin(VecI&) {}
