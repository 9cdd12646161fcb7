// What attention reads keys and values from where they are rows of elements. Included inside the anonymous
// namespace of the files isa/*.cc, after elements.inc.h.

#if defined(__AVX512F__)
constexpr int kKeysAtOnce = 16;
constexpr int kRowsAtOnce = 4;
#else
constexpr int kKeysAtOnce = 4;
constexpr int kRowsAtOnce = 1;
#endif

// Lane i of the result is the sum of the lanes of vector i, for 16 vectors.
#if defined(__AVX2__)
MOECHAT_INLINE __m256 eight_lanes(Vec x) {
#if defined(__AVX512F__)
  const __m256d high = _mm512_extractf64x4_pd(_mm512_castps_pd(x.a), 1);
  return _mm256_add_ps(_mm512_castps512_ps256(x.a), _mm256_castpd_ps(high));
#else
  return _mm256_add_ps(x.a, x.b);
#endif
}
MOECHAT_INLINE __m256 eight_sums(const Vec* v) {
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(eight_lanes(v[0]), eight_lanes(v[1])),
                                  _mm256_hadd_ps(eight_lanes(v[2]), eight_lanes(v[3])));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(eight_lanes(v[4]), eight_lanes(v[5])),
                                  _mm256_hadd_ps(eight_lanes(v[6]), eight_lanes(v[7])));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
MOECHAT_INLINE Vec sixteen_sums(const Vec* v) {
#if defined(__AVX512F__)
  const __m512d low = _mm512_castpd256_pd512(_mm256_castps_pd(eight_sums(v)));
  return Vec{_mm512_castpd_ps(_mm512_insertf64x4(low, _mm256_castps_pd(eight_sums(v + 8)), 1))};
#else
  return Vec{eight_sums(v), eight_sums(v + 8)};
#endif
}
#else
MOECHAT_INLINE Vec sixteen_sums(const Vec* v) {
  float sums[16];
  for (int i = 0; i < 16; ++i) sums[i] = lane_sum(v[i]);
  return load(sums);
}
#endif

// Converts `count` elements to float32 and pads with zeros to `width`, a multiple of 16.
template <ElementType kType>
MOECHAT_INLINE void widen(const typename Elements<kType>::Storage* from, std::int64_t count, float* to,
                          std::int64_t width) {
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) store(to + i, Elements<kType>::get(from + i));
  if (i < count) {
    float lanes[16];
    store(lanes, get_part<kType>(from + i, count - i));
    for (std::int64_t k = 0; k < count - i; ++k) to[i + k] = lanes[k];
    i = count;
  }
  for (; i < width; ++i) to[i] = 0.0f;
}

// Keys and values come from memory, and the processor stops fetching ahead wherever a loop pauses to compute.
// So the loops ask for the element that many keys after the one they read, once for each cache line; `d`
// counts elements from the beginning of a line.
constexpr std::int64_t kFetchedAhead = 16;  // keys
template <ElementType kType, bool kFetches>
MOECHAT_INLINE void fetch_ahead(const typename Elements<kType>::Storage* from, std::int64_t stride,
                                std::int64_t d) {
  constexpr std::int64_t kLine = 64 / sizeof(typename Elements<kType>::Storage);
  if (kFetches && d % kLine == 0) __builtin_prefetch(from + kFetchedAhead * stride);
}

template <ElementType kType>
MOECHAT_INLINE void fetch_row(const typename Elements<kType>::Storage* row, std::int64_t count) {
  constexpr std::int64_t kLine = 64 / sizeof(typename Elements<kType>::Storage);
  for (std::int64_t d = 0; d < count; d += kLine) __builtin_prefetch(row + d);
}

// Dot products of one query with 16 keys that lie `stride` elements apart.
template <ElementType kType, bool kFetches>
MOECHAT_INLINE Vec sixteen_products(const float* query, const typename Elements<kType>::Storage* keys,
                                    std::int64_t stride, std::int64_t width) {
  Vec all[16];
  const std::int64_t twice = 2 * stride, thrice = 3 * stride;
  for (int first = 0; first < 16; first += kKeysAtOnce) {
    Vec sums[kKeysAtOnce];
    for (int k = 0; k < kKeysAtOnce; ++k) sums[k] = zero();
    // One pointer for four keys: one for each would not fit into the registers.
    const typename Elements<kType>::Storage* four[kKeysAtOnce / 4];
    for (int k = 0; k < kKeysAtOnce / 4; ++k) four[k] = keys + (first + 4 * k) * stride;
    for (std::int64_t d = 0; d < width; d += 16) {
      const Vec q = load(query + d);
#pragma GCC unroll 4
      for (int k = 0; k < kKeysAtOnce / 4; ++k) {
        const std::int64_t at[4] = {0, stride, twice, thrice};
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const auto* key = four[k] + at[i];
          fetch_ahead<kType, kFetches>(key, stride, d);
          sums[4 * k + i] = fma(q, Elements<kType>::get(key), sums[4 * k + i]);
        }
        four[k] += 16;
      }
    }
    for (int k = 0; k < kKeysAtOnce; ++k) all[first + k] = sums[k];
  }
  return sixteen_sums(all);
}

// Adds weighted values to kRows rows of sums, kVecs * 16 elements from `d` on; read(k, i) gives those of key
// k from d + 16 * i on.
template <int kRows, int kVecs, class Read>
MOECHAT_INLINE void add_part(const float* weights, std::int64_t keys, float* out, std::int64_t row,
                             std::int64_t d, const Read& read) {
  Vec sums[kRows][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) sums[r][i] = load(out + r * row + d + 16 * i);
  }
  for (std::int64_t k = 0; k < keys; ++k) {
    Vec parts[kVecs];
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) parts[i] = read(k, i);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = set1(weights[r * kAttendKeys + k]);
#pragma GCC unroll 4
      for (int i = 0; i < kVecs; ++i) sums[r][i] = fma(weight, parts[i], sums[r][i]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) store(out + r * row + d + 16 * i, sums[r][i]);
  }
}

// Adds weighted values to kRows rows of sums, which lie `row` floats apart; rows of weights kAttendKeys.
template <ElementType kType, bool kFetches, int kRows>
MOECHAT_INLINE void add_values(const float* weights, const typename Elements<kType>::Storage* values,
                               std::int64_t stride, std::int64_t keys, float* out, std::int64_t row,
                               std::int64_t width) {
  std::int64_t d = 0;
  const auto read = [&](std::int64_t k, int i) __attribute__((always_inline)) {
    const auto* value = values + k * stride + d + 16 * i;
    fetch_ahead<kType, kFetches>(value, stride, 16 * i);
    return Elements<kType>::get(value);
  };
  for (; d + 64 <= width; d += 64) add_part<kRows, 4>(weights, keys, out, row, d, read);
  for (; d < width; d += 16) add_part<kRows, 1>(weights, keys, out, row, d, read);
}

// Reads rows of `kType` for attend.inc.h; packed_rows.inc.h has the same for packed rows. Strides count
// Storage.
template <ElementType kType>
struct PlainRows {
  using Storage = typename Elements<kType>::Storage;
  // Whether reading in place costs no conversion, so that any number of rows of queries may do it.
  static constexpr bool kFree = kType == ElementType::kFloat32;

  // Whether products() and add_rows() take rows of so many elements; other rows are widened first.
  static MOECHAT_INLINE bool reads(std::int64_t elements) { return elements % 16 == 0; }
  static MOECHAT_INLINE void fetch(const Storage* row, std::int64_t count) { fetch_row<kType>(row, count); }
  static MOECHAT_INLINE void widen_row(const Storage* row, std::int64_t count, float* to,
                                       std::int64_t width) {
    widen<kType>(row, count, to, width);
  }
  static MOECHAT_INLINE Vec products(const float* query, const Storage* keys, std::int64_t stride,
                                     std::int64_t width) {
    return sixteen_products<kType, true>(query, keys, stride, width);
  }
  template <int kRows>
  static MOECHAT_INLINE void add_rows(const float* weights, const Storage* values, std::int64_t stride,
                                      std::int64_t keys, float* out, std::int64_t row, std::int64_t width) {
    add_values<kType, true, kRows>(weights, values, stride, keys, out, row, width);
  }
};
