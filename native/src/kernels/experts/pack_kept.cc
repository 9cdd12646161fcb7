#include <atomic>
#include <stdexcept>
#include <string>

#include "kernels/experts/block_fields.h"
#include "kernels/experts/pack.h"
#include "kernels/layout/gguf_blocks.h"

namespace moechat {
namespace {

[[noreturn]] void refuse_scale(const Field& field, const FileMatrix& matrix) {
  const std::int64_t groups = (field.cols + kGroupColumns - 1) / kGroupColumns;
  for (std::int64_t row = 0; row < field.rows; ++row) {
    for (std::int64_t group = 0; group < groups; ++group) {
      FileGroup read;
      if (read_file_group(field.encoding, matrix.rows + row * matrix.row_stride, field.cols, group, &read)) {
        continue;
      }
      throw std::invalid_argument(std::string(field.name) + " scale at row " + std::to_string(row) +
                                  ", columns " + std::to_string(group * kGroupColumns) + " to " +
                                  std::to_string((group + 1) * kGroupColumns - 1) + " is not finite");
    }
  }
  throw std::logic_error("no scale is refused");
}

}  // namespace

void pack_kept(const BlockLayout& layout, const FileExpert& source, unsigned char* records, int threads) {
  if (!layout.kept) throw std::invalid_argument("this layout does not keep the values of files");
  const Fields fields = fields_of(layout);
  const FileMatrix* matrices[kMatrices] = {&source.gate, &source.up, &source.down};
  std::atomic<int> refused{-1};
  for_each_tile(layout, fields, threads, [&](std::int64_t block, std::size_t m, std::int64_t tile) {
    if (refused.load(std::memory_order_relaxed) >= 0) return;
    const Field& field = fields.field[m];
    unsigned char* record = records + block * layout.record_bytes;
    const std::int64_t row = field.first_row(block, tile);
    const std::int64_t first_group = field.first_col(block) / kGroupColumns;
    const FileGroup nothing{};
    for (std::int64_t lane = 0; lane < kTileRows; ++lane) {
      const unsigned char* from = matrices[m]->rows + (row + lane) * matrices[m]->row_stride;
      for (std::int64_t g = 0; g < field.groups; ++g) {
        FileGroup read;
        const std::int64_t group = first_group + g;
        const bool real = row + lane < field.rows && group * kGroupColumns < field.cols;
        if (real && !read_file_group(field.encoding, from, field.cols, group, &read)) {
          refused.store(static_cast<int>(m), std::memory_order_relaxed);
          return;
        }
        const std::int64_t at = tile * field.groups + g;
        put_kept_row(field.encoding, real ? read : nothing, lane, record + field.q + at * field.group_bytes,
                     record + field.sz + at * kScaleBytes, record + field.super_place(tile, g));
      }
    }
  });
  if (refused.load() >= 0) {
    const auto m = static_cast<std::size_t>(refused.load());
    refuse_scale(fields.field[m], *matrices[m]);
  }
  write_tails(layout, source.biases, records);
}

}  // namespace moechat
