// The many-token path, see ManyTokens in kernel_api.h. Included inside the anonymous namespace of one
// instruction set, after the panel products: panel_kernel.inc.h or panel_amx.inc.h.

constexpr std::int64_t kPanelGroups = 4;    // groups of two tiles that are unpacked at a time
constexpr std::int64_t kChunkTokens = 144;  // tokens whose sums are kept at a time
constexpr std::int64_t kStripPairs =
    4;  // pairs of tiles that use the groups of a token while these are in the cache

constexpr std::int64_t kPairSums = (kChunkTokens + kRowsAfter) * 2 * kTileRows;

// Prefetches the codes of groups of two tiles in equal parts, between other work.
template <class W>
struct Ahead {
  static constexpr std::int64_t kLines =
      W::kSteps + 1;  // cache lines of a group, its scales included, at most
  GroupCodes at[2 * kPanelGroups];
  std::int64_t line = 0;
  std::int64_t lines = 0;

  MOECHAT_INLINE void add(GroupCodes group) {
    at[lines / kLines] = group;
    lines += kLines;
  }
  MOECHAT_INLINE void fetch(std::int64_t parts) {
    std::int64_t end = line + lines / parts + 1;
    if (end > lines) end = lines;
    for (; line < end; ++line) {
      const GroupCodes& group = at[line / kLines];
      const std::int64_t which = line % kLines;
      __builtin_prefetch(which + 1 == kLines ? group.sz : group.q + 64 * which, 0, 2);
    }
  }
};

// acc[pair * kPairSums + t * 32 + 16 * m] += all groups of tile m of the pair for token t. `source(pair, m,
// g)` returns the address of group g of that tile; `then` is the source that the thread reads next, or null.
template <class W, int kPlanes, Sum kSum, class Source>
MOECHAT_INLINE void strip_sums(const Source& source, const Source* then, std::int64_t pairs,
                               std::int64_t groups, const TokenRows& rows, std::int64_t tokens,
                               const float* weights, float* acc) {
  constexpr Form kForm = form_of<W, kPlanes>();
  constexpr std::int64_t kTileStride = kPanelGroups * panel_bytes<typename W::Panel>(kForm);
  alignas(64) unsigned char panel[2 * kTileStride];
  const Encoding encoding = source.encoding();
  const Codebook book = Keeping::of(encoding, false).book;
  for (std::int64_t first = 0; first < groups; first += kPanelGroups) {
    const std::int64_t count = groups - first < kPanelGroups ? groups - first : kPanelGroups;
    for (std::int64_t pair = 0; pair < pairs; ++pair) {
      for (int m = 0; m < 2; ++m) {
        for (std::int64_t g = 0; g < count; ++g) {
          const GroupCodes from = source(pair, m, first + g);
          unsigned char* to = panel + m * kTileStride + g * panel_bytes<typename W::Panel>(kForm);
          unpack_panel<kForm, W>(from, book, to);
          if constexpr (kSum == Sum::kBiased)
            store(to + code_bytes(kForm) + kBiasPlace<typename W::Panel>, source.bias(pair, m, first + g));
        }
      }
      Ahead<W> ahead;
      const bool same = pair + 1 < pairs;
      const bool last = !same && first + count >= groups;
      const std::int64_t next = same ? first : (last ? 0 : first + count);
      const Source* reads = last ? then : &source;
      if (reads != nullptr) {
        const std::int64_t end = groups - next < kPanelGroups ? groups : next + kPanelGroups;
        for (int m = 0; m < 2; ++m) {
          for (std::int64_t g = next; g < end; ++g) ahead.add((*reads)(same ? pair + 1 : 0, m, g));
        }
      }
      add_panel<kForm, typename W::Panel, kSum, panel_terms<W, kPlanes>()>(
          panel, kTileStride, first, count, rows, tokens, weights, acc + pair * kPairSums,
          [&ahead](std::int64_t parts) { ahead.fetch(parts); });
    }
  }
}

MOECHAT_INLINE void clear_sums(float* acc, std::int64_t pairs, std::int64_t tokens) {
  const auto bytes = static_cast<unsigned long>(tokens + kRowsAfter) * 2 * kTileRows * sizeof(float);
  for (std::int64_t pair = 0; pair < pairs; ++pair) __builtin_memset(acc + pair * kPairSums, 0, bytes);
}

template <class W, int kPlanes>
MOECHAT_INLINE TokenRows gathered_rows(const unsigned char* data, std::int64_t groups, std::int64_t first) {
  const std::int64_t stride = gathered_bytes<typename W::Panel>(form_of<W, kPlanes>(), groups);
  return {data + first * stride, stride, groups};
}

template <class W, int kPlanes>
void many_gather_of(const QuantisedRows& from, std::int64_t groups, const std::int32_t* index,
                    std::int64_t base, std::int64_t count, unsigned char* to) {
  constexpr Form kForm = form_of<W, kPlanes>();
  const std::int64_t stride = gathered_bytes<typename W::Panel>(kForm, groups);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t row = index != nullptr ? index[i] - base : base + i;
    for (std::int64_t g = 0; g < groups; ++g) {
      gather_group<kForm, W, kPlanes>(from, row * groups + g, to + i * stride, groups, g);
    }
  }
}

// Address of the activations of the run of entry `local`.
template <Form kForm, class W>
MOECHAT_INLINE unsigned char* slots_of(const ForwardTask& task, std::int64_t local) {
  return task.many_slots +
         task.slot_start[task.run_begin[local]] * gathered_bytes<typename W::Panel>(kForm, 1);
}

template <class W, int kPlanes>
void many_gather_slots_of(const ForwardTask& task, std::int64_t local) {
  constexpr Form kForm = form_of<W, kPlanes>();
  const std::int64_t groups = task.run_end[local] - task.run_begin[local];
  const std::int64_t stride = gathered_bytes<typename W::Panel>(kForm, groups);
  unsigned char* to = slots_of<kForm, W>(task, local);
  for (std::int64_t slot = task.slot_start[local]; slot < task.slot_start[local + 1]; ++slot, to += stride) {
    gather_group<kForm, W, kPlanes>(task.quantised, slot, to, groups, local - task.run_begin[local]);
  }
}

// The rows of gate and up of tiles [tile, end) of one block, in pairs; see neuron_stream.
template <class W>
struct NeuronCodes {
  const BlockLayout& layout;
  const unsigned char* record;
  std::int64_t tile;
  std::int64_t end;
  Keeping keeping;

  MOECHAT_INLINE GroupCodes operator()(std::int64_t pair, int m, std::int64_t group) const {
    const NeuronStream from = neuron_stream(layout, m, tile + pair * tiles_a_step(layout), end);
    const std::int64_t at = from.tile * layout.groups + group;
    const unsigned char* super = nullptr;
    if constexpr (W::kKept) {
      super = keeping.super_of(
          super_tile(record, from.super, layout.encoding, from.tile, layout.groups, true), group);
    }
    return {record + from.q + at * W::group_bytes(layout.group_bytes), record + from.sz + at * kScaleBytes,
            super};
  }
  MOECHAT_INLINE Encoding encoding() const { return layout.encoding; }
};

template <class W, int kPlanes>
void many_neurons_of(const ForwardTask& task, std::int64_t entry, std::int64_t begin, std::int64_t end) {
  const BlockLayout& layout = *task.layout;
  const std::int64_t local = entry - task.entry_begin;
  const std::int64_t item = task.row_start[task.block_row[entry]] + task.part_begin;
  const std::int64_t slot = task.slot_start[local];
  const std::int64_t count = task.slot_start[local + 1] - slot;
  const unsigned char* record = reinterpret_cast<const unsigned char*>(task.block_ptr[entry]);
  const std::int64_t following = entry + 1 < task.list_end ? entry + 1 : entry;
  const Keeping keeping = Keeping::of(layout.encoding, true);
  const NeuronCodes<W> source{layout, record, begin, end, keeping};
  const bool ends = end == kTilesPerBlock;
  const NeuronCodes<W> then{layout,
                            ends ? reinterpret_cast<const unsigned char*>(task.block_ptr[following]) : record,
                            ends ? 0 : end, kTilesPerBlock, keeping};
  const int step = tiles_a_step(layout);
  const std::int64_t tiles = end - begin;
  const std::int64_t pairs = (tiles + step - 1) / step;
  alignas(64) float acc[kTilesPerBlock * kPairSums];
  for (std::int64_t done = 0; done < count; done += kChunkTokens) {
    const std::int64_t tokens = count - done < kChunkTokens ? count - done : kChunkTokens;
    const TokenRows rows = gathered_rows<W, kPlanes>(task.many_x, layout.groups, item + done);
    clear_sums(acc, pairs, tokens);
    strip_sums<W, kPlanes, Sum::kTerms>(source, done + tokens < count ? &source : &then, pairs, layout.groups,
                                        rows, tokens, nullptr, acc);
    for (std::int64_t i = 0; i < tiles; ++i) {
      Vec bias[2] = {zero(), zero()};
      if (layout.has_bias) {
        const std::int64_t at = (begin + i) * std::int64_t{kTileRows * sizeof(float)};
        bias[0] = load(record + layout.gate_bias + at);
        if (layout.gated) bias[1] = load(record + layout.up_bias + at);
      }
      for (std::int64_t t = 0; t < tokens; ++t) {
        const float* sums = acc + i / step * kPairSums + t * 2 * kTileRows;
        Vec gate = load(sums + i % step * kTileRows);
        Vec up = load(sums + kTileRows);  // if not gated, it has no effect
        if (layout.has_bias) {
          gate = add(gate, bias[0]);
          up = add(up, bias[1]);
        }
        store(task.activations + (slot + done + t) * kBlockNeurons + (begin + i) * kTileRows,
              gate_lanes(task.gate, gate, up));
      }
    }
  }
}

// Rows of the down projection of output tiles from `tile` on; the groups are the blocks of a run. An odd tile
// at the end is computed twice.
template <class W>
struct OutputCodes {
  const ForwardTask& task;
  std::int64_t entry;
  std::int64_t tile;
  std::int64_t end;

  MOECHAT_INLINE std::int64_t tile_of(std::int64_t pair, int m) const {
    const std::int64_t which = tile + 2 * pair + m;
    return which < end ? which : end - 1;
  }
  MOECHAT_INLINE GroupCodes operator()(std::int64_t pair, int m, std::int64_t group) const {
    const unsigned char* record = reinterpret_cast<const unsigned char*>(task.block_ptr[entry + group]);
    const std::int64_t at = tile_of(pair, m);
    const unsigned char* super = nullptr;
    if constexpr (W::kKept) {
      super = super_tile(record, task.layout->down_super, task.layout->down_encoding, at, 1, false);
    }
    return {record + task.layout->down_q + at * W::group_bytes(task.layout->down_group_bytes),
            record + task.layout->down_sz + at * kScaleBytes, super};
  }
  MOECHAT_INLINE Encoding encoding() const { return task.layout->down_encoding; }
  // Returns 0 if another block holds the bias of these rows.
  MOECHAT_INLINE Vec bias(std::int64_t pair, int m, std::int64_t group) const {
    const BlockLayout& layout = *task.layout;
    const unsigned char* record = reinterpret_cast<const unsigned char*>(task.block_ptr[entry + group]);
    const std::int64_t row =
        tile_of(pair, m) * kTileRows - task.block_index[entry + group] * layout.down_bias_rows;
    if (!layout.has_bias || row < 0 || row >= layout.down_bias_rows) return zero();
    return load(record + layout.down_bias + row * std::int64_t{sizeof(float)});
  }
};

template <class W, int kPlanes, Sum kSum>
MOECHAT_INLINE void many_output_strip(const ForwardTask& task, std::int64_t entry, std::int64_t begin,
                                      std::int64_t strip_end, std::int64_t end) {
  constexpr Form kForm = form_of<W, kPlanes>();
  const BlockLayout& layout = *task.layout;
  const std::int64_t local = entry - task.entry_begin;
  const std::int64_t item = task.row_start[task.block_row[entry]] + task.part_begin;
  const std::int64_t count = task.slot_start[local + 1] - task.slot_start[local];
  const std::int64_t blocks = task.run_end[local] - local;
  const std::int64_t pairs = (strip_end - begin + 1) / 2;
  const std::int64_t row = begin * kTileRows;
  const std::int64_t rows_end =
      strip_end * kTileRows < layout.hidden_size ? strip_end * kTileRows : layout.hidden_size;
  const OutputCodes<W> source{task, entry, begin, strip_end};
  const OutputCodes<W> then{task, entry, strip_end, end};
  const auto* after = strip_end < end ? &then : nullptr;
  const std::int32_t* out_rows = task.row_out + item;
  alignas(64) float acc[kStripPairs * kPairSums];
  float weights[kChunkTokens + kRowsAfter];
  for (std::int64_t done = 0; done < count; done += kChunkTokens) {
    const std::int64_t tokens = count - done < kChunkTokens ? count - done : kChunkTokens;
    const TokenRows rows = gathered_rows<W, kPlanes>(slots_of<kForm, W>(task, local), blocks, done);
    clear_sums(acc, pairs, tokens);
    for (std::int64_t t = 0; t < tokens + kRowsAfter; ++t) {
      weights[t] = t < tokens ? task.row_weight[item + done + t] : 0.0f;
    }
    for (std::int64_t t = 0; t < tokens; ++t) {
      const float* out = task.out + out_rows[done + t] * layout.hidden_size;
      for (std::int64_t at = row; at < rows_end; at += 2 * kTileRows) {
        float* to = acc + (at - row) / (2 * kTileRows) * kPairSums + t * 2 * kTileRows;
        if (at + 2 * kTileRows <= rows_end) {
          store(to, load(out + at));
          store(to + kTileRows, load(out + at + kTileRows));
        } else {
          for (std::int64_t i = at; i < rows_end; ++i) to[i - at] = out[i];
        }
      }
    }
    strip_sums<W, kPlanes, kSum>(source, done + tokens < count ? &source : after, pairs, blocks, rows, tokens,
                                 weights, acc);
    for (std::int64_t t = 0; t < tokens; ++t) {
      float* out = task.out + out_rows[done + t] * layout.hidden_size;
      for (std::int64_t at = row; at < rows_end; at += 2 * kTileRows) {
        const float* from = acc + (at - row) / (2 * kTileRows) * kPairSums + t * 2 * kTileRows;
        if (at + 2 * kTileRows <= rows_end) {
          store(out + at, load(from));
          store(out + at + kTileRows, load(from + kTileRows));
        } else {
          for (std::int64_t i = at; i < rows_end; ++i) out[i] = from[i - at];
        }
      }
    }
  }
}

template <class W, int kPlanes>
void many_outputs_of(const ForwardTask& task, std::int64_t entry, std::int64_t begin, std::int64_t end) {
  for (std::int64_t tile = begin; tile < end; tile += 2 * kStripPairs) {
    const std::int64_t strip_end = end - tile < 2 * kStripPairs ? end : tile + 2 * kStripPairs;
    // Kept weights without biases have zeros of them, which spares compile time.
    if (W::kKept || task.layout->has_bias) {
      many_output_strip<W, kPlanes, Sum::kBiased>(task, entry, tile, strip_end, end);
    } else if constexpr (!W::kKept) {
      many_output_strip<W, kPlanes, Sum::kWeighted>(task, entry, tile, strip_end, end);
    }
  }
}

// Tiles of a linear layer from `tile` on; an odd tile at the end is computed twice.
template <class W>
struct LinearCodes {
  const LinearTask& task;
  std::int64_t tile;
  std::int64_t end;
  Keeping keeping;

  MOECHAT_INLINE GroupCodes operator()(std::int64_t pair, int m, std::int64_t group) const {
    const std::int64_t asked = tile + 2 * pair + m;
    const std::int64_t which = asked < end ? asked : end - 1;
    const std::int64_t at = which * task.groups + group;
    const unsigned char* super = nullptr;
    if constexpr (W::kKept) {
      super = keeping.super_of(super_tile(task.super, 0, task.encoding, which, task.groups, true), group);
    }
    return {task.q + at * W::group_bytes(task.group_bytes), task.sz + at * kScaleBytes, super};
  }
  MOECHAT_INLINE Encoding encoding() const { return task.encoding; }
};

template <class W, int kPlanes>
void many_linear_of(const LinearTask& task, std::int64_t begin, std::int64_t end) {
  alignas(64) float acc[kStripPairs * kPairSums];
  const Keeping keeping = Keeping::of(task.encoding, true);
  for (std::int64_t tile = begin; tile < end; tile += 2 * kStripPairs) {
    const std::int64_t strip_end = end - tile < 2 * kStripPairs ? end : tile + 2 * kStripPairs;
    const std::int64_t pairs = (strip_end - tile + 1) / 2;
    const LinearCodes<W> source{task, tile, strip_end, keeping};
    const LinearCodes<W> then{task, strip_end, end, keeping};
    const auto* after = strip_end < end ? &then : nullptr;
    for (std::int64_t done = 0; done < task.tokens; done += kChunkTokens) {
      const std::int64_t tokens = task.tokens - done < kChunkTokens ? task.tokens - done : kChunkTokens;
      const TokenRows rows = gathered_rows<W, kPlanes>(task.many_x, task.groups, done);
      clear_sums(acc, pairs, tokens);
      strip_sums<W, kPlanes, Sum::kTerms>(source, done + tokens < task.tokens ? &source : after, pairs,
                                          task.groups, rows, tokens, nullptr, acc);
      for (std::int64_t t = 0; t < tokens; ++t) {
        for (std::int64_t i = tile; i < strip_end; ++i) {
          const float* from =
              acc + (i - tile) / 2 * kPairSums + t * 2 * kTileRows + (i - tile) % 2 * kTileRows;
          store_rows(task, done + t, i * kTileRows, load(from));
        }
      }
    }
  }
}

template <class W, int kPlanes>
std::int64_t many_row_bytes_of(std::int64_t groups) {
  return gathered_bytes<typename W::Panel>(form_of<W, kPlanes>(), groups);
}
std::int64_t many_row_bytes(Encoding encoding, int activation_bits, std::int64_t groups) {
  MOECHAT_BY_CLASS(many_row_bytes_of, encoding, activation_bits, groups)
}
void many_gather(Encoding encoding, int activation_bits, const QuantisedRows& from, std::int64_t groups,
                 const std::int32_t* index, std::int64_t base, std::int64_t count, unsigned char* to) {
  MOECHAT_BY_CLASS(many_gather_of, encoding, activation_bits, from, groups, index, base, count, to)
}
void many_gather_slots(const ForwardTask& task, std::int64_t local) {
  MOECHAT_BY_CLASS(many_gather_slots_of, task.layout->down_encoding, task.activation_bits, task, local)
}
void many_neurons(const ForwardTask& task, std::int64_t entry, std::int64_t begin, std::int64_t end) {
  MOECHAT_BY_CLASS(many_neurons_of, task.layout->encoding, task.activation_bits, task, entry, begin, end)
}
void many_outputs(const ForwardTask& task, std::int64_t entry, std::int64_t begin, std::int64_t end) {
  MOECHAT_BY_CLASS(many_outputs_of, task.layout->down_encoding, task.activation_bits, task, entry, begin, end)
}
void many_linear(const LinearTask& task, std::int64_t begin, std::int64_t end) {
  MOECHAT_BY_CLASS(many_linear_of, task.encoding, task.activation_bits, task, begin, end)
}
constexpr ManyTokens kManyTokens = {kThreshold, kRowsAfter, many_row_bytes, many_gather,  many_gather_slots,
                                    kEnter,     kLeave,     many_neurons,   many_outputs, many_linear};
