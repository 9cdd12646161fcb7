// Scales of one (tile, group) of weights of 2 to 4 bits, see block_layout.h. Included inside the anonymous
// namespace of one instruction set, after its simd_*.h.

// The scale words of 16 rows.
struct HalfScales {
  VecI words;

  MOECHAT_INLINE static HalfScales read(const unsigned char* sz) { return HalfScales{loadi(sz)}; }

  MOECHAT_INLINE Vec step() const {
    return as_float(addi(andi(shr(words, 24 - kStepShift), seti(0xffu << kStepShift)), seti(kLeastStep)));
  }
  MOECHAT_INLINE VecI factor(int half) const { return andi(shr(words, 8 + 4 * half), seti(15)); }
  MOECHAT_INLINE VecI offset(int half) const { return andi(shr(words, 16 * half), seti(255)); }
  // Offsets of both halves in 16 bits each.
  MOECHAT_INLINE VecI offsets() const { return andi(words, seti(0x00ff00ffu)); }
};

// How the integer sums of a group become a term, by bits of the weights and planes of the inputs: with a
// scale and a zero, or with offsets of the halves, whose input sums fit in 16 bits or not.
enum class Terms { kZeros, kPairs, kWide };
constexpr Terms terms_of(int bits, int planes) {
  return !has_halves(bits) ? Terms::kZeros : (planes == 1 ? Terms::kPairs : Terms::kWide);
}

// The sum over the halves of offset * sum of the inputs.
template <Terms kTerms>
MOECHAT_INLINE VecI offset_sums(VecI offsets, std::uint32_t first, std::uint32_t second) {
  static_assert(kTerms != Terms::kZeros, "only weights of 2 to 4 bits have offsets");
  if constexpr (kTerms == Terms::kPairs) return madd16(offsets, seti(first));  // the pair
  return addi(muli(andi(offsets, seti(0xffff)), seti(first)), muli(shr(offsets, 16), seti(second)));
}

// Returns acc + the term of one group for 16 rows, see QuantisedRows in kernel_api.h.
MOECHAT_INLINE Vec zero_term(Vec scale, Vec zeros, VecI isum, float x_scale, float x_sum, Vec acc) {
  return fma(mul(scale, set1(x_scale)), fnma(zeros, set1(x_sum), to_float(isum)), acc);
}
MOECHAT_INLINE Vec half_term(Vec step, VecI isum, float x_scale, Vec acc) {
  return fma(mul(step, set1(x_scale)), to_float(isum), acc);
}

// The same from the sz field and the sums of the inputs; isum is without the offsets.
template <int kBits, int kPlanes>
struct GroupTerm {
  static constexpr Terms kTerms = terms_of(kBits, kPlanes);
  Vec scale;
  Vec zeros;  // at 6 and 8 bits
  VecI offsets;

  MOECHAT_INLINE static GroupTerm read(const unsigned char* sz) {
    if constexpr (kTerms == Terms::kZeros) {
      return {load_fp16(sz), load_fp16(sz + 32), seti(0)};
    } else {
      const HalfScales halves = HalfScales::read(sz);
      return {halves.step(), zero(), halves.offsets()};
    }
  }
  MOECHAT_INLINE Vec add_to(Vec acc, VecI isum, float x_scale, const InputSums& sums) const {
    if constexpr (kTerms == Terms::kZeros) {
      return zero_term(scale, zeros, isum, x_scale, sums.total, acc);
    } else {
      const bool pairs = kTerms == Terms::kPairs;
      const VecI taken =
          offset_sums<kTerms>(offsets, pairs ? sums.pair : static_cast<std::uint32_t>(sums.half[0]),
                              static_cast<std::uint32_t>(sums.half[1]));
      return half_term(scale, subi(isum, taken), x_scale, acc);
    }
  }
};
