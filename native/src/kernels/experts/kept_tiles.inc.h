// Rearranges encoded rows of files into kept tiles: 16 rows of 64 columns at a time, a lane for each row.
// Gives the bytes of read_file_group and put_kept_row in layout/gguf_blocks.h, where the formats are read one
// row at a time. Included inside the anonymous namespace of one instruction set, after its simd_*.h.

// A group of 16 rows. Byte k of codes[d] is the code of column 4d + k; the bits of `super` above those that
// are stored do not matter.
struct LaneGroup {
  VecI codes[16];
  VecI word;
  VecI super;
};

struct LaneRows {
  const unsigned char* from;  // where the block begins that holds the group, in the first row
  std::int64_t stride;

  // Bytes [at, at + 16) of every row, as four dwords.
  MOECHAT_INLINE void four(std::int64_t at, VecI* to) const { load_dwords4(from + at, stride, to); }
  template <int kDwords>
  MOECHAT_INLINE void dwords(std::int64_t at, VecI (&to)[kDwords]) const {
    static_assert(kDwords % 4 == 0, "loaded by fours");
    MOECHAT_UNROLL
    for (int d = 0; d < kDwords; d += 4) four(at + 4 * d, to + d);
  }
  MOECHAT_INLINE VecI dword(std::int64_t at) const {
    std::uint32_t words[16];
    for (int row = 0; row < 16; ++row) {
      __builtin_memcpy(words + row, from + at + row * stride, sizeof *words);
    }
    return loadi(words);
  }
};

MOECHAT_INLINE VecI bytes_of(VecI x, int shift, std::uint32_t mask) {
  return andi(shr(x, shift), seti(mask * 0x01010101u));
}

// Sets the top bit of each half of `bad` whose fp16 value in `halves` is not finite.
MOECHAT_INLINE void note_not_finite(VecI halves, VecI* bad) {
  *bad = ori(*bad, addi(andi(halves, seti(0x7c007c00u)), seti(0x04000400u)));
}

// Bytes of 0..63, less 32.
MOECHAT_INLINE VecI less_32(VecI bytes) { return xori(addi(bytes, seti(0x60606060u)), seti(0x80808080u)); }

// 32 codes of 4 bits from 16 bytes: byte i holds those of columns i and i + 16.
MOECHAT_INLINE void nibbles16(const VecI (&from)[4], VecI* codes) {
  MOECHAT_UNROLL
  for (int d = 0; d < 4; ++d) {
    codes[d] = bytes_of(from[d], 0, 15);
    codes[d + 4] = bytes_of(from[d], 4, 15);
  }
}

// Adds bit 4 of the codes of 32 columns, one bit of `bits` for each.
MOECHAT_INLINE void add_fifth_bits(VecI bits, VecI* codes) {
  MOECHAT_UNROLL
  for (int d = 0; d < 8; ++d) {
    // Copies at distances of 7 bring bit k to bit 8k; no two bits meet.
    const VecI spread = muli(andi(shr(bits, 4 * d), seti(15)), seti(0x00204081u));
    codes[d] = ori(codes[d], shl(andi(spread, seti(0x01010101u)), 4));
  }
}

// Two blocks of 32 columns.
template <Encoding kEncoding>
MOECHAT_INLINE void read_pair(const LaneRows& rows, LaneGroup* to, VecI* bad) {
  constexpr KeptForm kForm = kept_form(kEncoding);
  to->word = to->super = seti(0);
  MOECHAT_UNROLL
  for (int half = 0; half < 2; ++half) {
    std::int64_t at = half * kForm.file_bytes;
    VecI* const codes = to->codes + 8 * half;
    const VecI head = rows.dword(at);
    if constexpr (kEncoding == Encoding::kMxfp4) {
      const VecI exponent = andi(head, seti(255));
      // 255 sets bit 15.
      *bad = ori(*bad, shl(addi(exponent, seti(1)), 7));
      to->word = ori(to->word, shl(subi(maxi(exponent, seti(1)), seti(1)), 8 * half));
      at += 1;
    } else {
      const VecI d = andi(head, seti(0xffffu));
      note_not_finite(d, bad);
      to->word = ori(to->word, shl(d, 16 * half));
      at += 2;
      if constexpr (kForm.words == ScaleWords::kMins) {
        const VecI least = shr(head, 16);
        note_not_finite(least, bad);
        to->super = ori(to->super, shl(least, 16 * half));
        at += 2;
      }
    }
    if constexpr (kForm.code_bits == 8) {
      VecI bytes[8];
      rows.dwords(at, bytes);
      MOECHAT_UNROLL
      for (int d = 0; d < 8; ++d) codes[d] = xori(bytes[d], seti(0x80808080u));
    } else {
      constexpr int kHighBytes = kForm.code_bits == 5 ? 4 : 0;
      VecI bytes[4];
      rows.dwords(at + kHighBytes, bytes);
      nibbles16(bytes, codes);
      if constexpr (kHighBytes > 0) add_fifth_bits(rows.dword(at), codes);
    }
  }
}

// Sets the top bit of `bad` whose fp32 value in `floats` is not finite.
MOECHAT_INLINE void note_not_finite_float(VecI floats, VecI* bad) {
  *bad = ori(*bad, addi(andi(floats, seti(0x7f800000u)), seti(0x00800000u)));
}

// Runs of 32 codes behind words with fp32 scales: a word for a run, or one for both.
template <Encoding kEncoding>
MOECHAT_INLINE void read_word_blocks(const LaneRows& rows, LaneGroup* to, VecI* bad) {
  constexpr KeptForm kForm = kept_form(kEncoding);
  constexpr bool kShared = kForm.file_columns == kGroupColumns;
  constexpr int kRunBytes = 32 * kForm.code_bits / 8;
  to->word = rows.dword(0);
  note_not_finite_float(to->word, bad);
  to->super = kShared ? seti(0) : rows.dword(kForm.file_bytes);
  note_not_finite_float(to->super, bad);
  MOECHAT_UNROLL
  for (int run = 0; run < 2; ++run) {
    const std::int64_t at = 4 + run * (kShared ? kRunBytes : kForm.file_bytes);
    VecI bytes[kRunBytes / 4];
    rows.dwords(at, bytes);
    if constexpr (kForm.code_bits == 8) {
      for (int d = 0; d < 8; ++d) to->codes[8 * run + d] = bytes[d];
    } else {
      nibbles16(bytes, to->codes + 8 * run);
    }
  }
}

// A block of 64 columns.
MOECHAT_INLINE void read_nvfp4(const LaneRows& rows, LaneGroup* to, VecI* bad) {
  to->super = as_int(mul(as_float(rows.dword(0)), set1(kE4m3Shift)));
  note_not_finite_float(to->super, bad);
  to->word = rows.dword(4);
  // Patterns of 127 stand for no number.
  const VecI above = addi(andi(to->word, seti(0x7f7f7f7fu)), seti(0x01010101u));
  *bad = ori(*bad, ori(above, shl(above, 8)));
  MOECHAT_UNROLL
  for (int run = 0; run < 2; ++run) {
    VecI bytes[4];
    rows.dwords(8 + 16 * run, bytes);
    nibbles16(bytes, to->codes + 8 * run);
  }
}

// Scale words of quarter `quarter` of Q4_K and Q5_K, from the 12 bytes of scales and mins.
MOECHAT_INLINE VecI factors_of(const VecI* scales, int quarter) {
  VecI scale, min;
  if (quarter < 2) {
    scale = bytes_of(scales[0], 0, 63);
    min = bytes_of(scales[1], 0, 63);
  } else {
    scale = ori(bytes_of(scales[2], 0, 15), bytes_of(scales[0], 2, 48));
    min = ori(bytes_of(scales[2], 4, 15), bytes_of(scales[1], 2, 48));
  }
  if (quarter % 2 == 0) return ori(andi(scale, seti(0xffffu)), shl(min, 16));
  return ori(shr(scale, 16), andi(min, seti(0xffff0000u)));
}

// A quarter of a block of 256 columns.
template <Encoding kEncoding>
MOECHAT_INLINE void read_quarter(const LaneRows& rows, int quarter, LaneGroup* to, VecI* bad) {
  const int half = quarter / 2;        // of the block
  const int pair = 2 * (quarter % 2);  // of its four runs of 32 columns, the first of the quarter
  if constexpr (kEncoding == Encoding::kQ4K || kEncoding == Encoding::kQ5K) {
    constexpr bool kFive = kEncoding == Encoding::kQ5K;
    VecI head[4];
    rows.dwords(0, head);
    VecI bytes[8];
    rows.dwords((kFive ? 48 : 16) + 32 * quarter, bytes);
    MOECHAT_UNROLL
    for (int d = 0; d < 8; ++d) {
      to->codes[d] = bytes_of(bytes[d], 0, 15);
      to->codes[d + 8] = bytes_of(bytes[d], 4, 15);
    }
    if constexpr (kFive) {
      VecI high[8];
      rows.dwords(16, high);
      MOECHAT_UNROLL
      for (int d = 0; d < 8; ++d) {
        const VecI bits = shr(high[d], 2 * quarter);
        to->codes[d] = ori(to->codes[d], shl(bytes_of(bits, 0, 1), 4));
        to->codes[d + 8] = ori(to->codes[d + 8], shl(bytes_of(bits, 1, 1), 4));
      }
    }
    to->word = factors_of(head + 1, quarter);
    to->super = head[0];
    note_not_finite(to->super, bad);
  } else if constexpr (kEncoding == Encoding::kQ6K) {
    VecI low[16];
    rows.dwords(64 * half, low);
    VecI high[8];
    rows.dwords(128 + 32 * half, high);
    MOECHAT_UNROLL
    for (int d = 0; d < 16; ++d) {
      const VecI top = bytes_of(high[d % 8], 2 * (pair + d / 8), 3);
      to->codes[d] = ori(bytes_of(low[d], 2 * pair, 15), shl(top, 4));
    }
    to->word = rows.dword(192 + 4 * quarter);
    to->super = shr(rows.dword(206), 16);  // the last two bytes of the block
    note_not_finite(to->super, bad);
  } else if constexpr (kEncoding == Encoding::kQ2K) {
    VecI bytes[8];
    rows.dwords(16 + 32 * half, bytes);
    MOECHAT_UNROLL
    for (int d = 0; d < 16; ++d) to->codes[d] = bytes_of(bytes[d % 8], 2 * (pair + d / 8), 3);
    to->word = rows.dword(4 * quarter);
    to->super = rows.dword(80);
    note_not_finite(to->super, bad);
  } else if constexpr (kEncoding == Encoding::kQ3K) {
    VecI bytes[8];
    rows.dwords(32 + 32 * half, bytes);
    VecI high[8];
    rows.dwords(0, high);
    MOECHAT_UNROLL
    for (int d = 0; d < 16; ++d) {
      const VecI top = bytes_of(high[d % 8], 4 * half + pair + d / 8, 1);
      to->codes[d] = ori(bytes_of(bytes[d % 8], 2 * (pair + d / 8), 3), shl(top, 2));
    }
    const VecI nibbles = bytes_of(rows.dword(96 + 4 * (quarter % 2)), 4 * half, 15);
    const VecI tops = bytes_of(rows.dword(104), 2 * quarter, 3);
    to->word = less_32(ori(nibbles, shl(tops, 4)));
    to->super = shr(rows.dword(106), 16);  // the last two bytes of the block
    note_not_finite(to->super, bad);
  } else {
    static_assert(kEncoding == Encoding::kIq4Xs, "every encoding with blocks of 256 columns is read");
    const VecI head = rows.dword(0);  // d, and the high bits of the scales
    const VecI low = shr(rows.dword(4), 8 * quarter);
    const VecI high = shr(head, 16 + 4 * quarter);
    const VecI first = ori(andi(low, seti(15)), shl(andi(high, seti(3)), 4));
    const VecI second = ori(andi(shr(low, 4), seti(15)), shl(andi(shr(high, 2), seti(3)), 4));
    const VecI scales = andi(less_32(ori(first, shl(second, 8))), seti(0xffffu));
    to->word = ori(scales, shl(head, 16));
    to->super = seti(0);
    MOECHAT_UNROLL
    for (int run = 0; run < 2; ++run) {
      VecI bytes[4];
      rows.dwords(8 + 16 * (2 * quarter + run), bytes);
      nibbles16(bytes, to->codes + 8 * run);
    }
    note_not_finite(andi(head, seti(0xffffu)), bad);
  }
}

// A quarter of a block of an encoding with a grid: the words of its q field.
template <Encoding kEncoding>
MOECHAT_INLINE void read_grid_quarter(const LaneRows& rows, int quarter, VecI* steps, LaneGroup* to,
                                      VecI* bad) {
  const auto half_at = [&rows](std::int64_t at) __attribute__((always_inline)) {
    return at == 0 ? andi(rows.dword(0), seti(0xffffu)) : shr(rows.dword(at - 2), 16);
  };
  const auto pair = [&rows](std::int64_t at, VecI* first, VecI* second) __attribute__((always_inline)) {
    *first = rows.dword(at);
    *second = rows.dword(at + 4);
  };
  to->super = seti(0);
  if constexpr (kEncoding == Encoding::kIq2Xxs) {
    VecI words[4];
    rows.dwords(2 + 16 * quarter, words);
    steps[0] = words[0];
    steps[1] = words[2];
    steps[2] = words[1];
    to->word = words[3];
    to->super = half_at(0);
  } else if constexpr (kEncoding == Encoding::kIq2Xs) {
    rows.four(2 + 16 * quarter, steps);
    to->word = ori(half_at(66 + 2 * quarter), shl(rows.dword(0), 16));
  } else if constexpr (kEncoding == Encoding::kIq2S) {
    pair(2 + 8 * quarter, steps, steps + 1);
    pair(34 + 8 * quarter, steps + 2, steps + 3);
    to->word = ori(half_at(66 + 2 * quarter), shl(half_at(74 + 2 * quarter), 16));
    to->super = half_at(0);
  } else if constexpr (kEncoding == Encoding::kIq3Xxs) {
    rows.four(2 + 16 * quarter, steps);
    pair(66 + 8 * quarter, steps + 4, &to->word);
    to->super = half_at(0);
  } else if constexpr (kEncoding == Encoding::kIq3S) {
    rows.four(2 + 16 * quarter, steps);
    pair(74 + 8 * quarter, steps + 4, steps + 5);
    const VecI scales = bits_of(rows.dword(106), 8 * quarter, 8);
    to->word = ori(half_at(66 + 2 * quarter), shl(scales, 16));
    to->super = half_at(0);
  } else if constexpr (kEncoding == Encoding::kIq1S) {
    pair(2 + 8 * quarter, steps, steps + 1);
    to->word = rows.dword(34 + 4 * quarter);
    to->super = half_at(0);
  } else {
    static_assert(kEncoding == Encoding::kIq1M, "every encoding with a grid is read");
    pair(8 * quarter, steps, steps + 1);
    steps[2] = rows.dword(32 + 4 * quarter);
    VecI d = seti(0);
    for (int i = 0; i < 4; ++i) d = ori(d, shl(shr(half_at(48 + 2 * i), 12), 4 * i));
    to->word = ori(andi(half_at(48 + 2 * quarter), seti(0xfffu)), shl(d, 16));
  }
  note_not_finite(odd_scales(kEncoding).own_d ? shr(to->word, 16) : to->super, bad);
}

// Stores bits [shift, shift + kBits) of the codes as a plane; returns where the next one begins.
template <int kBits>
MOECHAT_INLINE unsigned char* store_plane(const VecI (&codes)[16], int shift, unsigned char* plane) {
  constexpr int kPerStep = 8 / kBits;
  MOECHAT_UNROLL
  for (int step = 0; step < 16 / kPerStep; ++step) {
    VecI word = bytes_of(codes[step * kPerStep], shift, (1u << kBits) - 1);
    MOECHAT_UNROLL
    for (int j = 1; j < kPerStep; ++j) {
      word = ori(word, shl(bytes_of(codes[step * kPerStep + j], shift, (1u << kBits) - 1), kBits * j));
    }
    storei(plane + step * kStepBytes, word);
  }
  return plane + 16 / kPerStep * kStepBytes;
}

template <Encoding kEncoding>
bool pack_kept_of(const KeptRows& from, const KeptPlaces& to) {
  constexpr KeptForm kForm = kept_form(kEncoding);
  constexpr int kLow = kForm.code_bits == 8 ? 8 : (kForm.code_bits >= 4 ? 4 : 2);
  VecI bad = seti(0);
  for (std::int64_t g = 0; g < from.groups; ++g) {
    LaneGroup read;
    if constexpr (kForm.table == CodeTable::kGrid) {
      const LaneRows rows{from.rows + g / kSuperGroups * kForm.file_bytes, from.row_stride};
      VecI steps[kMostGridSteps];
      read_grid_quarter<kEncoding>(rows, static_cast<int>(g % kSuperGroups), steps, &read, &bad);
      for (int s = 0; s < kForm.grid_steps; ++s) storei(to.q + g * to.q_stride + s * kStepBytes, steps[s]);
    } else if constexpr (kForm.file_columns == kGroupColumns * kSuperGroups) {
      const LaneRows rows{from.rows + g / kSuperGroups * kForm.file_bytes, from.row_stride};
      read_quarter<kEncoding>(rows, static_cast<int>(g % kSuperGroups), &read, &bad);
    } else if constexpr (kForm.words == ScaleWords::kFloats || kForm.words == ScaleWords::kWholes) {
      constexpr int kBlocks = kGroupColumns / kForm.file_columns;
      read_word_blocks<kEncoding>({from.rows + kBlocks * g * kForm.file_bytes, from.row_stride}, &read, &bad);
    } else if constexpr (kForm.words == ScaleWords::kE4m3) {
      read_nvfp4({from.rows + g * kForm.file_bytes, from.row_stride}, &read, &bad);
    } else {
      read_pair<kEncoding>({from.rows + 2 * g * kForm.file_bytes, from.row_stride}, &read, &bad);
    }
    if constexpr (kForm.table != CodeTable::kGrid) {
      unsigned char* const high = store_plane<kLow>(read.codes, 0, to.q + g * to.q_stride);
      if constexpr (kForm.code_bits > kLow) store_plane<kForm.code_bits - kLow>(read.codes, kLow, high);
    }
    storei(to.sz + g * to.sz_stride, read.word);
    if constexpr (kForm.super_halves == 2) storei(to.super + g / to.share * to.super_stride, read.super);
    if constexpr (kForm.super_halves == 1) {
      store_low_halves(to.super + g / to.share * to.super_stride, read.super);
    }
  }
  std::uint32_t words[16];
  storei(words, andi(bad, seti(0x80008000u)));
  std::uint32_t any = 0;
  for (const std::uint32_t word : words) any |= word;
  return any == 0;
}

bool pack_kept_rows(Encoding encoding, const KeptRows& from, const KeptPlaces& to) {
  switch (encoding) {
    case Encoding::kQ4_0:
      return pack_kept_of<Encoding::kQ4_0>(from, to);
    case Encoding::kQ4_1:
      return pack_kept_of<Encoding::kQ4_1>(from, to);
    case Encoding::kQ5_0:
      return pack_kept_of<Encoding::kQ5_0>(from, to);
    case Encoding::kQ5_1:
      return pack_kept_of<Encoding::kQ5_1>(from, to);
    case Encoding::kQ8_0:
      return pack_kept_of<Encoding::kQ8_0>(from, to);
    case Encoding::kQ2K:
      return pack_kept_of<Encoding::kQ2K>(from, to);
    case Encoding::kQ3K:
      return pack_kept_of<Encoding::kQ3K>(from, to);
    case Encoding::kQ4K:
      return pack_kept_of<Encoding::kQ4K>(from, to);
    case Encoding::kQ5K:
      return pack_kept_of<Encoding::kQ5K>(from, to);
    case Encoding::kQ6K:
      return pack_kept_of<Encoding::kQ6K>(from, to);
    case Encoding::kIq4Nl:
      return pack_kept_of<Encoding::kIq4Nl>(from, to);
    case Encoding::kIq4Xs:
      return pack_kept_of<Encoding::kIq4Xs>(from, to);
    case Encoding::kIq2Xxs:
      return pack_kept_of<Encoding::kIq2Xxs>(from, to);
    case Encoding::kIq2Xs:
      return pack_kept_of<Encoding::kIq2Xs>(from, to);
    case Encoding::kIq2S:
      return pack_kept_of<Encoding::kIq2S>(from, to);
    case Encoding::kIq3Xxs:
      return pack_kept_of<Encoding::kIq3Xxs>(from, to);
    case Encoding::kIq3S:
      return pack_kept_of<Encoding::kIq3S>(from, to);
    case Encoding::kIq1S:
      return pack_kept_of<Encoding::kIq1S>(from, to);
    case Encoding::kIq1M:
      return pack_kept_of<Encoding::kIq1M>(from, to);
    case Encoding::kInt4:
      return pack_kept_of<Encoding::kInt4>(from, to);
    case Encoding::kInt4By32:
      return pack_kept_of<Encoding::kInt4By32>(from, to);
    case Encoding::kInt8:
      return pack_kept_of<Encoding::kInt8>(from, to);
    case Encoding::kInt8By32:
      return pack_kept_of<Encoding::kInt8By32>(from, to);
    case Encoding::kNvfp4:
      return pack_kept_of<Encoding::kNvfp4>(from, to);
    case Encoding::kFp8:
      return pack_kept_of<Encoding::kFp8>(from, to);
    default:
      return pack_kept_of<Encoding::kMxfp4>(from, to);
  }
}
