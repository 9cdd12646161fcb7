// Products of kept codes and quantised inputs: a sub-block at a time, then in floats; see kept_encodings.h
// and kernel_api.h. Included inside the anonymous namespace of one instruction set, after
// weight_classes.inc.h.

// isum[stream][token] of a sub-block.
template <class W, int kPlanes, int kStreams, int kTokens>
MOECHAT_INLINE void sub_dots(const KeptGroup (&at)[kStreams], int sub, const Codebook& book,
                             const std::int8_t* const (&x)[kTokens], VecI (&isum)[kStreams][kTokens]) {
  VecI codes[kStreams][W::kDwords];
  for (int s = 0; s < kStreams; ++s) W::codes(at[s], sub, book, codes[s]);
  const int first = sub * W::kDwords;
  if constexpr (kWideDot) {
    constexpr int kChains = 2 * kStreams * kTokens * kPlanes <= kMostChains ? 2 : 1;
    VecI chain[kStreams][kTokens][kPlanes][kChains];
    for (int s = 0; s < kStreams; ++s) {
      for (int t = 0; t < kTokens; ++t) {
        for (int p = 0; p < kPlanes; ++p) {
          for (int c = 0; c < kChains; ++c) chain[s][t][p][c] = seti(0);
        }
      }
    }
    MOECHAT_UNROLL
    for (int i = 0; i < W::kDwords; ++i) {
      for (int t = 0; t < kTokens; ++t) {
        for (int p = 0; p < kPlanes; ++p) {
          const VecI bytes = broadcast4(x[t] + p * 64 + 4 * (first + i));
          for (int s = 0; s < kStreams; ++s) {
            chain[s][t][p][i % kChains] = dot(chain[s][t][p][i % kChains], codes[s][i], bytes);
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
        isum[s][t] = kPlanes == 2 ? addi(shl(sums[0], 8), sums[kPlanes - 1]) : sums[0];
      }
    }
  } else {
    // Codes whose products do not fit in 16 bits are processed as two of 4 bits.
    constexpr int kParts = W::kRun == 0 ? 2 : 1;
    constexpr int kRun = kParts == 2 ? short_run(15, W::kDwords) : W::kRun;
    for (int s = 0; s < kStreams; ++s) {
      for (int t = 0; t < kTokens; ++t) isum[s][t] = seti(0);
      MOECHAT_UNROLL
      for (int run = 0; run < W::kDwords / kRun; ++run) {
        VecI chain[kTokens][kPlanes][kParts];
        for (int t = 0; t < kTokens; ++t) {
          for (int p = 0; p < kPlanes; ++p) {
            for (int part = 0; part < kParts; ++part) chain[t][p][part] = seti(0);
          }
        }
        MOECHAT_UNROLL
        for (int i = run * kRun; i < (run + 1) * kRun; ++i) {
          VecI parts[kParts];
          if constexpr (kParts == 2) {
            parts[0] = andi(codes[s][i], seti(0x0f0f0f0fu));
            parts[kParts - 1] = andi(shr(codes[s][i], 4), seti(0x0f0f0f0fu));
          } else {
            parts[0] = codes[s][i];
          }
          for (int t = 0; t < kTokens; ++t) {
            for (int p = 0; p < kPlanes; ++p) {
              const VecI bytes = broadcast4(x[t] + p * 64 + 4 * (first + i));
              for (int part = 0; part < kParts; ++part) {
                chain[t][p][part] = dot(chain[t][p][part], parts[part], bytes);
                pin(chain[t][p][part]);
              }
            }
          }
        }
        for (int t = 0; t < kTokens; ++t) {
          for (int p = 0; p < kPlanes; ++p) {
            for (int part = 0; part < kParts; ++part) {
              const int shift = (kPlanes == 2 && p == 0 ? 8 : 0) + (part == 1 ? 4 : 0);
              isum[s][t] = addi(isum[s][t], madd16(chain[t][p][part], seti(0x00010001u << shift)));
            }
          }
        }
      }
    }
  }
}

// acc[stream][token] plus one group.
template <class W, int kPlanes, int kStreams, int kTokens>
MOECHAT_INLINE void add_kept_group(const KeptGroup (&at)[kStreams], const Codebook& book,
                                   const std::int8_t* const (&x)[kTokens], const float (&x_scale)[kTokens],
                                   const InputSums* const (&sums)[kTokens], Vec (&acc)[kStreams][kTokens]) {
  if constexpr (kStreams > 1 && !kPairDots) {
    for (int s = 0; s < kStreams; ++s) {
      const KeptGroup one[1] = {at[s]};
      const std::int8_t* again[kTokens];
      for (int t = 0; t < kTokens; ++t) {
        // Hides that the pointer is the same for every stream; see group_dots().
        again[t] = x[t];
        __asm__("" : "+r"(again[t]));
      }
      Vec one_acc[1][kTokens];
      for (int t = 0; t < kTokens; ++t) one_acc[0][t] = acc[s][t];
      add_kept_group<W, kPlanes>(one, book, again, x_scale, sums, one_acc);
      for (int t = 0; t < kTokens; ++t) acc[s][t] = one_acc[0][t];
    }
  } else {
    typename W::Room rooms[kStreams];
    KeptGroup opened[kStreams];
    for (int s = 0; s < kStreams; ++s) opened[s] = W::open(at[s], book, rooms + s);
    SubScales<W::kSubs> scales[kStreams];
    for (int s = 0; s < kStreams; ++s) scales[s] = read_scales<W>(book.encoding, at[s]);
    Vec u[kStreams][kTokens];
    for (int s = 0; s < kStreams; ++s) {
      for (int t = 0; t < kTokens; ++t) u[s][t] = zero();
    }
    MOECHAT_UNROLL
    for (int sub = 0; sub < W::kSubs; ++sub) {
      VecI isum[kStreams][kTokens];
      sub_dots<typename W::Opened, kPlanes>(opened, sub, book, x, isum);
      for (int s = 0; s < kStreams; ++s) {
        for (int t = 0; t < kTokens; ++t) {
          const float x_sum = sub_sum<W::kSubs>(*sums[t], sub);
          const Vec step = scales[s].step[sub];
          const Vec min = scales[s].min[sub];
          if (sub == 0) {
            u[s][t] = first_sub_term(step, min, isum[s][t], x_sum);
          } else {
            u[s][t] = sub_term(step, min, isum[s][t], x_sum, u[s][t]);
          }
        }
      }
    }
    for (int s = 0; s < kStreams; ++s) {
      for (int t = 0; t < kTokens; ++t) acc[s][t] = fma(set1(x_scale[t]), u[s][t], acc[s][t]);
    }
  }
}
