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

// Steps of one chain of sums. Those of short quads are a half of a group: there two products of a code of 4
// bits and -128 each fit in 16 bits, and one factor applies.
constexpr int chain_of(Form form) {
  return form == Form::kPairs ? kPairSteps : (form == Form::kShortQuads ? kQuadSteps / 2 : kQuadSteps);
}

// Element m * kTokens + t: the sums over one group of tile m for token t.
template <Form kForm, int kTiles, int kTokens>
MOECHAT_INLINE Bundle<kTiles * kTokens> panel_products(const unsigned char* const (&panel)[kTiles],
                                                       const unsigned char* const (&x)[kTokens]) {
  constexpr int kCount = kTiles * kTokens;
  Bundle<kCount> sums;
#if defined(MOECHAT_PANEL_BY_ROW)
  unrolled<0, kCount>(MOECHAT_UNROLLED(i) {
    const unsigned char* rows = panel[MOECHAT_VALUE(i) / kTokens];
    std::int16_t token[64];
    __builtin_memcpy(token, x[MOECHAT_VALUE(i) % kTokens], sizeof token);
    std::int32_t lanes[16];
    for (int r = 0; r < kTileRows; ++r) {
      std::int16_t row[64];
      __builtin_memcpy(row, rows + r * sizeof row, sizeof row);
      std::int32_t sum = 0;
      for (int c = 0; c < 64; ++c) sum += row[c] * token[c];
      lanes[r] = sum;
    }
    pick<MOECHAT_VALUE(i)>(sums) = loadi(lanes);
  });
#else
  constexpr int kSteps = kForm == Form::kPairs ? kPairSteps : kQuadSteps;
  constexpr int kChain = chain_of(kForm);
  // A short chain starts with its first product, a long one with zeros.
  constexpr bool kShort = kForm == Form::kShortQuads;
  unrolled<0, kSteps / kChain>(MOECHAT_UNROLLED(run) {
    constexpr int kFirst = kChain * MOECHAT_VALUE(run);
    Bundle<kCount> chain;
    const auto step = [&](int e, auto first) __attribute__((always_inline)) {
      Bundle<kTiles> codes;
      unrolled<0, kTiles>(MOECHAT_UNROLLED(m) {
        pick<MOECHAT_VALUE(m)>(codes) = loadi(panel[MOECHAT_VALUE(m)] + e * kStepBytes);
      });
      unrolled<0, kTokens>(MOECHAT_UNROLLED(t) {
        const VecI dword = broadcast_dword(x[MOECHAT_VALUE(t)] + 4 * e);
        unrolled<0, kTiles>(MOECHAT_UNROLLED(m) {
          VecI& sum = pick<MOECHAT_VALUE(m) * kTokens + MOECHAT_VALUE(t)>(chain);
          if constexpr (kForm == Form::kPairs) {
            add_pairs(sum, pick<MOECHAT_VALUE(m)>(codes), dword);
          } else if constexpr (MOECHAT_VALUE(first) != 0) {
            sum = first_quads(pick<MOECHAT_VALUE(m)>(codes), dword);
          } else {
            add_quads(sum, pick<MOECHAT_VALUE(m)>(codes), dword);
          }
        });
      });
    };
    if constexpr (kShort) {
      step(kFirst, Constant<1>{});
      unrolled<1, kChain>(MOECHAT_UNROLLED(e) { step(kFirst + MOECHAT_VALUE(e), Constant<0>{}); });
    } else {
      unrolled<0, kCount>(MOECHAT_UNROLLED(i) { pick<MOECHAT_VALUE(i)>(chain) = seti(0); });
#pragma GCC unroll 2
      for (int e = kFirst; e < kFirst + kChain; ++e) step(e, Constant<0>{});
    }
    unrolled<0, kCount>(MOECHAT_UNROLLED(i) {
      VecI sum = pick<MOECHAT_VALUE(i)>(chain);
      if constexpr (kShort) {
        sum = madd16(sum, loadi(panel[MOECHAT_VALUE(i) / kTokens] + code_bytes(kForm) + kFactorPlace +
                                MOECHAT_VALUE(run) * kStepBytes));
      }
      VecI& total = pick<MOECHAT_VALUE(i)>(sums);
      total = MOECHAT_VALUE(run) == 0 ? sum : addi(total, sum);
    });
  });
#endif
  return sums;
}

// acc[t * 32 + 16 * m] += groups [first, first + groups) of tokens t = 0..kTokens - 1, whose panel records
// begin at panel + m * tile_stride. Sum defines the added terms and the meaning of `weights`.
template <Form kForm, Sum kSum, Terms kTerms, int kTiles, int kTokens>
__attribute__((noinline)) void add_groups(const unsigned char* panel, std::int64_t tile_stride,
                                          std::int64_t first, std::int64_t groups, const TokenRows& rows,
                                          const float* weights, float* acc) {
  constexpr std::int64_t kTokenBytes = token_bytes(kForm);
  const unsigned char* x[kTokens];
  const unsigned char* codes[kTiles];
  for (int t = 0; t < kTokens; ++t) x[t] = rows.data + t * rows.stride + first * kTokenBytes;
  for (int m = 0; m < kTiles; ++m) codes[m] = panel + m * tile_stride;
  const std::uint32_t* tail =
      reinterpret_cast<const std::uint32_t*>(rows.data + rows.groups * kTokenBytes) + kTailDwords * first;
  const std::int64_t tail_stride = rows.stride / 4;
  for (std::int64_t g = 0; g < groups; ++g) {
    Bundle<kTiles * kTokens> sums = panel_products<kForm, kTiles, kTokens>(codes, x);
    // Without this, GCC keeps acc in registers over the groups, and too few are left for the sums.
    asm volatile("" ::: "memory");
    unrolled<0, kTiles>(MOECHAT_UNROLLED(m) {
      const unsigned char* of_tile = codes[MOECHAT_VALUE(m)] + code_bytes(kForm);
      const Vec scale = load(of_tile);
      const Vec zeros = load(of_tile + kStepBytes);
      unrolled<0, kTokens>(MOECHAT_UNROLLED(t) {
        float* at = acc + MOECHAT_VALUE(t) * 2 * kTileRows + MOECHAT_VALUE(m) * kTileRows;
        store(at, next_sum<kSum, kTerms>(
                      of_tile, scale, zeros, pick<MOECHAT_VALUE(m) * kTokens + MOECHAT_VALUE(t)>(sums),
                      tail + MOECHAT_VALUE(t) * tail_stride, weights, MOECHAT_VALUE(t), load(at)));
      });
    });
    for (int t = 0; t < kTokens; ++t) x[t] += kTokenBytes;
    for (int m = 0; m < kTiles; ++m) codes[m] += panel_bytes(kForm);
    tail += kTailDwords;
  }
}

// The same for 1..kPanelTokens tokens and two tiles; may read and add up to kTokenStep - 1 more tokens.
template <Form kForm, Sum kSum, Terms kTerms, int kTokens = kPanelTokens>
MOECHAT_INLINE void add_groups_of(std::int64_t tokens, const unsigned char* panel, std::int64_t tile_stride,
                                  std::int64_t first, std::int64_t groups, const TokenRows& rows,
                                  const float* weights, float* acc) {
  if constexpr (kTokens > 0) {
    if (tokens <= kTokens - kTokenStep) {
      return add_groups_of<kForm, kSum, kTerms, kTokens - kTokenStep>(tokens, panel, tile_stride, first,
                                                                      groups, rows, weights, acc);
    }
    for (int m = 0; m < 2; m += kPanelTiles) {
      add_groups<kForm, kSum, kTerms, kPanelTiles, kTokens>(panel + m * tile_stride, tile_stride, first,
                                                            groups, rows, weights, acc + m * kTileRows);
    }
  }
}

// acc[t * 32 + 16 * m] += groups [first, first + groups) of all tokens. Calls `between` with the number of
// blocks before every block of tokens.
template <Form kForm, Sum kSum, Terms kTerms, class Between>
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
    add_groups_of<kForm, kSum, kTerms>(end - begin, panel, tile_stride, first, groups, part, of_part,
                                       acc + begin * 2 * kTileRows);
  }
}

template <int kBits, int kPlanes>
constexpr Form form_of() {
  if (!kHasQuads || kPlanes == 2 || (kQuadsIn16 && kBits == 8)) return Form::kPairs;
  return kQuadsIn16 ? Form::kShortQuads : Form::kQuads;
}
constexpr std::int64_t kThreshold = 8;
constexpr std::int64_t kRowsAfter = kTokenStep - 1;
constexpr void (*kEnter)() = nullptr;
constexpr void (*kLeave)() = nullptr;
