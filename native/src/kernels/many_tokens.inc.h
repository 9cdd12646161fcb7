// The many-token path, see ManyTokens in kernel_api.h. Included inside the anonymous namespace of one
// instruction set, after what adds panels: panel_kernel.inc.h or panel_amx.inc.h.

constexpr std::int64_t kPanelGroups = 8;    // unpacked at a time, of two tiles
constexpr std::int64_t kChunkTokens = 144;  // whose sums are kept at a time

// Prefetches a stretch of memory in equal parts while something else runs.
struct Ahead {
  const unsigned char* at = nullptr;
  std::int64_t lines = 0;

  MOECHAT_INLINE void set(const unsigned char* from, std::int64_t bytes) {
    at = from;
    lines = bytes / 64;
  }
  MOECHAT_INLINE void fetch(std::int64_t parts) {
    std::int64_t count = lines / parts + 1;
    if (count > lines) count = lines;
    for (std::int64_t i = 0; i < count; ++i) __builtin_prefetch(at + 64 * i, 0, 2);
    at += 64 * count;
    lines -= count;
  }
};

// Two row tiles: their codes, and what the thread reads after them (or null).
struct TilePair {
  const unsigned char* q[2];
  const unsigned char* sz[2];
  const unsigned char* next_q[2];
};

// acc[t * 32 + 16 * m] = all groups of tile m for token t.
template <int kBits, int kPlanes>
MOECHAT_INLINE void pair_sums(const TilePair& pair, std::int64_t groups, const TokenRows& rows,
                              std::int64_t tokens, float* acc) {
  constexpr Form kForm = form_of<kBits, kPlanes>();
  constexpr std::int64_t kBytes = 16 * 64 * kBits / 8;
  alignas(64) unsigned char panel[2 * kPanelGroups * panel_bytes(kForm)];
  constexpr std::int64_t kTileStride = kPanelGroups * panel_bytes(kForm);
  __builtin_memset(acc, 0, static_cast<unsigned long>(tokens + kRowsAfter) * 2 * kTileRows * sizeof(float));
  for (std::int64_t first = 0; first < groups; first += kPanelGroups) {
    const std::int64_t count = groups - first < kPanelGroups ? groups - first : kPanelGroups;
    Ahead ahead[2];
    for (int m = 0; m < 2; ++m) {
      const unsigned char* q = pair.q[m] + first * kBytes;
      const unsigned char* sz = pair.sz[m] + first * kScaleBytes;
      for (std::int64_t g = 0; g < count; ++g) {
        unpack_panel<kForm, kBits>(q + g * kBytes, sz + g * kScaleBytes,
                                   panel + m * kTileStride + g * panel_bytes(kForm));
      }
      const std::int64_t left = groups - first - count;
      if (left > 0) {
        ahead[m].set(q + count * kBytes, (left < kPanelGroups ? left : kPanelGroups) * kBytes);
      } else if (pair.next_q[m] != nullptr) {
        ahead[m].set(pair.next_q[m], (groups < kPanelGroups ? groups : kPanelGroups) * kBytes);
      }
    }
    add_panel<kForm, kBits>(panel, kTileStride, first, count, rows, tokens, acc,
                            [&ahead](std::int64_t parts) {
                              ahead[0].fetch(parts);
                              ahead[1].fetch(parts);
                            });
  }
}

template <int kBits, int kPlanes>
MOECHAT_INLINE TokenRows gathered_rows(const unsigned char* data, std::int64_t groups, std::int64_t first) {
  const std::int64_t stride = gathered_bytes(form_of<kBits, kPlanes>(), groups);
  return {data + first * stride, stride, groups};
}

template <int kBits, int kPlanes>
void many_gather_of(const QuantisedRows& from, std::int64_t groups, const std::int32_t* index,
                    std::int64_t base, std::int64_t count, unsigned char* to) {
  constexpr Form kForm = form_of<kBits, kPlanes>();
  const std::int64_t stride = gathered_bytes(kForm, groups);
  for (std::int64_t i = 0; i < count; ++i) {
    gather_row<kForm, kPlanes>(from, groups, index != nullptr ? index[i] - base : base + i, to + i * stride);
  }
}

template <int kBits, int kPlanes>
void many_neurons_of(const ForwardTask& task, const unsigned char* record, int tile, std::int64_t item,
                     std::int64_t slot, std::int64_t count) {
  const BlockLayout& layout = *task.layout;
  const std::int64_t span = layout.groups * layout.group_bytes;
  const std::int64_t span_sz = layout.groups * kScaleBytes;
  TilePair pair{{record + layout.gate_q + tile * span, record + layout.up_q + tile * span},
                {record + layout.gate_sz + tile * span_sz, record + layout.up_sz + tile * span_sz},
                {nullptr, nullptr}};
  if (tile + 1 < kTilesPerBlock) {
    pair.next_q[0] = pair.q[0] + span;
    pair.next_q[1] = pair.q[1] + span;
  }
  Vec bias[2] = {zero(), zero()};
  if (layout.has_bias) {
    const std::int64_t at = tile * std::int64_t{kTileRows * sizeof(float)};
    bias[0] = load(record + layout.gate_bias + at);
    bias[1] = load(record + layout.up_bias + at);
  }
  alignas(64) float acc[(kChunkTokens + kRowsAfter) * 2 * kTileRows];
  for (std::int64_t done = 0; done < count; done += kChunkTokens) {
    const std::int64_t tokens = count - done < kChunkTokens ? count - done : kChunkTokens;
    const TokenRows rows = gathered_rows<kBits, kPlanes>(task.many_x, layout.groups, item + done);
    pair_sums<kBits, kPlanes>(pair, layout.groups, rows, tokens, acc);
    for (std::int64_t t = 0; t < tokens; ++t) {
      Vec gate = load(acc + t * 2 * kTileRows);
      Vec up = load(acc + t * 2 * kTileRows + kTileRows);
      if (layout.has_bias) {
        gate = add(gate, bias[0]);
        up = add(up, bias[1]);
      }
      store(task.activations + (slot + done + t) * kBlockNeurons + tile * kTileRows,
            activate_lanes(task.activation, gate, up));
    }
  }
}

template <int kBits, int kPlanes>
void many_outputs_of(const ForwardTask& task, const unsigned char* record, const unsigned char* next,
                     std::int64_t block, std::int64_t begin, std::int64_t end, std::int64_t item,
                     std::int64_t slot, std::int64_t count) {
  const BlockLayout& layout = *task.layout;
  constexpr std::int64_t kBytes = 16 * 64 * kBits / 8;
  alignas(64) float acc[(kChunkTokens + kRowsAfter) * 2 * kTileRows];
  for (std::int64_t tile = begin; tile < end; tile += 2) {
    // An odd tile at the end is computed twice and added once.
    const std::int64_t tiles = end - tile < 2 ? 1 : 2;
    TilePair pair{};
    for (std::int64_t m = 0; m < 2; ++m) {
      const std::int64_t which = tile + (m < tiles ? m : 0);
      pair.q[m] = record + layout.down_q + which * kBytes;
      pair.sz[m] = record + layout.down_sz + which * kScaleBytes;
      if (next != nullptr) pair.next_q[m] = next + layout.down_q + which * kBytes;
    }
    const std::int64_t row = tile * kTileRows;
    const std::int64_t bias_row = row - block * layout.down_bias_rows;
    const bool whole = row + 2 * kTileRows <= layout.hidden_size && tiles == 2 && !layout.has_bias;
    for (std::int64_t done = 0; done < count; done += kChunkTokens) {
      const std::int64_t tokens = count - done < kChunkTokens ? count - done : kChunkTokens;
      const TokenRows rows = gathered_rows<kBits, kPlanes>(task.many_slots, 1, slot + done);
      pair_sums<kBits, kPlanes>(pair, 1, rows, tokens, acc);
      const std::int32_t* out_rows = task.row_out + item + done;
      const float* weights = task.row_weight + item + done;
      if (whole) {
        for (std::int64_t t = 0; t < tokens; ++t) {
          float* out = task.out + out_rows[t] * layout.hidden_size + row;
          const float* from = acc + t * 2 * kTileRows;
          const Vec weight = set1(weights[t]);
          store(out, fma(weight, load(from), load(out)));
          store(out + kTileRows, fma(weight, load(from + kTileRows), load(out + kTileRows)));
        }
        continue;
      }
      for (std::int64_t t = 0; t < tokens; ++t) {
        float* out = task.out + out_rows[t] * layout.hidden_size;
        for (std::int64_t m = 0; m < tiles; ++m) {
          const std::int64_t at = bias_row + m * kTileRows;
          Vec partial = load(acc + t * 2 * kTileRows + m * kTileRows);
          if (layout.has_bias && at >= 0 && at < layout.down_bias_rows) {
            partial = add(partial, load(record + layout.down_bias + at * std::int64_t{sizeof(float)}));
          }
          add_output(out + row + m * kTileRows, layout.hidden_size - row - m * kTileRows, weights[t],
                     partial);
        }
      }
    }
  }
}

template <int kBits, int kPlanes>
void many_linear_of(const LinearTask& task, std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t kBytes = 16 * 64 * kBits / 8;
  const std::int64_t span = task.groups * kBytes;
  const std::int64_t span_sz = task.groups * kScaleBytes;
  alignas(64) float acc[(kChunkTokens + kRowsAfter) * 2 * kTileRows];
  for (std::int64_t tile = begin; tile < end; tile += 2) {
    const std::int64_t tiles = end - tile < 2 ? 1 : 2;
    TilePair pair{};
    for (std::int64_t m = 0; m < 2; ++m) {
      const std::int64_t which = tile + (m < tiles ? m : 0);
      pair.q[m] = task.q + which * span;
      pair.sz[m] = task.sz + which * span_sz;
      if (tile + 2 + m < end) pair.next_q[m] = pair.q[m] + 2 * span;
    }
    for (std::int64_t done = 0; done < task.tokens; done += kChunkTokens) {
      const std::int64_t tokens = task.tokens - done < kChunkTokens ? task.tokens - done : kChunkTokens;
      const TokenRows rows = gathered_rows<kBits, kPlanes>(task.many_x, task.groups, done);
      pair_sums<kBits, kPlanes>(pair, task.groups, rows, tokens, acc);
      for (std::int64_t t = 0; t < tokens; ++t) {
        for (std::int64_t m = 0; m < tiles; ++m) {
          store_rows(task, done + t, (tile + m) * kTileRows, load(acc + t * 2 * kTileRows + m * kTileRows));
        }
      }
    }
  }
}

#define MOECHAT_BY_BITS(function, bits, activation_bits, ...)                                   \
  switch (bits) {                                                                               \
    case 2:                                                                                     \
      return activation_bits == 16 ? function<2, 2>(__VA_ARGS__) : function<2, 1>(__VA_ARGS__); \
    case 3:                                                                                     \
      return activation_bits == 16 ? function<3, 2>(__VA_ARGS__) : function<3, 1>(__VA_ARGS__); \
    case 4:                                                                                     \
      return activation_bits == 16 ? function<4, 2>(__VA_ARGS__) : function<4, 1>(__VA_ARGS__); \
    default:                                                                                    \
      return activation_bits == 16 ? function<8, 2>(__VA_ARGS__) : function<8, 1>(__VA_ARGS__); \
  }

template <int kBits, int kPlanes>
std::int64_t many_row_bytes_of(std::int64_t groups) {
  return gathered_bytes(form_of<kBits, kPlanes>(), groups);
}
std::int64_t many_row_bytes(int bits, int activation_bits, std::int64_t groups) {
  MOECHAT_BY_BITS(many_row_bytes_of, bits, activation_bits, groups)
}
void many_gather(int bits, int activation_bits, const QuantisedRows& from, std::int64_t groups,
                 const std::int32_t* index, std::int64_t base, std::int64_t count, unsigned char* to) {
  MOECHAT_BY_BITS(many_gather_of, bits, activation_bits, from, groups, index, base, count, to)
}
void many_neurons(const ForwardTask& task, const unsigned char* record, int tile, std::int64_t item,
                  std::int64_t slot, std::int64_t count) {
  MOECHAT_BY_BITS(many_neurons_of, task.layout->bits, task.activation_bits, task, record, tile, item, slot,
                  count)
}
void many_outputs(const ForwardTask& task, const unsigned char* record, const unsigned char* next,
                  std::int64_t block, std::int64_t begin, std::int64_t end, std::int64_t item,
                  std::int64_t slot, std::int64_t count) {
  MOECHAT_BY_BITS(many_outputs_of, task.layout->bits, task.activation_bits, task, record, next, block, begin,
                  end, item, slot, count)
}
void many_linear(const LinearTask& task, std::int64_t begin, std::int64_t end) {
  MOECHAT_BY_BITS(many_linear_of, task.bits, task.activation_bits, task, begin, end)
}
#undef MOECHAT_BY_BITS

constexpr ManyTokens kManyTokens = {kThreshold, kRowsAfter,   many_row_bytes, many_gather, kEnter,
                                    kLeave,     many_neurons, many_outputs,   many_linear};
