#include "kernels/layout/gguf_blocks.h"

#include <algorithm>
#include <cstring>

#include "kernels/layout/codes.h"
#include "kernels/layout/grids.h"
#include "kernels/layout/half.h"

namespace moechat {
namespace {

constexpr int kBlock32 = 32;
constexpr int kBlock256 = 256;

std::uint32_t load_word(const unsigned char* at) {
  return load_half(at) | static_cast<std::uint32_t>(load_half(at + 2)) << 16;
}

void store_word(unsigned char* at, std::uint32_t word) {
  for (int i = 0; i < 4; ++i) at[i] = static_cast<unsigned char>(word >> (8 * i));
}

bool is_finite(std::uint16_t pattern) { return (pattern & 0x7c00u) != 0x7c00u; }

// 32 codes of 4 bits: byte i holds those of columns i and i + 16.
void read_nibbles16(const unsigned char* from, unsigned char* to) {
  for (int i = 0; i < 16; ++i) {
    to[i] = from[i] & 15u;
    to[i + 16] = from[i] >> 4;
  }
}

// Blocks of 32 columns, of which a group has two, or one at the end of a row.
bool read_half_blocks(Encoding encoding, const unsigned char* row, std::int64_t columns, std::int64_t group,
                      FileGroup* to) {
  const KeptForm form = kept_form(encoding);
  const int count = columns - group * kGroupColumns > kBlock32 ? 2 : 1;
  bool fine = true;
  for (int half = 0; half < count; ++half) {
    const unsigned char* at = row + (2 * group + half) * form.file_bytes;
    unsigned char* codes = to->codes + half * kBlock32;
    if (encoding == Encoding::kMxfp4) {
      const std::uint32_t exponent = at[0];
      fine = fine && exponent != 255;
      to->word |= (exponent < 2 ? 0 : exponent - 1) << (8 * half);
      read_nibbles16(at + 1, codes);
      continue;
    }
    const std::uint16_t d = load_half(at);
    fine = fine && is_finite(d);
    to->word |= static_cast<std::uint32_t>(d) << (16 * half);
    at += 2;
    if (form.words == ScaleWords::kMins) {
      to->super[half] = load_half(at);
      fine = fine && is_finite(to->super[half]);
      at += 2;
    }
    if (form.code_bits == 8) {
      for (int i = 0; i < kBlock32; ++i) codes[i] = static_cast<unsigned char>(at[i] ^ 0x80u);
    } else if (form.code_bits == 5) {
      const std::uint32_t high = load_word(at);
      read_nibbles16(at + 4, codes);
      for (int i = 0; i < kBlock32; ++i)
        codes[i] = static_cast<unsigned char>(codes[i] | (high >> i & 1u) << 4);
    } else {
      read_nibbles16(at, codes);
    }
  }
  return fine;
}

bool is_finite_word(std::uint32_t word) { return (word & 0x7f800000u) != 0x7f800000u; }

// Runs of 32 codes behind words with fp32 scales: a word for a run, or one for both runs of a group.
bool read_word_blocks(const KeptForm& form, const unsigned char* row, std::int64_t columns,
                      std::int64_t group, FileGroup* to) {
  const int run_bytes = kBlock32 * form.code_bits / 8;
  const bool shared = form.file_columns == kGroupColumns;
  const int runs = columns - group * kGroupColumns > kBlock32 ? 2 : 1;
  bool fine = true;
  for (int run = 0; run < runs; ++run) {
    const unsigned char* block = row + (shared ? group : 2 * group + run) * form.file_bytes;
    const unsigned char* from = block + 4 + (shared ? run * run_bytes : 0);
    unsigned char* codes = to->codes + run * kBlock32;
    if (form.code_bits == 8) {
      std::memcpy(codes, from, kBlock32);
    } else {
      read_nibbles16(from, codes);
    }
    const std::uint32_t word = load_word(block);
    fine = fine && is_finite_word(word);
    if (run == 0) {
      to->word = word;
    } else if (!shared) {
      to->super[0] = static_cast<std::uint16_t>(word);
      to->super[1] = static_cast<std::uint16_t>(word >> 16);
    }
  }
  return fine;
}

// 64 columns of NVFP4.
bool read_nvfp4(const unsigned char* block, FileGroup* to) {
  const float scale = half::bits_to_float(load_word(block)) * kE4m3Shift;
  const std::uint32_t bits = half::float_to_bits(scale);
  to->super[0] = static_cast<std::uint16_t>(bits);
  to->super[1] = static_cast<std::uint16_t>(bits >> 16);
  to->word = load_word(block + 4);
  bool fine = is_finite_word(bits);
  for (int s = 0; s < 4; ++s) fine = fine && (block[4 + s] & 0x7fu) != 0x7fu;
  for (int run = 0; run < 2; ++run) read_nibbles16(block + 8 + 16 * run, to->codes + kBlock32 * run);
  return fine;
}

// Scale and min of sub-block j = 0..7 of Q4_K and Q5_K.
void read_factors(const unsigned char* scales, int j, std::uint32_t* scale, std::uint32_t* min) {
  if (j < 4) {
    *scale = scales[j] & 63u;
    *min = scales[j + 4] & 63u;
  } else {
    *scale = (scales[j + 4] & 15u) | static_cast<std::uint32_t>(scales[j - 4] >> 6) << 4;
    *min = static_cast<std::uint32_t>(scales[j + 4] >> 4) | static_cast<std::uint32_t>(scales[j] >> 6) << 4;
  }
}

std::uint32_t byte_of(int value, int at) {
  return static_cast<std::uint32_t>(static_cast<unsigned char>(value)) << (8 * at);
}

// A quarter of a block of an encoding with a grid.
bool read_grid_quarter(Encoding encoding, const unsigned char* block, int quarter, FileGroup* to) {
  const int steps = kept_form(encoding).grid_steps;
  const auto half_at = [block](int at) { return static_cast<std::uint32_t>(load_half(block + at)); };
  // Steps [begin, end) from bytes `at` on.
  const auto copy = [&](int begin, int end, const unsigned char* at) {
    for (int s = begin; s < end; ++s) to->steps[s] = load_word(at + 4 * (s - begin));
  };
  std::uint32_t d = half_at(0);
  switch (encoding) {
    case Encoding::kIq2Xxs: {
      const unsigned char* at = block + 2 + 16 * quarter;
      to->steps[0] = load_word(at);
      to->steps[1] = load_word(at + 8);
      to->steps[2] = load_word(at + 4);
      to->word = load_word(at + 12);
      break;
    }
    case Encoding::kIq2Xs:
      copy(0, steps, block + 2 + 16 * quarter);
      to->word = half_at(66 + 2 * quarter) | d << 16;
      break;
    case Encoding::kIq2S:
      copy(0, 2, block + 2 + 8 * quarter);
      copy(2, steps, block + 34 + 8 * quarter);
      to->word = half_at(66 + 2 * quarter) | half_at(74 + 2 * quarter) << 16;
      break;
    case Encoding::kIq3Xxs:
      copy(0, 4, block + 2 + 16 * quarter);
      copy(4, steps, block + 66 + 8 * quarter);
      to->word = load_word(block + 70 + 8 * quarter);
      break;
    case Encoding::kIq3S:
      copy(0, 4, block + 2 + 16 * quarter);
      copy(4, steps, block + 74 + 8 * quarter);
      to->word = half_at(66 + 2 * quarter) | static_cast<std::uint32_t>(block[106 + quarter]) << 16;
      break;
    case Encoding::kIq1S:
      copy(0, steps, block + 2 + 8 * quarter);
      to->word = load_word(block + 34 + 4 * quarter);
      break;
    default: {  // IQ1_M, whose d is in the highest bits of its four words of scales
      copy(0, 2, block + 8 * quarter);
      copy(2, steps, block + 32 + 4 * quarter);
      d = 0;
      for (int i = 0; i < 4; ++i) d |= (half_at(48 + 2 * i) >> 12) << (4 * i);
      to->word = (half_at(48 + 2 * quarter) & 0xfffu) | d << 16;
    }
  }
  to->super[0] = static_cast<std::uint16_t>(d);
  grid_codes(encoding, to->steps, to->word, to->codes);
  return is_finite(to->super[0]);
}

// A group is a quarter of a block of 256 columns.
bool read_quarter(Encoding encoding, const unsigned char* row, std::int64_t group, FileGroup* to) {
  const KeptForm form = kept_form(encoding);
  const unsigned char* block = row + group / kSuperGroups * form.file_bytes;
  const int quarter = static_cast<int>(group % kSuperGroups);
  const int half = quarter / 2;        // of the block
  const int pair = 2 * (quarter % 2);  // of its four runs of 32 columns, the first of the quarter
  if (form.table == CodeTable::kGrid) return read_grid_quarter(encoding, block, quarter, to);
  std::uint16_t d = 0;
  std::uint16_t least = 0;
  switch (encoding) {
    case Encoding::kQ4K:
    case Encoding::kQ5K: {
      d = load_half(block);
      least = load_half(block + 2);
      const unsigned char* codes = block + (encoding == Encoding::kQ4K ? 16 : 48) + 32 * quarter;
      for (int i = 0; i < 32; ++i) {
        to->codes[i] = codes[i] & 15u;
        to->codes[32 + i] = codes[i] >> 4;
      }
      if (encoding == Encoding::kQ5K) {
        const unsigned char* high = block + 16;
        for (int i = 0; i < 32; ++i) {
          to->codes[i] = static_cast<unsigned char>(to->codes[i] | (high[i] >> (2 * quarter) & 1u) << 4);
          to->codes[32 + i] =
              static_cast<unsigned char>(to->codes[32 + i] | (high[i] >> (2 * quarter + 1) & 1u) << 4);
        }
      }
      for (int s = 0; s < 2; ++s) {
        std::uint32_t scale, min;
        read_factors(block + 4, 2 * quarter + s, &scale, &min);
        to->word |= scale << (8 * s) | min << (16 + 8 * s);
      }
      break;
    }
    case Encoding::kQ6K: {
      d = load_half(block + 208);
      const unsigned char* low = block + 64 * half;
      const unsigned char* high = block + 128 + 32 * half;
      for (int run = 0; run < 2; ++run) {
        const int which = pair + run;  // 0..3: columns 32 * which of the half
        for (int i = 0; i < 32; ++i) {
          const unsigned nibble = low[i + 32 * (which % 2)] >> (4 * (which / 2)) & 15u;
          const unsigned top = high[i] >> (2 * which) & 3u;
          to->codes[32 * run + i] = static_cast<unsigned char>(nibble | top << 4);
        }
      }
      for (int s = 0; s < 4; ++s) to->word |= byte_of(block[192 + 4 * quarter + s], s);
      break;
    }
    case Encoding::kQ2K:
    case Encoding::kQ3K: {
      const bool three = encoding == Encoding::kQ3K;
      d = load_half(block + (three ? 108 : 80));
      const unsigned char* codes = block + (three ? 32 : 16) + 32 * half;
      for (int run = 0; run < 2; ++run) {
        const int which = pair + run;
        for (int i = 0; i < 32; ++i) {
          unsigned code = codes[i] >> (2 * which) & 3u;
          if (three) code |= (block[i] >> (4 * half + which) & 1u) << 2;
          to->codes[32 * run + i] = static_cast<unsigned char>(code);
        }
      }
      if (!three) {
        least = load_half(block + 82);
        for (int s = 0; s < 4; ++s) to->word |= byte_of(block[4 * quarter + s], s);
        break;
      }
      const unsigned char* scales = block + 96;
      for (int s = 0; s < 4; ++s) {
        const int j = 4 * quarter + s;
        const unsigned nibble = j < 8 ? scales[j] & 15u : scales[j - 8] >> 4;
        const unsigned top = scales[8 + j % 4] >> (2 * (j / 4)) & 3u;
        to->word |= byte_of(static_cast<int>(nibble | top << 4) - 32, s);
      }
      break;
    }
    default: {  // IQ4_XS
      d = load_half(block);
      const unsigned high = load_half(block + 2);
      for (int s = 0; s < 2; ++s) {
        const int run = 2 * quarter + s;
        const unsigned nibble = block[4 + run / 2] >> (4 * (run % 2)) & 15u;
        to->word |= byte_of(static_cast<int>(nibble | (high >> (2 * run) & 3u) << 4) - 32, s);
        read_nibbles16(block + 8 + 16 * run, to->codes + 32 * s);
      }
      to->word |= static_cast<std::uint32_t>(d) << 16;
      return is_finite(d);
    }
  }
  to->super[0] = d;
  to->super[1] = least;
  return is_finite(d) && is_finite(least);
}

int low_bits(int code_bits) { return code_bits == 8 ? 8 : (code_bits >= 4 ? 4 : 2); }

// Puts the bits of code dwords in a plane of `bits` bits.
void put_plane(const std::uint32_t (&dwords)[16], int bits, int shift, std::int64_t row,
               unsigned char* plane) {
  const int per_step = 8 / bits;
  const std::uint32_t mask = 0x01010101u * ((1u << bits) - 1u);
  for (int step = 0; step < 16 / per_step; ++step) {
    std::uint32_t word = 0;
    for (int j = 0; j < per_step; ++j) word |= (dwords[step * per_step + j] >> shift & mask) << (bits * j);
    store_word(plane + step * kStepBytes + 4 * row, word);
  }
}

unsigned plane_code(const unsigned char* plane, int bits, std::int64_t row, int column) {
  const int per_step = 8 / bits;
  const int dword = column / 4;
  const std::uint32_t word = load_word(plane + dword / per_step * kStepBytes + 4 * row);
  return word >> (8 * (column % 4) + bits * (dword % per_step)) & ((1u << bits) - 1u);
}

float number_of(const KeptForm& form, unsigned code) {
  if (form.table == CodeTable::kE4m3) return half::from_fp16(e4m3_half(code));
  return static_cast<float>(kept_value(form.table, static_cast<int>(code)));
}

struct Affine {
  float step;
  float min;
};

// `steps`: of encodings with grids, of a row.
Affine affine_of_grid(Encoding encoding, const std::uint32_t* steps, std::uint32_t word, std::uint16_t super,
                      int sub) {
  const OddScales at = odd_scales(encoding);
  const std::uint32_t from = odd_word(encoding, steps, word, sub);
  const std::uint32_t scale = from >> (at.first + at.apart * sub) & ((1u << at.bits) - 1u);
  const float d = half::from_fp16(at.own_d ? static_cast<std::uint16_t>(word >> 16) : super);
  const float step = d * (static_cast<float>(2 * scale + 1) * at.unit);
  return {step, step * static_cast<float>(kept_form(encoding).zero)};
}

Affine affine_of(const KeptForm& form, std::uint32_t word, const std::uint16_t (&super)[2], int sub) {
  const auto byte = [word](int at) { return word >> (8 * at) & 255u; };
  const auto signed_byte = [&byte](int at) { return static_cast<float>(static_cast<signed char>(byte(at))); };
  const auto zero = static_cast<float>(form.zero);
  const float d = half::from_fp16(super[0]);
  const float least = half::from_fp16(super[1]);
  const std::uint32_t both = super[0] | static_cast<std::uint32_t>(super[1]) << 16;
  float step = 0.0f;
  switch (form.words) {
    case ScaleWords::kFactors:
      return {d * static_cast<float>(byte(sub)), least * static_cast<float>(byte(2 + sub))};
    case ScaleWords::kNibbles:
      return {d * static_cast<float>(byte(sub) & 15u), least * static_cast<float>(byte(sub) >> 4)};
    case ScaleWords::kMins:
      return {half::from_fp16(static_cast<std::uint16_t>(word >> (16 * sub))), -half::from_fp16(super[sub])};
    case ScaleWords::kHalves:
      step = half::from_fp16(static_cast<std::uint16_t>(word >> (16 * sub)));
      break;
    case ScaleWords::kExponents:
      step = half::bits_to_float(byte(sub) << 23);
      break;
    case ScaleWords::kSigned2:
      step = half::from_fp16(static_cast<std::uint16_t>(word >> 16)) * signed_byte(sub);
      break;
    case ScaleWords::kSigned4:
      step = d * signed_byte(sub);
      break;
    case ScaleWords::kFloats: {
      const bool own = form.super_halves > 0 && sub > 0;
      const std::uint32_t of_sub = own ? both : word;
      step = half::bits_to_float(of_sub & ~0xffu);
      return {step, step * static_cast<float>(of_sub & 0xffu)};
    }
    case ScaleWords::kE4m3: {
      step = half::from_fp16(e4m3_half(byte(sub))) * half::bits_to_float(both);
      break;
    }
    case ScaleWords::kWholes:
      return {half::bits_to_float(word) * kFp8Shift, 0.0f};
    case ScaleWords::kOdd:  // see affine_of_grid
      break;
  }
  return {step, step * zero};
}

}  // namespace

std::int64_t file_row_bytes(Encoding encoding, std::int64_t columns) {
  const KeptForm form = kept_form(encoding);
  return columns / form.file_columns * form.file_bytes;
}

bool read_file_group(Encoding encoding, const unsigned char* row, std::int64_t columns, std::int64_t group,
                     FileGroup* to) {
  std::memset(to, 0, sizeof *to);
  const KeptForm form = kept_form(encoding);
  if (form.words == ScaleWords::kFloats || form.words == ScaleWords::kWholes) {
    return read_word_blocks(form, row, columns, group, to);
  }
  if (form.words == ScaleWords::kE4m3) return read_nvfp4(row + group * form.file_bytes, to);
  if (form.file_columns == kBlock256) return read_quarter(encoding, row, group, to);
  return read_half_blocks(encoding, row, columns, group, to);
}

bool scales_are_finite(Encoding encoding, const unsigned char* rows, std::int64_t stride, std::int64_t count,
                       std::int64_t columns) {
  // The fp16 scales of a block of 256 columns are those of each of its groups.
  const int step = kept_form(encoding).file_columns == kBlock256 ? kSuperGroups : 1;
  const std::int64_t groups = (columns + kGroupColumns - 1) / kGroupColumns;
  for (std::int64_t row = 0; row < count; ++row) {
    for (std::int64_t group = 0; group < groups; group += step) {
      FileGroup read;
      if (!read_file_group(encoding, rows + row * stride, columns, group, &read)) return false;
    }
  }
  return true;
}

void file_group_values(Encoding encoding, const FileGroup& from, float* values) {
  const KeptForm form = kept_form(encoding);
  const int columns = kGroupColumns / form.subs;
  for (int sub = 0; sub < form.subs; ++sub) {
    const Affine affine = form.table == CodeTable::kGrid
                              ? affine_of_grid(encoding, from.steps, from.word, from.super[0], sub)
                              : affine_of(form, from.word, from.super, sub);
    for (int c = sub * columns; c < (sub + 1) * columns; ++c) {
      values[c] = affine.step * number_of(form, from.codes[c]) - affine.min;
    }
  }
}

void put_kept_row(Encoding encoding, const FileGroup& from, std::int64_t row, unsigned char* q,
                  unsigned char* words, unsigned char* super) {
  const KeptForm form = kept_form(encoding);
  if (form.table == CodeTable::kGrid) {
    for (int s = 0; s < form.grid_steps; ++s) store_word(q + s * kStepBytes + 4 * row, from.steps[s]);
  } else {
    std::uint32_t dwords[16];
    for (int d = 0; d < 16; ++d) dwords[d] = load_word(from.codes + 4 * d);
    const int low = low_bits(form.code_bits);
    put_plane(dwords, low, 0, row, q);
    if (form.code_bits > low) {
      put_plane(dwords, form.code_bits - low, low, row,
                q + std::int64_t{kTileRows} * kGroupColumns * low / 8);
    }
  }
  store_word(words + 4 * row, from.word);
  if (form.super_halves == 2) {
    store_word(super + 4 * row, from.super[0] | static_cast<std::uint32_t>(from.super[1]) << 16);
  } else if (form.super_halves == 1) {
    super[2 * row] = static_cast<unsigned char>(from.super[0]);
    super[2 * row + 1] = static_cast<unsigned char>(from.super[0] >> 8);
  }
}

void unpack_kept_group(Encoding encoding, const unsigned char* q, const unsigned char* words,
                       const unsigned char* super, std::int64_t rows, int cols, float* matrix,
                       std::int64_t stride) {
  const KeptForm form = kept_form(encoding);
  for (std::int64_t row = 0; row < rows; ++row) {
    FileGroup group{};
    group.word = load_word(words + 4 * row);
    for (int i = 0; i < form.super_halves; ++i) {
      group.super[i] = load_half(super + (row * form.super_halves + i) * 2);
    }
    if (form.table == CodeTable::kGrid) {
      for (int s = 0; s < form.grid_steps; ++s) group.steps[s] = load_word(q + s * kStepBytes + 4 * row);
      grid_codes(encoding, group.steps, group.word, group.codes);
    } else {
      const int low = low_bits(form.code_bits);
      const unsigned char* high = q + std::int64_t{kTileRows} * kGroupColumns * low / 8;
      for (int c = 0; c < kGroupColumns; ++c) {
        unsigned code = plane_code(q, low, row, c);
        if (form.code_bits > low) code |= plane_code(high, form.code_bits - low, row, c) << low;
        group.codes[c] = static_cast<unsigned char>(code);
      }
    }
    float values[kGroupColumns];
    file_group_values(encoding, group, values);
    std::memcpy(matrix + row * stride, values, static_cast<std::size_t>(cols) * sizeof(float));
  }
}

}  // namespace moechat
