// 16 lanes of fp32 or uint32 in one AVX-512 register; names as in simd_portable.h.
// Included inside the anonymous namespace of the files isa/avx512*.cc.

#define MOECHAT_UNROLL _Pragma("GCC unroll 16")

constexpr bool kPairStreams = true;
constexpr int kMostTokens = 4;
constexpr int kMostChains = 16;

struct Vec {
  __m512 a;
};
struct VecI {
  __m512i a;
};
struct Mask {
  __mmask16 a;
};

MOECHAT_INLINE Vec load(const void* from) { return Vec{_mm512_loadu_ps(from)}; }
MOECHAT_INLINE void store(void* to, Vec x) { _mm512_storeu_ps(to, x.a); }
MOECHAT_INLINE Vec set1(float value) { return Vec{_mm512_set1_ps(value)}; }
MOECHAT_INLINE Vec zero() { return Vec{_mm512_setzero_ps()}; }
MOECHAT_INLINE Vec add(Vec x, Vec y) { return Vec{_mm512_add_ps(x.a, y.a)}; }
MOECHAT_INLINE Vec sub(Vec x, Vec y) { return Vec{_mm512_sub_ps(x.a, y.a)}; }
MOECHAT_INLINE Vec mul(Vec x, Vec y) { return Vec{_mm512_mul_ps(x.a, y.a)}; }
MOECHAT_INLINE Vec div(Vec x, Vec y) { return Vec{_mm512_div_ps(x.a, y.a)}; }
MOECHAT_INLINE Vec fma(Vec x, Vec y, Vec z) { return Vec{_mm512_fmadd_ps(x.a, y.a, z.a)}; }
MOECHAT_INLINE Vec fnma(Vec x, Vec y, Vec z) { return Vec{_mm512_fnmadd_ps(x.a, y.a, z.a)}; }
MOECHAT_INLINE Vec min(Vec x, Vec y) { return Vec{_mm512_min_ps(x.a, y.a)}; }
MOECHAT_INLINE Vec max(Vec x, Vec y) { return Vec{_mm512_max_ps(x.a, y.a)}; }
MOECHAT_INLINE Vec round_small(Vec x) {
  return Vec{_mm512_roundscale_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
MOECHAT_INLINE Vec sqrt(Vec x) { return Vec{_mm512_sqrt_ps(x.a)}; }
// Lane t: the sum of the lanes of x[t], of 16 Vecs, in the order of lane_sum().
MOECHAT_INLINE Vec lane_sums(const Vec* x) {
  // Each step adds halves of what is left of two sums and puts them side by side. Sums 4 * m + j begin at
  // place 4 * j + m, where the last two steps, which stay within four lanes, leave them.
  const auto at = [x](int place) { return x[place % 4 * 4 + place / 4].a; };
  __m512 eight[8], four[4], two[2];
  for (int i = 0; i < 8; ++i) {
    const __m512 first = at(2 * i), second = at(2 * i + 1);
    eight[i] =
        _mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x44), _mm512_shuffle_f32x4(first, second, 0xee));
  }
  for (int i = 0; i < 4; ++i) {
    four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(eight[2 * i], eight[2 * i + 1], 0x88),
                            _mm512_shuffle_f32x4(eight[2 * i], eight[2 * i + 1], 0xdd));
  }
  for (int i = 0; i < 2; ++i) {
    two[i] = _mm512_add_ps(_mm512_shuffle_ps(four[2 * i], four[2 * i + 1], 0x44),
                           _mm512_shuffle_ps(four[2 * i], four[2 * i + 1], 0xee));
  }
  return Vec{_mm512_add_ps(_mm512_shuffle_ps(two[0], two[1], 0x88), _mm512_shuffle_ps(two[0], two[1], 0xdd))};
}

MOECHAT_INLINE VecI loadi(const void* from) { return VecI{_mm512_loadu_si512(from)}; }
MOECHAT_INLINE void storei(void* to, VecI x) { _mm512_storeu_si512(to, x.a); }
MOECHAT_INLINE VecI seti(std::uint32_t value) { return VecI{_mm512_set1_epi32(static_cast<int>(value))}; }
MOECHAT_INLINE VecI andi(VecI x, VecI y) { return VecI{_mm512_and_si512(x.a, y.a)}; }
MOECHAT_INLINE VecI ori(VecI x, VecI y) { return VecI{_mm512_or_si512(x.a, y.a)}; }
MOECHAT_INLINE VecI xori(VecI x, VecI y) { return VecI{_mm512_xor_si512(x.a, y.a)}; }
MOECHAT_INLINE VecI addi(VecI x, VecI y) { return VecI{_mm512_add_epi32(x.a, y.a)}; }
MOECHAT_INLINE VecI subi(VecI x, VecI y) { return VecI{_mm512_sub_epi32(x.a, y.a)}; }
MOECHAT_INLINE VecI muli(VecI x, VecI y) { return VecI{_mm512_mullo_epi32(x.a, y.a)}; }
MOECHAT_INLINE VecI madd16(VecI x, VecI y) { return VecI{_mm512_madd_epi16(x.a, y.a)}; }
MOECHAT_INLINE VecI shl(VecI x, int bits) {
  return VecI{_mm512_slli_epi32(x.a, static_cast<unsigned>(bits))};
}
MOECHAT_INLINE VecI shr(VecI x, int bits) {
  return VecI{_mm512_srli_epi32(x.a, static_cast<unsigned>(bits))};
}
// Bytes of a table of 16, which stands four times in `table`, by the low four bits of bytes below 16.
MOECHAT_INLINE VecI lookup(VecI table, VecI codes) { return VecI{_mm512_shuffle_epi8(table.a, codes.a)}; }
// Elements are loaded one by one: gathering instructions were no faster where it was measured, a Zen 4, and
// are slower on Intel's processors whose microcode guards them.
MOECHAT_INLINE void gather_pairs(const std::uint32_t* from, VecI at, VecI* first, VecI* second) {
  std::uint32_t places[16];
  storei(places, at);
  const auto two = [&](int i) __attribute__((always_inline)) {
    const double* const pairs = reinterpret_cast<const double*>(from);
    return _mm_castpd_si128(_mm_loadh_pd(_mm_load_sd(pairs + places[i]), pairs + places[i + 1]));
  };
  const auto eight = [&](int i) __attribute__((always_inline)) {
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(two(i)), two(i + 2), 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(two(i + 4)), two(i + 6), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  };
  const __m512i a = eight(0);
  const __m512i b = eight(8);
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  first->a = _mm512_permutex2var_epi32(a, even, b);
  second->a = _mm512_permutex2var_epi32(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
}
MOECHAT_INLINE VecI flip_signs(VecI codes, VecI signs, int byte, int nibble) {
  const __m512i which = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
  const __m512i copies =
      _mm512_shuffle_epi8(signs.a, _mm512_add_epi8(which, _mm512_set1_epi8(static_cast<char>(byte))));
  const __mmask64 set = _mm512_test_epi8_mask(copies, _mm512_set1_epi32(0x08040201 << (4 * nibble)));
  return VecI{_mm512_mask_sub_epi8(codes.a, set, _mm512_set1_epi8(-128), codes.a)};
}
MOECHAT_INLINE VecI maxi(VecI x, VecI y) { return VecI{_mm512_max_epi32(x.a, y.a)}; }
MOECHAT_INLINE VecI shr_signed(VecI x, int bits) {
  return VecI{_mm512_srai_epi32(x.a, static_cast<unsigned>(bits))};
}
MOECHAT_INLINE void store_bytes(std::int8_t* to, VecI x, const unsigned char* order) {
  const __m128i places = _mm_loadu_si128(reinterpret_cast<const __m128i*>(order));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(x.a), places));
}
MOECHAT_INLINE Vec as_float(VecI x) { return Vec{_mm512_castsi512_ps(x.a)}; }
MOECHAT_INLINE VecI as_int(Vec x) { return VecI{_mm512_castps_si512(x.a)}; }
MOECHAT_INLINE Vec to_float(VecI x) { return Vec{_mm512_cvtepi32_ps(x.a)}; }
MOECHAT_INLINE VecI to_int(Vec x) { return VecI{_mm512_cvtps_epi32(x.a)}; }

MOECHAT_INLINE Mask less(Vec x, Vec y) { return Mask{_mm512_cmp_ps_mask(x.a, y.a, _CMP_LT_OQ)}; }
MOECHAT_INLINE Mask equal(Vec x, Vec y) { return Mask{_mm512_cmp_ps_mask(x.a, y.a, _CMP_EQ_OQ)}; }
MOECHAT_INLINE Mask both(Mask x, Mask y) { return Mask{static_cast<__mmask16>(x.a & y.a)}; }
MOECHAT_INLINE Mask either(Mask x, Mask y) { return Mask{static_cast<__mmask16>(x.a | y.a)}; }
MOECHAT_INLINE Mask negate(Mask x) { return Mask{static_cast<__mmask16>(~x.a)}; }
MOECHAT_INLINE Vec select(Mask m, Vec yes, Vec no) { return Vec{_mm512_mask_blend_ps(m.a, no.a, yes.a)}; }
MOECHAT_INLINE bool any(Mask m) { return m.a != 0; }
MOECHAT_INLINE bool all(Mask m) { return m.a == 0xffff; }

MOECHAT_INLINE Vec load_fp16(const void* from) {
  return Vec{_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)))};
}
MOECHAT_INLINE void store_fp16(void* to, Vec x) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
}
MOECHAT_INLINE void split_fp16(VecI words, Vec* low, Vec* high) {
  low->a = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words.a));
  high->a = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(words.a, 16)));
}

MOECHAT_INLINE void transpose_tile(const float* rows, float* columns) {
  const __m512i lanes = _mm512_mullo_epi32(
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(64));
  for (int c = 0; c < 64; ++c) _mm512_storeu_ps(columns + c * 16, _mm512_i32gather_ps(lanes, rows + c, 4));
}
// Copies four bytes of a plane to every row; dot_portable.h has the same.
MOECHAT_INLINE VecI broadcast4(const std::int8_t* from) {
  std::int32_t word;
  __builtin_memcpy(&word, from, sizeof word);
  return VecI{_mm512_set1_epi32(word)};
}

MOECHAT_INLINE __m512i load_rows4(const unsigned char* from, std::int64_t stride) {
  const auto row = [from, stride](int r) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + r * stride));
  };
  __m512i rows = _mm512_castsi128_si512(row(0));
  rows = _mm512_inserti32x4(rows, row(4), 1);
  rows = _mm512_inserti32x4(rows, row(8), 2);
  return _mm512_inserti32x4(rows, row(12), 3);
}
MOECHAT_INLINE void load_dwords4(const unsigned char* from, std::int64_t stride, VecI* to) {
  const __m512i a = load_rows4(from, stride);
  const __m512i b = load_rows4(from + stride, stride);
  const __m512i c = load_rows4(from + 2 * stride, stride);
  const __m512i d = load_rows4(from + 3 * stride, stride);
  const __m512i ab_low = _mm512_unpacklo_epi32(a, b);
  const __m512i ab_high = _mm512_unpackhi_epi32(a, b);
  const __m512i cd_low = _mm512_unpacklo_epi32(c, d);
  const __m512i cd_high = _mm512_unpackhi_epi32(c, d);
  to[0] = VecI{_mm512_unpacklo_epi64(ab_low, cd_low)};
  to[1] = VecI{_mm512_unpackhi_epi64(ab_low, cd_low)};
  to[2] = VecI{_mm512_unpacklo_epi64(ab_high, cd_high)};
  to[3] = VecI{_mm512_unpackhi_epi64(ab_high, cd_high)};
}
MOECHAT_INLINE void store_low_halves(void* to, VecI x) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtepi32_epi16(x.a));
}
