// Products of unpacked codes with activation integers, 16 rows at a time, and the register blocks that suit
// the instruction set. Included inside the anonymous namespace of one instruction set, after its simd_*.h.
//
// Pairs: a 32-bit lane holds two codes as int16; a dword of a token holds two integers of 16 bits.
// Quads: a lane holds four codes as bytes; a dword of a token holds four integers of 8 bits. Without kWideDot
// (MOECHAT_SHORT_SUMS) their sums are two int16 per lane, which the caller widens before they can overflow.
//
// Inline assembly instead of intrinsics: with intrinsics GCC copies every sum before and after the product,
// and keeps some on the stack.

#if defined(__AVX512F__)

constexpr int kPanelTokens = 12;  // 2 row tiles x 12 tokens are 24 sums in 32 registers
constexpr int kPanelTiles = 2;
constexpr int kTokenStep = 2;  // token counts of blocks are multiples of it
constexpr bool kHasQuads = true;

#if defined(__AVX512VNNI__)
MOECHAT_INLINE void add_pairs(VecI& sum, VecI codes, VecI x) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum.a) : "v"(codes.a), "v"(x.a));
}
MOECHAT_INLINE void add_quads(VecI& sum, VecI codes, VecI x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.a) : "v"(codes.a), "v"(x.a));
}
#else
MOECHAT_INLINE void add_pairs(VecI& sum, VecI codes, VecI x) {
  __m512i product;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sum.a), "=v"(product) : "v"(codes.a), "v"(x.a));
}
MOECHAT_INLINE __m512i first_quads(__m512i codes, __m512i x) {
  __m512i sum;
  asm("vpmaddubsw %2, %1, %0" : "=v"(sum) : "v"(codes), "v"(x));
  return sum;
}
MOECHAT_INLINE void add_quads(__m512i& sum, __m512i codes, __m512i x) {
  __m512i product;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(sum), "=v"(product) : "v"(codes), "v"(x));
}
MOECHAT_INLINE void add_widened(__m512i& sum, __m512i quads, __m512i ones) {
  asm("vpmaddwd %2, %1, %1\n\tvpaddd %1, %0, %0" : "+v"(sum), "+v"(quads) : "v"(ones));
}
MOECHAT_INLINE VecI first_quads(VecI codes, VecI x) { return VecI{first_quads(codes.a, x.a)}; }
MOECHAT_INLINE void add_quads(VecI& sum, VecI codes, VecI x) { add_quads(sum.a, codes.a, x.a); }

#define MOECHAT_SHORT_SUMS 1
// A register of rows: 16 rows have kRegisters.
using Rows = __m512i;
constexpr int kRegisters = 1;
MOECHAT_INLINE Rows load_rows(const unsigned char* from) { return _mm512_loadu_si512(from); }
MOECHAT_INLINE Rows all_rows(std::uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
template <int kRegister>
MOECHAT_INLINE Rows& rows_of(VecI& sum) {
  return sum.a;
}
#endif

#elif defined(__AVX2__)

constexpr int kPanelTokens = 4;  // 1 row tile x 4 tokens are 8 sums in 16 registers
constexpr int kPanelTiles = 1;
constexpr int kTokenStep = 1;
constexpr bool kHasQuads = true;

#if defined(__AVXVNNI__)
MOECHAT_INLINE void add_pairs(VecI& sum, VecI codes, VecI x) {
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum.a) : "x"(codes.a), "x"(x.a));
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum.b) : "x"(codes.b), "x"(x.b));
}
MOECHAT_INLINE void add_quads(VecI& sum, VecI codes, VecI x) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.a) : "x"(codes.a), "x"(x.a));
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.b) : "x"(codes.b), "x"(x.b));
}
#else
MOECHAT_INLINE void add_pairs(VecI& sum, VecI codes, VecI x) {
  __m256i product;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum.a), "=x"(product) : "x"(codes.a), "x"(x.a));
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum.b), "=x"(product) : "x"(codes.b), "x"(x.b));
}
MOECHAT_INLINE __m256i first_quads(__m256i codes, __m256i x) {
  __m256i sum;
  asm("vpmaddubsw %2, %1, %0" : "=x"(sum) : "x"(codes), "x"(x));
  return sum;
}
MOECHAT_INLINE void add_quads(__m256i& sum, __m256i codes, __m256i x) {
  __m256i product;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=x"(product) : "x"(codes), "x"(x));
}
MOECHAT_INLINE void add_widened(__m256i& sum, __m256i quads, __m256i ones) {
  asm("vpmaddwd %2, %1, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "+x"(quads) : "x"(ones));
}
MOECHAT_INLINE VecI first_quads(VecI codes, VecI x) {
  return VecI{first_quads(codes.a, x.a), first_quads(codes.b, x.b)};
}
MOECHAT_INLINE void add_quads(VecI& sum, VecI codes, VecI x) {
  add_quads(sum.a, codes.a, x.a);
  add_quads(sum.b, codes.b, x.b);
}

#define MOECHAT_SHORT_SUMS 1
// A register of rows: 16 rows have kRegisters.
using Rows = __m256i;
constexpr int kRegisters = 2;
MOECHAT_INLINE Rows load_rows(const unsigned char* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
MOECHAT_INLINE Rows all_rows(std::uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }
template <int kRegister>
MOECHAT_INLINE Rows& rows_of(VecI& sum) {
  return kRegister == 0 ? sum.a : sum.b;
}
#endif

#else

#define MOECHAT_PANEL_BY_ROW 1  // products of a row are a loop over its columns, see panel_kernel.inc.h
constexpr int kPanelTokens = 4;
constexpr int kPanelTiles = 1;
constexpr int kTokenStep = 1;
constexpr bool kHasQuads = false;

#endif
