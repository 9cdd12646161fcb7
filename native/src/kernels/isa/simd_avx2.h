// 16 lanes of fp32 or uint32 in two AVX2 registers; names as in simd_portable.h.
// Included inside the anonymous namespace of the files isa/avx2*.cc and of isa/amx_emulated.cc.

#define MOECHAT_UNROLL _Pragma("GCC unroll 16")

constexpr bool kPairStreams = true;
constexpr int kMostTokens = 2;
constexpr int kMostChains = 4;

struct Vec {
  __m256 a, b;
};
struct VecI {
  __m256i a, b;
};
struct Mask {
  __m256 a, b;
};

MOECHAT_INLINE Vec load(const void* from) {
  const float* f = static_cast<const float*>(from);
  return Vec{_mm256_loadu_ps(f), _mm256_loadu_ps(f + 8)};
}
MOECHAT_INLINE void store(void* to, Vec x) {
  float* f = static_cast<float*>(to);
  _mm256_storeu_ps(f, x.a);
  _mm256_storeu_ps(f + 8, x.b);
}
MOECHAT_INLINE Vec set1(float value) {
  const __m256 v = _mm256_set1_ps(value);
  return Vec{v, v};
}
MOECHAT_INLINE Vec zero() { return Vec{_mm256_setzero_ps(), _mm256_setzero_ps()}; }
MOECHAT_INLINE Vec add(Vec x, Vec y) { return Vec{_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
MOECHAT_INLINE Vec sub(Vec x, Vec y) { return Vec{_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
MOECHAT_INLINE Vec mul(Vec x, Vec y) { return Vec{_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
MOECHAT_INLINE Vec div(Vec x, Vec y) { return Vec{_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
MOECHAT_INLINE Vec fma(Vec x, Vec y, Vec z) {
  return Vec{_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
MOECHAT_INLINE Vec fnma(Vec x, Vec y, Vec z) {
  return Vec{_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}
MOECHAT_INLINE Vec min(Vec x, Vec y) { return Vec{_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
MOECHAT_INLINE Vec max(Vec x, Vec y) { return Vec{_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
MOECHAT_INLINE Vec round_small(Vec x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return Vec{_mm256_round_ps(x.a, kMode), _mm256_round_ps(x.b, kMode)};
}
MOECHAT_INLINE Vec sqrt(Vec x) { return Vec{_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
// Lane t: the sum of the lanes of x[t], of 16 Vecs, in the order of lane_sum().
MOECHAT_INLINE __m256 half_sums(const Vec* x) {
  // As with AVX-512, but of 8 Vecs; sums 4 * j + m begin at place 2 * m + j.
  const auto at = [x](int place) {
    const Vec& own = x[place % 2 * 4 + place / 2];
    return _mm256_add_ps(own.a, own.b);
  };
  __m256 four[4], two[2];
  for (int i = 0; i < 4; ++i) {
    const __m256 first = at(2 * i), second = at(2 * i + 1);
    four[i] = _mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20),
                            _mm256_permute2f128_ps(first, second, 0x31));
  }
  for (int i = 0; i < 2; ++i) {
    two[i] = _mm256_add_ps(_mm256_shuffle_ps(four[2 * i], four[2 * i + 1], 0x44),
                           _mm256_shuffle_ps(four[2 * i], four[2 * i + 1], 0xee));
  }
  return _mm256_add_ps(_mm256_shuffle_ps(two[0], two[1], 0x88), _mm256_shuffle_ps(two[0], two[1], 0xdd));
}
MOECHAT_INLINE Vec lane_sums(const Vec* x) { return Vec{half_sums(x), half_sums(x + 8)}; }

MOECHAT_INLINE VecI loadi(const void* from) {
  const __m256i* p = static_cast<const __m256i*>(from);
  return VecI{_mm256_loadu_si256(p), _mm256_loadu_si256(p + 1)};
}
MOECHAT_INLINE void storei(void* to, VecI x) {
  __m256i* p = static_cast<__m256i*>(to);
  _mm256_storeu_si256(p, x.a);
  _mm256_storeu_si256(p + 1, x.b);
}
MOECHAT_INLINE VecI seti(std::uint32_t value) {
  const __m256i v = _mm256_set1_epi32(static_cast<int>(value));
  return VecI{v, v};
}
MOECHAT_INLINE VecI andi(VecI x, VecI y) {
  return VecI{_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
}
MOECHAT_INLINE VecI ori(VecI x, VecI y) { return VecI{_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
MOECHAT_INLINE VecI xori(VecI x, VecI y) {
  return VecI{_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)};
}
MOECHAT_INLINE VecI addi(VecI x, VecI y) {
  return VecI{_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
MOECHAT_INLINE VecI subi(VecI x, VecI y) {
  return VecI{_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)};
}
MOECHAT_INLINE VecI muli(VecI x, VecI y) {
  return VecI{_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)};
}
MOECHAT_INLINE VecI madd16(VecI x, VecI y) {
  return VecI{_mm256_madd_epi16(x.a, y.a), _mm256_madd_epi16(x.b, y.b)};
}
MOECHAT_INLINE VecI shl(VecI x, int bits) {
  return VecI{_mm256_slli_epi32(x.a, bits), _mm256_slli_epi32(x.b, bits)};
}
MOECHAT_INLINE VecI shr(VecI x, int bits) {
  return VecI{_mm256_srli_epi32(x.a, bits), _mm256_srli_epi32(x.b, bits)};
}
MOECHAT_INLINE VecI lookup(VecI table, VecI codes) {
  return VecI{_mm256_shuffle_epi8(table.a, codes.a), _mm256_shuffle_epi8(table.a, codes.b)};
}
// Elements are loaded one by one; see simd_avx512.h.
MOECHAT_INLINE void gather_pairs(const std::uint32_t* from, VecI at, VecI* first, VecI* second) {
  std::uint32_t places[16];
  storei(places, at);
  const auto two = [&](int i) __attribute__((always_inline)) {
    const double* const pairs = reinterpret_cast<const double*>(from);
    return _mm_castpd_ps(_mm_loadh_pd(_mm_load_sd(pairs + places[i]), pairs + places[i + 1]));
  };
  // Dwords 0, 2 of rows [i, i + 8), or dwords 1, 3.
  const auto eight = [&](int i, __m256i* even, __m256i* odd) __attribute__((always_inline)) {
    const __m256 low = _mm256_insertf128_ps(_mm256_castps128_ps256(two(i)), two(i + 4), 1);
    const __m256 high = _mm256_insertf128_ps(_mm256_castps128_ps256(two(i + 2)), two(i + 6), 1);
    *even = _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0x88));
    *odd = _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xdd));
  };
  eight(0, &first->a, &second->a);
  eight(8, &first->b, &second->b);
}
MOECHAT_INLINE __m256i flip_some(__m256i codes, __m256i signs, __m256i order, __m256i bits) {
  const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(signs, order), bits), bits);
  // 128 less a code: its negative, with the other highest bit.
  const __m256i flipped = _mm256_sub_epi8(_mm256_xor_si256(codes, set), set);
  return _mm256_xor_si256(flipped, _mm256_and_si256(set, _mm256_set1_epi8(-128)));
}
MOECHAT_INLINE VecI flip_signs(VecI codes, VecI signs, int byte, int nibble) {
  const __m256i which =
      _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c);
  const __m256i order = _mm256_add_epi8(which, _mm256_set1_epi8(static_cast<char>(byte)));
  const __m256i bits = _mm256_set1_epi32(0x08040201 << (4 * nibble));
  return VecI{flip_some(codes.a, signs.a, order, bits), flip_some(codes.b, signs.b, order, bits)};
}
MOECHAT_INLINE VecI maxi(VecI x, VecI y) {
  return VecI{_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)};
}
MOECHAT_INLINE VecI shr_signed(VecI x, int bits) {
  return VecI{_mm256_srai_epi32(x.a, bits), _mm256_srai_epi32(x.b, bits)};
}
MOECHAT_INLINE void store_bytes(std::int8_t* to, VecI x, const unsigned char* order) {
  const __m128i places = _mm_loadu_si128(reinterpret_cast<const __m128i*>(order));
  const __m128i a = _mm_packs_epi32(_mm256_castsi256_si128(x.a), _mm256_extracti128_si256(x.a, 1));
  const __m128i b = _mm_packs_epi32(_mm256_castsi256_si128(x.b), _mm256_extracti128_si256(x.b, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(_mm_packs_epi16(a, b), places));
}
MOECHAT_INLINE Vec as_float(VecI x) { return Vec{_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
MOECHAT_INLINE VecI as_int(Vec x) { return VecI{_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
MOECHAT_INLINE Vec to_float(VecI x) { return Vec{_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
MOECHAT_INLINE VecI to_int(Vec x) { return VecI{_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }

MOECHAT_INLINE Mask less(Vec x, Vec y) {
  return Mask{_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)};
}
MOECHAT_INLINE Mask equal(Vec x, Vec y) {
  return Mask{_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ)};
}
MOECHAT_INLINE Mask both(Mask x, Mask y) { return Mask{_mm256_and_ps(x.a, y.a), _mm256_and_ps(x.b, y.b)}; }
MOECHAT_INLINE Mask either(Mask x, Mask y) { return Mask{_mm256_or_ps(x.a, y.a), _mm256_or_ps(x.b, y.b)}; }
MOECHAT_INLINE Mask negate(Mask x) {
  const __m256 ones = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
  return Mask{_mm256_xor_ps(x.a, ones), _mm256_xor_ps(x.b, ones)};
}
MOECHAT_INLINE Vec select(Mask m, Vec yes, Vec no) {
  return Vec{_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)};
}
MOECHAT_INLINE bool any(Mask m) { return _mm256_movemask_ps(_mm256_or_ps(m.a, m.b)) != 0; }
MOECHAT_INLINE bool all(Mask m) { return _mm256_movemask_ps(_mm256_and_ps(m.a, m.b)) == 0xff; }

MOECHAT_INLINE Vec load_fp16(const void* from) {
  const __m128i* p = static_cast<const __m128i*>(from);
  return Vec{_mm256_cvtph_ps(_mm_loadu_si128(p)), _mm256_cvtph_ps(_mm_loadu_si128(p + 1))};
}
MOECHAT_INLINE void store_fp16(void* to, Vec x) {
  __m128i* p = static_cast<__m128i*>(to);
  _mm_storeu_si128(p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(p + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
MOECHAT_INLINE void split_fp16_half(__m256i words, __m256* low, __m256* high) {
  const __m256i halves = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,  //
                                          0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  const __m256i sorted = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(words, halves), 0xd8);
  *low = _mm256_cvtph_ps(_mm256_castsi256_si128(sorted));
  *high = _mm256_cvtph_ps(_mm256_extracti128_si256(sorted, 1));
}
MOECHAT_INLINE void split_fp16(VecI words, Vec* low, Vec* high) {
  split_fp16_half(words.a, &low->a, &high->a);
  split_fp16_half(words.b, &low->b, &high->b);
}

MOECHAT_INLINE void transpose_8x8(const float* from, std::int64_t from_stride, float* to,
                                  std::int64_t to_stride) {
  __m256 r[8];
  __m256 s[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(from + i * from_stride);
  for (int i = 0; i < 4; ++i) {
    s[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    s[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    r[4 * i] = _mm256_shuffle_ps(s[4 * i], s[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(s[4 * i], s[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm256_shuffle_ps(s[4 * i + 1], s[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(s[4 * i + 1], s[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
MOECHAT_INLINE void transpose_tile(const float* rows, float* columns) {
  for (int c = 0; c < 64; c += 8) {
    transpose_8x8(rows + c, 64, columns + c * 16, 16);
    transpose_8x8(rows + 8 * 64 + c, 64, columns + c * 16 + 8, 16);
  }
}
// Copies four bytes of a plane to every row; dot_portable.h has the same.
MOECHAT_INLINE VecI broadcast4(const std::int8_t* from) {
  std::int32_t word;
  __builtin_memcpy(&word, from, sizeof word);
  const __m256i all = _mm256_set1_epi32(word);
  return VecI{all, all};
}

MOECHAT_INLINE void load_dwords4_half(const unsigned char* from, std::int64_t stride, __m256i (&to)[4]) {
  const auto rows = [from, stride](int r) {
    const auto* low = reinterpret_cast<const __m128i*>(from + r * stride);
    const auto* high = reinterpret_cast<const __m128i*>(from + (r + 4) * stride);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(low)), _mm_loadu_si128(high), 1);
  };
  const __m256i ab_low = _mm256_unpacklo_epi32(rows(0), rows(1));
  const __m256i ab_high = _mm256_unpackhi_epi32(rows(0), rows(1));
  const __m256i cd_low = _mm256_unpacklo_epi32(rows(2), rows(3));
  const __m256i cd_high = _mm256_unpackhi_epi32(rows(2), rows(3));
  to[0] = _mm256_unpacklo_epi64(ab_low, cd_low);
  to[1] = _mm256_unpackhi_epi64(ab_low, cd_low);
  to[2] = _mm256_unpacklo_epi64(ab_high, cd_high);
  to[3] = _mm256_unpackhi_epi64(ab_high, cd_high);
}
MOECHAT_INLINE void load_dwords4(const unsigned char* from, std::int64_t stride, VecI* to) {
  __m256i a[4], b[4];
  load_dwords4_half(from, stride, a);
  load_dwords4_half(from + 8 * stride, stride, b);
  for (int d = 0; d < 4; ++d) to[d] = VecI{a[d], b[d]};
}
MOECHAT_INLINE void store_low_halves(void* to, VecI x) {
  const __m256i mask = _mm256_set1_epi32(0xffff);
  const __m256i halves = _mm256_packus_epi32(_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask));
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm256_permute4x64_epi64(halves, 0xd8));
}
