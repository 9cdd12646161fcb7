// Codes of a group of kept weights with a grid, see kept_encodings.h. Included inside the anonymous namespace
// of one instruction set, after its simd_*.h.

// Where a (tile, group) of kept weights lies.
struct KeptGroup {
  const unsigned char* q;
  const unsigned char* words;
  const unsigned char* super;  // or null
};

// What turns stored codes into those of kept_encodings.h.
struct Codebook {
  Encoding encoding;
  VecI table;  // of 16 values
  Grid grid;
  bool looks_up_bytes;  // see grid_bytes.h
};

// Bytes of 7 signs, each with the eighth that makes their number even. REQUIRES: the highest bit of a byte is
// 0.
MOECHAT_INLINE VecI even_signs(VecI signs) {
  // The lowest bit of a byte becomes the sum of its bits; what comes from the next byte does not reach it.
  VecI odd = xori(signs, shr(signs, 4));
  odd = xori(odd, shr(odd, 2));
  odd = xori(odd, shr(odd, 1));
  return ori(signs, shl(andi(odd, seti(0x01010101u)), 7));
}

// Four times 7 signs from bit 0 on, a byte for each time.
MOECHAT_INLINE VecI four_signs(VecI words) {
  VecI bytes = andi(words, seti(0x7fu));
  for (int i = 1; i < 4; ++i) bytes = ori(bytes, andi(shl(words, i), seti(0x7fu << (8 * i))));
  return even_signs(bytes);
}

// `bits` bits of every word from `at` on.
MOECHAT_INLINE VecI bits_of(VecI words, int at, int bits) {
  return andi(at == 0 ? words : shr(words, at), seti((1u << bits) - 1u));
}

#if defined(MOECHAT_LOOKS_UP_BYTES)
#include "kernels/isa/grid_bytes.h"
#endif

MOECHAT_INLINE VecI grid_step(const KeptGroup& at, int which) { return loadi(at.q + which * kStepBytes); }

// from[at[i]] for each lane i, one by one; see gather_pairs.
MOECHAT_INLINE VecI gather(const std::uint32_t* from, VecI at) {
  std::uint32_t places[16];
  storei(places, at);
  for (std::uint32_t& place : places) place = from[place];
  return loadi(places);
}

// to[0] and to[1]: codes of 8 columns of a grid of 8, with the signs in byte `byte`.
MOECHAT_INLINE void signed_run(const Codebook& book, VecI numbers, VecI signs, int byte, VecI* to) {
  gather_pairs(book.grid.codes, numbers, &to[0], &to[1]);
  to[0] = flip_signs(to[0], signs, byte, 0);
  to[1] = flip_signs(to[1], signs, byte, 1);
}

// The same, less 2 where `deltas` has a bit 31.
MOECHAT_INLINE void delta_run(const Codebook& book, VecI numbers, VecI deltas, VecI* to) {
  gather_pairs(book.grid.codes, numbers, &to[0], &to[1]);
  const VecI less = andi(shr_signed(deltas, 31), seti(0x02020202u));
  to[0] = subi(to[0], less);
  to[1] = subi(to[1], less);
}

// 16 columns of a grid of 4: numbers are bytes of `low`, and bits 8 of them the lowest bits of `high`.
MOECHAT_INLINE void signed_step(const Codebook& book, VecI low, VecI high, VecI signs, int part, VecI* to) {
  MOECHAT_UNROLL
  for (int d = 0; d < 4; ++d) {
    const VecI number = ori(bits_of(low, 8 * d, 8), shl(bits_of(high, d, 1), 8));
    to[d] = flip_signs(gather(book.grid.codes, number), signs, 2 * part + d / 2, d % 2);
  }
}

// The codes of a group of a grid, to[0..15]. Not inlined: lookups take most of the time, and every kernel
// would have the code of all encodings.
[[maybe_unused]] __attribute__((noinline)) void unpack_grid(const KeptGroup& at, const Codebook& book,
                                                            VecI* to) {
#if defined(MOECHAT_LOOKS_UP_BYTES)
  if (book.looks_up_bytes) return unpack_grid_bytes(at, book, to);
#endif
  const VecI word = loadi(at.words);
  for (int half = 0; half < 2; ++half) {
    VecI* const here = to + 8 * half;
    const VecI numbers = grid_step(at, half);
    switch (book.encoding) {
      case Encoding::kIq2Xxs: {
        const VecI signs = four_signs(half == 0 ? grid_step(at, 2) : word);
        MOECHAT_UNROLL
        for (int run = 0; run < 4; ++run) {
          signed_run(book, bits_of(numbers, 8 * run, 8), signs, run, here + 2 * run);
        }
        break;
      }
      case Encoding::kIq2Xs: {
        MOECHAT_UNROLL
        for (int run = 0; run < 4; ++run) {
          const VecI both = grid_step(at, 2 * half + run / 2);
          const VecI signs = even_signs(andi(shr(both, 9), seti(0x007f007fu)));
          signed_run(book, bits_of(both, 16 * (run % 2), 9), signs, 2 * (run % 2), here + 2 * run);
        }
        break;
      }
      case Encoding::kIq2S: {
        const VecI high = shr(word, 8 * half);
        MOECHAT_UNROLL
        for (int run = 0; run < 4; ++run) {
          const VecI number = ori(bits_of(numbers, 8 * run, 8), shl(bits_of(high, 2 * run, 2), 8));
          signed_run(book, number, grid_step(at, 2 + half), run, here + 2 * run);
        }
        break;
      }
      case Encoding::kIq3Xxs:
      case Encoding::kIq3S: {
        const bool has_high = book.encoding == Encoding::kIq3S;
        const VecI signs =
            has_high ? grid_step(at, 4 + half) : four_signs(half == 0 ? grid_step(at, 4) : word);
        MOECHAT_UNROLL
        for (int part = 0; part < 2; ++part) {
          const VecI high = has_high ? shr(word, 8 * half + 4 * part) : seti(0);
          signed_step(book, grid_step(at, 2 * half + part), high, signs, part, here + 4 * part);
        }
        break;
      }
      case Encoding::kIq1S: {
        const VecI more = shl(word, 16 - 16 * half);
        MOECHAT_UNROLL
        for (int run = 0; run < 4; ++run) {
          const VecI number = ori(bits_of(numbers, 8 * run, 8), shl(bits_of(more, 16 + 3 * run, 3), 8));
          delta_run(book, number, more, here + 2 * run);
        }
        break;
      }
      default: {  // IQ1_M
        const VecI more = shr(grid_step(at, 2), 16 * half);
        MOECHAT_UNROLL
        for (int run = 0; run < 4; ++run) {
          const VecI number = ori(bits_of(numbers, 8 * run, 8), shl(bits_of(more, 4 * run, 3), 8));
          delta_run(book, number, shl(more, 28 - 4 * run), here + 2 * run);
        }
      }
    }
  }
}
