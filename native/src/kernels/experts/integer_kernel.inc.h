// Integer kernels for few tokens, see kernel_api.h for the numerics. Included inside the anonymous namespace
// of one instruction set, after integer_dots.inc.h.

// Addresses of the quantised inputs of one token.
struct TokenInputs {
  const std::int8_t* planes;
  const float* scales;
  const InputSums* sums;
};

MOECHAT_INLINE TokenInputs inputs_of(const QuantisedRows& rows, int planes, std::int64_t groups,
                                     std::int64_t row) {
  return {rows.planes + row * groups * planes * kGroupColumns, rows.scales + row * groups,
          rows.sums + row * groups};
}

// Whether two tokens are computed together; of kept weights one or four are, which spares compile time.
template <class W>
constexpr bool kPairsOfTokens = W::kKept ? kMostTokens == 2 : kMostTokens >= 2;

// A range of tiles: their codes and scales, and those that the thread reads next.
struct TileStream {
  const unsigned char* q;
  const unsigned char* sz;
  const unsigned char* next_q;
  const unsigned char* next_sz;
  const unsigned char* super = nullptr;  // of kept weights that have this field
};

// Both streams of the tiles from `tile` on, without what is read next.
MOECHAT_INLINE void neuron_streams(const BlockLayout& layout, const unsigned char* record, std::int64_t tile,
                                   std::int64_t end, TileStream (&streams)[2]) {
  for (int s = 0; s < 2; ++s) {
    const NeuronStream at = neuron_stream(layout, s, tile, end);
    streams[s] = {record + at.q + at.tile * layout.groups * layout.group_bytes,
                  record + at.sz + at.tile * layout.groups * kScaleBytes, nullptr, nullptr,
                  super_tile(record, at.super, layout.encoding, at.tile, layout.groups, true)};
  }
}

// Prefetches codes and their scales.
MOECHAT_INLINE void prefetch_codes(const unsigned char* q, std::int64_t bytes, const unsigned char* sz,
                                   std::int64_t bytes_sz) {
  // Hides what the pointers are; otherwise compilers compute every address ahead and run out of registers.
  __asm__("" : "+r"(q), "+r"(sz));
  prefetch_bytes(q, bytes);
  prefetch_bytes(sz, bytes_sz);
}

constexpr std::int64_t kSuperAhead = 512;  // bytes

// acc[stream][token]: 16 rows over all groups.
template <class W, int kPlanes, int kStreams, int kTokens>
__attribute__((noinline)) void tile_sums(const TileStream (&streams)[kStreams], std::int64_t groups,
                                         const TokenInputs (&inputs)[kTokens], std::int64_t ahead,
                                         const Keeping& keeping, Vec (&acc)[kStreams][kTokens]) {
  const std::int64_t bytes = W::group_bytes(keeping.group_bytes);
  const unsigned char* q[kStreams];
  const unsigned char* sz[kStreams];
  const std::int8_t* x[kTokens];
  for (int s = 0; s < kStreams; ++s) {
    q[s] = streams[s].q;
    sz[s] = streams[s].sz;
    for (int t = 0; t < kTokens; ++t) acc[s][t] = zero();
  }
  for (int t = 0; t < kTokens; ++t) x[t] = inputs[t].planes;
  const std::int64_t groups_ahead = ahead / bytes;
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::int64_t later = g + groups_ahead;
    for (const TileStream& stream : streams) {
      const bool within = later < groups;
      const std::int64_t which = within ? later : later - groups;
      prefetch_codes((within ? stream.q : stream.next_q) + which * bytes, bytes,
                     (within ? stream.sz : stream.next_sz) + which * kScaleBytes, kScaleBytes);
    }
    if constexpr (W::kKept) {
      KeptGroup at[kStreams];
      float x_scale[kTokens];
      const InputSums* sums[kTokens];
      for (int s = 0; s < kStreams; ++s) {
        at[s] = {q[s], sz[s], keeping.super_of(streams[s].super, g)};
        // Supers of the tiles of a block lie one after the other.
        if (g % kSuperGroups == 0) __builtin_prefetch(at[s].super + kSuperAhead, 0, 3);
      }
      for (int t = 0; t < kTokens; ++t) {
        x_scale[t] = inputs[t].scales[g];
        sums[t] = inputs[t].sums + g;
      }
      add_kept_group<W, kPlanes>(at, keeping.book, x, x_scale, sums, acc);
    } else {
      VecI isum[kStreams][kTokens];
      group_dots<W::kBits, kPlanes>(q, sz, x, isum);
      for (int s = 0; s < kStreams; ++s) {
        const auto term = GroupTerm<W::kBits, kPlanes>::read(sz[s]);
        for (int t = 0; t < kTokens; ++t) {
          acc[s][t] = term.add_to(acc[s][t], isum[s][t], inputs[t].scales[g], inputs[t].sums[g]);
        }
      }
    }
    for (int s = 0; s < kStreams; ++s) {
      q[s] += bytes;
      sz[s] += kScaleBytes;
    }
    for (int t = 0; t < kTokens; ++t) x[t] += kPlanes * 64;
  }
}

// Writes the activations of 16 neurons for one token, from their sums without biases.
MOECHAT_INLINE void store_neurons(const ForwardTask& task, const unsigned char* record, int tile,
                                  std::int64_t slot, Vec gate, Vec up) {
  const BlockLayout& layout = *task.layout;
  if (layout.has_bias) {
    const std::int64_t at = tile * std::int64_t{kTileRows * sizeof(float)};
    gate = add(gate, load(record + layout.gate_bias + at));
    if (layout.gated) up = add(up, load(record + layout.up_bias + at));
  }
  store(task.activations + slot * kBlockNeurons + tile * kTileRows, gate_lanes(task.gate, gate, up));
}

// Activations of the neurons that two streams complete, of tiles before `end`, for kTokens tokens of one row.
template <class W, int kPlanes, int kTokens>
void neuron_tile_of(const ForwardTask& task, const unsigned char* record, int tile, int end,
                    std::int64_t item, std::int64_t slot, const TileStream (&streams)[2]) {
  const BlockLayout& layout = *task.layout;
  TokenInputs inputs[kTokens];
  for (int t = 0; t < kTokens; ++t) {
    inputs[t] =
        inputs_of(task.x_quantised, kPlanes, layout.groups, task.row_token[item + t] - task.token_base);
  }
  Vec acc[2][kTokens];
  tile_sums<W, kPlanes>(streams, layout.groups, inputs, task.reading.ahead,
                        Keeping::of(layout.encoding, true), acc);
  for (int t = 0; t < kTokens; ++t) {
    store_neurons(task, record, tile, slot + t, acc[0][t], layout.gated ? acc[1][t] : zero());
    if (!layout.gated && tile + 1 < end) {
      store_neurons(task, record, tile + 1, slot + t, acc[1][t], zero());
    }
  }
}

// Activations of a block for one token. Reads first all codes of gate, then all of up, then goes on to those
// of down: one stream, where neuron_tile_of reads two.
template <class W, int kPlanes>
void block_neurons_of(const ForwardTask& task, const unsigned char* record, std::int64_t item,
                      std::int64_t slot) {
  const BlockLayout& layout = *task.layout;
  const std::int64_t span = layout.groups * layout.group_bytes;
  const std::int64_t span_sz = layout.groups * kScaleBytes;
  const TokenInputs inputs[1] = {
      inputs_of(task.x_quantised, kPlanes, layout.groups, task.row_token[item] - task.token_base)};
  const int matrices = layout.gated ? 2 : 1;
  const std::int64_t q[3] = {layout.gate_q, layout.gated ? layout.up_q : layout.down_q, layout.down_q};
  const std::int64_t sz[3] = {layout.gate_sz, layout.gated ? layout.up_sz : layout.down_sz, layout.down_sz};
  const std::int64_t super[2] = {layout.gate_super, layout.up_super};
  const Keeping keeping = Keeping::of(layout.encoding, true);
  Vec sums[2][kTilesPerBlock];
  for (Vec& sum : sums[1]) sum = zero();
  for (int matrix = 0; matrix < matrices; ++matrix) {
    for (int tile = 0; tile < kTilesPerBlock; ++tile) {
      TileStream stream[1] = {
          {record + q[matrix] + tile * span, record + sz[matrix] + tile * span_sz, record + q[matrix + 1],
           record + sz[matrix + 1],
           super_tile(record, super[matrix], layout.encoding, tile, layout.groups, true)}};
      if (tile + 1 < kTilesPerBlock) {
        stream[0].next_q = stream[0].q + span;
        stream[0].next_sz = stream[0].sz + span_sz;
      }
      Vec acc[1][1];
      tile_sums<W, kPlanes>(stream, layout.groups, inputs, task.reading.ahead, keeping, acc);
      sums[matrix][tile] = acc[0][0];
    }
  }
  for (int tile = 0; tile < kTilesPerBlock; ++tile) {
    store_neurons(task, record, tile, slot, sums[0][tile], sums[1][tile]);
  }
}

// The same for all tokens of one row.
template <class W, int kPlanes>
MOECHAT_INLINE void neuron_tiles_of(const ForwardTask& task, const unsigned char* record, int tile, int end,
                                    std::int64_t item, std::int64_t slot, std::int64_t count,
                                    const TileStream (&streams)[2]) {
  std::int64_t t = 0;
  if constexpr (kMostTokens == 4) {
    for (; t + 4 <= count; t += 4)
      neuron_tile_of<W, kPlanes, 4>(task, record, tile, end, item + t, slot + t, streams);
  }
  if constexpr (kPairsOfTokens<W>) {
    for (; t + 2 <= count; t += 2)
      neuron_tile_of<W, kPlanes, 2>(task, record, tile, end, item + t, slot + t, streams);
  }
  for (; t < count; ++t) neuron_tile_of<W, kPlanes, 1>(task, record, tile, end, item + t, slot + t, streams);
}

MOECHAT_INLINE void quantise_activations(const ForwardTask& task, std::int64_t slot, std::int64_t count) {
  const unsigned char* order = byte_order(task.layout->down_encoding);
  for (std::int64_t i = slot; i < slot + count; ++i) {
    const float* from = task.activations + i * kBlockNeurons;
    const Vec part[4] = {load(from), load(from + 16), load(from + 32), load(from + 48)};
    quantise_group_inputs(part, task.activation_bits, order,
                          task.quantised.planes + i * 8 * task.activation_bits, task.quantised.scales + i,
                          task.quantised.sums + i);
  }
}

template <class W, int kPlanes>
void integer_neurons_of(const ForwardTask& task, std::int64_t begin, std::int64_t end, std::int64_t then) {
  const BlockLayout& layout = *task.layout;
  const int step = tiles_a_step(layout);
  for (std::int64_t unit = begin; unit < end; ++unit) {
    const std::int64_t local = unit / kTilesPerBlock;
    const int tile = static_cast<int>(unit % kTilesPerBlock);
    const std::int64_t entry = task.entry_begin + local;
    const unsigned char* record = reinterpret_cast<const unsigned char*>(task.block_ptr[entry]);
    const std::int64_t item = task.row_start[task.block_row[entry]] + task.part_begin;
    const std::int64_t slot = task.slot_start[local];
    const std::int64_t count = task.slot_start[local + 1] - slot;
    const bool many = task.many_x != nullptr && count >= task.many->threshold;
    std::int64_t tiles = end - unit < kTilesPerBlock - tile ? end - unit : kTilesPerBlock - tile;
    if (many) {
      task.many->neurons(task, entry, tile, tile + tiles);
    } else {
      if (tiles > step) tiles = step;
      const int tiles_end = tile + static_cast<int>(tiles);
      TileStream streams[2];
      TileStream next_streams[2];
      neuron_streams(layout, record, tile, tiles_end, streams);
      // The next block lies elsewhere in memory, which the hardware prefetcher cannot predict.
      if (tiles_end < kTilesPerBlock) {
        neuron_streams(layout, record, tiles_end, kTilesPerBlock, next_streams);
        for (int s = 0; s < 2; ++s) {
          streams[s].next_q = next_streams[s].q;
          streams[s].next_sz = next_streams[s].sz;
        }
      } else if (unit + tiles == end && then >= 0) {
        const unsigned char* first = reinterpret_cast<const unsigned char*>(task.block_ptr[task.entry_begin]);
        for (int s = 0; s < 2; ++s) {
          streams[s].next_q = first + layout.down_q + then * layout.down_group_bytes + s * task.reading.ahead;
          streams[s].next_sz = first + layout.down_sz + (then + s) * kScaleBytes;
        }
      } else {
        const std::int64_t following = entry + 1 < task.list_end ? entry + 1 : entry;
        const unsigned char* next = reinterpret_cast<const unsigned char*>(task.block_ptr[following]);
        neuron_streams(layout, next, 0, kTilesPerBlock, next_streams);
        for (int s = 0; s < 2; ++s) {
          streams[s].next_q = next_streams[s].q;
          streams[s].next_sz = next_streams[s].sz;
        }
      }
      neuron_tiles_of<W, kPlanes>(task, record, tile, tiles_end, item, slot, count, streams);
    }
    unit += tiles - 1;
    // The thread that completes a block quantises it; several threads may share the tiles of a block.
    if (__atomic_add_fetch(task.tiles_done + local, static_cast<std::int32_t>(tiles), __ATOMIC_ACQ_REL) ==
        kTilesPerBlock) {
      quantise_activations(task, slot, count);
      if (many) task.many->gather_slots(task, local);
    }
  }
}

// Output rows of kTiles adjacent tiles for kTokens tokens of one row.
template <class W, int kPlanes, int kTiles, int kTokens>
MOECHAT_INLINE void output_tiles_of(const ForwardTask& task, const unsigned char* record, std::int64_t block,
                                    std::int64_t tile, const OutputRows& to,
                                    const TokenInputs (&inputs)[kTokens], const Codebook& book) {
  const BlockLayout& layout = *task.layout;
  const std::int64_t bytes = W::group_bytes(layout.down_group_bytes);
  const unsigned char* q[kTiles];
  const unsigned char* sz[kTiles];
  const std::int8_t* x[kTokens];
  for (int i = 0; i < kTiles; ++i) {
    q[i] = record + layout.down_q + (tile + i) * bytes;
    sz[i] = record + layout.down_sz + (tile + i) * kScaleBytes;
  }
  for (int t = 0; t < kTokens; ++t) x[t] = inputs[t].planes;
  Vec partials[kTiles][kTokens];
  if constexpr (W::kKept) {
    KeptGroup at[kTiles];
    float x_scale[kTokens];
    const InputSums* sums[kTokens];
    for (int i = 0; i < kTiles; ++i) {
      at[i] = {q[i], sz[i], super_tile(record, layout.down_super, layout.down_encoding, tile + i, 1, false)};
    }
    for (int t = 0; t < kTokens; ++t) {
      x_scale[t] = inputs[t].scales[0];
      sums[t] = inputs[t].sums;
    }
    for (int i = 0; i < kTiles; ++i) {
      for (int t = 0; t < kTokens; ++t) partials[i][t] = zero();
    }
    add_kept_group<W, kPlanes>(at, book, x, x_scale, sums, partials);
  } else {
    VecI isum[kTiles][kTokens];
    group_dots<W::kBits, kPlanes>(q, sz, x, isum);
    for (int i = 0; i < kTiles; ++i) {
      const auto term = GroupTerm<W::kBits, kPlanes>::read(sz[i]);
      for (int t = 0; t < kTokens; ++t) {
        partials[i][t] = term.add_to(zero(), isum[i][t], inputs[t].scales[0], inputs[t].sums[0]);
      }
    }
  }
  for (int i = 0; i < kTiles; ++i) {
    const std::int64_t row = (tile + i) * kTileRows;
    const std::int64_t bias_row = row - block * layout.down_bias_rows;
    const bool biased = layout.has_bias && bias_row >= 0 && bias_row < layout.down_bias_rows;
    for (int t = 0; t < kTokens; ++t) {
      Vec partial = partials[i][t];
      if (biased) {
        partial = add(partial, load(record + layout.down_bias + bias_row * std::int64_t{sizeof(float)}));
      }
      to.put(t, row, partial);
    }
  }
}

template <class W, int kPlanes, int kTokens>
void integer_output_range(const ForwardTask& task, const unsigned char* record, std::int64_t block,
                          std::int64_t begin, std::int64_t end, const OutputRows& to, std::int64_t slot,
                          const unsigned char* next_record) {
  const BlockLayout& layout = *task.layout;
  constexpr int kStep = kWideDot && kTokens == 1 ? 2 : 1;
  const std::int64_t bytes = W::group_bytes(layout.down_group_bytes);
  TokenInputs inputs[kTokens];
  for (int t = 0; t < kTokens; ++t) inputs[t] = inputs_of(task.quantised, kPlanes, 1, slot + t);
  const std::int64_t tiles_ahead = task.reading.ahead / bytes;
  const Codebook book = Keeping::of(layout.down_encoding, false).book;
  std::int64_t tile = begin;
  for (; tile + kStep <= end; tile += kStep) {
    // Near the end of the range, prefetch the beginning of the range in the next block.
    const std::int64_t later = tile + tiles_ahead;
    const unsigned char* at = later < end ? record : next_record;
    const std::int64_t which = later < end ? later : begin + (later - end);
    prefetch_codes(at + layout.down_q + which * bytes, kStep * bytes,
                   at + layout.down_sz + which * kScaleBytes, kStep * kScaleBytes);
    if constexpr (W::kKept) {
      const unsigned char* super = super_tile(at, layout.down_super, layout.down_encoding, which, 1, false);
      for (int i = 0; i < kStep; ++i) __builtin_prefetch(super + i * kStepBytes, 0, 3);
    }
    output_tiles_of<W, kPlanes, kStep, kTokens>(task, record, block, tile, to, inputs, book);
  }
  if constexpr (kStep > 1) {
    if (tile < end) output_tiles_of<W, kPlanes, 1, kTokens>(task, record, block, tile, to, inputs, book);
  }
}

// Output tiles [begin, end) of the block of entry `entry`; `next` is the record that is read afterwards.
template <class W, int kPlanes>
void block_outputs_of(const ForwardTask& task, std::int64_t entry, std::int64_t begin, std::int64_t end,
                      const OutputRows& to, const unsigned char* next) {
  const auto [record, block, item, slot, count] = entry_of(task, entry);
  (void)item;
  std::int64_t t = 0;
  if constexpr (kMostTokens == 4) {
    for (; t + 4 <= count; t += 4)
      integer_output_range<W, kPlanes, 4>(task, record, block, begin, end, to.from(t), slot + t, next);
  }
  if constexpr (kPairsOfTokens<W>) {
    for (; t + 2 <= count; t += 2)
      integer_output_range<W, kPlanes, 2>(task, record, block, begin, end, to.from(t), slot + t, next);
  }
  for (; t < count; ++t)
    integer_output_range<W, kPlanes, 1>(task, record, block, begin, end, to.from(t), slot + t, next);
}

template <class W, int kPlanes>
void integer_outputs_of(const ForwardTask& task, std::int64_t begin, std::int64_t end) {
  for (std::int64_t entry = task.entry_begin; entry < task.entry_end; ++entry) {
    const std::int64_t local = entry - task.entry_begin;
    const std::int64_t count = task.slot_start[local + 1] - task.slot_start[local];
    if (task.many_x != nullptr && count >= task.many->threshold) {
      task.many->outputs(task, entry, begin, end);
      entry += task.run_end[local] - local - 1;
      continue;
    }
    const std::int64_t following = entry + 1 < task.entry_end ? entry + 1 : entry;
    block_outputs_of<W, kPlanes>(task, entry, begin, end, result_rows(task, entry),
                                 reinterpret_cast<const unsigned char*>(task.block_ptr[following]));
  }
}

// Quantised activations of the block of entry `local` of the chunk.
template <class W, int kPlanes>
void entry_neurons_of(const ForwardTask& task, std::int64_t local) {
  const BlockLayout& layout = *task.layout;
  const int step = tiles_a_step(layout);
  const std::int64_t entry = task.entry_begin + local;
  const auto [record, block, item, slot, count] = entry_of(task, entry);
  (void)block;
  const bool one_stream = task.reading.one_stream && count == 1;
  if (one_stream) block_neurons_of<W, kPlanes>(task, record, item, slot);
  for (int tile = 0; !one_stream && tile < kTilesPerBlock; tile += step) {
    TileStream streams[2];
    TileStream next_streams[2];
    const bool last = tile + step == kTilesPerBlock;
    neuron_streams(layout, record, tile, kTilesPerBlock, streams);
    neuron_streams(layout, record, last ? tile : tile + step, kTilesPerBlock, next_streams);
    for (int s = 0; s < 2; ++s) {
      streams[s].next_q = last ? record + layout.down_q + s * task.reading.ahead : next_streams[s].q;
      streams[s].next_sz = last ? record + layout.down_sz + s * kScaleBytes : next_streams[s].sz;
    }
    neuron_tiles_of<W, kPlanes>(task, record, tile, tile + step, item, slot, count, streams);
  }
  quantise_activations(task, slot, count);
}

// Rows of kTiles tiles, `apart` from each other, for kTokens tokens. `more`: the tiles after them follow.
template <class W, int kPlanes, int kTiles, int kTokens>
MOECHAT_INLINE void linear_tiles_of(const LinearTask& task, std::int64_t first, std::int64_t apart, bool more,
                                    std::int64_t token) {
  const std::int64_t span = task.groups * W::group_bytes(task.group_bytes);
  const std::int64_t span_sz = task.groups * kScaleBytes;
  TileStream streams[kTiles];
  TokenInputs inputs[kTokens];
  for (int i = 0; i < kTiles; ++i) {
    const std::int64_t tile = first + i * apart;
    streams[i].q = task.q + tile * span;
    streams[i].sz = task.sz + tile * span_sz;
    streams[i].next_q = streams[i].q + (more ? span : 0);
    streams[i].next_sz = streams[i].sz + (more ? span_sz : 0);
    if constexpr (W::kKept) {
      streams[i].super = super_tile(task.super, 0, task.encoding, tile, task.groups, true);
    }
  }
  for (int t = 0; t < kTokens; ++t) inputs[t] = inputs_of(task.x_quantised, kPlanes, task.groups, token + t);
  Vec acc[kTiles][kTokens];
  tile_sums<W, kPlanes>(streams, task.groups, inputs, task.reading.ahead, Keeping::of(task.encoding, true),
                        acc);
  for (int i = 0; i < kTiles; ++i) {
    const std::int64_t row = (first + i * apart) * kTileRows;
    for (int t = 0; t < kTokens; ++t) store_rows(task, token + t, row, acc[i][t]);
  }
}

// Two halves of the range side by side: each stream of codes and scales is then read in order from beginning
// to end, so that the processor's prefetchers never start anew.
template <class W, int kPlanes, int kTokens>
void linear_range_of(const LinearTask& task, std::int64_t begin, std::int64_t end, std::int64_t token) {
  constexpr int kTiles = kTokens <= 2 ? 2 : 1;
  if (kTiles == 2 && task.reading.one_stream) {
    for (std::int64_t tile = begin; tile < end; ++tile) {
      linear_tiles_of<W, kPlanes, 1, kTokens>(task, tile, 0, tile + 1 < end, token);
    }
    return;
  }
  const std::int64_t part = (end - begin) / kTiles;
  for (std::int64_t i = 0; i < part; ++i) {
    linear_tiles_of<W, kPlanes, kTiles, kTokens>(task, begin + i, part, i + 1 < part, token);
  }
  for (std::int64_t tile = begin + kTiles * part; tile < end; ++tile) {
    linear_tiles_of<W, kPlanes, 1, kTokens>(task, tile, 0, false, token);
  }
}

// Bytes of codes that several groups of tokens read one after the other, from the cache but for the first.
constexpr std::int64_t kLinearPart = 1 << 17;

template <class W, int kPlanes>
void integer_linear_of(const LinearTask& task, std::int64_t begin, std::int64_t end) {
  const bool at_once =
      task.tokens == 1 || (kPairsOfTokens<W> && task.tokens == 2) || (kMostTokens == 4 && task.tokens == 4);
  const std::int64_t tiles = kLinearPart / (task.groups * W::group_bytes(task.group_bytes));
  const std::int64_t step = at_once ? end - begin : tiles < 2 ? 2 : tiles;
  for (std::int64_t from = begin, to = from; from < end; from = to) {
    to = end - from < step ? end : from + step;
    std::int64_t t = 0;
    if constexpr (kMostTokens == 4) {
      for (; t + 4 <= task.tokens; t += 4) linear_range_of<W, kPlanes, 4>(task, from, to, t);
    }
    if constexpr (kPairsOfTokens<W>) {
      for (; t + 2 <= task.tokens; t += 2) linear_range_of<W, kPlanes, 2>(task, from, to, t);
    }
    for (; t < task.tokens; ++t) linear_range_of<W, kPlanes, 1>(task, from, to, t);
  }
}

// Calls enter() and leave() of the many-token path around its kernels, if there is one.
struct ManyTiles {
  const ManyTokens* many;
  explicit ManyTiles(const ManyTokens* used) : many(used) {
    if (many != nullptr && many->enter != nullptr) many->enter();
  }
  ~ManyTiles() {
    if (many != nullptr && many->leave != nullptr) many->leave();
  }
};

void integer_neurons(const ForwardTask& task, std::int64_t begin, std::int64_t end, std::int64_t then) {
  const ManyTiles tiles(task.many_x != nullptr ? task.many : nullptr);
  MOECHAT_BY_CLASS(integer_neurons_of, task.layout->encoding, task.activation_bits, task, begin, end, then)
}
void integer_outputs(const ForwardTask& task, std::int64_t begin, std::int64_t end) {
  const ManyTiles tiles(task.many_x != nullptr ? task.many : nullptr);
  MOECHAT_BY_CLASS(integer_outputs_of, task.layout->down_encoding, task.activation_bits, task, begin, end)
}
void entry_neurons(const ForwardTask& task, std::int64_t local) {
  MOECHAT_BY_CLASS(entry_neurons_of, task.layout->encoding, task.activation_bits, task, local)
}
void entry_outputs(const ForwardTask& task, std::int64_t entry, const OutputRows& to,
                   const unsigned char* next) {
  MOECHAT_BY_CLASS(block_outputs_of, task.layout->down_encoding, task.activation_bits, task, entry, 0,
                   output_tiles(*task.layout), to, next)
}
// The whole block of entry `local` of the chunk; the thread reads the record `next` afterwards.
void integer_block(const ForwardTask& task, std::int64_t local, bool stored, const unsigned char* next) {
  const std::int64_t entry = task.entry_begin + local;
  entry_neurons(task, local);
  entry_outputs(task, entry, stored ? partial_rows(task, task.slot_start[local]) : result_rows(task, entry),
                next);
}
void integer_linear(const LinearTask& task, std::int64_t begin, std::int64_t end) {
  if (task.many_x != nullptr) {
    const ManyTiles tiles(task.many);
    return task.many->linear(task, begin, end);
  }
  MOECHAT_BY_CLASS(integer_linear_of, task.encoding, task.activation_bits, task, begin, end)
}
