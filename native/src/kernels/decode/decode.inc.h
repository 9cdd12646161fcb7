// Kernels for the small parts of a decoding step, over the Vec of one instruction set; see decode_api.h.
// Included inside the anonymous namespace of the files isa/*.cc, after math.inc.h.

#if defined(__AVX512F__)
MOECHAT_INLINE Vec load_bf16(const void* from) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
  return Vec{_mm512_castsi512_ps(_mm512_slli_epi32(words, 16))};
}
constexpr int kKeysAtOnce = 16;
constexpr int kRowsAtOnce = 4;
#elif defined(__AVX2__)
MOECHAT_INLINE __m256 load_bf16_half(const __m128i* from) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(from)), 16));
}
MOECHAT_INLINE Vec load_bf16(const void* from) {
  const __m128i* p = static_cast<const __m128i*>(from);
  return Vec{load_bf16_half(p), load_bf16_half(p + 1)};
}
constexpr int kKeysAtOnce = 4;
constexpr int kRowsAtOnce = 1;
#else
MOECHAT_INLINE Vec load_bf16(const void* from) {
  std::uint16_t words[16];
  __builtin_memcpy(words, from, sizeof words);
  std::uint32_t bits[16];
  for (int i = 0; i < 16; ++i) bits[i] = static_cast<std::uint32_t>(words[i]) << 16;
  return load(bits);
}
constexpr int kKeysAtOnce = 4;
constexpr int kRowsAtOnce = 1;
#endif

// Rounds to nearest even; NaN stays NaN.
MOECHAT_INLINE VecI bf16_bits(Vec x) {
  const Vec safe = select(equal(x, x), x, as_float(seti(0x7fc00000u)));
  const VecI bits = as_int(safe);
  const VecI odd = andi(shr(bits, 16), seti(1u));
  // The quiet NaN has only zeros in its low bits, so that rounding never carries into it.
  return shr(addi(addi(bits, seti(0x7fffu)), odd), 16);
}

template <ElementType kType>
struct Elements {
  using Storage = std::uint16_t;
  static MOECHAT_INLINE Vec get(const Storage* from) {
    return kType == ElementType::kBfloat16 ? load_bf16(from) : load_fp16(from);
  }
  static MOECHAT_INLINE void put(Storage* to, Vec x) {
    if (kType == ElementType::kFloat16) {
      store_fp16(to, x);
      return;
    }
    std::uint32_t bits[16];
    storei(bits, bf16_bits(x));
    for (int i = 0; i < 16; ++i) to[i] = static_cast<std::uint16_t>(bits[i]);
  }
  static MOECHAT_INLINE Vec rounded(Vec x) {
    if (kType == ElementType::kBfloat16) return as_float(shl(bf16_bits(x), 16));
    Storage lanes[16];
    store_fp16(lanes, x);
    return load_fp16(lanes);
  }
};

template <>
struct Elements<ElementType::kFloat32> {
  using Storage = float;
  static MOECHAT_INLINE Vec get(const Storage* from) { return load(from); }
  static MOECHAT_INLINE void put(Storage* to, Vec x) { store(to, x); }
  static MOECHAT_INLINE Vec rounded(Vec x) { return x; }
};

// Access only the first `count` < 16 lanes: get_part sets the others to 0, put_part does not write them.
template <ElementType kType>
MOECHAT_INLINE Vec get_part(const typename Elements<kType>::Storage* from, std::int64_t count) {
  typename Elements<kType>::Storage lanes[16] = {};
  for (std::int64_t i = 0; i < count; ++i) lanes[i] = from[i];
  return Elements<kType>::get(lanes);
}
template <ElementType kType>
MOECHAT_INLINE void put_part(typename Elements<kType>::Storage* to, Vec x, std::int64_t count) {
  typename Elements<kType>::Storage lanes[16];
  Elements<kType>::put(lanes, x);
  for (std::int64_t i = 0; i < count; ++i) to[i] = lanes[i];
}

template <ElementType kType>
void rms_norm_of(const NormTask& task, std::int64_t row_begin, std::int64_t row_end) {
  using Type = Elements<kType>;
  using Storage = typename Type::Storage;
  const std::int64_t cols = task.cols;
  const std::int64_t whole = cols / 16 * 16;
  const Storage* weight = static_cast<const Storage*>(task.weight);
  const Vec offset = set1(task.offset);
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const Storage* x = static_cast<const Storage*>(task.x) + row * cols;
    Storage* out = static_cast<Storage*>(task.out) + row * cols;
    Vec sums[4] = {zero(), zero(), zero(), zero()};
    std::int64_t c = 0;
    for (; c + 64 <= cols; c += 64) {
      for (int i = 0; i < 4; ++i) {
        const Vec part = Type::get(x + c + 16 * i);
        sums[i] = fma(part, part, sums[i]);
      }
    }
    for (; c < whole; c += 16) {
      const Vec part = Type::get(x + c);
      sums[0] = fma(part, part, sums[0]);
    }
    if (c < cols) {
      const Vec part = get_part<kType>(x + c, cols - c);
      sums[1] = fma(part, part, sums[1]);
    }
    const float squares = lane_sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    const float mean = squares / static_cast<float>(cols);
    const Vec factor = set1(1.0f / ::sqrtf(mean + task.eps));
    const auto normal = [&](Vec part, Vec scale) __attribute__((always_inline)) {
      Vec y = mul(part, factor);
      if (task.round_first) y = Type::rounded(y);
      return mul(add(offset, scale), y);
    };
    for (c = 0; c < whole; c += 16) Type::put(out + c, normal(Type::get(x + c), Type::get(weight + c)));
    if (c < cols) {
      const Vec y = normal(get_part<kType>(x + c, cols - c), get_part<kType>(weight + c, cols - c));
      put_part<kType>(out + c, y, cols - c);
    }
  }
}

template <ElementType kType>
void rotate_of(const RotateTask& task) {
  using Type = Elements<kType>;
  using Storage = typename Type::Storage;
  const std::int64_t half = task.width / 2;
  const std::int64_t second =
      task.angles == task.width ? half : 0;  // offset of the angle of the second element of a pair
  for (std::int64_t t = 0; t < task.tokens; ++t) {
    const Storage* cos = static_cast<const Storage*>(task.cos) + t * task.angles;
    const Storage* sin = static_cast<const Storage*>(task.sin) + t * task.angles;
    for (std::int64_t h = 0; h < task.heads; ++h) {
      const Storage* x = static_cast<const Storage*>(task.x) + t * task.token_stride + h * task.head_stride;
      Storage* out = static_cast<Storage*>(task.out) + (t * task.heads + h) * task.dim;
      const auto turn = [&](std::int64_t i, auto get, auto put) __attribute__((always_inline)) {
        const Vec a = get(x + i);
        const Vec b = get(x + half + i);
        const Vec low = Type::rounded(mul(a, get(cos + i)));
        const Vec high = Type::rounded(mul(b, get(cos + second + i)));
        put(out + i, sub(low, Type::rounded(mul(b, get(sin + i)))));
        put(out + half + i, add(high, Type::rounded(mul(a, get(sin + second + i)))));
      };
      std::int64_t i = 0;
      for (; i + 16 <= half; i += 16) {
        turn(
            i, [](const Storage* from) { return Type::get(from); },
            [](Storage* to, Vec v) { Type::put(to, v); });
      }
      if (i < half) {
        const std::int64_t left = half - i;
        turn(
            i, [left](const Storage* from) { return get_part<kType>(from, left); },
            [left](Storage* to, Vec v) { put_part<kType>(to, v, left); });
      }
      for (std::int64_t d = task.width; d < task.dim; ++d) out[d] = x[d];
    }
  }
}

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

MOECHAT_INLINE float largest_lane(Vec x) {
  float lanes[16];
  store(lanes, x);
  float most = lanes[0];
  for (int i = 1; i < 16; ++i) most = lanes[i] > most ? lanes[i] : most;
  return most;
}

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

template <ElementType kType>
void attend_queries_of(const AttendTask& task, const AttendShape& shape, float* rows) {
  using Storage = typename Elements<kType>::Storage;
  for (std::int64_t h = 0; h < task.kv_heads * task.group; ++h) {
    for (std::int64_t t = 0; t < task.tokens; ++t) {
      const Storage* from =
          static_cast<const Storage*>(task.query) + h * task.query_head + t * task.query_token;
      widen<kType>(from, task.key_dim + task.tail_dim, rows + (h * task.tokens + t) * shape.query_width,
                   shape.query_width);
    }
  }
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

// Adds weighted values to kRows rows of sums, kVecs * 16 elements from `d` on.
template <ElementType kType, bool kFetches, int kRows, int kVecs>
MOECHAT_INLINE void add_part(const float* weights, const typename Elements<kType>::Storage* values,
                             std::int64_t stride, std::int64_t keys, float* out, std::int64_t row,
                             std::int64_t d) {
  Vec sums[kRows][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) sums[r][i] = load(out + r * row + d + 16 * i);
  }
  for (std::int64_t k = 0; k < keys; ++k) {
    const auto* value = values + k * stride + d;
    Vec parts[kVecs];
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) {
      fetch_ahead<kType, kFetches>(value + 16 * i, stride, 16 * i);
      parts[i] = Elements<kType>::get(value + 16 * i);
    }
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
  constexpr int kVecs = 4;
  std::int64_t d = 0;
  for (; d + 16 * kVecs <= width; d += 16 * kVecs) {
    add_part<kType, kFetches, kRows, kVecs>(weights, values, stride, keys, out, row, d);
  }
  for (; d < width; d += 16) add_part<kType, kFetches, kRows, 1>(weights, values, stride, keys, out, row, d);
}

constexpr std::int64_t kRowsInPlace = 2;

template <ElementType kType>
void attend_unit_of(const AttendTask& task, const AttendShape& shape, const float* queries, std::int64_t head,
                    std::int64_t index, float* scratch, float* partials) {
  using Storage = typename Elements<kType>::Storage;
  constexpr float kHidden = -3.0e38f;
  const std::int64_t begin = index * kAttendKeys;
  const std::int64_t count = begin + kAttendKeys < task.context ? kAttendKeys : task.context - begin;
  float* keys = scratch;
  float* values = keys + 16 * shape.query_width;
  float* weights = values + 16 * shape.value_width;  // [rows, kAttendKeys]
  const Storage* key = static_cast<const Storage*>(task.key) + head * task.key_head + begin * task.key_token;
  const Storage* tail =
      static_cast<const Storage*>(task.tail) + head * task.tail_head + begin * task.tail_token;
  const Storage* value =
      static_cast<const Storage*>(task.value) + head * task.value_head + begin * task.value_token;
  // Read in place where each is needed only once or twice, or is float32; else converted once for all rows.
  const bool in_place = kType == ElementType::kFloat32 || shape.rows <= kRowsInPlace;
  const bool plain_keys = in_place && task.tail_dim == 0 && task.key_dim == shape.query_width;
  const bool plain_values = in_place && task.value_dim == shape.value_width;
  const float* own = queries + head * shape.rows * shape.query_width;

  for (std::int64_t k = 0; k < count; k += 16) {
    const std::int64_t present = count - k < 16 ? count - k : 16;
    const bool plain = plain_keys && present == 16;
    if (!plain) {
      for (std::int64_t i = 0; i < 16; ++i) {
        float* to = keys + i * shape.query_width;
        // Past the last key, repeat it; the softmax below hides its products.
        const std::int64_t from = k + (i < present ? i : present - 1);
        fetch_row<kType>(key + (from + kFetchedAhead) * task.key_token, task.key_dim);
        widen<kType>(key + from * task.key_token, task.key_dim, to, shape.query_width);
        if (task.tail_dim > 0) {
          widen<kType>(tail + from * task.tail_token, task.tail_dim, to + task.key_dim,
                       shape.query_width - task.key_dim);
        }
      }
    }
    for (std::int64_t r = 0; r < shape.rows; ++r) {
      const float* query = own + r * shape.query_width;
      Vec products = plain ? sixteen_products<kType, true>(query, key + k * task.key_token, task.key_token,
                                                           shape.query_width)
                           : sixteen_products<ElementType::kFloat32, false>(query, keys, shape.query_width,
                                                                            shape.query_width);
      products = mul(products, set1(task.scale));
      float* to = weights + r * kAttendKeys + k;
      store(to, products);
      for (std::int64_t i = present; i < 16; ++i) to[i] = kHidden;
      if (task.visible != nullptr) {
        const unsigned char* seen = task.visible + (r % task.tokens) * task.visible_token + begin + k;
        for (std::int64_t i = 0; i < present; ++i) {
          if (seen[i] == 0) to[i] = kHidden;
        }
      }
    }
  }
  const std::int64_t padded = (count + 15) / 16 * 16;
  for (std::int64_t r = 0; r < shape.rows; ++r) {
    float* row = weights + r * kAttendKeys;
    Vec most = set1(kHidden);
    for (std::int64_t k = 0; k < padded; k += 16) most = max(most, load(row + k));
    const float maximum = largest_lane(most);
    Vec sum = zero();
    for (std::int64_t k = 0; k < padded; k += 16) {
      const Vec products = load(row + k);
      // exp() never returns 0, so hidden keys get weight 0 explicitly.
      const Vec weight = select(equal(products, set1(kHidden)), zero(), exp(sub(products, set1(maximum))));
      store(row + k, weight);
      sum = add(sum, weight);
    }
    float* partial = partials + r * shape.partial;
    for (std::int64_t d = 0; d < shape.value_width; d += 16) store(partial + d, zero());
    partial[shape.value_width] = maximum;
    partial[shape.value_width + 1] = lane_sum(sum);
  }
  for (std::int64_t k = 0; k < count; k += 16) {
    const std::int64_t present = count - k < 16 ? count - k : 16;
    if (!plain_values) {
      for (std::int64_t i = 0; i < present; ++i) {
        fetch_row<kType>(value + (k + i + kFetchedAhead) * task.value_token, task.value_dim);
        widen<kType>(value + (k + i) * task.value_token, task.value_dim, values + i * shape.value_width,
                     shape.value_width);
      }
    }
    const auto add_rows = [&](auto rows, std::int64_t r) __attribute__((always_inline)) {
      constexpr int kRows = decltype(rows)::value;
      const float* weight = weights + r * kAttendKeys + k;
      float* sum = partials + r * shape.partial;
      if (plain_values) {
        add_values<kType, true, kRows>(weight, value + k * task.value_token, task.value_token, present, sum,
                                       shape.partial, shape.value_width);
      } else {
        add_values<ElementType::kFloat32, false, kRows>(weight, values, shape.value_width, present, sum,
                                                        shape.partial, shape.value_width);
      }
    };
    std::int64_t r = 0;
    for (; r + kRowsAtOnce <= shape.rows; r += kRowsAtOnce) {
      add_rows(std::integral_constant<int, kRowsAtOnce>{}, r);
    }
    for (; r < shape.rows; ++r) add_rows(std::integral_constant<int, 1>{}, r);
  }
}

MOECHAT_INLINE float exponential(float x) {
  float lanes[16];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

template <ElementType kType>
void attend_sum_of(const AttendTask& task, const AttendShape& shape, float* partials) {
  using Storage = typename Elements<kType>::Storage;
  const std::int64_t unit = shape.rows * shape.partial;
  for (std::int64_t head = 0; head < task.kv_heads; ++head) {
    float* first = partials + head * shape.units * unit;
    for (std::int64_t r = 0; r < shape.rows; ++r) {
      float* row = first + r * shape.partial;
      const std::int64_t query_head = head * task.group + r / task.tokens;
      float maximum = row[shape.value_width];
      for (std::int64_t u = 1; u < shape.units; ++u) {
        const float other = row[u * unit + shape.value_width];
        maximum = other > maximum ? other : maximum;
      }
      float sum = 0.0f;
      if (task.sinks != nullptr) {
        const float sink = task.sinks[query_head];
        maximum = sink > maximum ? sink : maximum;
        sum = exponential(sink - maximum);
      }
      for (std::int64_t u = 0; u < shape.units; ++u) {
        float* part = row + u * unit;
        const float share = exponential(part[shape.value_width] - maximum);
        sum += share * part[shape.value_width + 1];
        const Vec factor = set1(share);
        for (std::int64_t d = 0; d < shape.value_width; d += 16) {
          const Vec weighted = mul(factor, load(part + d));
          store(row + d, u == 0 ? weighted : add(load(row + d), weighted));
        }
      }
      Storage* out = static_cast<Storage*>(task.out) +
                     ((r % task.tokens) * task.kv_heads * task.group + query_head) * task.value_dim;
      // If every key is hidden the output is 0, as in torch. A NaN sum stays NaN.
      const Vec inverse = set1(sum == 0.0f ? 0.0f : 1.0f / sum);
      std::int64_t d = 0;
      for (; d + 16 <= task.value_dim; d += 16) Elements<kType>::put(out + d, mul(inverse, load(row + d)));
      if (d < task.value_dim) put_part<kType>(out + d, mul(inverse, load(row + d)), task.value_dim - d);
    }
  }
}

template <ElementType kType>
void route_of(const RouteTask& task, std::int64_t begin, std::int64_t end) {
  using Type = Elements<kType>;
  using Storage = typename Type::Storage;
  const std::int64_t hidden = task.hidden;
  for (std::int64_t e = begin; e < end; ++e) {
    const Storage* weight = static_cast<const Storage*>(task.weight) + e * hidden;
    for (std::int64_t t = 0; t < task.tokens; ++t) {
      const Storage* x = static_cast<const Storage*>(task.x) + t * hidden;
      Vec sums[4] = {zero(), zero(), zero(), zero()};
      std::int64_t c = 0;
      for (; c + 64 <= hidden; c += 64) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          sums[i] = fma(Type::get(x + c + 16 * i), Type::get(weight + c + 16 * i), sums[i]);
        }
      }
      for (; c + 16 <= hidden; c += 16) sums[0] = fma(Type::get(x + c), Type::get(weight + c), sums[0]);
      if (c < hidden) {
        sums[1] = fma(get_part<kType>(x + c, hidden - c), get_part<kType>(weight + c, hidden - c), sums[1]);
      }
      float sum = lane_sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
      if (task.bias != nullptr) {
        float lanes[16];
        store(lanes, get_part<kType>(static_cast<const Storage*>(task.bias) + e, 1));
        sum += lanes[0];
      }
      if (task.logits_type == ElementType::kFloat32) {
        static_cast<float*>(task.logits)[t * task.experts + e] = sum;
      } else {
        put_part<kType>(static_cast<Storage*>(task.logits) + t * task.experts + e, set1(sum), 1);
      }
    }
  }
}

void exponentials(float* x, std::int64_t count, float shift) {
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) store(x + i, exp(sub(load(x + i), set1(shift))));
  if (i < count) {
    const Vec tail = exp(sub(get_part<ElementType::kFloat32>(x + i, count - i), set1(shift)));
    put_part<ElementType::kFloat32>(x + i, tail, count - i);
  }
}

template <ElementType kValue>
struct TypeTag {
  static constexpr ElementType kType = kValue;
};

// Calls body(tag), where decltype(tag)::kType is the type.
template <class Body>
MOECHAT_INLINE void for_type(ElementType type, const Body& body) {
  switch (type) {
    case ElementType::kFloat32:
      return body(TypeTag<ElementType::kFloat32>{});
    case ElementType::kBfloat16:
      return body(TypeTag<ElementType::kBfloat16>{});
    case ElementType::kFloat16:
      return body(TypeTag<ElementType::kFloat16>{});
  }
}

void rms_norm(const NormTask& task, std::int64_t begin, std::int64_t end) {
  for_type(task.type, [&](auto tag) { rms_norm_of<decltype(tag)::kType>(task, begin, end); });
}
void rotate(const RotateTask& task) {
  for_type(task.type, [&](auto tag) { rotate_of<decltype(tag)::kType>(task); });
}
void attend_queries(const AttendTask& task, const AttendShape& shape, float* rows) {
  for_type(task.type, [&](auto tag) { attend_queries_of<decltype(tag)::kType>(task, shape, rows); });
}
void attend_unit(const AttendTask& task, const AttendShape& shape, const float* queries, std::int64_t head,
                 std::int64_t index, float* scratch, float* partials) {
  for_type(task.type, [&](auto tag) {
    attend_unit_of<decltype(tag)::kType>(task, shape, queries, head, index, scratch, partials);
  });
}
void attend_sum(const AttendTask& task, const AttendShape& shape, float* partials) {
  for_type(task.type, [&](auto tag) { attend_sum_of<decltype(tag)::kType>(task, shape, partials); });
}
void route(const RouteTask& task, std::int64_t begin, std::int64_t end) {
  for_type(task.type, [&](auto tag) { route_of<decltype(tag)::kType>(task, begin, end); });
}

template <ElementType kType>
void widen_of(const void* from, std::int64_t count, float* to) {
  const auto* x = static_cast<const typename Elements<kType>::Storage*>(from);
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) store(to + i, Elements<kType>::get(x + i));
  if (i < count) put_part<ElementType::kFloat32>(to + i, get_part<kType>(x + i, count - i), count - i);
}
template <ElementType kType>
void narrow_of(const float* from, std::int64_t count, void* to) {
  auto* out = static_cast<typename Elements<kType>::Storage*>(to);
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) Elements<kType>::put(out + i, load(from + i));
  if (i < count) put_part<kType>(out + i, get_part<ElementType::kFloat32>(from + i, count - i), count - i);
}
template <ElementType kType>
void add_of(const float* x, std::int64_t count, void* to) {
  using Type = Elements<kType>;
  auto* out = static_cast<typename Type::Storage*>(to);
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) Type::put(out + i, add(Type::get(out + i), Type::rounded(load(x + i))));
  if (i < count) {
    const Vec part = Type::rounded(get_part<ElementType::kFloat32>(x + i, count - i));
    put_part<kType>(out + i, add(get_part<kType>(out + i, count - i), part), count - i);
  }
}
void widen(ElementType type, const void* from, std::int64_t count, float* to) {
  for_type(type, [&](auto tag) { widen_of<decltype(tag)::kType>(from, count, to); });
}
void narrow(ElementType type, const float* from, std::int64_t count, void* to) {
  for_type(type, [&](auto tag) { narrow_of<decltype(tag)::kType>(from, count, to); });
}
void add_elements(ElementType type, const float* x, std::int64_t count, void* out) {
  for_type(type, [&](auto tag) { add_of<decltype(tag)::kType>(x, count, out); });
}

const DecodeKernels kDecode = {rms_norm, rotate,       attend_queries, attend_unit, attend_sum,
                               route,    exponentials, widen,          narrow,      add_elements};
