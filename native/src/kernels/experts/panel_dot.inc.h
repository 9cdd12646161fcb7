// Products of unpacked codes with activation integers, 16 rows at a time, and the register blocks that suit
// the instruction set. Included inside the anonymous namespace of one instruction set, after its simd_*.h.
//
// Pairs: a 32-bit lane holds two codes as int16; a dword of a token holds two integers of 16 bits.
// Quads: a lane holds four codes as bytes; a dword of a token holds four integers of 8 bits. With kQuadsIn16
// their sums are two int16 per lane, which the caller widens, times a factor, before they can overflow.
//
// Inline assembly instead of intrinsics: with intrinsics GCC copies every sum before and after the product,
// and keeps some on the stack.

#if defined(__AVX512F__)

constexpr int kPanelTokens = 12;  // 2 row tiles x 12 tokens are 24 sums in 32 registers
constexpr int kPanelTiles = 2;
constexpr int kTokenStep = 2;  // token counts of blocks are multiples of it
constexpr bool kHasQuads = true;

#if defined(__AVX512VNNI__)
constexpr bool kQuadsIn16 = false;
MOECHAT_INLINE void add_pairs(VecI& sum, VecI codes, VecI x) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum.a) : "v"(codes.a), "v"(x.a));
}
MOECHAT_INLINE void add_quads(VecI& sum, VecI codes, VecI x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.a) : "v"(codes.a), "v"(x.a));
}
MOECHAT_INLINE VecI first_quads(VecI, VecI) { return seti(0); }  // used only for sums in 16 bits
#else
constexpr bool kQuadsIn16 = true;
MOECHAT_INLINE void add_pairs(VecI& sum, VecI codes, VecI x) {
  __m512i product;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sum.a), "=v"(product) : "v"(codes.a), "v"(x.a));
}
MOECHAT_INLINE void add_quads(VecI& sum, VecI codes, VecI x) {
  __m512i product;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(sum.a), "=v"(product) : "v"(codes.a), "v"(x.a));
}
MOECHAT_INLINE VecI first_quads(VecI codes, VecI x) {
  VecI sum;
  asm("vpmaddubsw %2, %1, %0" : "=v"(sum.a) : "v"(codes.a), "v"(x.a));
  return sum;
}
#endif

#elif defined(__AVX2__)

constexpr int kPanelTokens = 4;  // 1 row tile x 4 tokens are 8 sums in 16 registers
constexpr int kPanelTiles = 1;
constexpr int kTokenStep = 1;
constexpr bool kHasQuads = true;

#if defined(__AVXVNNI__)
constexpr bool kQuadsIn16 = false;
MOECHAT_INLINE void add_pairs(VecI& sum, VecI codes, VecI x) {
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum.a) : "x"(codes.a), "x"(x.a));
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum.b) : "x"(codes.b), "x"(x.b));
}
MOECHAT_INLINE void add_quads(VecI& sum, VecI codes, VecI x) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.a) : "x"(codes.a), "x"(x.a));
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.b) : "x"(codes.b), "x"(x.b));
}
MOECHAT_INLINE VecI first_quads(VecI, VecI) { return seti(0); }  // used only for sums in 16 bits
#else
constexpr bool kQuadsIn16 = true;
MOECHAT_INLINE void add_pairs(VecI& sum, VecI codes, VecI x) {
  __m256i product;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum.a), "=x"(product) : "x"(codes.a), "x"(x.a));
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum.b), "=x"(product) : "x"(codes.b), "x"(x.b));
}
MOECHAT_INLINE void add_quads(VecI& sum, VecI codes, VecI x) {
  __m256i product;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum.a), "=x"(product) : "x"(codes.a), "x"(x.a));
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum.b), "=x"(product) : "x"(codes.b), "x"(x.b));
}
MOECHAT_INLINE VecI first_quads(VecI codes, VecI x) {
  VecI sum;
  asm("vpmaddubsw %2, %1, %0" : "=x"(sum.a) : "x"(codes.a), "x"(x.a));
  asm("vpmaddubsw %2, %1, %0" : "=x"(sum.b) : "x"(codes.b), "x"(x.b));
  return sum;
}
#endif

#else

#define MOECHAT_PANEL_BY_ROW 1  // products of a row are a loop over its columns, see panel_kernel.inc.h
constexpr int kPanelTokens = 4;
constexpr int kPanelTiles = 1;
constexpr int kTokenStep = 1;
constexpr bool kHasQuads = false;
constexpr bool kQuadsIn16 = false;

#endif
