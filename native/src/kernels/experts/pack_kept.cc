#include <atomic>
#include <stdexcept>
#include <string>

#include "kernels/experts/block_fields.h"
#include "kernels/experts/pack.h"
#include "kernels/layout/gguf_blocks.h"

namespace moechat {

void refuse_scale(const char* name, Encoding encoding, const FileMatrix& source, std::int64_t rows,
                  std::int64_t cols) {
  const std::int64_t groups = (cols + kGroupColumns - 1) / kGroupColumns;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t group = 0; group < groups; ++group) {
      FileGroup read;
      if (read_file_group(encoding, source.rows + row * source.row_stride, cols, group, &read)) continue;
      throw std::invalid_argument(std::string(name) + " scale at row " + std::to_string(row) + ", columns " +
                                  std::to_string(group * kGroupColumns) + " to " +
                                  std::to_string((group + 1) * kGroupColumns - 1) + " is not finite");
    }
  }
  throw std::logic_error("no scale is refused");
}

bool pack_kept_tile(const KeptTile& tile) {
  const KeptForm form = kept_form(tile.encoding);
  const std::int64_t group_bytes = std::int64_t{kTileRows} * kGroupColumns * form.code_bits / 8;
  const FileGroup nothing{};
  for (std::int64_t lane = 0; lane < kTileRows; ++lane) {
    const unsigned char* from = tile.source.rows + (tile.row + lane) * tile.source.row_stride;
    for (std::int64_t g = 0; g < tile.groups; ++g) {
      FileGroup read;
      const std::int64_t group = tile.first_group + g;
      const bool real = tile.row + lane < tile.rows && group * kGroupColumns < tile.cols;
      if (real && !read_file_group(tile.encoding, from, tile.cols, group, &read)) return false;
      const std::int64_t super = g / form.super_groups * kTileRows * 2 * form.super_halves;
      put_kept_row(tile.encoding, real ? read : nothing, lane, tile.q + g * group_bytes,
                   tile.sz + g * kScaleBytes, form.super_halves > 0 ? tile.super + super : nullptr);
    }
  }
  return true;
}

void pack_kept(const BlockLayout& layout, const FileExpert& source, unsigned char* records, int threads) {
  if (!layout.kept) throw std::invalid_argument("this layout does not keep the values of files");
  const Fields fields = fields_of(layout);
  const FileMatrix* matrices[kMatrices] = {&source.gate, &source.up, &source.down};
  std::atomic<int> refused{-1};
  for_each_tile(layout, fields, threads, [&](std::int64_t block, std::size_t m, std::int64_t tile) {
    if (refused.load(std::memory_order_relaxed) >= 0) return;
    const Field& field = fields.field[m];
    unsigned char* record = records + block * layout.record_bytes;
    const std::int64_t at = tile * field.groups;
    if (!pack_kept_tile({field.encoding, *matrices[m], field.rows, field.cols, field.first_row(block, tile),
                         field.first_col(block) / kGroupColumns, field.groups,
                         record + field.q + at * field.group_bytes, record + field.sz + at * kScaleBytes,
                         record + field.super_place(tile, 0)})) {
      refused.store(static_cast<int>(m), std::memory_order_relaxed);
    }
  });
  if (refused.load() >= 0) {
    const auto m = static_cast<std::size_t>(refused.load());
    const Field& field = fields.field[m];
    refuse_scale(field.name, field.encoding, *matrices[m], field.rows, field.cols);
  }
  write_tails(layout, source.biases, records);
}

}  // namespace moechat
