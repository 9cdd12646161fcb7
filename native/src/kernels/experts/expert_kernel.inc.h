// Partial expert outputs over blocks. Included inside the anonymous namespace of one instruction set.
//
// Summation order of one row and one group, the same for every tile of tokens and every number of threads:
//   even = sum over even columns of q * x, odd = the same over odd columns, each one sequential chain;
//   acc  = acc + scale * ((even + odd) - zero * sum(x))          (16 bits: acc + (even + odd))
// at 2 to 4 bits with even, odd and sum(x) of each half of the group:
//   acc  = acc + step * (factor_0 * (even_0 + odd_0) - offset_0 * sum_0(x) + the same of half 1)
// The number of tokens or weight streams that share the unpacking changes how instructions interleave, but
// never the order within a chain, so results do not depend on it.

constexpr std::int64_t kPrefetchBytes = 2048;

// Most tokens that share the unpacking of a group, and most chains that fit in registers.
#if defined(__AVX512F__)
constexpr int kFloatTokens = 8;
constexpr int kFloatChains = 16;
#else
constexpr int kFloatTokens = 4;
constexpr int kFloatChains = 4;
#endif

// sums[stream][token] = the chain over the even (kFirst 0) or odd (kFirst 1) columns of units [begin, end) of
// a group.
template <class E, int kFirst, int kStreams, int kTokens>
MOECHAT_INLINE void dot_every_other(int begin, int end, const unsigned char* const (&q)[kStreams],
                                    const float* const (&x)[kTokens], Vec (&sums)[kStreams][kTokens]) {
  for (int s = 0; s < kStreams; ++s) {
    Vec chain[kTokens];
    for (int t = 0; t < kTokens; ++t) chain[t] = zero();
#pragma GCC unroll 2
    for (int unit = begin; unit < end; ++unit) {
      const typename E::Unit words = E::load_unit(q[s], unit);
#pragma GCC unroll 8
      for (int c = kFirst; c < E::kColumns; c += 2) {
        const Vec code = E::column(words, c);
        for (int t = 0; t < kTokens; ++t) chain[t] = fma(code, set1(x[t][unit * E::kColumns + c]), chain[t]);
      }
    }
    for (int t = 0; t < kTokens; ++t) sums[s][t] = chain[t];
  }
}

// sums[stream][token] = even + odd of units [begin, end) of a group.
template <class E, int kStreams, int kTokens>
MOECHAT_INLINE void dot_units(int begin, int end, const unsigned char* const (&q)[kStreams],
                              const float* const (&x)[kTokens], Vec (&sums)[kStreams][kTokens]) {
  if constexpr (2 * kStreams * kTokens <= kFloatChains) {
    Vec chain[2][kStreams][kTokens];
    for (int s = 0; s < kStreams; ++s) {
      for (int t = 0; t < kTokens; ++t) chain[0][s][t] = chain[1][s][t] = zero();
    }
#pragma GCC unroll 2
    for (int unit = begin; unit < end; ++unit) {
      typename E::Unit words[kStreams];
      for (int s = 0; s < kStreams; ++s) words[s] = E::load_unit(q[s], unit);
#pragma GCC unroll 16
      for (int c = 0; c < E::kColumns; ++c) {
        for (int s = 0; s < kStreams; ++s) {
          const Vec code = E::column(words[s], c);
          for (int t = 0; t < kTokens; ++t) {
            chain[c % 2][s][t] = fma(code, set1(x[t][unit * E::kColumns + c]), chain[c % 2][s][t]);
          }
        }
      }
    }
    for (int s = 0; s < kStreams; ++s) {
      for (int t = 0; t < kTokens; ++t) sums[s][t] = add(chain[0][s][t], chain[1][s][t]);
    }
  } else {
    // Too many chains for the registers: sum all even columns first, then all odd ones.
    Vec odd[kStreams][kTokens];
    dot_every_other<E, 0>(begin, end, q, x, sums);
    dot_every_other<E, 1>(begin, end, q, x, odd);
    for (int s = 0; s < kStreams; ++s) {
      for (int t = 0; t < kTokens; ++t) sums[s][t] = add(sums[s][t], odd[s][t]);
    }
  }
}

// acc[stream][token] plus one group of columns; sz[stream] its scales, x_sums[token] the sums of its halves.
template <class E, int kStreams, int kTokens>
MOECHAT_INLINE void add_group(const unsigned char* const (&q)[kStreams],
                              const unsigned char* const (&sz)[kStreams], const float* const (&x)[kTokens],
                              const float* const (&x_sums)[kTokens], Vec (&acc)[kStreams][kTokens]) {
  Vec total[kStreams][kTokens];
  for (int s = 0; s < kStreams; ++s) {
    for (int t = 0; t < kTokens; ++t) total[s][t] = zero();
  }
  for (int half = 0; half < E::kHalves; ++half) {
    constexpr int kUnits = E::kUnits / E::kHalves;
    Vec sums[kStreams][kTokens];
    dot_units<E>(half * kUnits, (half + 1) * kUnits, q, x, sums);
    for (int s = 0; s < kStreams; ++s) {
      if constexpr (E::kHalves == 2) {
        const HalfScales halves = HalfScales::read(sz[s]);
        const Vec factor = to_float(halves.factor(half));
        const Vec offset = to_float(halves.offset(half));
        for (int t = 0; t < kTokens; ++t) {
          total[s][t] = fnma(offset, set1(x_sums[t][half]), fma(factor, sums[s][t], total[s][t]));
        }
      } else if constexpr (E::kScaled) {
        const Vec zeros = load_fp16(sz[s] + 32);
        for (int t = 0; t < kTokens; ++t)
          total[s][t] = fnma(zeros, set1(x_sums[t][0] + x_sums[t][1]), sums[s][t]);
      } else {
        for (int t = 0; t < kTokens; ++t) total[s][t] = sums[s][t];
      }
    }
  }
  for (int s = 0; s < kStreams; ++s) {
    if constexpr (E::kScaled) {
      const Vec scale = E::kHalves == 2 ? HalfScales::read(sz[s]).step() : load_fp16(sz[s]);
      for (int t = 0; t < kTokens; ++t) acc[s][t] = fma(scale, total[s][t], acc[s][t]);
    } else {
      for (int t = 0; t < kTokens; ++t) acc[s][t] = add(acc[s][t], total[s][t]);
    }
  }
}

// Multiplies 16 values by their 2^-column_shift. The column number of the first is 0 modulo 16.
MOECHAT_INLINE Vec unshift_factors(int bits) {
  float factors[16];
  for (int c = 0; c < 16; ++c) factors[c] = 1.0f / static_cast<float>(1u << column_shift(bits, c));
  return load(factors);
}

void prepare_tokens(int bits, const float* x, std::int64_t cols, std::int64_t count, float* scaled,
                    float* sums) {
  const Vec factors = unshift_factors(bits);
  const std::int64_t groups = (cols + kGroupColumns - 1) / kGroupColumns;
  for (std::int64_t t = 0; t < count; ++t) {
    const float* from = x + t * cols;
    for (std::int64_t g = 0; g < groups; ++g) {
      float padded[64];
      const float* columns = from + g * 64;
      const std::int64_t valid = cols - g * 64;
      if (valid < 64) {
        for (std::int64_t c = 0; c < 64; ++c) padded[c] = c < valid ? columns[c] : 0.0f;
        columns = padded;
      }
      Vec part[4];
      float* to = scaled + (t * groups + g) * 64;
      for (int i = 0; i < 4; ++i) {
        part[i] = load(columns + 16 * i);
        store(to + 16 * i, mul(part[i], factors));
      }
      sums[2 * (t * groups + g)] = lane_sum(add(part[0], part[1]));
      sums[2 * (t * groups + g) + 1] = lane_sum(add(part[2], part[3]));
    }
  }
}

// Activations of 16 neurons (one tile) for kTokens tokens of one row.
template <class E, int kTokens>
void neuron_tile(const ForwardTask& task, const unsigned char* record, int tile, std::int64_t row_item,
                 std::int64_t slot, Vec factors) {
  const BlockLayout& layout = *task.layout;
  const std::int64_t groups = layout.groups;
  const std::int64_t bytes = layout.group_bytes;
  const unsigned char* gate = record + layout.gate_q + tile * groups * bytes;
  // If not gated, up is not read.
  const unsigned char* up = record + (layout.gated ? layout.up_q : layout.gate_q) + tile * groups * bytes;
  const unsigned char* gate_sz = record + layout.gate_sz + tile * groups * kScaleBytes;
  const unsigned char* up_sz =
      record + (layout.gated ? layout.up_sz : layout.gate_sz) + tile * groups * kScaleBytes;
  const float* x[kTokens];
  const float* x_sums[kTokens];
  for (int t = 0; t < kTokens; ++t) {
    const std::int64_t token = task.row_token[row_item + t] - task.token_base;
    x[t] = task.x + token * layout.hidden_padded;
    x_sums[t] = task.x_sums + token * groups * 2;
  }

  Vec acc[2][kTokens];
  for (int t = 0; t < kTokens; ++t) acc[0][t] = acc[1][t] = zero();
  for (std::int64_t g = 0; g < groups; ++g) {
    prefetch_bytes(gate + kPrefetchBytes, bytes);
    prefetch_bytes(up + kPrefetchBytes, bytes);
    bool done = false;
    if constexpr (kTokens == 1 && kPairStreams) {
      if (layout.gated) {
        const unsigned char* const streams[2] = {gate, up};
        const unsigned char* const scales[2] = {gate_sz, up_sz};
        add_group<E>(streams, scales, x, x_sums, acc);
        done = true;
      }
    }
    if (!done) {
      for (int m = 0; m < (layout.gated ? 2 : 1); ++m) {
        const unsigned char* const stream[1] = {m == 0 ? gate : up};
        const unsigned char* const scales[1] = {m == 0 ? gate_sz : up_sz};
        Vec one[1][kTokens];
        for (int t = 0; t < kTokens; ++t) one[0][t] = acc[m][t];
        add_group<E>(stream, scales, x, x_sums, one);
        for (int t = 0; t < kTokens; ++t) acc[m][t] = one[0][t];
      }
    }
    gate += bytes;
    up += bytes;
    if constexpr (E::kScaled) {
      gate_sz += kScaleBytes;
      up_sz += kScaleBytes;
      __builtin_prefetch(gate_sz + 4 * kScaleBytes, 0, 3);
      __builtin_prefetch(up_sz + 4 * kScaleBytes, 0, 3);
    }
    for (int t = 0; t < kTokens; ++t) {
      x[t] += 64;
      x_sums[t] += 2;
    }
  }

  for (int t = 0; t < kTokens; ++t) {
    if (layout.has_bias) {
      const std::int64_t at = tile * std::int64_t{kTileRows * sizeof(float)};
      acc[0][t] = add(acc[0][t], load(record + layout.gate_bias + at));
      if (layout.gated) acc[1][t] = add(acc[1][t], load(record + layout.up_bias + at));
    }
    const Vec value = gate_lanes(task.gate, acc[0][t], acc[1][t]);
    store(task.activations + (slot + t) * kBlockNeurons + tile * kTileRows, mul(value, factors));
    task.activation_sums[(slot + t) * kTilesPerBlock + tile] = lane_sum(value);
  }
}

// Activations of one tile for all tokens of one row.
template <class E>
MOECHAT_INLINE void neuron_tiles(const ForwardTask& task, std::int64_t entry, int tile, Vec factors) {
  const auto [record, block, item, slot, count] = entry_of(task, entry);
  (void)block;
  if (tile == kTilesPerBlock - 1 && entry + 1 < task.list_end) {
    // The next block lies elsewhere in memory, which the hardware prefetcher cannot predict.
    const unsigned char* next = reinterpret_cast<const unsigned char*>(task.block_ptr[entry + 1]);
    prefetch_bytes(next + task.layout->gate_q, kPrefetchBytes);
    if (task.layout->gated) prefetch_bytes(next + task.layout->up_q, kPrefetchBytes);
  }
  std::int64_t t = 0;
  for (; t + kFloatTokens <= count; t += kFloatTokens)
    neuron_tile<E, kFloatTokens>(task, record, tile, item + t, slot + t, factors);
  if (kFloatTokens > 4 && t + 4 <= count) {
    neuron_tile<E, 4>(task, record, tile, item + t, slot + t, factors);
    t += 4;
  }
  if (t + 2 <= count) {
    neuron_tile<E, 2>(task, record, tile, item + t, slot + t, factors);
    t += 2;
  }
  if (t < count) neuron_tile<E, 1>(task, record, tile, item + t, slot + t, factors);
}

template <class E>
void neurons_of(const ForwardTask& task, std::int64_t begin, std::int64_t end) {
  const Vec factors = unshift_factors(task.layout->bits);
  for (std::int64_t unit = begin; unit < end; ++unit) {
    neuron_tiles<E>(task, task.entry_begin + unit / kTilesPerBlock, static_cast<int>(unit % kTilesPerBlock),
                    factors);
  }
}

// Output rows of kTiles adjacent tiles for kTokens tokens of one row.
template <class E, int kTiles, int kTokens>
MOECHAT_INLINE void output_rows(const ForwardTask& task, const unsigned char* record, std::int64_t block,
                                std::int64_t tile, const OutputRows& to, const float* activations,
                                const float (&act_sums)[kTokens][2]) {
  const BlockLayout& layout = *task.layout;
  const unsigned char* q[kTiles];
  const unsigned char* sz[kTiles];
  const float* a[kTokens];
  const float* a_sums[kTokens];
  Vec sums[kTiles][kTokens];
  for (int t = 0; t < kTokens; ++t) {
    a[t] = activations + t * kBlockNeurons;
    a_sums[t] = act_sums[t];
  }
  for (int i = 0; i < kTiles; ++i) {
    q[i] = record + layout.down_q + (tile + i) * layout.group_bytes;
    sz[i] = E::kScaled ? record + layout.down_sz + (tile + i) * kScaleBytes : nullptr;
    for (int t = 0; t < kTokens; ++t) sums[i][t] = zero();
  }
  add_group<E>(q, sz, a, a_sums, sums);
  for (int i = 0; i < kTiles; ++i) {
    const std::int64_t row = (tile + i) * kTileRows;
    const std::int64_t bias_row = row - block * layout.down_bias_rows;
    const bool biased = layout.has_bias && bias_row >= 0 && bias_row < layout.down_bias_rows;
    for (int t = 0; t < kTokens; ++t) {
      Vec partial = sums[i][t];
      if (biased) {
        partial = add(partial, load(record + layout.down_bias + bias_row * std::int64_t{sizeof(float)}));
      }
      to.put(t, row, partial);
    }
  }
}

template <class E, int kTokens>
void output_range(const ForwardTask& task, const unsigned char* record, std::int64_t block,
                  std::int64_t begin, std::int64_t end, const OutputRows& to, std::int64_t slot,
                  const unsigned char* next_record) {
  const BlockLayout& layout = *task.layout;
  const float* activations = task.activations + slot * kBlockNeurons;
  float act_sums[kTokens][2];
  for (int t = 0; t < kTokens; ++t) {
    const float* s = task.activation_sums + (slot + t) * kTilesPerBlock;
    act_sums[t][0] = s[0] + s[1];
    act_sums[t][1] = s[2] + s[3];
  }
  constexpr int kStep = kTokens == 1 && kPairStreams ? 2 : 1;
  const std::int64_t bytes = layout.group_bytes;
  const std::int64_t ahead = (kPrefetchBytes + bytes - 1) / bytes;
  std::int64_t tile = begin;
  for (; tile + kStep <= end; tile += kStep) {
    // Near the end of the range, prefetch the beginning of the range in the next block.
    const std::int64_t later = tile + ahead;
    const unsigned char* at = later < end ? record : next_record;
    const std::int64_t which = later < end ? later : begin + (later - end);
    if (at != nullptr) {
      prefetch_bytes(at + layout.down_q + which * bytes, kStep * bytes);
      if constexpr (E::kScaled)
        prefetch_bytes(at + layout.down_sz + which * kScaleBytes, kStep * kScaleBytes);
    }
    output_rows<E, kStep, kTokens>(task, record, block, tile, to, activations, act_sums);
  }
  if constexpr (kStep > 1) {
    for (; tile < end; ++tile) {
      output_rows<E, 1, kTokens>(task, record, block, tile, to, activations, act_sums);
    }
  }
}

// Output tiles [begin, end) of the block of entry `entry`; `next` is the record that is read afterwards, or
// null.
template <class E>
void block_outputs(const ForwardTask& task, std::int64_t entry, std::int64_t begin, std::int64_t end,
                   const OutputRows& to, const unsigned char* next) {
  const auto [record, block, item, slot, count] = entry_of(task, entry);
  (void)item;
  std::int64_t t = 0;
  for (; t + kFloatTokens <= count; t += kFloatTokens)
    output_range<E, kFloatTokens>(task, record, block, begin, end, to.from(t), slot + t, next);
  if (kFloatTokens > 4 && t + 4 <= count) {
    output_range<E, 4>(task, record, block, begin, end, to.from(t), slot + t, next);
    t += 4;
  }
  if (t + 2 <= count) {
    output_range<E, 2>(task, record, block, begin, end, to.from(t), slot + t, next);
    t += 2;
  }
  if (t < count) output_range<E, 1>(task, record, block, begin, end, to.from(t), slot + t, next);
}

template <class E>
void outputs_of(const ForwardTask& task, std::int64_t begin, std::int64_t end) {
  for (std::int64_t entry = task.entry_begin; entry < task.entry_end; ++entry) {
    const unsigned char* next = entry + 1 < task.entry_end
                                    ? reinterpret_cast<const unsigned char*>(task.block_ptr[entry + 1])
                                    : nullptr;
    block_outputs<E>(task, entry, begin, end, result_rows(task, entry), next);
  }
}

// The whole block of entry `local` of the chunk.
template <class E>
void block_of(const ForwardTask& task, std::int64_t local, bool stored) {
  const Vec factors = unshift_factors(task.layout->bits);
  const std::int64_t entry = task.entry_begin + local;
  for (int tile = 0; tile < kTilesPerBlock; ++tile) neuron_tiles<E>(task, entry, tile, factors);
  block_outputs<E>(task, entry, 0, output_tiles(*task.layout),
                   stored ? partial_rows(task, task.slot_start[local]) : result_rows(task, entry), nullptr);
}

// Adds the kept outputs of entry `local` of the chunk to output tiles [begin, end).
void add_partials(const ForwardTask& task, std::int64_t local, std::int64_t begin, std::int64_t end) {
  const OutputRows to = result_rows(task, task.entry_begin + local);
  const OutputRows from = partial_rows(task, task.slot_start[local]);
  const auto count = static_cast<int>(task.slot_start[local + 1] - task.slot_start[local]);
  for (int t = 0; t < count; ++t) {
    for (std::int64_t tile = begin; tile < end; ++tile)
      to.put(t, tile * kTileRows, load(from.out + t * from.stride + tile * kTileRows));
  }
}

template <class E>
struct EncodingTag {
  using Type = E;
};

// Calls body(tag), where decltype(tag)::Type is the encoding's type.
template <class Body>
MOECHAT_INLINE void for_encoding(Encoding encoding, const Body& body) {
  switch (encoding) {
    case Encoding::kBits2:
      return body(EncodingTag<PackedBits<2>>{});
    case Encoding::kBits3:
      return body(EncodingTag<Bits3>{});
    case Encoding::kBits4:
      return body(EncodingTag<PackedBits<4>>{});
    case Encoding::kBits6:
      return body(EncodingTag<Bits6>{});
    case Encoding::kBits8:
      return body(EncodingTag<PackedBits<8>>{});
    case Encoding::kBf16:
      return body(EncodingTag<Bf16>{});
    default:
      return body(EncodingTag<Fp16>{});
  }
}

void neurons(const ForwardTask& task, std::int64_t begin, std::int64_t end) {
  if (task.layout->kept) return kept_neurons(task, begin, end);
  for_encoding(task.layout->encoding,
               [&](auto tag) { neurons_of<typename decltype(tag)::Type>(task, begin, end); });
}

void outputs(const ForwardTask& task, std::int64_t begin, std::int64_t end) {
  if (task.layout->kept) return kept_outputs(task, begin, end);
  for_encoding(task.layout->encoding,
               [&](auto tag) { outputs_of<typename decltype(tag)::Type>(task, begin, end); });
}

// The next record is prefetched by neuron_tiles().
void block(const ForwardTask& task, std::int64_t local, bool stored, const unsigned char*) {
  if (task.layout->kept) return kept_block(task, local, stored);
  for_encoding(task.layout->encoding,
               [&](auto tag) { block_of<typename decltype(tag)::Type>(task, local, stored); });
}

void activate(const GateSpec& spec, const float* gate, const float* up, float* out, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += 16) store(out + i, gate_lanes(spec, load(gate + i), load(up + i)));
}

// 16 output rows of a linear layer for kTokens tokens.
template <class E, int kTokens>
void linear_tile(const LinearTask& task, std::int64_t tile, std::int64_t token) {
  const std::int64_t bytes = task.group_bytes;
  const unsigned char* q = task.q + tile * task.groups * bytes;
  const unsigned char* sz = task.sz + tile * task.groups * kScaleBytes;
  const float* x[kTokens];
  const float* x_sums[kTokens];
  Vec acc[1][kTokens];
  for (int t = 0; t < kTokens; ++t) {
    x[t] = task.x + (token + t) * task.groups * kGroupColumns;
    x_sums[t] = task.x_sums + (token + t) * task.groups * 2;
    acc[0][t] = zero();
  }
  for (std::int64_t g = 0; g < task.groups; ++g) {
    const unsigned char* const stream[1] = {q};
    const unsigned char* const scales[1] = {sz};
    prefetch_bytes(q + kPrefetchBytes, bytes);
    add_group<E>(stream, scales, x, x_sums, acc);
    q += bytes;
    sz += kScaleBytes;
    for (int t = 0; t < kTokens; ++t) {
      x[t] += kGroupColumns;
      x_sums[t] += 2;
    }
  }
  for (int t = 0; t < kTokens; ++t) store_rows(task, token + t, tile * kTileRows, acc[0][t]);
}

template <class E>
void linear_of(const LinearTask& task, std::int64_t begin, std::int64_t end) {
  for (std::int64_t tile = begin; tile < end; ++tile) {
    std::int64_t t = 0;
    for (; t + kFloatTokens <= task.tokens; t += kFloatTokens) linear_tile<E, kFloatTokens>(task, tile, t);
    for (; kFloatTokens > 4 && t + 4 <= task.tokens; t += 4) linear_tile<E, 4>(task, tile, t);
    for (; t < task.tokens; ++t) linear_tile<E, 1>(task, tile, t);
  }
}

void linear(const LinearTask& task, std::int64_t begin, std::int64_t end) {
  switch (task.encoding) {
    case Encoding::kBits2:
      return linear_of<PackedBits<2>>(task, begin, end);
    case Encoding::kBits3:
      return linear_of<Bits3>(task, begin, end);
    case Encoding::kBits4:
      return linear_of<PackedBits<4>>(task, begin, end);
    case Encoding::kBits6:
      return linear_of<Bits6>(task, begin, end);
    case Encoding::kBits8:
      return linear_of<PackedBits<8>>(task, begin, end);
    default: {
      std::int64_t tile = begin;
      if (task.tokens == 1) {
        for (; tile + kTilesAbreast <= end; tile += kTilesAbreast) kept_linear_abreast(task, tile);
      }
      for (; tile < end; ++tile) kept_linear_tile(task, tile);
    }
  }
}
