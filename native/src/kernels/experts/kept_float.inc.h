// Kernels for kept weights and float inputs: the values of a group, as in its file, then products in fp32.
// Included inside the anonymous namespace of one instruction set, after weight_classes.inc.h.
//
// A sum is one chain over the columns: acc = fma(value, x, acc). Tokens share the values, not the chain.
// Chains of several tokens, or of a token and several tiles, are computed side by side, since a sum waits for
// the one before it.

constexpr std::int64_t kKeptTokens = 16;  // that share the values of a group
// Chains that fit in registers.
#if defined(__AVX512F__)
constexpr int kTokensAbreast = 8;
#else
constexpr int kTokensAbreast = 4;
#endif
constexpr int kTilesAbreast = 4;

// values[16 * c]: 16 rows of column c.
template <class W>
void kept_values_of(Encoding encoding, const KeptGroup& at, float* values) {
  const SubScales<W::kSubs> scales = read_scales<W>(encoding, at);
  const Codebook book = codebook_of(encoding);
  typename W::Room room;
  const KeptGroup opened = W::open(at, book, &room);
  for (int sub_block = 0; sub_block < W::kSubs; ++sub_block) {
    VecI codes[W::kDwords];
    W::Opened::codes(opened, sub_block, book, codes);
    for (int i = 0; i < W::kDwords; ++i) {
      for (int k = 0; k < 4; ++k) {
        const Vec scaled = mul(scales.step[sub_block], unsigned_bits(codes[i], 8 * k, 8));
        const int column = 4 * (sub_block * W::kDwords + i) + k;
        store(values + kTileRows * column, sub(scaled, scales.min[sub_block]));
      }
    }
  }
}

void fp8_values(const KeptGroup& at, float* values) {
  const Vec step = mul(as_float(loadi(at.words)), set1(kFp8Shift));
  for (int d = 0; d < 16; ++d) {
    const VecI words = loadi(at.q + d * kStepBytes);
    for (int k = 0; k < 2; ++k) {
      Vec low, high;
      split_e4m3(k == 0 ? words : shr(words, 8), &low, &high);
      store(values + kTileRows * (4 * d + k), mul(step, low));
      store(values + kTileRows * (4 * d + k + 2), mul(step, high));
    }
  }
}

__attribute__((noinline)) void kept_values(Encoding encoding, const KeptGroup& at, float* values) {
  const KeptForm form = kept_form(encoding);
  if (form.table == CodeTable::kE4m3) return fp8_values(at, values);
  if (form.table == CodeTable::kGrid) {
    return form.subs == 4 ? kept_values_of<Gridded<4>>(encoding, at, values)
                          : kept_values_of<Gridded<2>>(encoding, at, values);
  }
  if (form.table != CodeTable::kNone) {
    return form.subs == 4 ? kept_values_of<Kept<4, kE2m1Table, 4>>(encoding, at, values)
                          : kept_values_of<Kept<4, kIq4Table, 2>>(encoding, at, values);
  }
  switch (form.code_bits) {
    case 2:
      return kept_values_of<Kept<2, kNoTable, 4>>(encoding, at, values);
    case 3:
      return kept_values_of<Kept<3, kNoTable, 4>>(encoding, at, values);
    case 4:
      return kept_values_of<Kept<4, kNoTable, 2>>(encoding, at, values);
    case 5:
      return kept_values_of<Kept<5, kNoTable, 2>>(encoding, at, values);
    case 6:
      return kept_values_of<Kept<6, kNoTable, 4>>(encoding, at, values);
    default:
      return kept_values_of<Kept<8, kNoTable, 2>>(encoding, at, values);
  }
}

MOECHAT_INLINE Vec add_kept_columns(const float* values, const float* x, Vec acc) {
  for (int c = 0; c < kGroupColumns; ++c) acc = fma(load(values + kTileRows * c), set1(x[c]), acc);
  return acc;
}

// Activations of one tile for all tokens of a list entry.
void kept_neuron_tile(const ForwardTask& task, std::int64_t entry, int tile) {
  const BlockLayout& layout = *task.layout;
  const auto [record, block, item, slot, count] = entry_of(task, entry);
  (void)block;
  const Keeping keeping = Keeping::of(layout.encoding, true);
  const std::int64_t q[2] = {layout.gate_q, layout.up_q};
  const std::int64_t sz[2] = {layout.gate_sz, layout.up_sz};
  const std::int64_t supers[2] = {layout.gate_super, layout.up_super};
  const std::int64_t bias[2] = {layout.gate_bias, layout.up_bias};
  for (std::int64_t first = 0; first < count; first += kKeptTokens) {
    const std::int64_t tokens = count - first < kKeptTokens ? count - first : kKeptTokens;
    Vec acc[2][kKeptTokens];
    for (std::int64_t t = 0; t < tokens; ++t) acc[0][t] = acc[1][t] = zero();
    for (int m = 0; m < (layout.gated ? 2 : 1); ++m) {
      const unsigned char* super = super_tile(record, supers[m], layout.encoding, tile, layout.groups, true);
      for (std::int64_t g = 0; g < layout.groups; ++g) {
        const std::int64_t at = tile * layout.groups + g;
        alignas(64) float values[kTileRows * kGroupColumns];
        kept_values(layout.encoding,
                    {record + q[m] + at * layout.group_bytes, record + sz[m] + at * kScaleBytes,
                     keeping.super_of(super, g)},
                    values);
        for (std::int64_t t = 0; t < tokens; ++t) {
          const std::int64_t token = task.row_token[item + first + t] - task.token_base;
          acc[m][t] =
              add_kept_columns(values, task.x + token * layout.hidden_padded + g * kGroupColumns, acc[m][t]);
        }
      }
      if (!layout.has_bias) continue;
      const Vec of_tile = load(record + bias[m] + tile * std::int64_t{kTileRows * sizeof(float)});
      for (std::int64_t t = 0; t < tokens; ++t) acc[m][t] = add(acc[m][t], of_tile);
    }
    for (std::int64_t t = 0; t < tokens; ++t) {
      store(task.activations + (slot + first + t) * kBlockNeurons + tile * kTileRows,
            gate_lanes(task.gate, acc[0][t], acc[1][t]));
    }
  }
}

void kept_output_range(const ForwardTask& task, std::int64_t entry, std::int64_t begin, std::int64_t end,
                       const OutputRows& to) {
  const BlockLayout& layout = *task.layout;
  const auto [record, block, item, slot, count] = entry_of(task, entry);
  (void)item;
  for (std::int64_t tile = begin; tile < end; ++tile) {
    alignas(64) float values[kTileRows * kGroupColumns];
    kept_values(layout.down_encoding,
                {record + layout.down_q + tile * layout.down_group_bytes,
                 record + layout.down_sz + tile * kScaleBytes,
                 super_tile(record, layout.down_super, layout.down_encoding, tile, 1, false)},
                values);
    const std::int64_t row = tile * kTileRows;
    const std::int64_t bias_row = row - block * layout.down_bias_rows;
    const bool biased = layout.has_bias && bias_row >= 0 && bias_row < layout.down_bias_rows;
    for (std::int64_t t = 0; t < count; ++t) {
      Vec partial = add_kept_columns(values, task.activations + (slot + t) * kBlockNeurons, zero());
      if (biased) {
        partial = add(partial, load(record + layout.down_bias + bias_row * std::int64_t{sizeof(float)}));
      }
      to.put(static_cast<int>(t), row, partial);
    }
  }
}

void kept_neurons(const ForwardTask& task, std::int64_t begin, std::int64_t end) {
  for (std::int64_t unit = begin; unit < end; ++unit) {
    kept_neuron_tile(task, task.entry_begin + unit / kTilesPerBlock, static_cast<int>(unit % kTilesPerBlock));
  }
}

void kept_outputs(const ForwardTask& task, std::int64_t begin, std::int64_t end) {
  for (std::int64_t entry = task.entry_begin; entry < task.entry_end; ++entry) {
    kept_output_range(task, entry, begin, end, result_rows(task, entry));
  }
}

// acc[t] plus the columns of a group, for tokens whose inputs are `stride` floats apart.
template <int kTokens>
MOECHAT_INLINE void add_kept_columns(const float* values, const float* x, std::int64_t stride, Vec* acc) {
  Vec sums[kTokens];
  for (int t = 0; t < kTokens; ++t) sums[t] = acc[t];
  for (int c = 0; c < kGroupColumns; ++c) {
    const Vec column = load(values + kTileRows * c);
    MOECHAT_UNROLL
    for (int t = 0; t < kTokens; ++t) sums[t] = fma(column, set1(x[t * stride + c]), sums[t]);
  }
  for (int t = 0; t < kTokens; ++t) acc[t] = sums[t];
}

// kTilesAbreast tiles of 16 output rows of a linear layer for one token.
void kept_linear_abreast(const LinearTask& task, std::int64_t first) {
  const Keeping keeping = Keeping::of(task.encoding, true);
  Vec acc[kTilesAbreast];
  for (int i = 0; i < kTilesAbreast; ++i) acc[i] = zero();
  for (std::int64_t g = 0; g < task.groups; ++g) {
    alignas(64) float values[kTilesAbreast][kTileRows * kGroupColumns];
    for (int i = 0; i < kTilesAbreast; ++i) {
      const std::int64_t tile = first + i;
      const std::int64_t at = tile * task.groups + g;
      const unsigned char* super = super_tile(task.super, 0, task.encoding, tile, task.groups, true);
      kept_values(task.encoding,
                  {task.q + at * task.group_bytes, task.sz + at * kScaleBytes, keeping.super_of(super, g)},
                  values[i]);
    }
    const float* x = task.x + g * kGroupColumns;
    for (int c = 0; c < kGroupColumns; ++c) {
      const Vec input = set1(x[c]);
      MOECHAT_UNROLL
      for (int i = 0; i < kTilesAbreast; ++i) acc[i] = fma(load(values[i] + kTileRows * c), input, acc[i]);
    }
  }
  for (int i = 0; i < kTilesAbreast; ++i) store_rows(task, 0, (first + i) * kTileRows, acc[i]);
}

// 16 output rows of a linear layer for all tokens.
void kept_linear_tile(const LinearTask& task, std::int64_t tile) {
  const Keeping keeping = Keeping::of(task.encoding, true);
  const unsigned char* super = super_tile(task.super, 0, task.encoding, tile, task.groups, true);
  for (std::int64_t first = 0; first < task.tokens; first += kKeptTokens) {
    const std::int64_t tokens = task.tokens - first < kKeptTokens ? task.tokens - first : kKeptTokens;
    Vec acc[kKeptTokens];
    for (std::int64_t t = 0; t < tokens; ++t) acc[t] = zero();
    for (std::int64_t g = 0; g < task.groups; ++g) {
      const std::int64_t at = tile * task.groups + g;
      alignas(64) float values[kTileRows * kGroupColumns];
      kept_values(task.encoding,
                  {task.q + at * task.group_bytes, task.sz + at * kScaleBytes, keeping.super_of(super, g)},
                  values);
      const std::int64_t stride = task.groups * kGroupColumns;
      const float* x = task.x + first * stride + g * kGroupColumns;
      std::int64_t t = 0;
      for (; t + kTokensAbreast <= tokens; t += kTokensAbreast) {
        add_kept_columns<kTokensAbreast>(values, x + t * stride, stride, acc + t);
      }
      for (; t + 2 <= tokens; t += 2) add_kept_columns<2>(values, x + t * stride, stride, acc + t);
      for (; t < tokens; ++t) add_kept_columns<1>(values, x + t * stride, stride, acc + t);
    }
    for (std::int64_t t = 0; t < tokens; ++t) store_rows(task, first + t, tile * kTileRows, acc[t]);
  }
}

void kept_block(const ForwardTask& task, std::int64_t local, bool stored) {
  const std::int64_t entry = task.entry_begin + local;
  for (int tile = 0; tile < kTilesPerBlock; ++tile) kept_neuron_tile(task, entry, tile);
  kept_output_range(task, entry, 0, output_tiles(*task.layout),
                    stored ? partial_rows(task, task.slot_start[local]) : result_rows(task, entry));
}
