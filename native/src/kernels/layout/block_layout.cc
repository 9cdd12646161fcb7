#include "kernels/layout/block_layout.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/layout/kept_encodings.h"

namespace moechat {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

Encoding encoding_of(int bits, bool fp16) {
  switch (bits) {
    case 2:
    case 3:
    case 4:
    case 6:
    case 8:
      return plain_encoding(bits);
    case 16:
      return fp16 ? Encoding::kFp16 : Encoding::kBf16;
    default:
      throw std::invalid_argument(std::to_string(bits) +
                                  " bits are not supported; choose 2, 3, 4, 6, 8 or 16");
  }
}

// Sizes that do not depend on the encoding.
BlockLayout make_shape(std::int64_t hidden_size, std::int64_t intermediate_size, bool has_bias, bool gated) {
  check_dimension("hidden_size", hidden_size);
  check_dimension("intermediate_size", intermediate_size);
  BlockLayout layout{};
  layout.hidden_size = hidden_size;
  layout.intermediate_size = intermediate_size;
  layout.has_bias = has_bias;
  layout.gated = gated;
  layout.hidden_padded = round_up(hidden_size, kGroupColumns);
  layout.blocks = (intermediate_size + kBlockNeurons - 1) / kBlockNeurons;
  layout.groups = layout.hidden_padded / kGroupColumns;
  layout.down_bias_rows = round_up((layout.hidden_padded + layout.blocks - 1) / layout.blocks, kTileRows);
  return layout;
}

// Places the fields one after the other; `supers` has the bytes of the super fields of gate, up and down.
void place_fields(BlockLayout* layout, bool scaled, const std::int64_t (&supers)[3]) {
  const std::int64_t tile_groups = kTilesPerBlock * layout->groups;  // the same number in gate, up and down
  std::int64_t offset = 0;
  const auto take = [&offset](bool present, std::int64_t bytes) {
    if (!present) return std::int64_t{-1};
    const std::int64_t at = offset;
    offset += round_up(bytes, kStepBytes);
    return at;
  };
  layout->gate_q = take(true, tile_groups * layout->group_bytes);
  layout->up_q = take(layout->gated, tile_groups * layout->group_bytes);
  layout->down_q = take(true, tile_groups * layout->down_group_bytes);
  layout->gate_sz = take(scaled, tile_groups * kScaleBytes);
  layout->up_sz = take(scaled && layout->gated, tile_groups * kScaleBytes);
  layout->down_sz = take(scaled, tile_groups * kScaleBytes);
  layout->gate_super = take(supers[0] > 0, supers[0]);
  layout->up_super = take(supers[1] > 0 && layout->gated, supers[1]);
  layout->down_super = take(supers[2] > 0, supers[2]);
  layout->gate_bias = take(layout->has_bias, kBlockNeurons * std::int64_t{sizeof(float)});
  layout->up_bias = take(layout->has_bias && layout->gated, kBlockNeurons * std::int64_t{sizeof(float)});
  layout->down_bias = take(layout->has_bias, layout->down_bias_rows * std::int64_t{sizeof(float)});
  layout->payload_bytes = offset;
  layout->record_bytes = round_up(offset, kRecordAlignment);
}

}  // namespace

void check_dimension(const char* name, std::int64_t value) {
  if (value < 1 || value > kMaxDimension) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) +
                                "; it must be between 1 and " + std::to_string(kMaxDimension));
  }
}

void check_columns(const char* name, std::int64_t columns, Encoding encoding) {
  const int block = kept_form(encoding).file_columns;
  if (columns % block == 0) return;
  throw std::invalid_argument(std::string(name) + " is " + std::to_string(columns) +
                              "; this encoding has blocks of " + std::to_string(block) + " columns");
}

BlockLayout make_block_layout(std::int64_t hidden_size, std::int64_t intermediate_size, int bits, bool fp16,
                              bool has_bias, bool gated) {
  BlockLayout layout = make_shape(hidden_size, intermediate_size, has_bias, gated);
  layout.bits = bits;
  layout.fp16 = fp16;
  layout.kept = false;
  layout.encoding = layout.down_encoding = encoding_of(bits, fp16);
  layout.group_bytes = layout.down_group_bytes = std::int64_t{kTileRows} * kGroupColumns * bits / 8;
  place_fields(&layout, layout.quantised(), {0, 0, 0});
  return layout;
}

BlockLayout make_kept_layout(std::int64_t hidden_size, std::int64_t intermediate_size, Encoding gate_up,
                             Encoding down, bool has_bias, std::int64_t least_record_bytes, bool gated) {
  if (!is_kept(gate_up) || !is_kept(down)) throw std::invalid_argument("this encoding is not a kept one");
  if (least_record_bytes < 0 || least_record_bytes % kRecordAlignment != 0) {
    throw std::invalid_argument("records of " + std::to_string(least_record_bytes) +
                                " bytes are not a multiple of " + std::to_string(kRecordAlignment));
  }
  if (needs_floats(gate_up) || needs_floats(down)) {
    throw std::invalid_argument("this encoding is one of dense matrices");
  }
  BlockLayout layout = make_shape(hidden_size, intermediate_size, has_bias, gated);
  check_columns("hidden_size", hidden_size, gate_up);
  check_columns("intermediate_size", intermediate_size, down);
  layout.bits = kept_form(gate_up).code_bits;
  layout.kept = true;
  layout.encoding = gate_up;
  layout.down_encoding = down;
  layout.group_bytes = kept_group_bytes(gate_up);
  layout.down_group_bytes = kept_group_bytes(down);
  const std::int64_t of_gate = kTilesPerBlock * super_bytes(gate_up, layout.groups, true);
  const std::int64_t of_down = layout.hidden_padded / kTileRows * super_bytes(down, 1, false);
  place_fields(&layout, true, {of_gate, of_gate, of_down});
  layout.record_bytes = std::max(layout.record_bytes, least_record_bytes);
  return layout;
}

}  // namespace moechat
