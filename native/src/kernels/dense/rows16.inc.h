// Matrix-vector products with rows of 16-bit floats, read in place from a checkpoint. Included inside the
// anonymous namespace of one instruction set.
//
// Summation order of one row and one token: 32 chains, one for each column modulo 32, each sequential over
// the columns; chain i is added to chain i + 16, then lanes 8, 4, 2 and 1 apart; then the bias. The order
// does not depend on the other tokens of a pass or on threads, and neither do the results.
//
// rows16_inputs (rows16.cc) permutes the inputs of bf16 weights: of every 32 columns first those of the low
// halves of the words, then those of the high halves. Inputs of fp16 weights keep their order.

#if defined(__AVX512F__)
constexpr int kRow16Tokens = 8;
#elif defined(__AVX2__)
constexpr int kRow16Tokens = 2;
#else
constexpr int kRow16Tokens = 1;
#endif
constexpr std::int64_t kRow16Step = 32;     // columns
constexpr std::int64_t kRow16Ahead = 2048;  // bytes that are prefetched ahead

struct RowsBf16 {
  MOECHAT_INLINE static void columns(const std::uint16_t* at, Vec* first, Vec* second) {
    const VecI words = loadi(at);
    *first = as_float(shl(words, 16));
    *second = as_float(andi(words, seti(0xffff0000u)));
  }
};

struct RowsFp16 {
  MOECHAT_INLINE static void columns(const std::uint16_t* at, Vec* first, Vec* second) {
    *first = load_fp16(at);
    *second = load_fp16(at + 16);
  }
};

// Sum of 16 lanes: adds lanes 8 apart, then 4, 2 and 1.
MOECHAT_INLINE float sum_lanes(Vec x) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.a), _mm512_extractf32x8_ps(x.a, 1));
#else
  const __m256 eight = _mm256_add_ps(x.a, x.b);
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  float lanes[16];
  store(lanes, x);
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
#endif
}

// Adds the products of 32 columns to the chains.
template <class E, int kTokens>
MOECHAT_INLINE void rows16_step(const std::uint16_t* at, const float* x, std::int64_t stride,
                                Vec (&low)[kTokens], Vec (&high)[kTokens]) {
  Vec first;
  Vec second;
  E::columns(at, &first, &second);
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
    low[t] = fma(first, load(x + t * stride), low[t]);
    high[t] = fma(second, load(x + t * stride + 16), high[t]);
  }
}

// Computes one row for the kTokens tokens that begin at x.
template <class E, int kTokens, bool kPrefetch>
MOECHAT_INLINE void rows16_dot(const Rows16Task& task, const std::uint16_t* row, const float* x,
                               float (&sums)[kTokens]) {
  const std::int64_t cols = task.cols;
  const std::int64_t stride = task.padded;
  Vec low[kTokens];
  Vec high[kTokens];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) low[t] = high[t] = zero();
  const std::int64_t whole = cols / kRow16Step * kRow16Step;
  for (std::int64_t c = 0; c < whole; c += kRow16Step) {
    if (kPrefetch) __builtin_prefetch(reinterpret_cast<const char*>(row + c) + kRow16Ahead, 0, 3);
    rows16_step<E, kTokens>(row + c, x + c, stride, low, high);
  }
  if (whole < cols) {
    std::uint16_t rest[kRow16Step] = {};
    __builtin_memcpy(rest, row + whole, static_cast<std::size_t>(cols - whole) * sizeof *rest);
    rows16_step<E, kTokens>(rest, x + whole, stride, low, high);
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
    sums[t] = sum_lanes(add(low[t], high[t]));
  }
}

template <class E>
void rows16_of(const Rows16Task& task, std::int64_t begin, std::int64_t end) {
  for (std::int64_t r = begin; r < end; ++r) {
    const std::uint16_t* row = task.weights + r * task.cols;
    const float bias = task.bias != nullptr ? task.bias[r] : 0.0f;
    std::int64_t t = 0;
    const auto put = [&](const float* sums, int count) {
      for (int i = 0; i < count; ++i) task.out[(t + i) * task.rows + r] = sums[i] + bias;
      t += count;
    };
    for (; t + kRow16Tokens <= task.tokens;) {
      float sums[kRow16Tokens];
      rows16_dot<E, kRow16Tokens, true>(task, row, task.x + t * task.padded, sums);
      put(sums, kRow16Tokens);
    }
    if (kRow16Tokens > 4 && t + 4 <= task.tokens) {
      float sums[4];
      rows16_dot<E, 4, true>(task, row, task.x + t * task.padded, sums);
      put(sums, 4);
    }
    if (kRow16Tokens > 2 && t + 2 <= task.tokens) {
      float sums[2];
      rows16_dot<E, 2, true>(task, row, task.x + t * task.padded, sums);
      put(sums, 2);
    }
    if (t < task.tokens) {
      float sums[1];
      rows16_dot<E, 1, true>(task, row, task.x + t * task.padded, sums);
      put(sums, 1);
    }
  }
}

void rows16(const Rows16Task& task, std::int64_t begin, std::int64_t end) {
  if (task.fp16) {
    rows16_of<RowsFp16>(task, begin, end);
  } else {
    rows16_of<RowsBf16>(task, begin, end);
  }
}
