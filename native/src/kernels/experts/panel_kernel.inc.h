// Products of unpacked row tiles with many tokens. A block of sums stays in registers over a group. Included
// inside the anonymous namespace of one instruction set, after panel_unpack.inc.h.
//
// The sums of a group are exact integers and groups are added in ascending order (kernel_api.h), so results
// do not depend on the blocking.

// A block of vectors. Not an array, because GCC keeps an array that a loop indexes in memory.
template <int kCount>
struct Bundle {
  VecI head;
  Bundle<kCount - 1> tail;
};
template <>
struct Bundle<0> {};

template <int kAt, int kCount>
MOECHAT_INLINE VecI& pick(Bundle<kCount>& bundle) {
  if constexpr (kAt == 0) {
    return bundle.head;
  } else {
    return pick<kAt - 1>(bundle.tail);
  }
}

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// body(Constant<kFrom>), ..., body(Constant<kEnd - 1>)
template <int kFrom, int kEnd, class Body>
MOECHAT_INLINE void unrolled(const Body& body) {
  if constexpr (kFrom < kEnd) {
    body(Constant<kFrom>{});
    unrolled<kFrom + 1, kEnd>(body);
  }
}

#define MOECHAT_UNROLLED(name) [&](auto name) __attribute__((always_inline))
#define MOECHAT_VALUE(name) decltype(name)::value

MOECHAT_INLINE VecI broadcast_dword(const unsigned char* from) {
  std::uint32_t word;
  __builtin_memcpy(&word, from, sizeof word);
  return seti(word);
}

// Code dwords of one chain of sums of plain weights: with factors, those of a half.
template <class P>
constexpr int chain_of(Form form) {
  return has_factors<P>(form) ? kQuadSteps / 2 : kQuadSteps;
}

// Whether the sums of `dwords` code dwords are left in 16 bits, two in a lane, for the caller to widen.
template <class P>
constexpr bool stays_short(Form form, int dwords) {
  return form == Form::kShortQuads && P::kRun == dwords;
}

#if defined(MOECHAT_SHORT_SUMS)
// Element m * kTokens + t of `sums` += the sums over code dwords [first, first + kRun) of tile m for token t,
// added up in 16 bits. Registers of rows are taken one after the other: the codes of a run stay in registers
// over the tokens.
template <int kRun, int kTiles, int kTokens>
MOECHAT_INLINE void add_run(const unsigned char* const (&panel)[kTiles],
                            const unsigned char* const (&x)[kTokens], int first,
                            Bundle<kTiles * kTokens>& sums) {
  const Rows ones = all_rows(0x00010001u);
  unrolled<0, kTiles * kRegisters>(MOECHAT_UNROLLED(which) {
    constexpr int kTile = MOECHAT_VALUE(which) / kRegisters;
    constexpr int kRegister = MOECHAT_VALUE(which) % kRegisters;
    // Hides that the dwords are the same for every register of rows; otherwise GCC keeps those of all tokens,
    // and sums on the stack.
    std::int64_t place = 4 * first;
    asm volatile("" : "+r"(place));
    Rows codes[kRun];
    unrolled<0, kRun>(MOECHAT_UNROLLED(i) {
      codes[MOECHAT_VALUE(i)] = load_rows(panel[kTile] + (first + MOECHAT_VALUE(i)) * kStepBytes +
                                          kRegister * std::int64_t{sizeof(Rows)});
    });
    unrolled<0, kTokens>(MOECHAT_UNROLLED(t) {
      const auto dword = [&](int i) __attribute__((always_inline)) {
        std::uint32_t word;
        __builtin_memcpy(&word, x[MOECHAT_VALUE(t)] + place + 4 * i, sizeof word);
        return all_rows(word);
      };
      Rows quads = first_quads(codes[0], dword(0));
      unrolled<1, kRun>(
          MOECHAT_UNROLLED(i) { add_quads(quads, codes[MOECHAT_VALUE(i)], dword(MOECHAT_VALUE(i))); });
      add_widened(rows_of<kRegister>(pick<kTile * kTokens + MOECHAT_VALUE(t)>(sums)), quads, ones);
    });
  });
}
#endif

// Element m * kTokens + t: the sums over code dwords [kFirst, kFirst + kDwords) of tile m for token t; see
// stays_short().
template <Form kForm, class P, int kTiles, int kTokens, int kFirst, int kDwords>
MOECHAT_INLINE Bundle<kTiles * kTokens> chain_products(const unsigned char* const (&panel)[kTiles],
                                                       const unsigned char* const (&x)[kTokens]) {
  constexpr int kCount = kTiles * kTokens;
  Bundle<kCount> sums;
#if defined(MOECHAT_PANEL_BY_ROW)
  unrolled<0, kCount>(MOECHAT_UNROLLED(i) {
    const unsigned char* rows = panel[MOECHAT_VALUE(i) / kTokens];
    std::int16_t token[4 * kDwords];
    __builtin_memcpy(token, x[MOECHAT_VALUE(i) % kTokens] + 8 * kFirst, sizeof token);
    std::int32_t lanes[16];
    for (int r = 0; r < kTileRows; ++r) {
      std::int16_t row[4 * kDwords];
      __builtin_memcpy(row, rows + r * 128 + 8 * kFirst, sizeof row);
      std::int32_t sum = 0;
      for (int c = 0; c < 4 * kDwords; ++c) sum += row[c] * token[c];
      lanes[r] = sum;
    }
    pick<MOECHAT_VALUE(i)>(sums) = loadi(lanes);
  });
#else
  constexpr int kPerDword = kForm == Form::kPairs ? 2 : 1;
  constexpr int kBegin = kFirst * kPerDword;
  constexpr int kEnd = kBegin + kDwords * kPerDword;
  const auto step = [&](int e, auto first) __attribute__((always_inline)) {
    Bundle<kTiles> codes;
    unrolled<0, kTiles>(MOECHAT_UNROLLED(m) {
      pick<MOECHAT_VALUE(m)>(codes) = loadi(panel[MOECHAT_VALUE(m)] + e * kStepBytes);
    });
    unrolled<0, kTokens>(MOECHAT_UNROLLED(t) {
      const VecI dword = broadcast_dword(x[MOECHAT_VALUE(t)] + 4 * e);
      unrolled<0, kTiles>(MOECHAT_UNROLLED(m) {
        VecI& sum = pick<MOECHAT_VALUE(m) * kTokens + MOECHAT_VALUE(t)>(sums);
        if constexpr (kForm == Form::kPairs) {
          add_pairs(sum, pick<MOECHAT_VALUE(m)>(codes), dword);
        } else if constexpr (MOECHAT_VALUE(first) == 0) {
          add_quads(sum, pick<MOECHAT_VALUE(m)>(codes), dword);
        } else if constexpr (kForm == Form::kShortQuads) {
          sum = first_quads(pick<MOECHAT_VALUE(m)>(codes), dword);
        }
      });
    });
  };
  // A short chain starts with its first product, a long one with zeros.
  if constexpr (stays_short<P>(kForm, kDwords)) {
    step(kBegin, Constant<1>{});
    unrolled<1, kEnd - kBegin>(MOECHAT_UNROLLED(e) { step(kBegin + MOECHAT_VALUE(e), Constant<0>{}); });
#if defined(MOECHAT_SHORT_SUMS)
  } else if constexpr (kForm == Form::kShortQuads) {
    unrolled<0, kCount>(MOECHAT_UNROLLED(i) { pick<MOECHAT_VALUE(i)>(sums) = seti(0); });
#pragma GCC unroll 2
    for (int e = kBegin; e < kEnd; e += P::kRun) add_run<P::kRun, kTiles, kTokens>(panel, x, e, sums);
#endif
  } else {
    unrolled<0, kCount>(MOECHAT_UNROLLED(i) { pick<MOECHAT_VALUE(i)>(sums) = seti(0); });
#pragma GCC unroll 2
    for (int e = kBegin; e < kEnd; ++e) step(e, Constant<0>{});
  }
#endif
  return sums;
}

// Element m * kTokens + t: the sums over one group of plain weights of tile m for token t.
template <Form kForm, class P, int kTiles, int kTokens>
MOECHAT_INLINE Bundle<kTiles * kTokens> panel_products(const unsigned char* const (&panel)[kTiles],
                                                       const unsigned char* const (&x)[kTokens]) {
  constexpr int kCount = kTiles * kTokens;
  constexpr int kChain = chain_of<P>(kForm);
  Bundle<kCount> sums;
  unrolled<0, kQuadSteps / kChain>(MOECHAT_UNROLLED(run) {
    Bundle<kCount> chain =
        chain_products<kForm, P, kTiles, kTokens, kChain * MOECHAT_VALUE(run), kChain>(panel, x);
    unrolled<0, kCount>(MOECHAT_UNROLLED(i) {
      VecI sum = pick<MOECHAT_VALUE(i)>(chain);
      if constexpr (has_factors<P>(kForm)) {
        sum = madd16(sum, loadi(panel[MOECHAT_VALUE(i) / kTokens] + code_bytes(kForm) + kFactorPlace +
                                MOECHAT_VALUE(run) * kStepBytes));
      }
      VecI& total = pick<MOECHAT_VALUE(i)>(sums);
      total = MOECHAT_VALUE(run) == 0 ? sum : addi(total, sum);
    });
  });
  return sums;
}

// acc += one sub-block of a group of kept weights of tile kTile for token kToken; the last one completes the
// term of the group, for which `terms` has room.
template <class P, Sum kSum, int kTiles, int kTokens, int kSub, int kTile, int kToken>
MOECHAT_INLINE void add_sub_product(const unsigned char* of_tile, VecI isum, const std::uint32_t* of_token,
                                    const float* weights, float* terms, float* acc) {
  const Vec step = load(of_tile + kSub * kStepBytes);
  const Vec min = load(of_tile + (P::kSubs + kSub) * kStepBytes);
  float x_scale, x_sum;
  __builtin_memcpy(&x_scale, of_token, sizeof x_scale);
  __builtin_memcpy(&x_sum, of_token + 1 + kSub, sizeof x_sum);
  float* term = terms + (kTile * kTokens + kToken) * kTileRows;
  Vec u;
  if constexpr (kSub == 0) {
    u = first_sub_term(step, min, isum, x_sum);
  } else {
    u = sub_term(step, min, isum, x_sum, load(term));
  }
  if constexpr (kSub + 1 < P::kSubs) return store(term, u);
  float* at = acc + kToken * 2 * kTileRows + kTile * kTileRows;
  if constexpr (kSum == Sum::kTerms) return store(at, fma(set1(x_scale), u, load(at)));
  Vec whole = fma(set1(x_scale), u, zero());
  if constexpr (kSum == Sum::kBiased) whole = add(whole, load(of_tile + kBiasPlace<P>));
  store(at, fma(set1(weights[kToken]), whole, load(at)));
}

template <Form kForm, class P, Sum kSum, int kTiles, int kTokens, int kSub>
MOECHAT_INLINE void add_sub_products(const unsigned char* const (&codes)[kTiles],
                                     const unsigned char* const (&x)[kTokens], const std::uint32_t* tail,
                                     std::int64_t tail_stride, const float* weights, float* terms,
                                     float* acc) {
  Bundle<kTiles * kTokens> sums =
      chain_products<kForm, P, kTiles, kTokens, kSub * P::kDwords, P::kDwords>(codes, x);
  asm volatile("" ::: "memory");  // see add_groups()
  unrolled<0, kTiles * kTokens>(MOECHAT_UNROLLED(i) {
    constexpr int kTile = MOECHAT_VALUE(i) / kTokens;
    constexpr int kToken = MOECHAT_VALUE(i) % kTokens;
    VecI isum = pick<MOECHAT_VALUE(i)>(sums);
    if constexpr (stays_short<P>(kForm, P::kDwords)) isum = madd16(isum, seti(0x00010001u));
    add_sub_product<P, kSum, kTiles, kTokens, kSub, kTile, kToken>(
        codes[kTile] + code_bytes(kForm), isum, tail + kToken * tail_stride, weights, terms, acc);
  });
  if constexpr (kSub + 1 < P::kSubs) {
    add_sub_products<kForm, P, kSum, kTiles, kTokens, kSub + 1>(codes, x, tail, tail_stride, weights, terms,
                                                                acc);
  }
}

// acc[t * 32 + 16 * m] += groups [first, first + groups) of tokens t = 0..kTokens - 1, whose panel records
// begin at panel + m * tile_stride. Sum defines the added terms and the meaning of `weights`.
template <Form kForm, class P, Sum kSum, Terms kTerms, int kTiles, int kTokens>
__attribute__((noinline)) void add_groups(const unsigned char* panel, std::int64_t tile_stride,
                                          std::int64_t first, std::int64_t groups, const TokenRows& rows,
                                          const float* weights, float* acc) {
  constexpr std::int64_t kTokenBytes = token_bytes(kForm);
  const unsigned char* x[kTokens];
  const unsigned char* codes[kTiles];
  for (int t = 0; t < kTokens; ++t) x[t] = rows.data + t * rows.stride + first * kTokenBytes;
  for (int m = 0; m < kTiles; ++m) codes[m] = panel + m * tile_stride;
  const std::uint32_t* tail =
      reinterpret_cast<const std::uint32_t*>(rows.data + rows.groups * kTokenBytes) + kTailDwords<P> * first;
  const std::int64_t tail_stride = rows.stride / 4;
  for (std::int64_t g = 0; g < groups; ++g) {
    if constexpr (P::kKept) {
      alignas(64) float terms[kTokens * kTiles * kTileRows];
      add_sub_products<kForm, P, kSum, kTiles, kTokens, 0>(codes, x, tail, tail_stride, weights, terms, acc);
    } else {
      Bundle<kTiles * kTokens> sums = panel_products<kForm, P, kTiles, kTokens>(codes, x);
      // Without this, GCC keeps acc in registers over the groups, and too few are left for the sums.
      asm volatile("" ::: "memory");
      unrolled<0, kTiles>(MOECHAT_UNROLLED(m) {
        const unsigned char* of_tile = codes[MOECHAT_VALUE(m)] + code_bytes(kForm);
        const Vec scale = load(of_tile);
        const Vec zeros = load(of_tile + kStepBytes);
        unrolled<0, kTokens>(MOECHAT_UNROLLED(t) {
          float* at = acc + MOECHAT_VALUE(t) * 2 * kTileRows + MOECHAT_VALUE(m) * kTileRows;
          store(at, next_sum<kSum, P, kTerms>(
                        of_tile, scale, zeros, pick<MOECHAT_VALUE(m) * kTokens + MOECHAT_VALUE(t)>(sums),
                        tail + MOECHAT_VALUE(t) * tail_stride, weights, MOECHAT_VALUE(t), load(at)));
        });
      });
    }
    for (int t = 0; t < kTokens; ++t) x[t] += kTokenBytes;
    for (int m = 0; m < kTiles; ++m) codes[m] += panel_bytes<P>(kForm);
    tail += kTailDwords<P>;
  }
}

// The same for 1..kPanelTokens tokens and two tiles; may read and add up to kTokenStep - 1 more tokens.
template <Form kForm, class P, Sum kSum, Terms kTerms, int kTokens = kPanelTokens>
MOECHAT_INLINE void add_groups_of(std::int64_t tokens, const unsigned char* panel, std::int64_t tile_stride,
                                  std::int64_t first, std::int64_t groups, const TokenRows& rows,
                                  const float* weights, float* acc) {
  if constexpr (kTokens > 0) {
    if (tokens <= kTokens - kTokenStep) {
      return add_groups_of<kForm, P, kSum, kTerms, kTokens - kTokenStep>(tokens, panel, tile_stride, first,
                                                                         groups, rows, weights, acc);
    }
    for (int m = 0; m < 2; m += kPanelTiles) {
      add_groups<kForm, P, kSum, kTerms, kPanelTiles, kTokens>(panel + m * tile_stride, tile_stride, first,
                                                               groups, rows, weights, acc + m * kTileRows);
    }
  }
}

// acc[t * 32 + 16 * m] += groups [first, first + groups) of all tokens. Calls `between` with the number of
// blocks before every block of tokens.
template <Form kForm, class P, Sum kSum, Terms kTerms, class Between>
MOECHAT_INLINE void add_panel(const unsigned char* panel, std::int64_t tile_stride, std::int64_t first,
                              std::int64_t groups, const TokenRows& rows, std::int64_t tokens,
                              const float* weights, float* acc, const Between& between) {
  // Blocks are as equal in size as possible, because small ones leave execution units idle.
  const std::int64_t blocks = (tokens + kPanelTokens - 1) / kPanelTokens;
  const std::int64_t steps = (tokens + kTokenStep - 1) / kTokenStep;
  for (std::int64_t block = 0; block < blocks; ++block) {
    const std::int64_t begin = steps * block / blocks * kTokenStep;
    const std::int64_t end = steps * (block + 1) / blocks * kTokenStep;
    between(blocks);
    const TokenRows part{rows.data + begin * rows.stride, rows.stride, rows.groups};
    const float* of_part = kSum == Sum::kTerms ? nullptr : weights + begin;
    add_groups_of<kForm, P, kSum, kTerms>(end - begin, panel, tile_stride, first, groups, part, of_part,
                                          acc + begin * 2 * kTileRows);
  }
}

template <class W, int kPlanes>
constexpr Form form_of() {
  if (!kHasQuads || kPlanes == 2 || (!kWideDot && W::kRun == 0)) return Form::kPairs;
  return kWideDot ? Form::kQuads : Form::kShortQuads;
}
constexpr std::int64_t kThreshold = 8;
constexpr std::int64_t kRowsAfter = kTokenStep - 1;
constexpr void (*kEnter)() = nullptr;
constexpr void (*kLeave)() = nullptr;
