#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include "kernels/experts/block_fields.h"
#include "kernels/experts/pack.h"
#include "kernels/isa/dispatch.h"
#include "kernels/layout/gguf_blocks.h"
#include "kernels/threads/thread_pool.h"

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

namespace {

constexpr std::int64_t kGrain = 4;  // tiles of some 10 KB

// Groups [first, groups) of a tile, one row at a time.
bool pack_edge(const KeptTile& tile, std::int64_t first) {
  const KeptForm form = kept_form(tile.encoding);
  const FileGroup nothing{};
  for (std::int64_t lane = 0; lane < kTileRows; ++lane) {
    const unsigned char* from = tile.source.rows + (tile.row + lane) * tile.source.row_stride;
    for (std::int64_t group = first; group < tile.groups; ++group) {
      FileGroup read;
      const bool real = tile.row + lane < tile.rows && group * kGroupColumns < tile.cols;
      if (real && !read_file_group(tile.encoding, from, tile.cols, group, &read)) return false;
      const KeptPlaces& to = tile.to;
      put_kept_row(tile.encoding, real ? read : nothing, lane, to.q + group * to.q_stride,
                   to.sz + group * to.sz_stride,
                   form.super_halves > 0 ? to.super + group / to.share * to.super_stride : nullptr);
    }
  }
  return true;
}

// Tile `tile` of gate or up, from a block's record on: the groups of its rows follow each other.
KeptTile input_tile(const Field& field, const FileMatrix& source, unsigned char* record, std::int64_t block,
                    std::int64_t tile) {
  const KeptForm form = kept_form(field.encoding);
  const std::int64_t at = tile * field.groups;
  const KeptPlaces to{record + field.q + at * field.group_bytes,
                      field.group_bytes,
                      record + field.sz + at * kScaleBytes,
                      kScaleBytes,
                      record + field.super_place(tile, 0),
                      std::int64_t{kTileRows} * 2 * form.super_halves,
                      form.super_groups};
  return {field.encoding, source, field.rows, field.cols, field.first_row(block, tile), field.groups, to};
}

// Tile `tile` of down: each group belongs to another block. So a row of the file is read once, in order.
KeptTile output_tile(const BlockLayout& layout, const Field& field, const FileMatrix& source,
                     unsigned char* records, std::int64_t tile) {
  const KeptPlaces to{records + field.q + tile * field.group_bytes,
                      layout.record_bytes,
                      records + field.sz + tile * kScaleBytes,
                      layout.record_bytes,
                      records + field.super_place(tile, 0),
                      layout.record_bytes,
                      1};
  return {field.encoding, source, field.rows, field.cols, tile * kTileRows, layout.blocks, to};
}

}  // namespace

bool pack_kept_tile(const KeptTile& tile) {
  const bool whole_rows = tile.row + kTileRows <= tile.rows;
  const std::int64_t whole = whole_rows ? std::min(tile.cols / kGroupColumns, tile.groups) : 0;
  const KeptRows rows{tile.source.rows + tile.row * tile.source.row_stride, tile.source.row_stride, whole};
  if (whole > 0 && !kernels().pack_kept_rows(tile.encoding, rows, tile.to)) return false;
  return pack_edge(tile, whole);
}

void pack_kept(const BlockLayout& layout, const FileExpert& source, unsigned char* records, int threads) {
  if (!layout.kept) throw std::invalid_argument("this layout does not keep the values of files");
  const Fields fields = fields_of(layout);
  const FileMatrix* matrices[kMatrices] = {&source.gate, &source.up, &source.down};
  const std::int64_t inputs = kTilesPerBlock * layout.blocks;
  const std::int64_t bounds[kMatrices] = {inputs, layout.gated ? 2 * inputs : inputs,
                                          (layout.gated ? 2 : 1) * inputs + fields.field[2].tiles};
  std::atomic<int> refused{-1};
  const auto pack_unit = [&](std::int64_t unit) {
    const std::size_t m = unit < bounds[0] ? 0 : (unit < bounds[1] ? 1 : 2);
    const std::int64_t tile = m == 0 ? unit : unit - bounds[m - 1];
    const std::int64_t block = tile / kTilesPerBlock;
    const bool fine = pack_kept_tile(
        m == 2 ? output_tile(layout, fields.field[m], *matrices[m], records, tile)
               : input_tile(fields.field[m], *matrices[m], records + block * layout.record_bytes, block,
                            tile % kTilesPerBlock));
    if (!fine) refused.store(static_cast<int>(m), std::memory_order_relaxed);
  };
  const auto pack_units = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t unit = begin; unit < end; ++unit) {
      if (refused.load(std::memory_order_relaxed) >= 0) return;
      pack_unit(unit);
    }
  };
  if (threads == 1) {  // others may use the pool meanwhile
    pack_units(0, bounds[2]);
  } else {
    ThreadPool::Session session;
    session.parallel_for(threads > 0 ? threads : kMaxThreads, bounds[2], kGrain, pack_units);
  }
  if (refused.load() >= 0) {
    const auto m = static_cast<std::size_t>(refused.load());
    const Field& field = fields.field[m];
    refuse_scale(field.name, field.encoding, *matrices[m], field.rows, field.cols);
  }
  write_tails(layout, source.biases, records);
}

}  // namespace moechat
