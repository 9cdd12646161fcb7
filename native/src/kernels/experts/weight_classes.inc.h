// Classes of weights that the integer kernels are compiled for: plain ones, by bits, and kept ones, by the
// bits of their codes, whether codes go through a table, and sub-blocks of a group. Included inside the
// anonymous namespace of one instruction set, after its simd_*.h.

// Whether sums of two products for each of `dwords` dwords fit in 16 bits.
constexpr bool fits_16(int largest_code, int dwords) { return largest_code * 128 * 2 * dwords < 32768; }

// Dwords whose products are summed in 16 bits before the sums are widened: the most that fit, a power of two
// up to `most`. 0: those of one dword do not fit, or the instruction set sums in 32 bits.
constexpr int short_run(int largest_code, int most) {
  if (kWideDot) return 0;
  int run = most;
  while (run > 0 && !fits_16(largest_code, run)) run /= 2;
  return run;
}

template <int kCodeBits>
struct Plain {
  static constexpr bool kKept = false;
  static constexpr int kBits = kCodeBits;
  static constexpr int kSubs = 0;
  static constexpr int kSteps = 2 * kBits;
  static constexpr int kLargest = (1 << kBits) - 1;
  static constexpr bool kFactors = has_halves(kBits);
  static constexpr int kRun = short_run(kLargest, 8);  // up to a half, which has a factor of its own
  using Panel = Plain;                                 // see panel_unpack.inc.h

  // Of the q of a group; `actual` is the same, but not known to the compiler.
  MOECHAT_INLINE static constexpr std::int64_t group_bytes(std::int64_t actual) {
    (void)actual;
    return kSteps * kStepBytes;
  }
};

// Unpacked kept weights: panels differ only in their sub-blocks and their sums of 16 bits.
template <int kSubBlocks, int kShortRun>
struct KeptPanel {
  static constexpr bool kKept = true;
  static constexpr bool kFactors = false;
  static constexpr int kSubs = kSubBlocks;
  static constexpr int kDwords = 16 / kSubs;
  static constexpr int kRun = kShortRun;  // see short_run()
};

// Steps and mins of the sub-blocks of a group for 16 rows; see kept_encodings.h.
template <int kSubs>
struct SubScales {
  Vec step[kSubs];
  Vec min[kSubs];
};

// Largest values of tables, 0: codes are integers as they are. Only sums of 16 bits have a use for the
// difference; elsewhere one class serves both tables.
constexpr int kNoTable = 0;
constexpr int kIq4Table = largest_of(kIq4Values);
constexpr int kE2m1Table = kWideDot ? kIq4Table : largest_of(kE2m1Values);

template <int kCodeBits, int kTable, int kSubBlocks>
struct Kept {
  static constexpr bool kKept = true;
  static constexpr int kBits = kCodeBits;
  static constexpr bool kTabled = kTable != kNoTable;
  static constexpr int kSubs = kSubBlocks;
  static constexpr int kDwords = 16 / kSubs;  // of a sub-block
  static constexpr int kSteps = 2 * kBits;
  static constexpr int kLargest = kTabled ? kTable : (1 << kBits) - 1;
  static constexpr int kRun = short_run(kLargest, kDwords);
  static constexpr int kLowBits = kBits == 8 ? 8 : (kBits >= 4 ? 4 : 2);
  static constexpr int kHighBits = kBits - kLowBits;
  using Panel = KeptPanel<kSubs, kRun>;
  using Opened = Kept;
  struct Room {};
  static constexpr std::int64_t kHighPlane = std::int64_t{kTileRows} * kGroupColumns * kLowBits / 8;

  MOECHAT_INLINE static constexpr std::int64_t group_bytes(std::int64_t actual) {
    (void)actual;
    return kSteps * kStepBytes;
  }

  // A group whose codes Opened reads; `room` is in use as long as the result.
  MOECHAT_INLINE static KeptGroup open(const KeptGroup& at, const Codebook&, Room*) { return at; }
  // Codes of a sub-block: four columns for 16 rows each.
  MOECHAT_INLINE static void codes(const KeptGroup& at, int sub, const Codebook& book, VecI (&to)[kDwords]) {
    const unsigned char* const group = at.q;
    constexpr int kPerStep = 8 / kLowBits;
    const VecI mask = seti(0x01010101u * ((1u << kLowBits) - 1u));
    MOECHAT_UNROLL
    for (int i = 0; i < kDwords; i += kPerStep) {
      const VecI words = loadi(group + (sub * kDwords + i) / kPerStep * kStepBytes);
      for (int j = 0; j < kPerStep; ++j) {
        to[i + j] = kLowBits == 8 ? words : andi(j == 0 ? words : shr(words, kLowBits * j), mask);
      }
    }
    if constexpr (kHighBits > 0) {
      constexpr int kPerHigh = 8 / kHighBits;
      constexpr std::uint32_t kMask = 0x01010101u * (((1u << kHighBits) - 1u) << kLowBits);
      MOECHAT_UNROLL
      for (int i = 0; i < kDwords; ++i) {
        const int dword = sub * kDwords + i;
        const VecI words = loadi(group + kHighPlane + dword / kPerHigh * kStepBytes);
        const int from = kHighBits * (dword % kPerHigh);
        const VecI moved = from <= kLowBits ? shl(words, kLowBits - from) : shr(words, from - kLowBits);
        to[i] = ori(to[i], andi(moved, seti(kMask)));
      }
    }
    if constexpr (kTabled) {
      for (int i = 0; i < kDwords; ++i) to[i] = lookup(book.table, to[i]);
    }
  }
};

// Unpacked codes of a group with a grid.
template <int kSubBlocks>
struct Unpacked {
  static constexpr bool kKept = true;
  static constexpr int kSubs = kSubBlocks;
  static constexpr int kDwords = 16 / kSubs;
  static constexpr int kLargest = 2 * kSignedZero - 1;
  static constexpr int kRun = short_run(kLargest, kDwords);

  MOECHAT_INLINE static void codes(const KeptGroup& at, int sub, const Codebook&, VecI (&to)[kDwords]) {
    for (int i = 0; i < kDwords; ++i) to[i] = loadi(at.q + (sub * kDwords + i) * kStepBytes);
  }
};

// Kept weights with a grid, see kept_encodings.h: a group is unpacked whole, and its codes are read from
// there.
template <int kSubBlocks>
struct Gridded {
  static constexpr bool kKept = true;
  static constexpr int kSubs = kSubBlocks;
  static constexpr int kDwords = 16 / kSubs;
  static constexpr int kSteps = kMostGridSteps;
  static constexpr int kLargest = Unpacked<kSubs>::kLargest;
  static constexpr int kRun = Unpacked<kSubs>::kRun;
  using Panel = KeptPanel<kSubs, kRun>;
  using Opened = Unpacked<kSubs>;

  // Room for the codes of a group.
  struct Room {
    VecI codes[16];
  };

  MOECHAT_INLINE static std::int64_t group_bytes(std::int64_t actual) { return actual; }
  MOECHAT_INLINE static KeptGroup open(const KeptGroup& at, const Codebook& book, Room* room) {
    unpack_grid(at, book, room->codes);
    return {reinterpret_cast<const unsigned char*>(room->codes), at.words, at.super};
  }
};

template <class W>
constexpr bool kGridded = false;
template <int kSubs>
constexpr bool kGridded<Gridded<kSubs>> = true;

// The values of each CodeTable, four times over: a register of them.
struct CodeValues {
  alignas(64) unsigned char of[static_cast<int>(CodeTable::kGrid)][64];
};
constexpr CodeValues make_code_values() {
  CodeValues made{};
  for (int table = 0; table < static_cast<int>(CodeTable::kGrid); ++table) {
    for (int i = 0; i < 64; ++i) {
      made.of[table][i] = static_cast<unsigned char>(kept_value(static_cast<CodeTable>(table), i % 16));
    }
  }
  return made;
}
constexpr CodeValues kCodeValues = make_code_values();

// REQUIRES: is_kept(encoding).
MOECHAT_INLINE Codebook codebook_of(Encoding encoding) {
  const CodeTable table = kept_form(encoding).table;
  if (table == CodeTable::kGrid) {
    return {encoding, seti(0), grid_of(encoding), looks_up_bytes()};
  }
  return {encoding, loadi(kCodeValues.of[static_cast<int>(table)]), {}, false};
}

// What the kernels for kept weights need besides codes and scale words.
struct Keeping {
  Codebook book;
  int super_shift;           // groups that share a super, as a power of two
  std::int64_t super_bytes;  // for 16 rows
  std::int64_t group_bytes;

  // `shared`: several groups of a row share a super.
  MOECHAT_INLINE static Keeping of(Encoding encoding, bool shared) {
    if (!is_kept(encoding)) return {{encoding, seti(0), {}, false}, 0, 0, 0};
    const KeptForm form = kept_form(encoding);
    return {codebook_of(encoding), shared && form.super_groups > 1 ? 2 : 0,
            std::int64_t{kTileRows} * 2 * form.super_halves, kept_group_bytes(encoding)};
  }
  MOECHAT_INLINE const unsigned char* super_of(const unsigned char* tile, std::int64_t group) const {
    return tile + (group >> super_shift) * super_bytes;
  }
};
static_assert(kSuperGroups == 4, "super_shift is 2");

// Returns where tile `tile` of a matrix has its supers, whose field begins at `offset`; -1: it has none.
// REQUIRES: is_kept(encoding), or -1.
MOECHAT_INLINE const unsigned char* super_tile(const unsigned char* record, std::int64_t offset,
                                               Encoding encoding, std::int64_t tile, std::int64_t groups,
                                               bool shared) {
  return offset < 0 ? record : record + offset + tile * super_bytes(encoding, groups, shared);
}

// Byte `at` of every word, signed.
MOECHAT_INLINE Vec signed_byte(VecI words, int at) {
  return to_float(shr_signed(shl(words, 24 - 8 * at), 24));
}
// `bits` bits of every word from `at` on.
MOECHAT_INLINE Vec unsigned_bits(VecI words, int at, int bits) {
  return to_float(andi(shr(words, at), seti((1u << bits) - 1u)));
}

// Steps of weights with a grid, which are multiples of d.
template <int kSubs>
MOECHAT_INLINE void read_odd_scales(Encoding encoding, const KeptGroup& at, SubScales<kSubs>* to) {
  const OddScales odd = odd_scales(encoding);
  const VecI word = loadi(at.words);
  Vec d, unused;
  if (odd.own_d) {
    split_fp16(word, &unused, &d);
  } else {
    d = load_fp16(at.super);
  }
  d = mul(d, set1(odd.unit));
  for (int s = 0; s < kSubs; ++s) {
    const bool own = odd.apart == 0 && s == 0;
    const VecI from = own ? loadi(at.q + (kept_form(encoding).grid_steps - 1) * kStepBytes) : word;
    const VecI scale = bits_of(from, odd.first + odd.apart * s, odd.bits);
    to->step[s] = mul(d, to_float(addi(shl(scale, 1), seti(1))));
  }
}

// Numbers of the e4m3 patterns in bytes 0 and 2 of every word, 256 times smaller.
MOECHAT_INLINE void split_e4m3(VecI words, Vec* low, Vec* high) {
  const VecI magnitudes = shl(andi(words, seti(0x007f007fu)), 7);
  split_fp16(ori(magnitudes, shl(andi(words, seti(0x00800080u)), 8)), low, high);
}

template <int kSubs>
MOECHAT_INLINE void set_zeros(SubScales<kSubs>& scales, float zero_code) {
  for (int s = 0; s < kSubs; ++s) scales.min[s] = mul(scales.step[s], set1(zero_code));
}

// REQUIRES: an encoding of the class W.
template <class W>
MOECHAT_INLINE SubScales<W::kSubs> read_scales(Encoding encoding, const KeptGroup& at) {
  SubScales<W::kSubs> scales;
  const VecI words = loadi(at.words);
  const float zero_code = static_cast<float>(kept_form(encoding).zero);
  if constexpr (kGridded<W>) {
    read_odd_scales(encoding, at, &scales);
    set_zeros(scales, zero_code);
  } else if constexpr (W::kSubs == 4 && W::kTabled) {
    const Vec scale = as_float(loadi(at.super));
    for (int s = 0; s < 2; ++s) {
      Vec low, high;
      split_e4m3(s == 0 ? words : shr(words, 8), &low, &high);
      scales.step[s] = mul(scale, low);
      scales.step[s + 2] = mul(scale, high);
    }
    set_zeros(scales, zero_code);
  } else if constexpr (W::kSubs == 4 && W::kBits == 2) {
    Vec d, least;
    split_fp16(loadi(at.super), &d, &least);
    for (int s = 0; s < 4; ++s) {
      scales.step[s] = mul(d, unsigned_bits(words, 8 * s, 4));
      scales.min[s] = mul(least, unsigned_bits(words, 8 * s + 4, 4));
    }
  } else if constexpr (W::kSubs == 4) {
    const Vec d = load_fp16(at.super);
    for (int s = 0; s < 4; ++s) scales.step[s] = mul(d, signed_byte(words, s));
    set_zeros(scales, zero_code);
  } else {
    switch (kept_form(encoding).words) {
      case ScaleWords::kFactors: {
        Vec d, least;
        split_fp16(loadi(at.super), &d, &least);
        for (int s = 0; s < 2; ++s) {
          scales.step[s] = mul(d, unsigned_bits(words, 8 * s, 8));
          scales.min[s] = mul(least, unsigned_bits(words, 16 + 8 * s, 8));
        }
        break;
      }
      case ScaleWords::kMins:
        split_fp16(words, &scales.step[0], &scales.step[1]);
        split_fp16(loadi(at.super), &scales.min[0], &scales.min[1]);
        for (int s = 0; s < 2; ++s) scales.min[s] = sub(zero(), scales.min[s]);
        break;
      case ScaleWords::kExponents:
        for (int s = 0; s < 2; ++s)
          scales.step[s] = as_float(andi(shl(words, 23 - 8 * s), seti(0xffu << 23)));
        set_zeros(scales, zero_code);
        break;
      case ScaleWords::kSigned2: {
        Vec unused, d;
        split_fp16(words, &unused, &d);
        for (int s = 0; s < 2; ++s) scales.step[s] = mul(d, signed_byte(words, s));
        set_zeros(scales, zero_code);
        break;
      }
      case ScaleWords::kFloats: {
        const VecI second = kept_form(encoding).super_halves > 0 ? loadi(at.super) : words;
        for (int s = 0; s < 2; ++s) {
          const VecI of_sub = s == 0 ? words : second;
          scales.step[s] = as_float(andi(of_sub, seti(~0xffu)));
          scales.min[s] = mul(scales.step[s], unsigned_bits(of_sub, 0, 8));
        }
        break;
      }
      default:
        split_fp16(words, &scales.step[0], &scales.step[1]);
        set_zeros(scales, zero_code);
    }
  }
  return scales;
}

// Sum of the inputs of a sub-block.
template <int kSubs>
MOECHAT_INLINE float sub_sum(const InputSums& sums, int sub) {
  return kSubs == 4 ? sums.quarter[sub] : static_cast<float>(sums.half[sub]);
}
// u + one sub-block: fnma(min, sum, fma(step, isum, u)), or without u.
MOECHAT_INLINE Vec sub_term(Vec step, Vec min, VecI isum, float x_sum, Vec u) {
  return fnma(min, set1(x_sum), fma(step, to_float(isum), u));
}
MOECHAT_INLINE Vec first_sub_term(Vec step, Vec min, VecI isum, float x_sum) {
  return fnma(min, set1(x_sum), mul(step, to_float(isum)));
}

#define MOECHAT_BY_PLANES(function, W, activation_bits, ...) \
  return activation_bits == 16 ? function<W, 2>(__VA_ARGS__) : function<W, 1>(__VA_ARGS__)

// Returns function<class of the weights, planes of the activations>(...).
#if defined(MOECHAT_KEPT)
#define MOECHAT_BY_CLASS(function, encoding, activation_bits, ...)             \
  {                                                                            \
    const KeptForm form_of_weights = kept_form(encoding);                      \
    if (form_of_weights.table == CodeTable::kGrid) {                           \
      if (form_of_weights.subs == 4) {                                         \
        MOECHAT_BY_PLANES(function, Gridded<4>, activation_bits, __VA_ARGS__); \
      }                                                                        \
      MOECHAT_BY_PLANES(function, Gridded<2>, activation_bits, __VA_ARGS__);   \
    }                                                                          \
    if (form_of_weights.table == CodeTable::kE2m1) {                           \
      if (form_of_weights.subs == 4) {                                         \
        using Class = Kept<4, kE2m1Table, 4>;                                  \
        MOECHAT_BY_PLANES(function, Class, activation_bits, __VA_ARGS__);      \
      }                                                                        \
      using Class = Kept<4, kE2m1Table, 2>;                                    \
      MOECHAT_BY_PLANES(function, Class, activation_bits, __VA_ARGS__);        \
    }                                                                          \
    if (form_of_weights.table == CodeTable::kIq4) {                            \
      using Class = Kept<4, kIq4Table, 2>;                                     \
      MOECHAT_BY_PLANES(function, Class, activation_bits, __VA_ARGS__);        \
    }                                                                          \
    switch (form_of_weights.code_bits) {                                       \
      case 2: {                                                                \
        using Class = Kept<2, kNoTable, 4>;                                    \
        MOECHAT_BY_PLANES(function, Class, activation_bits, __VA_ARGS__);      \
      }                                                                        \
      case 3: {                                                                \
        using Class = Kept<3, kNoTable, 4>;                                    \
        MOECHAT_BY_PLANES(function, Class, activation_bits, __VA_ARGS__);      \
      }                                                                        \
      case 4: {                                                                \
        using Class = Kept<4, kNoTable, 2>;                                    \
        MOECHAT_BY_PLANES(function, Class, activation_bits, __VA_ARGS__);      \
      }                                                                        \
      case 5: {                                                                \
        using Class = Kept<5, kNoTable, 2>;                                    \
        MOECHAT_BY_PLANES(function, Class, activation_bits, __VA_ARGS__);      \
      }                                                                        \
      case 6: {                                                                \
        using Class = Kept<6, kNoTable, 4>;                                    \
        MOECHAT_BY_PLANES(function, Class, activation_bits, __VA_ARGS__);      \
      }                                                                        \
      default: {                                                               \
        using Class = Kept<8, kNoTable, 2>;                                    \
        MOECHAT_BY_PLANES(function, Class, activation_bits, __VA_ARGS__);      \
      }                                                                        \
    }                                                                          \
  }
#else
#define MOECHAT_BY_CLASS(function, encoding, activation_bits, ...)         \
  switch (encoding) {                                                      \
    case Encoding::kBits2:                                                 \
      MOECHAT_BY_PLANES(function, Plain<2>, activation_bits, __VA_ARGS__); \
    case Encoding::kBits3:                                                 \
      MOECHAT_BY_PLANES(function, Plain<3>, activation_bits, __VA_ARGS__); \
    case Encoding::kBits4:                                                 \
      MOECHAT_BY_PLANES(function, Plain<4>, activation_bits, __VA_ARGS__); \
    case Encoding::kBits6:                                                 \
      MOECHAT_BY_PLANES(function, Plain<6>, activation_bits, __VA_ARGS__); \
    default:                                                               \
      MOECHAT_BY_PLANES(function, Plain<8>, activation_bits, __VA_ARGS__); \
  }
#endif
