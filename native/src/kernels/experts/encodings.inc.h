// Conversion of the words of a q field to floats, one type per encoding. Included inside the anonymous
// namespace of one instruction set. A group of 64 columns is kUnits units of kColumns columns; column<c>() of
// a unit returns the code multiplied by 2^column_shift(c), see kernel_api.h. kHalves: parts of a group with
// factors and offsets of their own.

template <int kBits>
struct PackedBits {
  static constexpr bool kScaled = true;
  static constexpr int kHalves = has_halves(kBits) ? 2 : 1;
  static constexpr int kColumns = 32 / kBits;
  static constexpr int kUnits = 64 / kColumns;

  struct Unit {
    VecI words;
  };
  MOECHAT_INLINE static Unit load_unit(const unsigned char* group, int unit) {
    return Unit{loadi(group + unit * kStepBytes)};
  }
  MOECHAT_INLINE static Vec column(const Unit& unit, int c) {
    if (c == kColumns - 1) return to_float(shr(unit.words, 32 - kBits));
    return to_float(andi(unit.words, seti(((1u << kBits) - 1u) << (kBits * c))));
  }
};

struct Bits3 {
  static constexpr bool kScaled = true;
  static constexpr int kHalves = 2;
  static constexpr int kColumns = 16;
  static constexpr int kUnits = 4;

  struct Unit {
    VecI low;   // two bits per column
    VecI high;  // one bit per column, in the low half
  };
  MOECHAT_INLINE static Unit load_unit(const unsigned char* group, int unit) {
    const VecI high = loadi(group + (4 + unit / 2) * kStepBytes);
    return Unit{loadi(group + unit * kStepBytes), shr(high, 16 * (unit % 2))};
  }
  MOECHAT_INLINE static Vec column(const Unit& unit, int c) {
    if (c == 15) return to_float(ori(shr(unit.low, 30), andi(shr(unit.high, 13), seti(4))));
    const VecI low = andi(unit.low, seti(3u << (2 * c)));
    const VecI high = andi(shl(unit.high, c + 2), seti(4u << (2 * c)));
    return to_float(ori(low, high));
  }
};

struct Bits6 {
  static constexpr bool kScaled = true;
  static constexpr int kHalves = 1;
  static constexpr int kColumns = 8;
  static constexpr int kUnits = 8;

  struct Unit {
    VecI low;   // four bits per column
    VecI high;  // two bits per column, from bit 8 * (c / 2) + 2 * (c % 2) on
  };
  MOECHAT_INLINE static Unit load_unit(const unsigned char* group, int unit) {
    const VecI high = loadi(group + (8 + unit / 2) * kStepBytes);
    return Unit{loadi(group + unit * kStepBytes), shr(high, 4 * (unit % 2))};
  }
  MOECHAT_INLINE static Vec column(const Unit& unit, int c) {
    const VecI low = andi(c == 0 ? unit.low : shr(unit.low, 4 * c), seti(15));
    const int place = 8 * (c / 2) + 2 * (c % 2);
    const VecI high = andi(place < 4 ? shl(unit.high, 4 - place) : shr(unit.high, place - 4), seti(48));
    return to_float(ori(low, high));
  }
};

struct Bf16 {
  static constexpr bool kScaled = false;
  static constexpr int kHalves = 1;
  static constexpr int kColumns = 2;
  static constexpr int kUnits = 32;

  struct Unit {
    VecI words;
  };
  MOECHAT_INLINE static Unit load_unit(const unsigned char* group, int unit) {
    return Unit{loadi(group + unit * kStepBytes)};
  }
  MOECHAT_INLINE static Vec column(const Unit& unit, int c) {
    return as_float(c == 0 ? shl(unit.words, 16) : andi(unit.words, seti(0xffff0000u)));
  }
};

struct Fp16 {
  static constexpr bool kScaled = false;
  static constexpr int kHalves = 1;
  static constexpr int kColumns = 2;
  static constexpr int kUnits = 32;

  struct Unit {
    Vec first, second;
  };
  MOECHAT_INLINE static Unit load_unit(const unsigned char* group, int unit) {
    Unit result;
    split_fp16(loadi(group + unit * kStepBytes), &result.first, &result.second);
    return result;
  }
  MOECHAT_INLINE static Vec column(const Unit& unit, int c) { return c == 0 ? unit.first : unit.second; }
};
