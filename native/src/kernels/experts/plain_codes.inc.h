// Codes of plain weights as bytes. Included inside the anonymous namespace of one instruction set, after its
// simd_*.h.

// Codes of four columns for 16 rows: dword `d` of a group, see QuantisedRows. A group is kUnits units of
// kWords dwords.
template <int kBits>
struct Codes {
  static constexpr int kWords = 8 / kBits;
  static constexpr int kUnits = 16 / kWords;
  static constexpr int kLargest = (1 << kBits) - 1;

  MOECHAT_INLINE static void unit(const unsigned char* group, int at, VecI (&codes)[kWords]) {
    const VecI words = loadi(group + at * kStepBytes);
    if constexpr (kBits == 8) {
      codes[0] = words;
    } else {
      const VecI mask = seti(0x01010101u * static_cast<unsigned>(kLargest));
      for (int i = 0; i < kWords; ++i) codes[i] = andi(i == 0 ? words : shr(words, kBits * i), mask);
    }
  }
  // At 8 bits: the low four bits of the codes, and the others.
  MOECHAT_INLINE static void parts(const unsigned char* group, int at, VecI (&low)[kWords],
                                   VecI (&high)[kWords]) {
    const VecI words = loadi(group + at * kStepBytes);
    const VecI four = seti(0x0f0f0f0fu);
    low[0] = andi(words, four);
    high[0] = andi(shr(words, 4), four);
  }
};

template <>
struct Codes<3> {
  static constexpr int kWords = 4;
  static constexpr int kUnits = 4;
  static constexpr int kLargest = 7;

  MOECHAT_INLINE static void unit(const unsigned char* group, int at, VecI (&codes)[kWords]) {
    const VecI low = loadi(group + at * kStepBytes);
    // Of the 16 high bits, those of columns 4k..4k+3 go to byte k.
    VecI high = loadi(group + (4 + at / 2) * kStepBytes);
    high = at % 2 == 0 ? andi(high, seti(0xffffu)) : shr(high, 16);
    high = andi(ori(high, shl(high, 8)), seti(0x00ff00ffu));
    high = andi(ori(high, shl(high, 4)), seti(0x0f0f0f0fu));
    const VecI two = seti(0x03030303u);
    const VecI four = seti(0x04040404u);
    codes[0] = ori(andi(low, two), andi(shl(high, 2), four));
    codes[1] = ori(andi(shr(low, 2), two), andi(shl(high, 1), four));
    codes[2] = ori(andi(shr(low, 4), two), andi(high, four));
    codes[3] = ori(andi(shr(low, 6), two), andi(shr(high, 1), four));
  }
};

template <>
struct Codes<6> {
  static constexpr int kWords = 2;
  static constexpr int kUnits = 8;
  static constexpr int kLargest = 63;

  MOECHAT_INLINE static void unit(const unsigned char* group, int at, VecI (&codes)[kWords]) {
    const VecI low = loadi(group + at * kStepBytes);
    const VecI high = loadi(group + (8 + at / 2) * kStepBytes);
    const bool first = at % 2 == 0;
    const VecI four = seti(0x0f0f0f0fu);
    const VecI two = seti(0x30303030u);
    codes[0] = ori(andi(low, four), andi(first ? shl(high, 4) : high, two));
    codes[1] = ori(andi(shr(low, 4), four), andi(first ? shl(high, 2) : shr(high, 2), two));
  }
};
