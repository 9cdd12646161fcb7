// Byte map of a neuron block, the unit of storage, transfer, caching and compute.
//
// FORMAT VERSION 2. Any change below changes stores on disk: raise kBlockFormatVersion, and
// FORMAT_VERSION in moechat/store/manifest.py.
//
// A block holds 64 neurons of one expert: 64 rows of gate and up, 64 columns of down. Hp is hidden_size
// rounded up to 64. Every field starts on a 64-byte boundary; the record is padded with zeros to a multiple
// of 4096 bytes so that records can be read directly from a file and mapped by page.
//
//   gate.q | up.q | down.q | gate.sz | up.sz | down.sz | gate.bias | up.bias | down.bias        (biases if
//   any)
//
// q fields. A matrix is cut into tiles of 16 rows; a tile into groups of 64 columns; a group into steps of 64
// bytes. A step is 16 lanes of one little-endian 32-bit word: lane = row of the tile, word = consecutive
// columns of that row, lowest bits = first column. One vector load therefore holds one column step of 16
// rows, and a warp that reads a step reads it coalesced.
//
//   bits   columns a word   steps a group   bytes a group
//      2         16               4              256
//      3     planes, below        6              384
//      4          8               8              512
//      6     planes, below       12              768
//      8          4              16             1024
//     16          2              32             2048     raw bf16 or fp16 patterns
//
// 3 bits: four steps with the low two bits (16 columns each), then two steps with the high bit (32 columns
// each).
//
// 6 bits: eight steps with the low four bits (8 columns each), then four steps with the high two bits (16
// columns each). Those of column c of the 16 begin at bit 8 * (c % 8 / 2) + 4 * (c / 8) + 2 * (c % 2), in the
// byte whose number the low bits have in their own word: masked and shifted, the words of both planes are
// the codes of columns 0, 2, 4 and 6 of a low step, or of 1, 3, 5 and 7.
//
// Order: tile, then group, then step.   gate, up: [64, Hp] = 4 tiles x Hp/64 groups.   down: [Hp, 64] = Hp/16
// tiles x 1 group.
//
// sz fields (absent at 16 bits): 64 bytes for every (tile, group) in the same order.
//
// 6 and 8 bits: 16 fp16 scales, then 16 fp16 zeros, one per row. A value is (q - zero) * scale in fp32.
//
// 2 to 4 bits: 16 little-endian 32-bit scale words, one per row. The columns of half h = 0 (0..31) and h = 1
// (32..63) have factors and offsets of their own: a value is (q * factor_h - offset_h) * step.
//
//   bits of a word   0-7       8-11      12-15     16-23     24-31
//                    offset_0  factor_0  factor_1  offset_1  step, as exponent and mantissa of 5 and 3 bits:
//                                                            2^(e - 24) * (1 + m / 8)
//
// q * factor_h - offset_h is an integer of at most 8 bits and a sign: the products of a group stay integers,
// and so halves cost the kernels little, although they have scales of their own. Q4_K of llama.cpp has the
// same idea, with 6-bit factors and offsets for 8 groups of 32 and two fp16 steps.
//
// Padding neurons and rows have q 0, offset 0 (6 and 8 bits: scale 1, zero 0) and are exactly 0; padding
// columns inside a group of real columns have q 0 and are only multiplied by x = 0.
//
// Kept encodings hold the values of a GGUF file or of a quantised checkpoint, see kept_encodings.h. Their q
// fields are planes, their sz fields have the scales of the sub-blocks of every row, and some have a third
// field after those, super, with the scales of blocks of 256 columns. Gate and up have one encoding, down has
// one of its own:
//
//   gate.q | up.q | down.q | gate.sz | up.sz | down.sz | gate.super | up.super | down.super | biases
//
// Experts without a gate projection (gated = false) have one input projection. It stands in the fields of
// gate, and those of up are absent; the same holds for the names of matrices everywhere here.
//
// Biases are fp32. gate.bias, up.bias: the block's 64 neurons. down.bias: the slice of the expert's down bias
// that this block adds to its partial output, rows [b*S, min((b+1)*S, hidden)) of block b, S = ceil(Hp /
// blocks) rounded up to 16, zero padded to S: a block needs no other block, and partial outputs are only
// added.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moechat {

constexpr int kBlockFormatVersion = 2;
constexpr int kBlockNeurons = 64;
constexpr int kGroupColumns = 64;
constexpr int kHalfColumns = 32;  // columns with one factor and offset, at 2 to 4 bits
constexpr int kTileRows = 16;
constexpr int kTilesPerBlock = kBlockNeurons / kTileRows;
constexpr int kStepBytes = 64;
constexpr int kScaleBytes = 64;  // of the sz of a (tile, group)
constexpr int kMostFactor = 15;
constexpr int kMostOffset = 255;
constexpr int kStepShift = 20;                    // a step as fp32: its 8 bits shifted by this,
constexpr std::uint32_t kLeastStep = 103u << 23;  // plus the pattern of 2^-24
constexpr std::int64_t kRecordAlignment = 4096;
constexpr std::int64_t kMaxDimension = 1 << 20;

enum class Encoding : int {
  kBits2,
  kBits3,
  kBits4,
  kBits6,
  kBits8,
  kBf16,
  kFp16,
  // Kept, see kept_encodings.h.
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ2K,
  kQ3K,
  kQ4K,
  kQ5K,
  kQ6K,
  kIq4Nl,
  kIq4Xs,
  kMxfp4,
  kIq2Xxs,
  kIq2Xs,
  kIq2S,
  kIq3Xxs,
  kIq3S,
  kIq1S,
  kIq1M,
  kInt4,
  kInt4By32,
  kInt8,
  kInt8By32,
  kNvfp4,
  kFp8
};

// REQUIRES: 2, 3, 4, 6 or 8 bits.
static constexpr Encoding plain_encoding(int bits) {
  return bits == 2   ? Encoding::kBits2
         : bits == 3 ? Encoding::kBits3
         : bits == 4 ? Encoding::kBits4
         : bits == 6 ? Encoding::kBits6
                     : Encoding::kBits8;
}

// Whether the halves of a group have factors and offsets of their own; else all its columns have one scale
// and one zero. REQUIRES: codes of 2, 3, 4, 6 or 8 bits.
static constexpr bool has_halves(int bits) { return bits <= 4; }

struct BlockLayout {
  std::int64_t hidden_size;
  std::int64_t intermediate_size;
  std::int64_t hidden_padded;     // Hp
  std::int64_t blocks;            // of one expert
  std::int64_t groups;            // Hp / 64
  std::int64_t group_bytes;       // q bytes of a (tile, group) of gate and up
  std::int64_t down_group_bytes;  // of down
  int bits;                       // of a code of gate and up
  bool fp16;                      // 16-bit patterns are fp16, else bf16
  bool has_bias;
  bool gated;              // gate and up; else one input projection, called gate
  bool kept;               // the encodings are kept ones
  Encoding encoding;       // of gate and up
  Encoding down_encoding;  // the same if not kept

  // Byte offsets in a record; -1 for absent fields.
  std::int64_t gate_q, up_q, down_q;
  std::int64_t gate_sz, up_sz, down_sz;
  std::int64_t gate_super, up_super, down_super;
  std::int64_t gate_bias, up_bias, down_bias;
  std::int64_t down_bias_rows;  // S
  std::int64_t payload_bytes;   // without the padding to 4096
  std::int64_t record_bytes;

  bool quantised() const { return bits != 16; }
};

// Throws std::invalid_argument for a size outside 1..2^20.
void check_dimension(const char* name, std::int64_t value);

// Throws std::invalid_argument unless the columns are whole blocks of the encoding. REQUIRES: it is a kept
// one.
void check_columns(const char* name, std::int64_t columns, Encoding encoding);

// Throws std::invalid_argument for bits other than 2, 3, 4, 6, 8, 16 or sizes outside 1..2^20.
BlockLayout make_block_layout(std::int64_t hidden_size, std::int64_t intermediate_size, int bits, bool fp16,
                              bool has_bias, bool gated = true);

// A layout with kept encodings. Layers of a model may differ in their encodings and share the size of their
// records: `least_record_bytes`, a multiple of 4096, or 0, is that of the largest.
// Throws std::invalid_argument for other encodings and FP8, sizes out of range, columns that are not whole
// blocks of the encoding.
BlockLayout make_kept_layout(std::int64_t hidden_size, std::int64_t intermediate_size, Encoding gate_up,
                             Encoding down, bool has_bias, std::int64_t least_record_bytes,
                             bool gated = true);

}  // namespace moechat
