// Elements of float32, bfloat16 or float16 over the Vec of one instruction set, for the parts of a decoding
// step. Included inside the anonymous namespace of the files isa/*.cc, after math.inc.h.

#if defined(__AVX512F__)
MOECHAT_INLINE Vec load_bf16(const void* from) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
  return Vec{_mm512_castsi512_ps(_mm512_slli_epi32(words, 16))};
}
#elif defined(__AVX2__)
MOECHAT_INLINE __m256 load_bf16_half(const __m128i* from) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(from)), 16));
}
MOECHAT_INLINE Vec load_bf16(const void* from) {
  const __m128i* p = static_cast<const __m128i*>(from);
  return Vec{load_bf16_half(p), load_bf16_half(p + 1)};
}
#else
MOECHAT_INLINE Vec load_bf16(const void* from) {
  std::uint16_t words[16];
  __builtin_memcpy(words, from, sizeof words);
  std::uint32_t bits[16];
  for (int i = 0; i < 16; ++i) bits[i] = static_cast<std::uint32_t>(words[i]) << 16;
  return load(bits);
}
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
