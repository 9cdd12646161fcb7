// Rows of keys and values in 8 bits (decode_api.h): packing, unpacking, and what attention reads from them.
// Included inside the anonymous namespace of the files isa/*.cc, after plain_rows.inc.h.

#if defined(__AVX512F__)
MOECHAT_INLINE VecI load_unsigned_bytes(const void* from) {
  return VecI{_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)))};
}
MOECHAT_INLINE Vec load_codes(const void* from) {
  return Vec{_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from))))};
}
#elif defined(__AVX2__)
MOECHAT_INLINE VecI load_unsigned_bytes(const void* from) {
  const auto* half = static_cast<const unsigned char*>(from);
  return VecI{_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(half))),
              _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(half + 8)))};
}
MOECHAT_INLINE Vec load_codes(const void* from) {
  const auto* half = static_cast<const unsigned char*>(from);
  return to_float(VecI{_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(half))),
                       _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(half + 8)))});
}
#else
MOECHAT_INLINE VecI load_unsigned_bytes(const void* from) {
  unsigned char bytes[16];
  __builtin_memcpy(bytes, from, sizeof bytes);
  std::uint32_t lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = bytes[i];
  return loadi(lanes);
}
MOECHAT_INLINE Vec load_codes(const void* from) {
  std::int8_t bytes[16];
  __builtin_memcpy(bytes, from, sizeof bytes);
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = static_cast<float>(bytes[i]);
  return load(lanes);
}
#endif

constexpr std::uint32_t kNoNumber = 255;  // the exponent of infinities and NaN

MOECHAT_INLINE float scale_of(std::uint8_t exponent) {
  const std::uint32_t bits = static_cast<std::uint32_t>(exponent) << 23;
  float scale;
  __builtin_memcpy(&scale, &bits, sizeof scale);
  return scale;
}

// Calls body(d, count, values) for the elements of a packed row, 16 at a time: values are those from `d` on,
// of which `count` exist, and zeros.
template <class Body>
MOECHAT_INLINE void for_packed(const std::uint8_t* row, std::int64_t dim, const Body& body) {
  const std::uint8_t* codes = row + packed_groups(dim);
  for (std::int64_t d = 0; d < dim; d += 16) {
    const Vec scale = set1(scale_of(row[d / kPackedGroup]));
    const std::int64_t count = dim - d < 16 ? dim - d : 16;
    if (count == 16) {
      body(d, count, mul(load_codes(codes + d), scale));
      continue;
    }
    std::uint8_t lanes[16] = {};
    for (std::int64_t i = 0; i < count; ++i) lanes[i] = codes[d + i];
    body(d, count, mul(load_codes(lanes), scale));
  }
}

// Reads packed rows for attend.inc.h, as PlainRows reads others.
//
// Values are made first and then added up like those of PlainRows, so attention has the same bits as over the
// unpacked rows. To add up codes and apply the scale to their sum would save an instruction for 16 elements,
// but layers without a native step, which read unpacked rows, would give other bits.
struct PackedRows {
  using Storage = std::uint8_t;
  static constexpr bool kFree = false;
  // Most groups of a row that products() and add_rows() take: those whose exponents are read at once.
  static constexpr std::int64_t kMostGroups = 16;

  static MOECHAT_INLINE bool reads(std::int64_t elements) {
    return elements % kPackedGroup == 0 && elements <= kMostGroups * kPackedGroup;
  }
  static MOECHAT_INLINE void fetch(const Storage* row, std::int64_t count) {
    for (std::int64_t d = 0; d < count; d += 64) __builtin_prefetch(row + d);
  }
  static MOECHAT_INLINE void widen_row(const Storage* row, std::int64_t count, float* to,
                                       std::int64_t width) {
    for_packed(row, count, [&](std::int64_t d, std::int64_t, Vec values) __attribute__((always_inline)) {
      store(to + d, values);  // `width` is a multiple of 16, and missing elements are zeros
    });
    for (std::int64_t d = (count + 15) / 16 * 16; d < width; ++d) to[d] = 0.0f;
  }

  // Scales of `rows` rows. A row of 32 elements and more has 16 bytes to read, whatever its groups.
  static MOECHAT_INLINE void read_scales(const Storage* row, std::int64_t stride, std::int64_t rows,
                                         float* scales) {
    for (std::int64_t k = 0; k < rows; ++k) {
      store(scales + k * kMostGroups, as_float(shl(load_unsigned_bytes(row + k * stride), 23)));
    }
  }
  static MOECHAT_INLINE Vec element(const Storage* codes, const float* scales, std::int64_t d) {
    return mul(load_codes(codes + d), set1(scales[d / kPackedGroup]));
  }
  static MOECHAT_INLINE void fetch_ahead(const Storage* codes, std::int64_t stride, std::int64_t d) {
    if (d % 64 == 0) __builtin_prefetch(codes + d + kFetchedAhead * stride);
  }

  static MOECHAT_INLINE Vec products(const float* query, const Storage* keys, std::int64_t stride,
                                     std::int64_t width) {
    float scales[16 * kMostGroups];
    read_scales(keys, stride, 16, scales);
    const Storage* codes = keys + packed_groups(width);
    Vec all[16];
    for (int first = 0; first < 16; first += kKeysAtOnce) {
      Vec sums[kKeysAtOnce];
      for (int k = 0; k < kKeysAtOnce; ++k) sums[k] = zero();
      for (std::int64_t d = 0; d < width; d += 16) {
        const Vec q = load(query + d);
#pragma GCC unroll 16
        for (int k = 0; k < kKeysAtOnce; ++k) {
          const Storage* key = codes + (first + k) * stride;
          fetch_ahead(key, stride, d);
          sums[k] = fma(q, element(key, scales + (first + k) * kMostGroups, d), sums[k]);
        }
      }
      for (int k = 0; k < kKeysAtOnce; ++k) all[first + k] = sums[k];
    }
    return sixteen_sums(all);
  }

  template <int kRows>
  static MOECHAT_INLINE void add_rows(const float* weights, const Storage* values, std::int64_t stride,
                                      std::int64_t keys, float* out, std::int64_t row, std::int64_t width) {
    float scales[16 * kMostGroups];
    read_scales(values, stride, keys, scales);
    const Storage* codes = values + packed_groups(width);
    std::int64_t d = 0;
    const auto read = [&](std::int64_t k, int i) __attribute__((always_inline)) {
      const Storage* value = codes + k * stride;
      if (i == 0) __builtin_prefetch(value + d + kFetchedAhead * stride);
      return element(value, scales + k * kMostGroups, d + 16 * i);
    };
    for (; d + 64 <= width; d += 64) add_part<kRows, 4>(weights, keys, out, row, d, read);
    for (; d < width; d += 32) add_part<kRows, 2>(weights, keys, out, row, d, read);
  }
};

MOECHAT_INLINE std::uint32_t largest_bits(VecI x) {
  std::uint32_t lanes[16];
  storei(lanes, x);
  std::uint32_t most = lanes[0];
  for (int i = 1; i < 16; ++i) most = lanes[i] > most ? lanes[i] : most;
  return most;
}

// All steps are exact or rounded to nearest even, so every instruction set makes the same row.
template <ElementType kType>
void pack_row_of(const typename Elements<kType>::Storage* x, std::int64_t dim, std::uint8_t* row) {
  static const unsigned char kInOrder[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  std::uint8_t* codes = row + packed_groups(dim);
  const auto part = [&](std::int64_t d) __attribute__((always_inline)) {
    if (dim - d >= 16) return Elements<kType>::get(x + d);
    return dim > d ? get_part<kType>(x + d, dim - d) : zero();
  };
  for (std::int64_t first = 0; first < dim; first += kPackedGroup) {
    const Vec both[2] = {part(first), part(first + 16)};
    const VecI magnitude = seti(0x7fffffffu);
    // The bits of magnitudes are in the order of their values, and NaN comes last.
    const VecI most = maxi(andi(as_int(both[0]), magnitude), andi(as_int(both[1]), magnitude));
    const std::uint32_t exponent = largest_bits(most) >> 23;
    const bool number = exponent != kNoNumber;
    // The largest element becomes 64 to 127 units.
    const std::uint32_t unit = !number ? kNoNumber : exponent > 6 ? exponent - 6 : 1;
    row[first / kPackedGroup] = static_cast<std::uint8_t>(unit);
    const Vec inverse = set1(scale_of(static_cast<std::uint8_t>(254 - unit)));
    for (int i = 0; i < 2 && first + 16 * i < dim; ++i) {
      const Vec rounded = min(max(round_small(mul(both[i], inverse)), set1(-127.0f)), set1(127.0f));
      std::int8_t lanes[16] = {};
      // Of a group with a NaN or infinity all elements become 0 times infinity: NaN.
      if (number) store_bytes(lanes, to_int(rounded), kInOrder);
      const std::int64_t at = first + 16 * i;
      const std::int64_t count = dim - at < 16 ? dim - at : 16;
      for (std::int64_t k = 0; k < count; ++k) codes[at + k] = static_cast<std::uint8_t>(lanes[k]);
    }
  }
}

template <ElementType kType>
void pack_rows_of(const PackTask& task, std::int64_t begin, std::int64_t end) {
  using Storage = typename Elements<kType>::Storage;
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t head = i / task.tokens, token = i % task.tokens;
    const Storage* x =
        static_cast<const Storage*>(task.plain) + head * task.plain_head + token * task.plain_token;
    pack_row_of<kType>(x, task.dim,
                       task.packed + head * task.packed_head + token * packed_row_bytes(task.dim));
  }
}

template <ElementType kType>
void unpack_rows_of(const PackTask& task, std::int64_t begin, std::int64_t end) {
  using Storage = typename Elements<kType>::Storage;
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t head = i / task.tokens, token = i % task.tokens;
    Storage* x = static_cast<Storage*>(task.plain) + head * task.plain_head + token * task.plain_token;
    const std::uint8_t* row = task.packed + head * task.packed_head + token * packed_row_bytes(task.dim);
    for_packed(row, task.dim, [&](std::int64_t d, std::int64_t count, Vec values) {
      if (count == 16) {
        Elements<kType>::put(x + d, values);
      } else {
        put_part<kType>(x + d, values, count);
      }
    });
  }
}
