// Matrices of an expert as fields of its block records: for packing and unpacking.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/experts/pack.h"
#include "kernels/layout/block_layout.h"
#include "kernels/layout/kept_encodings.h"
#include "kernels/threads/thread_pool.h"

namespace moechat {

// Position of a matrix of the expert in its blocks. A block holds 64 rows of gate and up, and 64 columns of
// down.
struct Field {
  const char* name;
  std::int64_t q;
  std::int64_t sz;
  std::int64_t tiles;   // per block
  std::int64_t groups;  // per tile
  std::int64_t rows;    // of the matrix
  std::int64_t cols;
  bool by_rows;
  Encoding encoding;
  std::int64_t group_bytes;
  std::int64_t super;  // -1: none

  std::int64_t first_row(std::int64_t block, std::int64_t tile) const {
    return (by_rows ? block * kBlockNeurons : 0) + tile * kTileRows;
  }
  std::int64_t first_col(std::int64_t block) const { return by_rows ? 0 : block * kBlockNeurons; }
  // Where the supers of a (tile, group) of kept weights are; 0 without them.
  std::int64_t super_place(std::int64_t tile, std::int64_t group) const {
    if (super < 0) return 0;
    const KeptForm form = kept_form(encoding);
    const std::int64_t part = by_rows ? group / form.super_groups : 0;
    return super + tile * super_bytes(encoding, groups, by_rows) + part * kTileRows * 2 * form.super_halves;
  }
};

constexpr int kMatrices = 3;

// If the layout is not gated, up has no tiles and no rows.
struct Fields {
  Field field[kMatrices];
};

inline Fields fields_of(const BlockLayout& layout) {
  const std::int64_t hidden = layout.hidden_size;
  const std::int64_t neurons = layout.intermediate_size;
  const std::int64_t down_tiles = layout.hidden_padded / kTileRows;
  const std::int64_t up_tiles = layout.gated ? kTilesPerBlock : 0;
  return {{{"gate", layout.gate_q, layout.gate_sz, kTilesPerBlock, layout.groups, neurons, hidden, true,
            layout.encoding, layout.group_bytes, layout.gate_super},
           {"up", layout.up_q, layout.up_sz, up_tiles, layout.groups, layout.gated ? neurons : 0, hidden,
            true, layout.encoding, layout.group_bytes, layout.up_super},
           {"down", layout.down_q, layout.down_sz, down_tiles, 1, hidden, neurons, false,
            layout.down_encoding, layout.down_group_bytes, layout.down_super}}};
}

// Calls body(block, matrix, tile) for all tiles of an expert, on several threads.
template <class Body>
void for_each_tile(const BlockLayout& layout, const Fields& fields, int threads, const Body& body) {
  const std::int64_t per_matrix = kTilesPerBlock;  // down tiles form four bundles: all units are equal work
  const std::int64_t units = layout.blocks * kMatrices * per_matrix;
  ThreadPool::Session session;
  session.parallel_for(threads > 0 ? threads : kMaxThreads, units, 1,
                       [&](std::int64_t begin, std::int64_t end) {
                         for (std::int64_t unit = begin; unit < end; ++unit) {
                           const std::int64_t block = unit / (kMatrices * per_matrix);
                           const auto matrix = static_cast<std::size_t>(unit / per_matrix % kMatrices);
                           const std::int64_t part = unit % per_matrix;
                           const std::int64_t tiles = fields.field[matrix].tiles;
                           for (std::int64_t tile = part * tiles / per_matrix;
                                tile < (part + 1) * tiles / per_matrix; ++tile) {
                             body(block, matrix, tile);
                           }
                         }
                       });
}

inline void store_floats(unsigned char* to, const float* from, std::int64_t count) {
  std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
}

// Writes biases and the zero padding of all records; q and sz fields are written tile by tile.
inline void write_tails(const BlockLayout& layout, const ExpertBiases* biases, unsigned char* records) {
  const std::int64_t packed = layout.has_bias ? layout.gate_bias : layout.payload_bytes;
  for (std::int64_t block = 0; block < layout.blocks; ++block) {
    unsigned char* record = records + block * layout.record_bytes;
    std::memset(record + packed, 0, static_cast<std::size_t>(layout.record_bytes - packed));
    if (!layout.has_bias) continue;
    const std::int64_t neuron = block * kBlockNeurons;
    const std::int64_t neurons = std::min<std::int64_t>(kBlockNeurons, layout.intermediate_size - neuron);
    store_floats(record + layout.gate_bias, biases->gate + neuron, neurons);
    if (layout.gated) store_floats(record + layout.up_bias, biases->up + neuron, neurons);
    const std::int64_t row = std::min(block * layout.down_bias_rows, layout.hidden_size);
    const std::int64_t rows = std::min(layout.down_bias_rows, layout.hidden_size - row);
    store_floats(record + layout.down_bias, biases->down + row, rows);
  }
}

}  // namespace moechat
