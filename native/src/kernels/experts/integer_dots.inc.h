// Products of the codes of a group and quantised inputs, see kernel_api.h for the numerics. Included inside
// the anonymous namespace of one instruction set.

// isum[stream][token] of one group, x[token] its planes; at 2 to 4 bits with the factors of the halves,
// sz[stream] their scale words, and without the offsets.
template <int kBits, int kPlanes, int kStreams, int kTokens>
MOECHAT_INLINE void group_dots(const unsigned char* const (&q)[kStreams],
                               const unsigned char* const (&sz)[kStreams],
                               const std::int8_t* const (&x)[kTokens], VecI (&isum)[kStreams][kTokens]) {
  using C = Codes<kBits>;
  constexpr int kHalves = has_halves(kBits) ? 2 : 1;
  if constexpr (kStreams > 1 && !kPairDots) {
    for (int s = 0; s < kStreams; ++s) {
      const unsigned char* const one[1] = {q[s]};
      const unsigned char* const one_sz[1] = {sz[s]};
      const std::int8_t* again[kTokens];
      for (int t = 0; t < kTokens; ++t) {
        // Hides that the pointer is the same for every stream; otherwise compilers keep all of it on the
        // stack.
        again[t] = x[t];
        __asm__("" : "+r"(again[t]));
      }
      VecI sums[1][kTokens];
      group_dots<kBits, kPlanes>(one, one_sz, again, sums);
      for (int t = 0; t < kTokens; ++t) isum[s][t] = sums[0][t];
    }
  } else if constexpr (kWideDot) {
    // Use two chains each if there are few sums; with one, the latency of a product would bound the loop.
    constexpr int kChains = 2 * kStreams * kTokens * kPlanes <= kMostChains ? 2 : 1;
    MOECHAT_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      VecI chain[kStreams][kTokens][kPlanes][kChains];
      for (int s = 0; s < kStreams; ++s) {
        for (int t = 0; t < kTokens; ++t) {
          for (int p = 0; p < kPlanes; ++p) {
            for (int c = 0; c < kChains; ++c) chain[s][t][p][c] = seti(0);
          }
        }
      }
      MOECHAT_UNROLL
      for (int unit = 0; unit < C::kUnits / kHalves; ++unit) {
        const int at = half * (C::kUnits / kHalves) + unit;
        VecI codes[kStreams][C::kWords];
        for (int s = 0; s < kStreams; ++s) C::unit(q[s], at, codes[s]);
        MOECHAT_UNROLL
        for (int i = 0; i < C::kWords; ++i) {
          const int d = at * C::kWords + i;
          for (int t = 0; t < kTokens; ++t) {
            for (int p = 0; p < kPlanes; ++p) {
              const VecI bytes = broadcast4(x[t] + p * 64 + 4 * d);
              for (int s = 0; s < kStreams; ++s) {
                chain[s][t][p][d % kChains] = dot(chain[s][t][p][d % kChains], codes[s][i], bytes);
              }
            }
          }
        }
      }
      for (int s = 0; s < kStreams; ++s) {
        for (int t = 0; t < kTokens; ++t) {
          VecI sums[kPlanes];
          for (int p = 0; p < kPlanes; ++p) {
            sums[p] = chain[s][t][p][0];
            if constexpr (kChains == 2) sums[p] = addi(sums[p], chain[s][t][p][1]);
          }
          VecI sum = kPlanes == 2 ? addi(shl(sums[0], 8), sums[kPlanes - 1]) : sums[0];
          if constexpr (kHalves == 2) sum = muli(sum, HalfScales::read(sz[s]).factor(half));
          isum[s][t] = half == 0 ? sum : addi(isum[s][t], sum);
        }
      }
    }
  } else {
    // Codes of 8 bits are processed as two of 4 bits; sums of 16 bits are widened, times the factors of the
    // halves, before they can overflow.
    constexpr int kParts = kBits == 8 ? 2 : 1;
    constexpr int kRun = short_run(kParts == 2 ? 15 : C::kLargest, 8);
    constexpr int kRuns = 16 / kRun;
    static_assert(!has_halves(kBits) || kRuns == kHalves, "a factor for each run");
    for (int s = 0; s < kStreams; ++s) {
      for (int t = 0; t < kTokens; ++t) isum[s][t] = seti(0);
      MOECHAT_UNROLL
      for (int run = 0; run < kRuns; ++run) {
        VecI chain[kTokens][kPlanes][kParts];
        for (int t = 0; t < kTokens; ++t) {
          for (int p = 0; p < kPlanes; ++p) {
            for (int part = 0; part < kParts; ++part) chain[t][p][part] = seti(0);
          }
        }
        MOECHAT_UNROLL
        for (int unit = 0; unit < C::kUnits / kRuns; ++unit) {
          const int at = run * (C::kUnits / kRuns) + unit;
          VecI parts[kParts][C::kWords];
          if constexpr (kParts == 2) {
            C::parts(q[s], at, parts[0], parts[1]);
          } else {
            C::unit(q[s], at, parts[0]);
          }
          MOECHAT_UNROLL
          for (int i = 0; i < C::kWords; ++i) {
            const int d = at * C::kWords + i;
            for (int t = 0; t < kTokens; ++t) {
              for (int p = 0; p < kPlanes; ++p) {
                const VecI bytes = broadcast4(x[t] + p * 64 + 4 * d);
                for (int part = 0; part < kParts; ++part) {
                  chain[t][p][part] = dot(chain[t][p][part], parts[part][i], bytes);
                  pin(chain[t][p][part]);
                }
              }
            }
          }
        }
        const VecI of_half = has_halves(kBits) ? HalfScales::read(sz[s]).factor(run) : seti(1);
        for (int t = 0; t < kTokens; ++t) {
          for (int p = 0; p < kPlanes; ++p) {
            for (int part = 0; part < kParts; ++part) {
              const int shift = (kPlanes == 2 && p == 0 ? 8 : 0) + (part == 1 ? 4 : 0);
              const VecI factor = shl(of_half, shift);
              isum[s][t] = addi(isum[s][t], madd16(chain[t][p][part], ori(factor, shl(factor, 16))));
            }
          }
        }
      }
    }
  }
}
