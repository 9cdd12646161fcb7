// 16 lanes of fp32 or uint32 in plain C++: GCC and Clang vector types, which compile to the baseline
// instructions. Included inside the anonymous namespace of one file isa/*.cc; the three simd_*.h files define
// the same names.

// Unroll factor of loops over a group.
#define MOECHAT_UNROLL _Pragma("GCC unroll 1")

constexpr bool kPairStreams = false;  // whether registers suffice for two weight streams at one token

typedef float F4 __attribute__((vector_size(16)));
typedef std::int32_t I4 __attribute__((vector_size(16)));
typedef std::uint32_t U4 __attribute__((vector_size(16)));

struct Vec {
  F4 v[4];
};
struct VecI {
  U4 v[4];
};
struct Mask {
  I4 v[4];
};

#define MOECHAT_LANES(expression)                                       \
  do {                                                                  \
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) { expression; } \
  } while (false)

MOECHAT_INLINE Vec load(const void* from) {
  Vec r;
  __builtin_memcpy(&r, from, sizeof r);
  return r;
}
MOECHAT_INLINE void store(void* to, const Vec& a) { __builtin_memcpy(to, &a, sizeof a); }
MOECHAT_INLINE Vec set1(float value) {
  const F4 f = {value, value, value, value};
  return Vec{{f, f, f, f}};
}
MOECHAT_INLINE Vec zero() { return set1(0.0f); }
MOECHAT_INLINE Vec add(Vec a, Vec b) {
  MOECHAT_LANES(a.v[i] = a.v[i] + b.v[i]);
  return a;
}
MOECHAT_INLINE Vec sub(Vec a, Vec b) {
  MOECHAT_LANES(a.v[i] = a.v[i] - b.v[i]);
  return a;
}
MOECHAT_INLINE Vec mul(Vec a, Vec b) {
  MOECHAT_LANES(a.v[i] = a.v[i] * b.v[i]);
  return a;
}
MOECHAT_INLINE Vec div(Vec a, Vec b) {
  MOECHAT_LANES(a.v[i] = a.v[i] / b.v[i]);
  return a;
}
// a * b + c and c - a * b; rounded twice here, once on instruction sets with FMA.
MOECHAT_INLINE Vec fma(Vec a, Vec b, Vec c) { return add(mul(a, b), c); }
MOECHAT_INLINE Vec fnma(Vec a, Vec b, Vec c) { return sub(c, mul(a, b)); }
// min and max return the second operand if either is NaN.
MOECHAT_INLINE Vec min(Vec a, Vec b) {
  MOECHAT_LANES(a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]);
  return a;
}
MOECHAT_INLINE Vec max(Vec a, Vec b) {
  MOECHAT_LANES(a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]);
  return a;
}
// Rounds to nearest even for |a| < 2^22: the sum with 1.5 * 2^23 has no fraction bits left.
MOECHAT_INLINE Vec round_small(Vec a) {
  const Vec magic = set1(12582912.0f);
  return sub(add(a, magic), magic);
}
// Lane t: the sum of the lanes of x[t], of 16 Vecs, in the order of lane_sum().
MOECHAT_INLINE Vec lane_sums(const Vec* x) {
  float sums[16];
  for (int t = 0; t < 16; ++t) {
    float lanes[16];
    store(lanes, x[t]);
    for (int width = 8; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    sums[t] = lanes[0];
  }
  return load(sums);
}
MOECHAT_INLINE Vec sqrt(Vec a) {
  float f[16];
  store(f, a);
  for (int i = 0; i < 16; ++i) f[i] = ::sqrtf(f[i]);
  return load(f);
}

MOECHAT_INLINE VecI loadi(const void* from) {
  VecI r;
  __builtin_memcpy(&r, from, sizeof r);
  return r;
}
MOECHAT_INLINE void storei(void* to, const VecI& a) { __builtin_memcpy(to, &a, sizeof a); }
MOECHAT_INLINE VecI seti(std::uint32_t value) {
  const U4 u = {value, value, value, value};
  return VecI{{u, u, u, u}};
}
MOECHAT_INLINE VecI andi(VecI a, VecI b) {
  MOECHAT_LANES(a.v[i] = a.v[i] & b.v[i]);
  return a;
}
MOECHAT_INLINE VecI ori(VecI a, VecI b) {
  MOECHAT_LANES(a.v[i] = a.v[i] | b.v[i]);
  return a;
}
MOECHAT_INLINE VecI xori(VecI a, VecI b) {
  MOECHAT_LANES(a.v[i] = a.v[i] ^ b.v[i]);
  return a;
}
MOECHAT_INLINE VecI addi(VecI a, VecI b) {
  MOECHAT_LANES(a.v[i] = a.v[i] + b.v[i]);
  return a;
}
MOECHAT_INLINE VecI subi(VecI a, VecI b) {
  MOECHAT_LANES(a.v[i] = a.v[i] - b.v[i]);
  return a;
}
// Low 32 bits of the products.
MOECHAT_INLINE VecI muli(VecI a, VecI b) {
  MOECHAT_LANES(a.v[i] = a.v[i] * b.v[i]);
  return a;
}
// Sums of the two products of signed 16-bit halves.
MOECHAT_INLINE VecI madd16(VecI a, VecI b) {
  MOECHAT_LANES(const I4 low = ((I4)(a.v[i] << 16) >> 16) * ((I4)(b.v[i] << 16) >> 16);
                const I4 high = ((I4)a.v[i] >> 16) * ((I4)b.v[i] >> 16); a.v[i] = (U4)low + (U4)high);
  return a;
}
MOECHAT_INLINE VecI shl(VecI a, int bits) {
  MOECHAT_LANES(a.v[i] = a.v[i] << bits);
  return a;
}
MOECHAT_INLINE VecI shr(VecI a, int bits) {
  MOECHAT_LANES(a.v[i] = a.v[i] >> bits);
  return a;
}
MOECHAT_INLINE VecI lookup(VecI table, VecI codes) {
  unsigned char values[64];
  unsigned char bytes[64];
  storei(values, table);
  storei(bytes, codes);
  for (unsigned char& byte : bytes) byte = values[byte];
  return loadi(bytes);
}
// from[2 * at[i]] and from[2 * at[i] + 1].
MOECHAT_INLINE void gather_pairs(const std::uint32_t* from, VecI at, VecI* first, VecI* second) {
  std::uint32_t words[16];
  std::uint32_t others[16];
  storei(words, at);
  for (int i = 0; i < 16; ++i) {
    const std::uint32_t* const pair = from + 2 * words[i];
    words[i] = pair[0];
    others[i] = pair[1];
  }
  *first = loadi(words);
  *second = loadi(others);
}
// 128 less the codes whose bit is set: byte k of a lane has bit k of nibble `nibble` of byte `byte` of that
// lane of `signs`. REQUIRES: codes of 1 to 127.
MOECHAT_INLINE VecI flip_signs(VecI codes, VecI signs, int byte, int nibble) {
  // Copies at distances of 7 bring bit k to bit 8k; no two bits meet.
  const VecI spread = muli(andi(shr(signs, 8 * byte + 4 * nibble), seti(15)), seti(0x00204081u));
  const VecI ones = andi(spread, seti(0x01010101u));
  return addi(xori(codes, subi(shl(ones, 7), ones)), ones);
}
// Maximum of signed values.
MOECHAT_INLINE VecI maxi(VecI a, VecI b) {
  MOECHAT_LANES(a.v[i] = (I4)a.v[i] > (I4)b.v[i] ? a.v[i] : b.v[i]);
  return a;
}
MOECHAT_INLINE VecI shr_signed(VecI a, int bits) {
  MOECHAT_LANES(a.v[i] = (U4)((I4)a.v[i] >> bits));
  return a;
}
// Stores the low bytes of lanes order[0], order[1], ...
MOECHAT_INLINE void store_bytes(std::int8_t* to, const VecI& a, const unsigned char* order) {
  std::int32_t lanes[16];
  storei(lanes, a);
  for (int i = 0; i < 16; ++i) to[i] = static_cast<std::int8_t>(lanes[order[i]]);
}
MOECHAT_INLINE Vec as_float(VecI a) {
  Vec r;
  MOECHAT_LANES(r.v[i] = (F4)a.v[i]);
  return r;
}
MOECHAT_INLINE VecI as_int(Vec a) {
  VecI r;
  MOECHAT_LANES(r.v[i] = (U4)a.v[i]);
  return r;
}
MOECHAT_INLINE Vec to_float(VecI a) {  // signed
  Vec r;
  MOECHAT_LANES(r.v[i] = __builtin_convertvector((I4)a.v[i], F4));
  return r;
}
MOECHAT_INLINE VecI to_int(Vec a) {  // of integral values
  VecI r;
  MOECHAT_LANES(r.v[i] = (U4) __builtin_convertvector(a.v[i], I4));
  return r;
}

MOECHAT_INLINE Mask less(Vec a, Vec b) {
  Mask m;
  MOECHAT_LANES(m.v[i] = a.v[i] < b.v[i]);
  return m;
}
MOECHAT_INLINE Mask equal(Vec a, Vec b) {
  Mask m;
  MOECHAT_LANES(m.v[i] = a.v[i] == b.v[i]);
  return m;
}
MOECHAT_INLINE Mask both(Mask a, Mask b) {
  MOECHAT_LANES(a.v[i] = a.v[i] & b.v[i]);
  return a;
}
MOECHAT_INLINE Mask either(Mask a, Mask b) {
  MOECHAT_LANES(a.v[i] = a.v[i] | b.v[i]);
  return a;
}
MOECHAT_INLINE Mask negate(Mask a) {
  MOECHAT_LANES(a.v[i] = ~a.v[i]);
  return a;
}
MOECHAT_INLINE Vec select(Mask m, Vec yes, Vec no) {
  MOECHAT_LANES(yes.v[i] = m.v[i] ? yes.v[i] : no.v[i]);
  return yes;
}
MOECHAT_INLINE bool any(Mask m) {
  const I4 r = (m.v[0] | m.v[1]) | (m.v[2] | m.v[3]);
  return (r[0] | r[1] | r[2] | r[3]) != 0;
}
MOECHAT_INLINE bool all(Mask m) { return !any(negate(m)); }

MOECHAT_INLINE Vec load_fp16(const void* from) {
  std::uint16_t h[16];
  float f[16];
  __builtin_memcpy(h, from, sizeof h);
  for (int i = 0; i < 16; ++i) f[i] = half::from_fp16(h[i]);
  return load(f);
}
MOECHAT_INLINE void store_fp16(void* to, const Vec& a) {
  std::uint16_t h[16];
  float f[16];
  store(f, a);
  for (int i = 0; i < 16; ++i) h[i] = half::to_fp16(f[i]);
  __builtin_memcpy(to, h, sizeof h);
}
// Converts the fp16 values in the low and in the high half of every word.
MOECHAT_INLINE void split_fp16(const VecI& words, Vec* low, Vec* high) {
  std::uint32_t w[16];
  float l[16];
  float h[16];
  storei(w, words);
  for (int i = 0; i < 16; ++i) {
    l[i] = half::from_fp16(static_cast<std::uint16_t>(w[i] & 0xffffu));
    h[i] = half::from_fp16(static_cast<std::uint16_t>(w[i] >> 16));
  }
  *low = load(l);
  *high = load(h);
}
// rows [16][64] -> columns [64][16]
MOECHAT_INLINE void transpose_tile(const float* rows, float* columns) {
  for (int r = 0; r < 16; ++r) {
    for (int c = 0; c < 64; ++c) columns[c * 16 + r] = rows[r * 64 + c];
  }
}
// Four dwords of 16 rows `stride` bytes apart: to[d] has dword d of every row.
MOECHAT_INLINE void load_dwords4(const unsigned char* from, std::int64_t stride, VecI* to) {
  std::uint32_t dwords[4][16];
  for (int r = 0; r < 16; ++r) {
    std::uint32_t row[4];
    __builtin_memcpy(row, from + r * stride, sizeof row);
    for (int d = 0; d < 4; ++d) dwords[d][r] = row[d];
  }
  for (int d = 0; d < 4; ++d) to[d] = loadi(dwords[d]);
}
// Stores the low halves of the lanes, 32 bytes.
MOECHAT_INLINE void store_low_halves(void* to, const VecI& a) {
  std::uint32_t lanes[16];
  std::uint16_t halves[16];
  storei(lanes, a);
  for (int i = 0; i < 16; ++i) halves[i] = static_cast<std::uint16_t>(lanes[i]);
  __builtin_memcpy(to, halves, sizeof halves);
}

#undef MOECHAT_LANES
