#include "kernels/layout/grids.h"

#include <cstddef>

#include "kernels/layout/grid_patterns.h"

namespace moechat {
namespace {

constexpr int kSigned8[] = {64 + 8, 64 + 25, 64 + 43};
constexpr int kSigned4[] = {64 + 4, 64 + 12, 64 + 20, 64 + 28, 64 + 36, 64 + 44, 64 + 52, 64 + 62};
constexpr int kOdd4[] = {64 + 1, 64 + 3, 64 + 5, 64 + 7, 64 + 9, 64 + 11, 64 + 13, 64 + 15};
constexpr int kTernary[] = {2, 10, 18};  // eighths of -7/8, 1/8 and 9/8, plus 9
static_assert(kSignedZero == 64, "the codes above begin there");

constexpr int level_bits(int columns) { return columns == 8 ? 2 : 3; }

// What Grid points to.
template <int kColumns, std::size_t kNumbers>
struct Tables {
  alignas(64) std::uint32_t codes[kNumbers * kColumns / 4];
  alignas(64) unsigned char low[kNumbers];
  alignas(64) unsigned char high[kNumbers];
  alignas(64) unsigned char levels[64];

  Grid grid() const { return {codes, static_cast<int>(kNumbers), kColumns, low, high, levels}; }
};

template <int kColumns, std::size_t kNumbers>
constexpr Tables<kColumns, kNumbers> tables(const std::uint16_t (&patterns)[kNumbers], const int* levels) {
  constexpr int kBits = level_bits(kColumns);
  constexpr int kLevels = 1 << kBits;
  Tables<kColumns, kNumbers> made{};
  for (std::size_t i = 0; i < kNumbers; ++i) {
    for (int c = 0; c < kColumns; ++c) {
      const int code = levels[patterns[i] >> (kBits * c) & (kLevels - 1)];
      made.codes[(i * kColumns + static_cast<std::size_t>(c)) / 4] |= static_cast<std::uint32_t>(code)
                                                                      << (8 * (c % 4));
    }
    constexpr int kHalf = kBits * kColumns / 2;
    made.low[i] = static_cast<unsigned char>(patterns[i] & ((1 << kHalf) - 1));
    made.high[i] = static_cast<unsigned char>(patterns[i] >> kHalf);
  }
  for (int i = 0; i < 64; ++i) {
    const int level = i % kLevels;
    if (kColumns == 8 && level == 3) continue;  // there are three
    const bool flag = (i >> kBits) % 2 == 1;
    const int code = levels[level];
    const int other = levels == kTernary ? code - 2 : 2 * kSignedZero - code;
    made.levels[i] = static_cast<unsigned char>(flag ? other : code);
  }
  return made;
}

constexpr auto kIq2Xxs = tables<8>(kIq2XxsPatterns, kSigned8);
constexpr auto kIq2Xs = tables<8>(kIq2XsPatterns, kSigned8);
constexpr auto kIq2S = tables<8>(kIq2SPatterns, kSigned8);
constexpr auto kIq3Xxs = tables<4>(kIq3XxsPatterns, kSigned4);
constexpr auto kIq3S = tables<4>(kIq3SPatterns, kOdd4);
constexpr auto kIq1 = tables<8>(kIq1Patterns, kTernary);

// The numbers and the signs, or the deltas, of the 8 runs of 8 columns of a row.
struct Runs {
  unsigned number[16];
  unsigned flags[8];  // a bit for each column
};

unsigned byte_of(const std::uint32_t* steps, int at) { return steps[at / 4] >> (8 * (at % 4)) & 255u; }

// 7 signs, and the one that makes their number even.
unsigned even_signs(unsigned signs) {
  unsigned odd = signs;
  for (int shift = 4; shift > 0; shift /= 2) odd ^= odd >> shift;
  return signs | (odd & 1u) << 7;
}

Runs runs_of(Encoding encoding, const std::uint32_t* steps, std::uint32_t word) {
  Runs runs{};
  const int numbers = kGroupColumns / grid_of(encoding).columns;
  for (int i = 0; i < numbers; ++i) runs.number[i] = byte_of(steps, i);
  for (int run = 0; run < 8; ++run) {
    const int half = run / 4;
    const int place = run % 4;
    unsigned& number = runs.number[run];
    unsigned& flags = runs.flags[run];
    switch (encoding) {
      case Encoding::kIq2Xs: {
        const unsigned both = steps[run / 2] >> (16 * (run % 2)) & 0xffffu;
        number = both & 511u;
        flags = even_signs(both >> 9);
        break;
      }
      case Encoding::kIq2S:
        number |= (word >> (2 * run) & 3u) << 8;
        flags = byte_of(steps, 8 + run);
        break;
      case Encoding::kIq3S:
        for (int i = 2 * run; i < 2 * run + 2; ++i) runs.number[i] |= (word >> i & 1u) << 8;
        flags = byte_of(steps, 16 + run);
        break;
      case Encoding::kIq1S:
        number |= (word >> (16 * half + 3 * place) & 7u) << 8;
        flags = (word >> (16 * half + 15) & 1u) * 255u;
        break;
      case Encoding::kIq1M:
        number |= (steps[2] >> (4 * run) & 7u) << 8;
        flags = (steps[2] >> (4 * run + 3) & 1u) * 255u;
        break;
      default:  // IQ2_XXS and IQ3_XXS
        flags = even_signs(odd_word(encoding, steps, word, half) >> (7 * place) & 127u);
    }
  }
  return runs;
}

}  // namespace

Grid grid_of(Encoding encoding) {
  switch (encoding) {
    case Encoding::kIq2Xxs:
      return kIq2Xxs.grid();
    case Encoding::kIq2Xs:
      return kIq2Xs.grid();
    case Encoding::kIq2S:
      return kIq2S.grid();
    case Encoding::kIq3Xxs:
      return kIq3Xxs.grid();
    case Encoding::kIq3S:
      return kIq3S.grid();
    default:
      return kIq1.grid();
  }
}

void grid_codes(Encoding encoding, const std::uint32_t* steps, std::uint32_t word, unsigned char* codes) {
  const Grid grid = grid_of(encoding);
  const Runs runs = runs_of(encoding, steps, word);
  const unsigned zero = static_cast<unsigned>(kept_form(encoding).zero);
  for (int c = 0; c < kGroupColumns; ++c) {
    const std::uint32_t* entry =
        grid.codes + runs.number[c / grid.columns] * static_cast<unsigned>(grid.dwords());
    const unsigned code = byte_of(entry, c % grid.columns);
    const bool set = (runs.flags[c / 8] >> (c % 8) & 1u) != 0;
    const unsigned other = zero == static_cast<unsigned>(kSignedZero) ? 2 * zero - code : code - 2;
    codes[c] = static_cast<unsigned char>(set ? other : code);
  }
}

}  // namespace moechat
