// Partial expert outputs over blocks. Included inside the anonymous namespace of one instruction set.
//
// Summation order of one row and one group, the same for every tile of tokens and every number of threads:
//   even = sum over even columns of q * x, odd = the same over odd columns, each one sequential chain;
//   acc  = acc + scale * ((even + odd) - zero * sum(x))          (16 bits: acc + (even + odd))
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

// sums[stream][token] = the chain over the even (kFirst 0) or odd (kFirst 1) columns of one group.
template <class E, int kFirst, int kStreams, int kTokens>
MOECHAT_INLINE void dot_half(const unsigned char* const (&q)[kStreams], const float* const (&x)[kTokens],
                             Vec (&sums)[kStreams][kTokens]) {
  for (int s = 0; s < kStreams; ++s) {
    Vec chain[kTokens];
    for (int t = 0; t < kTokens; ++t) chain[t] = zero();
#pragma GCC unroll 2
    for (int unit = 0; unit < E::kUnits; ++unit) {
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

// sums[stream][token] = even + odd of one group.
template <class E, int kStreams, int kTokens>
MOECHAT_INLINE void dot_group(const unsigned char* const (&q)[kStreams], const float* const (&x)[kTokens],
                              Vec (&sums)[kStreams][kTokens]) {
  if constexpr (2 * kStreams * kTokens <= kFloatChains) {
    Vec chain[2][kStreams][kTokens];
    for (int s = 0; s < kStreams; ++s) {
      for (int t = 0; t < kTokens; ++t) chain[0][s][t] = chain[1][s][t] = zero();
    }
#pragma GCC unroll 2
    for (int unit = 0; unit < E::kUnits; ++unit) {
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
    dot_half<E, 0>(q, x, sums);
    dot_half<E, 1>(q, x, odd);
    for (int s = 0; s < kStreams; ++s) {
      for (int t = 0; t < kTokens; ++t) sums[s][t] = add(sums[s][t], odd[s][t]);
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
      sums[t * groups + g] = lane_sum(add(add(part[0], part[1]), add(part[2], part[3])));
    }
  }
}

// One matrix of the neurons phase: adds group g of one tile to acc[token].
template <class E, int kTokens>
MOECHAT_INLINE void add_group(const unsigned char* sz, const float* const (&x_sums)[kTokens], std::int64_t g,
                              const Vec (&sums)[kTokens], Vec (&acc)[kTokens]) {
  if constexpr (E::kScaled) {
    const Vec scale = load_fp16(sz);
    const Vec zeros = load_fp16(sz + 32);
    for (int t = 0; t < kTokens; ++t) acc[t] = fma(scale, fnma(zeros, set1(x_sums[t][g]), sums[t]), acc[t]);
  } else {
    for (int t = 0; t < kTokens; ++t) acc[t] = add(acc[t], sums[t]);
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
  const unsigned char* up = record + layout.up_q + tile * groups * bytes;
  const unsigned char* gate_sz = record + layout.gate_sz + tile * groups * kScaleBytes;
  const unsigned char* up_sz = record + layout.up_sz + tile * groups * kScaleBytes;
  const float* x[kTokens];
  const float* x_sums[kTokens];
  for (int t = 0; t < kTokens; ++t) {
    const std::int64_t token = task.row_token[row_item + t] - task.token_base;
    x[t] = task.x + token * layout.hidden_padded;
    x_sums[t] = task.x_sums + token * groups;
  }

  Vec gate_acc[kTokens];
  Vec up_acc[kTokens];
  for (int t = 0; t < kTokens; ++t) gate_acc[t] = up_acc[t] = zero();
  for (std::int64_t g = 0; g < groups; ++g) {
    Vec sums[2][kTokens];
    prefetch_bytes(gate + kPrefetchBytes, bytes);
    prefetch_bytes(up + kPrefetchBytes, bytes);
    if constexpr (kTokens == 1 && kPairStreams) {
      const unsigned char* const streams[2] = {gate, up};
      dot_group<E>(streams, x, sums);
    } else {
      const unsigned char* const gate_stream[1] = {gate};
      const unsigned char* const up_stream[1] = {up};
      Vec one[1][kTokens];
      dot_group<E>(gate_stream, x, one);
      for (int t = 0; t < kTokens; ++t) sums[0][t] = one[0][t];
      dot_group<E>(up_stream, x, one);
      for (int t = 0; t < kTokens; ++t) sums[1][t] = one[0][t];
    }
    add_group<E>(gate_sz, x_sums, g, sums[0], gate_acc);
    add_group<E>(up_sz, x_sums, g, sums[1], up_acc);
    gate += bytes;
    up += bytes;
    if constexpr (E::kScaled) {
      gate_sz += kScaleBytes;
      up_sz += kScaleBytes;
      __builtin_prefetch(gate_sz + 4 * kScaleBytes, 0, 3);
      __builtin_prefetch(up_sz + 4 * kScaleBytes, 0, 3);
    }
    for (int t = 0; t < kTokens; ++t) x[t] += 64;
  }

  for (int t = 0; t < kTokens; ++t) {
    if (layout.has_bias) {
      const std::int64_t at = tile * std::int64_t{kTileRows * sizeof(float)};
      gate_acc[t] = add(gate_acc[t], load(record + layout.gate_bias + at));
      up_acc[t] = add(up_acc[t], load(record + layout.up_bias + at));
    }
    const Vec value = activate_lanes(task.activation, gate_acc[t], up_acc[t]);
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
    prefetch_bytes(next + task.layout->up_q, kPrefetchBytes);
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
                                const float (&act_sums)[kTokens]) {
  const BlockLayout& layout = *task.layout;
  const unsigned char* q[kTiles];
  const float* a[kTokens];
  for (int i = 0; i < kTiles; ++i) q[i] = record + layout.down_q + (tile + i) * layout.group_bytes;
  for (int t = 0; t < kTokens; ++t) a[t] = activations + t * kBlockNeurons;
  Vec sums[kTiles][kTokens];
  dot_group<E>(q, a, sums);
  for (int i = 0; i < kTiles; ++i) {
    const std::int64_t row = (tile + i) * kTileRows;
    const std::int64_t bias_row = row - block * layout.down_bias_rows;
    const bool biased = layout.has_bias && bias_row >= 0 && bias_row < layout.down_bias_rows;
    Vec scale = zero();
    Vec zeros = zero();
    if constexpr (E::kScaled) {
      const unsigned char* sz = record + layout.down_sz + (tile + i) * kScaleBytes;
      scale = load_fp16(sz);
      zeros = load_fp16(sz + 32);
    }
    for (int t = 0; t < kTokens; ++t) {
      Vec partial = sums[i][t];
      if constexpr (E::kScaled) partial = mul(scale, fnma(zeros, set1(act_sums[t]), partial));
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
  float act_sums[kTokens];
  for (int t = 0; t < kTokens; ++t) {
    const float* s = task.activation_sums + (slot + t) * kTilesPerBlock;
    act_sums[t] = (s[0] + s[1]) + (s[2] + s[3]);
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
    case Encoding::kBits8:
      return body(EncodingTag<PackedBits<8>>{});
    case Encoding::kBf16:
      return body(EncodingTag<Bf16>{});
    case Encoding::kFp16:
      return body(EncodingTag<Fp16>{});
  }
}

void neurons(const ForwardTask& task, std::int64_t begin, std::int64_t end) {
  for_encoding(task.layout->encoding,
               [&](auto tag) { neurons_of<typename decltype(tag)::Type>(task, begin, end); });
}

void outputs(const ForwardTask& task, std::int64_t begin, std::int64_t end) {
  for_encoding(task.layout->encoding,
               [&](auto tag) { outputs_of<typename decltype(tag)::Type>(task, begin, end); });
}

// The next record is prefetched by neuron_tiles().
void block(const ForwardTask& task, std::int64_t local, bool stored, const unsigned char*) {
  for_encoding(task.layout->encoding,
               [&](auto tag) { block_of<typename decltype(tag)::Type>(task, local, stored); });
}

void activate(const ActivationSpec& spec, const float* gate, const float* up, float* out,
              std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += 16)
    store(out + i, activate_lanes(spec, load(gate + i), load(up + i)));
}

// 16 output rows of a linear layer for kTokens tokens.
template <class E, int kTokens>
void linear_tile(const LinearTask& task, std::int64_t tile, std::int64_t token) {
  const std::int64_t bytes = std::int64_t{kTileRows} * kGroupColumns * task.bits / 8;
  const unsigned char* q = task.q + tile * task.groups * bytes;
  const unsigned char* sz = task.sz + tile * task.groups * kScaleBytes;
  const float* x[kTokens];
  const float* x_sums[kTokens];
  Vec acc[kTokens];
  for (int t = 0; t < kTokens; ++t) {
    x[t] = task.x + (token + t) * task.groups * kGroupColumns;
    x_sums[t] = task.x_sums + (token + t) * task.groups;
    acc[t] = zero();
  }
  for (std::int64_t g = 0; g < task.groups; ++g) {
    const unsigned char* const stream[1] = {q};
    Vec sums[1][kTokens];
    prefetch_bytes(q + kPrefetchBytes, bytes);
    dot_group<E>(stream, x, sums);
    add_group<E>(sz, x_sums, g, sums[0], acc);
    q += bytes;
    sz += kScaleBytes;
    for (int t = 0; t < kTokens; ++t) x[t] += kGroupColumns;
  }
  for (int t = 0; t < kTokens; ++t) store_rows(task, token + t, tile * kTileRows, acc[t]);
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
  switch (task.bits) {
    case 2:
      return linear_of<PackedBits<2>>(task, begin, end);
    case 3:
      return linear_of<Bits3>(task, begin, end);
    case 4:
      return linear_of<PackedBits<4>>(task, begin, end);
    default:
      return linear_of<PackedBits<8>>(task, begin, end);
  }
}
