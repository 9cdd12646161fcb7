// Codes of a (tile, group) unpacked for many tokens, and tokens rearranged to match them. Included inside the
// anonymous namespace of one instruction set.
//
// A panel record of plain weights holds the codes of 16 rows x 64 columns, then 16 lanes each of: fp32 scales
// or steps; fp32 zeros or, at 2 to 4 bits, offsets of both halves; for biased sums, fp32 biases; for
// kShortQuads at 2 to 4 bits, the factors of the first half and of the second, in both int16 of a lane.
//   kQuads, kShortQuads, kPlanes: 16 steps, step d = code dword d (see QuantisedRows in kernel_api.h)
//   kPairs: 32 steps of two int16 a lane, step 2d + j = bytes j and j + 2 of dword d; instruction sets that
//   multiply by row hold 16 rows of these 64 int16 instead
// At 2 to 4 bits the codes are multiplied by the factors of their halves, except in kShortQuads, whose sums
// have 16 bits and are multiplied when they are widened. A gathered token holds, for every group, the
// integers that are multiplied by the record: the hi plane (kQuads, kShortQuads), the hi and lo planes
// (kPlanes) or int16 in the order of kPairs. After all groups follow three dwords of every group: the scale
// as float, then the sum as float, or that of each half as an integer or those of both halves in 16 bits each
// (see Terms).
//
// Kept weights (kept_encodings.h) have the codes in the same forms, then 16 lanes of fp32 for the step of
// every sub-block, for the min of every sub-block, and for biases. A gathered token has, after the scale of a
// group, the sums of its sub-blocks as floats. Their panels (class P below) depend on the bits only in how
// many products of kShortQuads fit in 16 bits.

enum class Form { kQuads, kShortQuads, kPairs, kPlanes };

constexpr std::int64_t token_bytes(Form form) {
  return form == Form::kQuads || form == Form::kShortQuads ? 64 : 128;
}

constexpr int kPairSteps = 32;
constexpr int kQuadSteps = 16;

constexpr std::int64_t code_bytes(Form form) {
  return (form == Form::kPairs ? kPairSteps : kQuadSteps) * kStepBytes;
}
constexpr std::int64_t kFactorPlace = 3 * kStepBytes;  // after the codes
template <class P>
constexpr bool has_factors(Form form) {
  return P::kFactors && form == Form::kShortQuads;
}
template <class P>
constexpr std::int64_t kBiasPlace = (P::kKept ? 2 * P::kSubs : 2) * std::int64_t{kStepBytes};
template <class P>
constexpr std::int64_t panel_bytes(Form form) {
  return code_bytes(form) + kBiasPlace<P> + (has_factors<P>(form) ? 3 : 1) * kStepBytes;
}

template <class P>
constexpr std::int64_t kTailDwords = P::kKept ? 1 + P::kSubs : 3;

// Bytes of a gathered token, an odd number of cache lines: rows of a power of two bytes would map to the same
// cache sets.
template <class P>
constexpr std::int64_t gathered_bytes(Form form, std::int64_t groups) {
  const std::int64_t bytes = groups * (token_bytes(form) + kTailDwords<P> * 4);
  return ((bytes + 63) / 64 | 1) * 64;
}

// Gathered tokens, `stride` bytes apart, of `groups` groups.
struct TokenRows {
  const unsigned char* data;
  std::int64_t stride;
  std::int64_t groups;
};

// The term that is added to the sum of a row and a token for every group: kTerms, the term itself; kWeighted,
// the term times the weight of the token (groups are blocks of an expert); kBiased, the same with the bias in
// the record added to the term.
enum class Sum { kTerms, kWeighted, kBiased };

template <Terms kTerms>
MOECHAT_INLINE Vec panel_term(Vec scale, Vec zeros, VecI isum, const std::uint32_t* of_group, Vec acc) {
  float x_scale;
  __builtin_memcpy(&x_scale, of_group, sizeof x_scale);
  if constexpr (kTerms == Terms::kZeros) {
    float sum;
    __builtin_memcpy(&sum, of_group + 1, sizeof sum);
    return zero_term(scale, zeros, isum, x_scale, sum, acc);
  } else {
    const VecI taken = offset_sums<kTerms>(as_int(zeros), of_group[1], of_group[2]);
    return half_term(scale, subi(isum, taken), x_scale, acc);
  }
}

template <Sum kSum, class P, Terms kTerms>
MOECHAT_INLINE Vec next_sum(const unsigned char* of_tile, Vec scale, Vec zeros, VecI isum,
                            const std::uint32_t* of_group, const float* weights, int token, Vec acc) {
  if constexpr (kSum == Sum::kTerms) {
    return panel_term<kTerms>(scale, zeros, isum, of_group, acc);
  } else {
    Vec term = panel_term<kTerms>(scale, zeros, isum, of_group, zero());
    if constexpr (kSum == Sum::kBiased) term = add(term, load(of_tile + kBiasPlace<P>));
    return fma(set1(weights[token]), term, acc);
  }
}

// Calls to(d, codes) for the code dwords d = 0..15 of a group.
template <int kBits, class Store>
MOECHAT_INLINE void unpack_dwords(const unsigned char* q, const Store& to) {
  using C = Codes<kBits>;
  for (int unit = 0; unit < C::kUnits; ++unit) {
    VecI codes[C::kWords];
    C::unit(q, unit, codes);
    for (int i = 0; i < C::kWords; ++i) to(unit * C::kWords + i, codes[i]);
  }
}

// Calls to(d, codes) for the code dwords of a group of kept weights.
template <class W, class Store>
MOECHAT_INLINE void unpack_kept_dwords(const KeptGroup& at, const Codebook& book, const Store& to) {
  typename W::Room room;
  const KeptGroup opened = W::open(at, book, &room);
  for (int sub = 0; sub < W::kSubs; ++sub) {
    VecI codes[W::kDwords];
    W::Opened::codes(opened, sub, book, codes);
    for (int i = 0; i < W::kDwords; ++i) to(sub * W::kDwords + i, codes[i]);
  }
}

// Stores code dword d of 16 rows in a panel record.
template <Form kForm>
MOECHAT_INLINE void store_dword(unsigned char* panel, int d, VecI codes) {
  if constexpr (kForm == Form::kPairs) {
    const VecI low = seti(0x00ff00ffu);
#if defined(MOECHAT_PANEL_BY_ROW)
    std::uint32_t lanes[2][16];
    storei(lanes[0], andi(codes, low));
    storei(lanes[1], andi(shr(codes, 8), low));
    for (int r = 0; r < kTileRows; ++r) {
      const std::uint32_t pairs[2] = {lanes[0][r], lanes[1][r]};
      __builtin_memcpy(panel + (r * kPairSteps + 2 * d) * 4, pairs, sizeof pairs);
    }
#else
    storei(panel + 2 * d * kStepBytes, andi(codes, low));
    storei(panel + (2 * d + 1) * kStepBytes, andi(shr(codes, 8), low));
#endif
  } else {
    storei(panel + d * kStepBytes, codes);
  }
}

// Address of one group of a row tile.
struct GroupCodes {
  const unsigned char* q;
  const unsigned char* sz;
  const unsigned char* super = nullptr;  // of kept weights that have this field
};

template <Form kForm, class W>
MOECHAT_INLINE void unpack_panel(const GroupCodes& from, const Codebook& book, unsigned char* panel) {
  unsigned char* tail = panel + code_bytes(kForm);
  if constexpr (W::kKept) {
    const KeptGroup at{from.q, from.sz, from.super};
    const auto scales = read_scales<W>(book.encoding, at);
    for (int s = 0; s < W::kSubs; ++s) {
      store(tail + s * kStepBytes, scales.step[s]);
      store(tail + (W::kSubs + s) * kStepBytes, scales.min[s]);
    }
    unpack_kept_dwords<W>(at, book, [&](int d, VecI codes) __attribute__((always_inline)) {
      store_dword<kForm>(panel, d, codes);
    });
  } else {
    constexpr int kBits = W::kBits;
    VecI factors[2] = {seti(1), seti(1)};
    if constexpr (!has_halves(kBits)) {
      store(tail, load_fp16(from.sz));
      store(tail + kStepBytes, load_fp16(from.sz + 32));
    } else {
      const HalfScales halves = HalfScales::read(from.sz);
      store(tail, halves.step());
      storei(tail + kStepBytes, halves.offsets());
      for (int half = 0; half < 2; ++half) {
        factors[half] = halves.factor(half);
        if constexpr (has_factors<W>(kForm)) {
          storei(tail + kFactorPlace + half * kStepBytes, ori(factors[half], shl(factors[half], 16)));
        }
      }
    }
    // A product of a code and a factor fits in a byte, so a product of lanes is one of bytes.
    unpack_dwords<kBits>(from.q, [&](int d, VecI codes) __attribute__((always_inline)) {
      const bool raw = !has_halves(kBits) || has_factors<W>(kForm);
      store_dword<kForm>(panel, d, raw ? codes : muli(codes, factors[d / 8]));
    });
  }
}

// Writes the integers of one group, 64 bytes of hi and, with two planes, 64 of lo, as pairs.
MOECHAT_INLINE void gather_pairs(const std::int8_t* hi, const std::int8_t* lo, unsigned char* to) {
  std::int16_t values[64];
  if (lo != nullptr) {
    for (int i = 0; i < 64; ++i) values[i] = static_cast<std::int16_t>(256 * hi[i] + lo[i]);
  } else {
    for (int i = 0; i < 64; ++i) values[i] = hi[i];
  }
  std::uint64_t words[16];
  __builtin_memcpy(words, values, sizeof words);
  // 0 1 2 3 -> 0 2 1 3
  for (std::uint64_t& word : words) {
    word = (word & 0xffff00000000ffffu) | ((word & 0xffff0000u) << 16) | ((word >> 16) & 0xffff0000u);
  }
  __builtin_memcpy(to, words, sizeof words);
}

// Copies group `from` of `rows` to group `at` of a gathered token of `groups` groups.
template <Form kForm, class W, int kPlanes>
MOECHAT_INLINE void gather_group(const QuantisedRows& rows, std::int64_t from, unsigned char* to,
                                 std::int64_t groups, std::int64_t at) {
  constexpr std::int64_t kFrom = 64 * kPlanes;
  constexpr std::int64_t kTo = token_bytes(kForm);
  const std::int8_t* planes = rows.planes + from * kFrom;
  if constexpr (kForm == Form::kPairs) {
    gather_pairs(planes, kPlanes == 2 ? planes + 64 : nullptr, to + at * kTo);
  } else {
    __builtin_memcpy(to + at * kTo, planes, kFrom);
  }
  const InputSums& sums = rows.sums[from];
  unsigned char* tail = to + groups * kTo + kTailDwords<typename W::Panel> * 4 * at;
  __builtin_memcpy(tail, rows.scales + from, 4);
  if constexpr (W::kKept) {
    for (int s = 0; s < W::kSubs; ++s) {
      const float sum = sub_sum<W::kSubs>(sums, s);
      __builtin_memcpy(tail + 4 + 4 * s, &sum, sizeof sum);
    }
  } else if constexpr (terms_of(W::kBits, kPlanes) == Terms::kZeros) {
    __builtin_memcpy(tail + 4, &sums.total, 4);
  } else if constexpr (terms_of(W::kBits, kPlanes) == Terms::kPairs) {
    __builtin_memcpy(tail + 4, &sums.pair, 4);
  } else {
    __builtin_memcpy(tail + 4, sums.half, 8);
  }
}

template <class W, int kPlanes>
constexpr Terms panel_terms() {
  if constexpr (W::kKept) {
    return Terms::kZeros;  // not used
  } else {
    return terms_of(W::kBits, kPlanes);
  }
}
