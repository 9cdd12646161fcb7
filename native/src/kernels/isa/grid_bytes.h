// Codes of weights with a grid by AVX-512 VBMI: 64 numbers are looked up in registers at a time, as patterns
// of bits, which become codes through a second table; see Grid in layout/grids.h. Included inside the
// anonymous namespace of isa/avx512_vnni_kept.cc, by grid_codes.inc.h.

#define MOECHAT_VBMI inline __attribute__((always_inline, target("avx512vbmi")))

// Bytes of `table` by 64 numbers below 64 * kTables. Their low 8 bits are in `low`; high[i] has bit 8 + i of
// each.
template <int kTables>
MOECHAT_VBMI __m512i look_up(const unsigned char* table, __m512i low, const __mmask64* high) {
  const __m512i* const at = reinterpret_cast<const __m512i*>(table);
  if constexpr (kTables == 2) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(at), low, _mm512_load_si512(at + 1));
  } else {
    constexpr int kHalf = kTables / 2;
    constexpr int kBit = kTables == 32 ? 2 : (kTables == 16 ? 1 : 0);
    const __mmask64 upper = kTables == 4 ? _mm512_movepi8_mask(low) : high[kBit];
    return _mm512_mask_blend_epi8(upper, look_up<kHalf>(table, low, high),
                                  look_up<kHalf>(table + 64 * kHalf, low, high));
  }
}

// For byte k of each dword, the eight bits of the dword from at + apart * k on. What is before bit 0 or after
// bit 31 comes from elsewhere.
MOECHAT_VBMI __m512i fields(__m512i words, int at, unsigned apart) {
  const unsigned long long first = static_cast<unsigned>(at + 64) % 64;
  const unsigned long long places =
      0x2020202000000000ull + 0x0101010101010101ull * first + 0x0302010003020100ull * apart;
  return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(static_cast<long long>(places)), words);
}

// Codes of four columns. The low kBits bits of the bytes of `levels` are theirs; bit kBits of `flags` is the
// sign or the delta.
template <int kBits>
MOECHAT_VBMI VecI level_codes(__m512i levels, __m512i flags, const Grid& grid) {
  const __m512i mask = _mm512_set1_epi8((1 << kBits) - 1);
  const __m512i which =
      _mm512_ternarylogic_epi32(mask, levels, flags, 0xca);  // of `levels` where mask is set
  return VecI{_mm512_permutexvar_epi8(which, _mm512_load_si512(grid.levels))};
}

// 8 columns of a grid of 8: patterns in byte `byte` of the dwords of `low` and `high`, signs in that of
// `signs`.
MOECHAT_VBMI void signed_run(__m512i low, __m512i high, int byte, __m512i signs, const Grid& grid, VecI* to) {
  to[0] = level_codes<2>(fields(low, 8 * byte, 2), fields(signs, 8 * byte - 2, 1), grid);
  to[1] = level_codes<2>(fields(high, 8 * byte, 2), fields(signs, 8 * byte + 2, 1), grid);
}

// 16 columns of a grid of 4, whose numbers are the bytes of `numbers`: half `half` of those that `signs` has.
template <int kTables>
MOECHAT_VBMI void signed_step(__m512i numbers, const __mmask64* more, __m512i signs, int half,
                              const Grid& grid, VecI* to) {
  const __m512i low = look_up<kTables>(grid.low, numbers, more);
  const __m512i high = look_up<kTables>(grid.high, numbers, more);
  MOECHAT_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m512i levels =
        _mm512_mask_blend_epi8(0xccccccccccccccccull, fields(low, 8 * i, 3), fields(high, 8 * i - 6, 3));
    to[i] = level_codes<3>(levels, fields(signs, 16 * half + 4 * i - 3, 1), grid);
  }
}

MOECHAT_VBMI __m512i step_of(const KeptGroup& at, int which) {
  return _mm512_loadu_si512(at.q + which * kStepBytes);
}

// The patterns of 64 numbers of a grid of 8.
struct RunPatterns {
  __m512i low;
  __m512i high;
};

template <int kTables>
MOECHAT_VBMI RunPatterns look_up_runs(const Grid& grid, __m512i numbers, const __mmask64* more) {
  return {look_up<kTables>(grid.low, numbers, more), look_up<kTables>(grid.high, numbers, more)};
}

// to[i]: bit i of each byte.
template <int kBits>
MOECHAT_VBMI void masks_of(__m512i bits, __mmask64 (&to)[kBits]) {
  MOECHAT_UNROLL
  for (int i = 0; i < kBits; ++i) to[i] = _mm512_test_epi8_mask(bits, _mm512_set1_epi8(1 << i));
}

// 32 columns of a grid of 8 with deltas, which are bit 2 of the bytes of `deltas`. `apart`: byte i of a dword
// is that of run i; else all four are the same.
MOECHAT_VBMI void delta_runs(const Grid& grid, __m512i numbers, __m512i more, __m512i deltas, bool apart,
                             VecI* to) {
  __mmask64 masks[3];
  masks_of<3>(more, masks);
  const RunPatterns found = look_up_runs<32>(grid, numbers, masks);
  MOECHAT_UNROLL
  for (int run = 0; run < 4; ++run) {
    const __m512i flags = apart ? fields(deltas, 8 * run, 0) : deltas;
    to[2 * run] = level_codes<2>(fields(found.low, 8 * run, 2), flags, grid);
    to[2 * run + 1] = level_codes<2>(fields(found.high, 8 * run, 2), flags, grid);
  }
}

// As unpack_grid.
__attribute__((noinline, target("avx512vbmi"))) void unpack_grid_bytes(const KeptGroup& at,
                                                                       const Codebook& book, VecI* to) {
  const Grid& grid = book.grid;
  const VecI word = loadi(at.words);
  for (int half = 0; half < 2; ++half) {
    VecI* const here = to + 8 * half;
    switch (book.encoding) {
      case Encoding::kIq2Xxs: {
        const VecI signs = four_signs(half == 0 ? VecI{step_of(at, 2)} : word);
        const RunPatterns found = look_up_runs<4>(grid, step_of(at, half), nullptr);
        MOECHAT_UNROLL
        for (int run = 0; run < 4; ++run)
          signed_run(found.low, found.high, run, signs.a, grid, here + 2 * run);
        break;
      }
      case Encoding::kIq2Xs: {
        // Numbers begin in bytes 0 and 2 of dwords; between them fit those of the next step.
        const VecI one{step_of(at, 2 * half)};
        const VecI two{step_of(at, 2 * half + 1)};
        const VecI bytes = seti(0x00ff00ffu);
        const VecI numbers = ori(andi(one, bytes), shl(andi(two, bytes), 8));
        const VecI rest = ori(andi(shr(one, 8), bytes), andi(two, seti(0xff00ff00u)));
        __mmask64 more[1];
        masks_of<1>(rest.a, more);
        const RunPatterns found = look_up_runs<8>(grid, numbers.a, more);
        const VecI signs = even_signs(andi(shr(rest, 1), seti(0x7f7f7f7fu)));
        MOECHAT_UNROLL
        for (int run = 0; run < 4; ++run) {
          const int byte = run / 2 + 2 * (run % 2);
          signed_run(found.low, found.high, byte, signs.a, grid, here + 2 * run);
        }
        break;
      }
      case Encoding::kIq2S: {
        __mmask64 more[2];
        masks_of<2>(fields(word.a, 8 * half, 2), more);
        const RunPatterns found = look_up_runs<16>(grid, step_of(at, half), more);
        const __m512i signs = step_of(at, 2 + half);
        MOECHAT_UNROLL
        for (int run = 0; run < 4; ++run) signed_run(found.low, found.high, run, signs, grid, here + 2 * run);
        break;
      }
      case Encoding::kIq3Xxs: {
        const VecI signs = four_signs(half == 0 ? VecI{step_of(at, 4)} : word);
        MOECHAT_UNROLL
        for (int part = 0; part < 2; ++part) {
          signed_step<4>(step_of(at, 2 * half + part), nullptr, signs.a, part, grid, here + 4 * part);
        }
        break;
      }
      case Encoding::kIq3S: {
        const __m512i signs = step_of(at, 4 + half);
        MOECHAT_UNROLL
        for (int part = 0; part < 2; ++part) {
          __mmask64 more[1];
          masks_of<1>(fields(word.a, 8 * half + 4 * part, 1), more);
          signed_step<8>(step_of(at, 2 * half + part), more, signs, part, grid, here + 4 * part);
        }
        break;
      }
      case Encoding::kIq1S: {
        const VecI deltas = andi(shr_signed(shl(word, 16 - 16 * half), 31), seti(0x04040404u));
        delta_runs(grid, step_of(at, half), fields(word.a, 16 * half, 3), deltas.a, false, here);
        break;
      }
      default: {  // IQ1_M
        const __m512i more = step_of(at, 2);
        delta_runs(grid, step_of(at, half), fields(more, 16 * half, 4), fields(more, 16 * half + 1, 4), true,
                   here);
      }
    }
  }
}
