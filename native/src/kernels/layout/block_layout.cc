#include "kernels/layout/block_layout.h"

#include <stdexcept>
#include <string>

namespace moechat {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

void check_dimension(const char* name, std::int64_t value) {
  if (value < 1 || value > kMaxDimension) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) +
                                "; it must be between 1 and " + std::to_string(kMaxDimension));
  }
}

Encoding encoding_of(int bits, bool fp16) {
  switch (bits) {
    case 2:
      return Encoding::kBits2;
    case 3:
      return Encoding::kBits3;
    case 4:
      return Encoding::kBits4;
    case 8:
      return Encoding::kBits8;
    case 16:
      return fp16 ? Encoding::kFp16 : Encoding::kBf16;
    default:
      throw std::invalid_argument(std::to_string(bits) + " bits are not supported; choose 2, 3, 4, 8 or 16");
  }
}

}  // namespace

BlockLayout make_block_layout(std::int64_t hidden_size, std::int64_t intermediate_size, int bits, bool fp16,
                              bool has_bias) {
  check_dimension("hidden_size", hidden_size);
  check_dimension("intermediate_size", intermediate_size);

  BlockLayout layout{};
  layout.hidden_size = hidden_size;
  layout.intermediate_size = intermediate_size;
  layout.bits = bits;
  layout.fp16 = fp16;
  layout.has_bias = has_bias;
  layout.encoding = encoding_of(bits, fp16);
  layout.hidden_padded = round_up(hidden_size, kGroupColumns);
  layout.blocks = (intermediate_size + kBlockNeurons - 1) / kBlockNeurons;
  layout.groups = layout.hidden_padded / kGroupColumns;
  layout.group_bytes = std::int64_t{kTileRows} * kGroupColumns * bits / 8;
  layout.down_bias_rows = round_up((layout.hidden_padded + layout.blocks - 1) / layout.blocks, kTileRows);

  const std::int64_t tile_groups = kTilesPerBlock * layout.groups;  // the same number in gate, up and down
  std::int64_t offset = 0;
  const auto take = [&offset](bool present, std::int64_t bytes) {
    if (!present) return std::int64_t{-1};
    const std::int64_t at = offset;
    offset += bytes;
    return at;
  };
  const bool scaled = layout.quantised();
  layout.gate_q = take(true, tile_groups * layout.group_bytes);
  layout.up_q = take(true, tile_groups * layout.group_bytes);
  layout.down_q = take(true, tile_groups * layout.group_bytes);
  layout.gate_sz = take(scaled, tile_groups * kScaleBytes);
  layout.up_sz = take(scaled, tile_groups * kScaleBytes);
  layout.down_sz = take(scaled, tile_groups * kScaleBytes);
  layout.gate_bias = take(has_bias, kBlockNeurons * std::int64_t{sizeof(float)});
  layout.up_bias = take(has_bias, kBlockNeurons * std::int64_t{sizeof(float)});
  layout.down_bias = take(has_bias, layout.down_bias_rows * std::int64_t{sizeof(float)});
  layout.payload_bytes = offset;
  layout.record_bytes = round_up(offset, kRecordAlignment);
  return layout;
}

}  // namespace moechat
