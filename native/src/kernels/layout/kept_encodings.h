// Kept encodings: weights with the values that a GGUF file or a quantised checkpoint gives them, rearranged
// for the kernels and not quantised again. Also for files compiled for one instruction set.
//
// Every encoding is affine in sub-blocks of 16 or 32 columns of a row: value = step * code - min, with step
// and min in fp32 computed from the file's own scales. `min` includes the zero of encodings with signed
// codes.
//
// q fields. As in block_layout.h a group is 16 rows x 64 columns and a step 64 bytes, one 32-bit word for
// each row; but column 4d + k of a group is byte k of code dword d = 0..15, and dwords are cut into planes:
//
//   code bits    planes, in their order
//   8            8-bit: step d holds dword d
//   6            4-bit, 2-bit
//   5            4-bit, 1-bit
//   4            4-bit
//   3            2-bit, 1-bit
//   2            2-bit
//
// A plane of w bits holds 8 / w dwords in a step: bits [w * j, w * j + w) of every byte belong to dword j of
// the step. The first plane has the low bits of a code.
//
// IQ1 to IQ3 have grids in place of planes: a number chooses the codes of 8 or 4 neighbouring columns from a
// table, grids.h. Number i of a group is that of columns 8i or 4i on; its low 8 bits are byte i of the first
// steps, two of a grid of 8 columns and four of one of 4. IQ2 and IQ3 have signs, too: 8 bits for 8 columns,
// or 7, of which an eighth makes the number of set bits even. Of a column with a sign the code is 2 * zero
// less the table's. IQ1 has deltas: with a set bit the codes of its columns are smaller by 2.
//
//             steps after the numbers           scale word, from bit 0
//   IQ2_XXS   signs of columns 0..31: 4 x 7,    signs of columns 32..63: 4 x 7, s1 of 4 bits
//             then s0 of 4 bits
//   IQ2_XS    (four steps in all: 8 numbers of  s0, s1, s2, s3 of 4 bits; fp16 d
//             9 bits, each followed by 7 signs)
//   IQ2_S     two: 64 signs                     8 x bits 8 and 9 of numbers; s0, s1, s2, s3 of 4 bits
//   IQ3_XXS   as IQ2_XXS                        as IQ2_XXS
//   IQ3_S     two: 64 signs                     16 x bit 8 of numbers; s0, s1 of 4 bits
//   IQ1_S     none                              for each half: 4 x bits 8 to 10 of numbers, s of 3 bits,
//   delta IQ1_M     one: 8 x bits 8 to 10 of a        s0, s1, s2, s3 of 3 bits; from bit 16 on fp16 d
//             number and its delta
//
// sz fields: one 32-bit scale word for each row of a (tile, group), in the same order as the groups. super
// fields: for each row of a tile and block of 256 columns (of a group: down, whose rows have 64 columns in a
// block, Q4_1 and Q5_1) one fp16, or two: the first in the low half.
//
//   words     bytes or halves of a scale word            super    step           min
//   halves    fp16 d of sub-blocks 0 and 1               -        d              zero * d
//   mins      fp16 d of sub-blocks 0 and 1               m0, m1   d              -m
//   exponents exponents e0, e1, in bytes 0 and 1         -        2^(e - 127)    zero * step
//   signed2   signed s0, s1; fp16 d                      -        d * s          zero * step
//   signed4   signed s0, s1, s2, s3                      d        d * s          zero * step
//   factors   unsigned s0, s1, m0, m1                    d, dmin  d * s          dmin * m
//   nibbles   s in the low, m in the high half of bytes  d, dmin  d * s          dmin * m
//   floats    d of both sub-blocks, its zero in byte 0   -        d              zero * d
//   floats    the same of sub-block 0                    of 1     d              zero * d
//   e4m3      e4m3 patterns of s0, s1, s2, s3            g        g * s          zero * step
//   wholes    d of both sub-blocks                       -        256 * d        -
//   odd       as above                                   d or -   d * (2s+1) * u zero * step
//
// The u of `odd` is 1/8; of IQ3_XXS 1/4, of IQ3_S 1.
//
// Exponents are those of the file less one, because the values of MXFP4 are stored twice as large; blocks
// with exponents of 0 and 1, whose values are below 2^-124, have 0 there and are 0.
//
// `floats` are words that hold an fp32 number d with zeros in the last 8 bits of its mantissa, where bf16 and
// fp16 have none, and there the code that means 0: integers of any checkpoint with such scales are exact. The
// `g` of NVFP4 is one fp32 in the place of two fp16, the scale of the whole matrix times 128: values are
// stored twice as large, and the kernels read e4m3 patterns as fp16, which makes them 256 times smaller.
//
// Rows of the last six encodings have blocks of their own, little-endian: INT4, INT8 and FP8 the word, then
// the codes of 64 columns; INT4_32 and INT8_32 the same for 32 columns; NVFP4 the scale of the matrix as
// fp32, four e4m3 scales and the codes of 64 columns. Codes of 4 bits are in pairs as in Q4_0: byte i of 16
// has columns i and i + 16 of 32.
#pragma once

#include <cstdint>

#include "kernels/layout/block_layout.h"

namespace moechat {

enum class ScaleWords : int {
  kHalves,
  kMins,
  kExponents,
  kSigned2,
  kSigned4,
  kFactors,
  kNibbles,
  kFloats,
  kE4m3,
  kWholes,
  kOdd
};

// How codes become numbers: integers as they are or through a table of 16 values; e4m3 patterns. Codes of a
// grid are integers as they are.
enum class CodeTable : int { kNone, kIq4, kE2m1, kE4m3, kGrid };

struct KeptForm {
  int code_bits;  // in planes; of a grid the bits that a column takes, about
  CodeTable table;
  int subs;  // sub-blocks of a group: 2 or 4
  ScaleWords words;
  int zero;
  int super_halves;  // fp16 values of a row in the super field: 0, 1 or 2; fp32 and words count as two
  int super_groups;  // groups that share them, in gate and up
  int file_columns;  // of a block in the rows of a file
  int file_bytes;
  int grid_steps = 0;  // of the q of a group; 0: codes are in planes

  constexpr int steps() const { return grid_steps > 0 ? grid_steps : 2 * code_bits; }
};

constexpr int kSuperGroups = 4;       // groups of a block of 256 columns
constexpr float kE4m3Shift = 128.0f;  // of the scale of a matrix of NVFP4
constexpr float kFp8Shift = 256.0f;   // of a scale of FP8

constexpr int kSignedZero = 64;  // of grids whose codes have signs: above the largest value, 62
constexpr int kMostGridSteps = 6;

constexpr int kKeptEncodings = 26;

// Names as in GGUF files where they have the encoding, and those of the encodings that are not kept.
static constexpr const char* encoding_name(Encoding encoding) {
  constexpr const char* kNames[] = {"2 bits",  "3 bits", "4 bits",  "6 bits", "8 bits", "bf16",  "fp16",
                                    "q4_0",    "q4_1",   "q5_0",    "q5_1",   "q8_0",   "q2_k",  "q3_k",
                                    "q4_k",    "q5_k",   "q6_k",    "iq4_nl", "iq4_xs", "mxfp4", "iq2_xxs",
                                    "iq2_xs",  "iq2_s",  "iq3_xxs", "iq3_s",  "iq1_s",  "iq1_m", "int4",
                                    "int4_32", "int8",   "int8_32", "nvfp4",  "fp8"};
  static_assert(sizeof kNames / sizeof *kNames == static_cast<int>(Encoding::kFp8) + 1, "a name each");
  return kNames[static_cast<int>(encoding)];
}

static constexpr bool is_kept(Encoding encoding) { return encoding >= Encoding::kQ4_0; }

// Forms in the order of the encodings, from the first kept one on.
static constexpr KeptForm kKeptForms[kKeptEncodings] = {
    {4, CodeTable::kNone, 2, ScaleWords::kHalves, 8, 0, 1, 32, 18},                         // kQ4_0
    {4, CodeTable::kNone, 2, ScaleWords::kMins, 0, 2, 1, 32, 20},                           // kQ4_1
    {5, CodeTable::kNone, 2, ScaleWords::kHalves, 16, 0, 1, 32, 22},                        // kQ5_0
    {5, CodeTable::kNone, 2, ScaleWords::kMins, 0, 2, 1, 32, 24},                           // kQ5_1
    {8, CodeTable::kNone, 2, ScaleWords::kHalves, 128, 0, 1, 32, 34},                       // kQ8_0
    {2, CodeTable::kNone, 4, ScaleWords::kNibbles, 0, 2, kSuperGroups, 256, 84},            // kQ2K
    {3, CodeTable::kNone, 4, ScaleWords::kSigned4, 4, 1, kSuperGroups, 256, 110},           // kQ3K
    {4, CodeTable::kNone, 2, ScaleWords::kFactors, 0, 2, kSuperGroups, 256, 144},           // kQ4K
    {5, CodeTable::kNone, 2, ScaleWords::kFactors, 0, 2, kSuperGroups, 256, 176},           // kQ5K
    {6, CodeTable::kNone, 4, ScaleWords::kSigned4, 32, 1, kSuperGroups, 256, 210},          // kQ6K
    {4, CodeTable::kIq4, 2, ScaleWords::kHalves, 127, 0, 1, 32, 18},                        // kIq4Nl
    {4, CodeTable::kIq4, 2, ScaleWords::kSigned2, 127, 0, 1, 256, 136},                     // kIq4Xs
    {4, CodeTable::kE2m1, 2, ScaleWords::kExponents, 12, 0, 1, 32, 17},                     // kMxfp4
    {2, CodeTable::kGrid, 2, ScaleWords::kOdd, kSignedZero, 1, kSuperGroups, 256, 66, 3},   // kIq2Xxs
    {2, CodeTable::kGrid, 4, ScaleWords::kOdd, kSignedZero, 0, 1, 256, 74, 4},              // kIq2Xs
    {2, CodeTable::kGrid, 4, ScaleWords::kOdd, kSignedZero, 1, kSuperGroups, 256, 82, 4},   // kIq2S
    {3, CodeTable::kGrid, 2, ScaleWords::kOdd, kSignedZero, 1, kSuperGroups, 256, 98, 5},   // kIq3Xxs
    {3, CodeTable::kGrid, 2, ScaleWords::kOdd, kSignedZero, 1, kSuperGroups, 256, 110, 6},  // kIq3S
    {1, CodeTable::kGrid, 2, ScaleWords::kOdd, 9, 1, kSuperGroups, 256, 50, 2},             // kIq1S
    {1, CodeTable::kGrid, 4, ScaleWords::kOdd, 9, 0, 1, 256, 56, 3},                        // kIq1M
    {4, CodeTable::kNone, 2, ScaleWords::kFloats, 0, 0, 1, 64, 36},                         // kInt4
    {4, CodeTable::kNone, 2, ScaleWords::kFloats, 0, 2, 1, 32, 20},                         // kInt4By32
    {8, CodeTable::kNone, 2, ScaleWords::kFloats, 0, 0, 1, 64, 68},                         // kInt8
    {8, CodeTable::kNone, 2, ScaleWords::kFloats, 0, 2, 1, 32, 36},                         // kInt8By32
    {4, CodeTable::kE2m1, 4, ScaleWords::kE4m3, 12, 2, kSuperGroups, 64, 40},               // kNvfp4
    {8, CodeTable::kE4m3, 2, ScaleWords::kWholes, 0, 0, 1, 64, 68},                         // kFp8
};

// REQUIRES: is_kept(encoding).
static constexpr const KeptForm& kept_form(Encoding encoding) {
  return kKeptForms[static_cast<int>(encoding) - static_cast<int>(Encoding::kQ4_0)];
}

// Values of the tables plus the zero of their encodings.
static constexpr unsigned char kIq4Values[16] = {0,   23,  44,  62,  78,  92,  105, 117,
                                                 128, 140, 152, 165, 180, 196, 216, 240};
static constexpr unsigned char kE2m1Values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

static constexpr int largest_of(const unsigned char (&values)[16]) {
  int largest = 0;
  for (const unsigned char value : values) largest = value > largest ? value : largest;
  return largest;
}

// REQUIRES: codes are integers.
static constexpr int kept_value(CodeTable table, int code) {
  if (table == CodeTable::kNone || table == CodeTable::kGrid) return code;
  return (table == CodeTable::kIq4 ? kIq4Values : kE2m1Values)[code];
}

// Bytes of the q of a (tile, group).
static constexpr std::int64_t kept_group_bytes(Encoding encoding) {
  return std::int64_t{kept_form(encoding).steps()} * kStepBytes;
}

// Whether codes are floats, for which only the kernels for float inputs have products, and only of dense
// matrices. REQUIRES: is_kept(encoding).
static constexpr bool needs_floats(Encoding encoding) {
  return kept_form(encoding).table == CodeTable::kE4m3;
}

// The fp16 pattern of an e4m3 pattern, which stands for a number 256 times smaller.
static constexpr std::uint16_t e4m3_half(unsigned pattern) {
  return static_cast<std::uint16_t>((pattern & 0x7fu) << 7 | (pattern & 0x80u) << 8);
}

// Bytes of the super field of a tile, for `groups` groups; `shared`: in gate and up.
static constexpr std::int64_t super_bytes(Encoding encoding, std::int64_t groups, bool shared) {
  const KeptForm form = kept_form(encoding);
  const int share = shared ? form.super_groups : 1;
  return (groups + share - 1) / share * kTileRows * 2 * form.super_halves;
}

}  // namespace moechat
