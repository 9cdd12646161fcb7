// Integer kernels for few tokens: products of codes and quantised inputs, see kernel_api.h for the numerics.
// Included inside the anonymous namespace of one instruction set.

// Codes of four columns for 16 rows: dword `d` of a group, see QuantisedRows. A group is kUnits units of
// kWords dwords.
template <int kBits>
struct Codes {
  static constexpr int kWords = 8 / kBits;
  static constexpr int kUnits = 16 / kWords;
  static constexpr int kLargest = (1 << kBits) - 1;

  MOECHAT_INLINE static void unit(const unsigned char* group, int at, VecI (&codes)[kWords]) {
    const VecI words = loadi(group + at * kStepBytes);
    if constexpr (kBits == 8) {
      codes[0] = words;
    } else {
      const VecI mask = seti(0x01010101u * static_cast<unsigned>(kLargest));
      for (int i = 0; i < kWords; ++i) codes[i] = andi(i == 0 ? words : shr(words, kBits * i), mask);
    }
  }
};

template <>
struct Codes<3> {
  static constexpr int kWords = 4;
  static constexpr int kUnits = 4;
  static constexpr int kLargest = 7;

  MOECHAT_INLINE static void unit(const unsigned char* group, int at, VecI (&codes)[kWords]) {
    const VecI low = loadi(group + at * kStepBytes);
    // Of the 16 high bits, those of columns 4k..4k+3 go to byte k.
    VecI high = loadi(group + (4 + at / 2) * kStepBytes);
    high = at % 2 == 0 ? andi(high, seti(0xffffu)) : shr(high, 16);
    high = andi(ori(high, shl(high, 8)), seti(0x00ff00ffu));
    high = andi(ori(high, shl(high, 4)), seti(0x0f0f0f0fu));
    const VecI two = seti(0x03030303u);
    const VecI four = seti(0x04040404u);
    codes[0] = ori(andi(low, two), andi(shl(high, 2), four));
    codes[1] = ori(andi(shr(low, 2), two), andi(shl(high, 1), four));
    codes[2] = ori(andi(shr(low, 4), two), andi(high, four));
    codes[3] = ori(andi(shr(low, 6), two), andi(shr(high, 1), four));
  }
};

// Whether sums of two products for each of `dwords` dwords fit in 16 bits.
constexpr bool fits_16(int largest_code, int dwords) { return largest_code * 128 * 2 * dwords < 32768; }

// isum[stream][token] of one group, x[token] its planes; below 8 bits with the factors of the halves,
// sz[stream] their scale words, and without the offsets.
template <int kBits, int kPlanes, int kStreams, int kTokens>
MOECHAT_INLINE void group_dots(const unsigned char* const (&q)[kStreams],
                               const unsigned char* const (&sz)[kStreams],
                               const std::int8_t* const (&x)[kTokens], VecI (&isum)[kStreams][kTokens]) {
  using C = Codes<kBits>;
  constexpr int kHalves = kBits == 8 ? 1 : 2;
  if constexpr (kStreams > 1 && !kPairDots) {
    for (int s = 0; s < kStreams; ++s) {
      const unsigned char* const one[1] = {q[s]};
      const unsigned char* const one_sz[1] = {sz[s]};
      const std::int8_t* again[kTokens];
      for (int t = 0; t < kTokens; ++t) {
        // Hides that the pointer is the same for every stream; otherwise compilers keep all of it on the
        // stack.
        again[t] = x[t];
        __asm__("" : "+r"(again[t]));
      }
      VecI sums[1][kTokens];
      group_dots<kBits, kPlanes>(one, one_sz, again, sums);
      for (int t = 0; t < kTokens; ++t) isum[s][t] = sums[0][t];
    }
  } else if constexpr (kWideDot) {
    // Use two chains each if there are few sums; with one, the latency of a product would bound the loop.
    constexpr int kChains = 2 * kStreams * kTokens * kPlanes <= kMostChains ? 2 : 1;
    MOECHAT_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      VecI chain[kStreams][kTokens][kPlanes][kChains];
      for (int s = 0; s < kStreams; ++s) {
        for (int t = 0; t < kTokens; ++t) {
          for (int p = 0; p < kPlanes; ++p) {
            for (int c = 0; c < kChains; ++c) chain[s][t][p][c] = seti(0);
          }
        }
      }
      MOECHAT_UNROLL
      for (int unit = 0; unit < C::kUnits / kHalves; ++unit) {
        const int at = half * (C::kUnits / kHalves) + unit;
        VecI codes[kStreams][C::kWords];
        for (int s = 0; s < kStreams; ++s) C::unit(q[s], at, codes[s]);
        MOECHAT_UNROLL
        for (int i = 0; i < C::kWords; ++i) {
          const int d = at * C::kWords + i;
          for (int t = 0; t < kTokens; ++t) {
            for (int p = 0; p < kPlanes; ++p) {
              const VecI bytes = broadcast4(x[t] + p * 64 + 4 * d);
              for (int s = 0; s < kStreams; ++s) {
                chain[s][t][p][d % kChains] = dot(chain[s][t][p][d % kChains], codes[s][i], bytes);
              }
            }
          }
        }
      }
      for (int s = 0; s < kStreams; ++s) {
        for (int t = 0; t < kTokens; ++t) {
          VecI sums[kPlanes];
          for (int p = 0; p < kPlanes; ++p) {
            sums[p] = chain[s][t][p][0];
            if constexpr (kChains == 2) sums[p] = addi(sums[p], chain[s][t][p][1]);
          }
          VecI sum = kPlanes == 2 ? addi(shl(sums[0], 8), sums[kPlanes - 1]) : sums[0];
          if constexpr (kHalves == 2) sum = muli(sum, HalfScales::read(sz[s]).factor(half));
          isum[s][t] = half == 0 ? sum : addi(isum[s][t], sum);
        }
      }
    }
  } else {
    // Codes of 8 bits are processed as two of 4 bits; sums of 16 bits are widened, times the factors of the
    // halves, before they can overflow.
    constexpr int kParts = kBits == 8 ? 2 : 1;
    constexpr int kLargest = kBits == 8 ? 15 : C::kLargest;
    constexpr int kRuns = 2;
    static_assert(fits_16(kLargest, 16 / kRuns), "sums of 16 bits would overflow");
    for (int s = 0; s < kStreams; ++s) {
      for (int t = 0; t < kTokens; ++t) isum[s][t] = seti(0);
      MOECHAT_UNROLL
      for (int run = 0; run < kRuns; ++run) {
        VecI chain[kTokens][kPlanes][kParts];
        for (int t = 0; t < kTokens; ++t) {
          for (int p = 0; p < kPlanes; ++p) {
            for (int part = 0; part < kParts; ++part) chain[t][p][part] = seti(0);
          }
        }
        MOECHAT_UNROLL
        for (int unit = 0; unit < C::kUnits / kRuns; ++unit) {
          const int at = run * (C::kUnits / kRuns) + unit;
          VecI codes[C::kWords];
          C::unit(q[s], at, codes);
          MOECHAT_UNROLL
          for (int i = 0; i < C::kWords; ++i) {
            const int d = at * C::kWords + i;
            VecI parts[kParts];
            if constexpr (kBits == 8) {
              parts[0] = andi(codes[i], seti(0x0f0f0f0fu));
              parts[kParts - 1] = andi(shr(codes[i], 4), seti(0x0f0f0f0fu));
            } else {
              parts[0] = codes[i];
            }
            for (int t = 0; t < kTokens; ++t) {
              for (int p = 0; p < kPlanes; ++p) {
                const VecI bytes = broadcast4(x[t] + p * 64 + 4 * d);
                for (int part = 0; part < kParts; ++part) {
                  chain[t][p][part] = dot(chain[t][p][part], parts[part], bytes);
                  pin(chain[t][p][part]);
                }
              }
            }
          }
        }
        const VecI of_half = kBits == 8 ? seti(1) : HalfScales::read(sz[s]).factor(run);
        for (int t = 0; t < kTokens; ++t) {
          for (int p = 0; p < kPlanes; ++p) {
            for (int part = 0; part < kParts; ++part) {
              const int shift = (kPlanes == 2 && p == 0 ? 8 : 0) + (part == 1 ? 4 : 0);
              const VecI factor = shl(of_half, shift);
              isum[s][t] = addi(isum[s][t], madd16(chain[t][p][part], ori(factor, shl(factor, 16))));
            }
          }
        }
      }
    }
  }
}

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

// A range of tiles: their codes and scales, and those that the thread reads next.
struct TileStream {
  const unsigned char* q;
  const unsigned char* sz;
  const unsigned char* next_q;
  const unsigned char* next_sz;
};

// Prefetches codes and their scales.
MOECHAT_INLINE void prefetch_codes(const unsigned char* q, std::int64_t bytes, const unsigned char* sz,
                                   std::int64_t bytes_sz) {
  // Hides what the pointers are; otherwise compilers compute every address ahead and run out of registers.
  __asm__("" : "+r"(q), "+r"(sz));
  prefetch_bytes(q, bytes);
  prefetch_bytes(sz, bytes_sz);
}

// acc[stream][token]: 16 rows over all groups.
template <int kBits, int kPlanes, int kStreams, int kTokens>
__attribute__((noinline)) void tile_sums(const TileStream (&streams)[kStreams], std::int64_t groups,
                                         const TokenInputs (&inputs)[kTokens], std::int64_t ahead,
                                         Vec (&acc)[kStreams][kTokens]) {
  constexpr std::int64_t kBytes = 16 * 64 * kBits / 8;
  const unsigned char* q[kStreams];
  const unsigned char* sz[kStreams];
  const std::int8_t* x[kTokens];
  for (int s = 0; s < kStreams; ++s) {
    q[s] = streams[s].q;
    sz[s] = streams[s].sz;
    for (int t = 0; t < kTokens; ++t) acc[s][t] = zero();
  }
  for (int t = 0; t < kTokens; ++t) x[t] = inputs[t].planes;
  const std::int64_t groups_ahead = ahead / kBytes;
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::int64_t later = g + groups_ahead;
    for (const TileStream& stream : streams) {
      const bool within = later < groups;
      const std::int64_t which = within ? later : later - groups;
      prefetch_codes((within ? stream.q : stream.next_q) + which * kBytes, kBytes,
                     (within ? stream.sz : stream.next_sz) + which * kScaleBytes, kScaleBytes);
    }
    VecI isum[kStreams][kTokens];
    group_dots<kBits, kPlanes>(q, sz, x, isum);
    for (int s = 0; s < kStreams; ++s) {
      const auto term = GroupTerm<kBits, kPlanes>::read(sz[s]);
      for (int t = 0; t < kTokens; ++t) {
        acc[s][t] = term.add_to(acc[s][t], isum[s][t], inputs[t].scales[g], inputs[t].sums[g]);
      }
      q[s] += kBytes;
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
    up = add(up, load(record + layout.up_bias + at));
  }
  store(task.activations + slot * kBlockNeurons + tile * kTileRows,
        activate_lanes(task.activation, gate, up));
}

// Activations of 16 neurons (one tile) for kTokens tokens of one row.
template <int kBits, int kPlanes, int kTokens>
void neuron_tile_of(const ForwardTask& task, const unsigned char* record, int tile, std::int64_t item,
                    std::int64_t slot, const TileStream (&streams)[2]) {
  const BlockLayout& layout = *task.layout;
  TokenInputs inputs[kTokens];
  for (int t = 0; t < kTokens; ++t) {
    inputs[t] =
        inputs_of(task.x_quantised, kPlanes, layout.groups, task.row_token[item + t] - task.token_base);
  }
  Vec acc[2][kTokens];
  tile_sums<kBits, kPlanes>(streams, layout.groups, inputs, task.reading.ahead, acc);
  for (int t = 0; t < kTokens; ++t) store_neurons(task, record, tile, slot + t, acc[0][t], acc[1][t]);
}

// Activations of a block for one token. Reads first all codes of gate, then all of up, then goes on to those
// of down: one stream, where neuron_tile_of reads two.
template <int kBits, int kPlanes>
void block_neurons_of(const ForwardTask& task, const unsigned char* record, std::int64_t item,
                      std::int64_t slot) {
  const BlockLayout& layout = *task.layout;
  const std::int64_t span = layout.groups * layout.group_bytes;
  const std::int64_t span_sz = layout.groups * kScaleBytes;
  const TokenInputs inputs[1] = {
      inputs_of(task.x_quantised, kPlanes, layout.groups, task.row_token[item] - task.token_base)};
  const std::int64_t q[3] = {layout.gate_q, layout.up_q, layout.down_q};
  const std::int64_t sz[3] = {layout.gate_sz, layout.up_sz, layout.down_sz};
  Vec sums[2][kTilesPerBlock];
  for (int matrix = 0; matrix < 2; ++matrix) {
    for (int tile = 0; tile < kTilesPerBlock; ++tile) {
      TileStream stream[1] = {{record + q[matrix] + tile * span, record + sz[matrix] + tile * span_sz,
                               record + q[matrix + 1], record + sz[matrix + 1]}};
      if (tile + 1 < kTilesPerBlock) {
        stream[0].next_q = stream[0].q + span;
        stream[0].next_sz = stream[0].sz + span_sz;
      }
      Vec acc[1][1];
      tile_sums<kBits, kPlanes>(stream, layout.groups, inputs, task.reading.ahead, acc);
      sums[matrix][tile] = acc[0][0];
    }
  }
  for (int tile = 0; tile < kTilesPerBlock; ++tile) {
    store_neurons(task, record, tile, slot, sums[0][tile], sums[1][tile]);
  }
}

// Activations of one tile for all tokens of one row.
template <int kBits, int kPlanes>
MOECHAT_INLINE void neuron_tiles_of(const ForwardTask& task, const unsigned char* record, int tile,
                                    std::int64_t item, std::int64_t slot, std::int64_t count,
                                    const TileStream (&streams)[2]) {
  std::int64_t t = 0;
  if constexpr (kMostTokens == 4) {
    for (; t + 4 <= count; t += 4)
      neuron_tile_of<kBits, kPlanes, 4>(task, record, tile, item + t, slot + t, streams);
  }
  if constexpr (kMostTokens >= 2) {
    for (; t + 2 <= count; t += 2)
      neuron_tile_of<kBits, kPlanes, 2>(task, record, tile, item + t, slot + t, streams);
  }
  for (; t < count; ++t) neuron_tile_of<kBits, kPlanes, 1>(task, record, tile, item + t, slot + t, streams);
}

MOECHAT_INLINE void quantise_activations(const ForwardTask& task, std::int64_t slot, std::int64_t count) {
  const unsigned char* order = byte_order(task.layout->bits);
  for (std::int64_t i = slot; i < slot + count; ++i) {
    const float* from = task.activations + i * kBlockNeurons;
    const Vec part[4] = {load(from), load(from + 16), load(from + 32), load(from + 48)};
    quantise_group_inputs(part, task.activation_bits, order,
                          task.quantised.planes + i * 8 * task.activation_bits, task.quantised.scales + i,
                          task.quantised.sums + i);
  }
}

template <int kBits, int kPlanes>
void integer_neurons_of(const ForwardTask& task, std::int64_t begin, std::int64_t end, std::int64_t then) {
  const BlockLayout& layout = *task.layout;
  const std::int64_t span = layout.groups * layout.group_bytes;
  const std::int64_t span_sz = layout.groups * kScaleBytes;
  for (std::int64_t unit = begin; unit < end; ++unit) {
    const std::int64_t local = unit / kTilesPerBlock;
    const int tile = static_cast<int>(unit % kTilesPerBlock);
    const std::int64_t entry = task.entry_begin + local;
    const unsigned char* record = reinterpret_cast<const unsigned char*>(task.block_ptr[entry]);
    const std::int64_t item = task.row_start[task.block_row[entry]] + task.part_begin;
    const std::int64_t slot = task.slot_start[local];
    const std::int64_t count = task.slot_start[local + 1] - slot;
    const bool many = task.many_x != nullptr && count >= task.many->threshold;
    std::int64_t tiles = 1;
    if (many) {
      tiles = end - unit < kTilesPerBlock - tile ? end - unit : kTilesPerBlock - tile;
      task.many->neurons(task, entry, tile, tile + tiles);
      unit += tiles - 1;
    } else {
      TileStream streams[2] = {
          {record + layout.gate_q + tile * span, record + layout.gate_sz + tile * span_sz, nullptr, nullptr},
          {record + layout.up_q + tile * span, record + layout.up_sz + tile * span_sz, nullptr, nullptr}};
      // The next block lies elsewhere in memory, which the hardware prefetcher cannot predict.
      if (tile + 1 < kTilesPerBlock) {
        for (TileStream& stream : streams) {
          stream.next_q = stream.q + span;
          stream.next_sz = stream.sz + span_sz;
        }
      } else if (unit + 1 == end && then >= 0) {
        const unsigned char* first = reinterpret_cast<const unsigned char*>(task.block_ptr[task.entry_begin]);
        for (int s = 0; s < 2; ++s) {
          streams[s].next_q = first + layout.down_q + then * layout.group_bytes + s * task.reading.ahead;
          streams[s].next_sz = first + layout.down_sz + (then + s) * kScaleBytes;
        }
      } else {
        const std::int64_t following = entry + 1 < task.list_end ? entry + 1 : entry;
        const unsigned char* next = reinterpret_cast<const unsigned char*>(task.block_ptr[following]);
        streams[0].next_q = next + layout.gate_q;
        streams[0].next_sz = next + layout.gate_sz;
        streams[1].next_q = next + layout.up_q;
        streams[1].next_sz = next + layout.up_sz;
      }
      neuron_tiles_of<kBits, kPlanes>(task, record, tile, item, slot, count, streams);
    }
    // The thread that completes a block quantises it; several threads may share the tiles of a block.
    if (__atomic_add_fetch(task.tiles_done + local, static_cast<std::int32_t>(tiles), __ATOMIC_ACQ_REL) ==
        kTilesPerBlock) {
      quantise_activations(task, slot, count);
      if (many) task.many->gather_slots(task, local);
    }
  }
}

// Output rows of kTiles adjacent tiles for kTokens tokens of one row.
template <int kBits, int kPlanes, int kTiles, int kTokens>
MOECHAT_INLINE void output_tiles_of(const ForwardTask& task, const unsigned char* record, std::int64_t block,
                                    std::int64_t tile, const OutputRows& to,
                                    const TokenInputs (&inputs)[kTokens]) {
  const BlockLayout& layout = *task.layout;
  constexpr std::int64_t kBytes = 16 * 64 * kBits / 8;
  const unsigned char* q[kTiles];
  const unsigned char* sz[kTiles];
  const std::int8_t* x[kTokens];
  for (int i = 0; i < kTiles; ++i) {
    q[i] = record + layout.down_q + (tile + i) * kBytes;
    sz[i] = record + layout.down_sz + (tile + i) * kScaleBytes;
  }
  for (int t = 0; t < kTokens; ++t) x[t] = inputs[t].planes;
  VecI isum[kTiles][kTokens];
  group_dots<kBits, kPlanes>(q, sz, x, isum);
  for (int i = 0; i < kTiles; ++i) {
    const std::int64_t row = (tile + i) * kTileRows;
    const std::int64_t bias_row = row - block * layout.down_bias_rows;
    const bool biased = layout.has_bias && bias_row >= 0 && bias_row < layout.down_bias_rows;
    const auto term = GroupTerm<kBits, kPlanes>::read(sz[i]);
    for (int t = 0; t < kTokens; ++t) {
      Vec partial = term.add_to(zero(), isum[i][t], inputs[t].scales[0], inputs[t].sums[0]);
      if (biased) {
        partial = add(partial, load(record + layout.down_bias + bias_row * std::int64_t{sizeof(float)}));
      }
      to.put(t, row, partial);
    }
  }
}

template <int kBits, int kPlanes, int kTokens>
void integer_output_range(const ForwardTask& task, const unsigned char* record, std::int64_t block,
                          std::int64_t begin, std::int64_t end, const OutputRows& to, std::int64_t slot,
                          const unsigned char* next_record) {
  const BlockLayout& layout = *task.layout;
  constexpr int kStep = kWideDot && kTokens == 1 ? 2 : 1;
  constexpr std::int64_t kBytes = 16 * 64 * kBits / 8;
  TokenInputs inputs[kTokens];
  for (int t = 0; t < kTokens; ++t) inputs[t] = inputs_of(task.quantised, kPlanes, 1, slot + t);
  const std::int64_t tiles_ahead = task.reading.ahead / kBytes;
  std::int64_t tile = begin;
  for (; tile + kStep <= end; tile += kStep) {
    // Near the end of the range, prefetch the beginning of the range in the next block.
    const std::int64_t later = tile + tiles_ahead;
    const unsigned char* at = later < end ? record : next_record;
    const std::int64_t which = later < end ? later : begin + (later - end);
    prefetch_codes(at + layout.down_q + which * kBytes, kStep * kBytes,
                   at + layout.down_sz + which * kScaleBytes, kStep * kScaleBytes);
    output_tiles_of<kBits, kPlanes, kStep, kTokens>(task, record, block, tile, to, inputs);
  }
  if constexpr (kStep > 1) {
    if (tile < end) output_tiles_of<kBits, kPlanes, 1, kTokens>(task, record, block, tile, to, inputs);
  }
}

// Output tiles [begin, end) of the block of entry `entry`; `next` is the record that is read afterwards.
template <int kBits, int kPlanes>
void block_outputs_of(const ForwardTask& task, std::int64_t entry, std::int64_t begin, std::int64_t end,
                      const OutputRows& to, const unsigned char* next) {
  const auto [record, block, item, slot, count] = entry_of(task, entry);
  (void)item;
  std::int64_t t = 0;
  if constexpr (kMostTokens == 4) {
    for (; t + 4 <= count; t += 4)
      integer_output_range<kBits, kPlanes, 4>(task, record, block, begin, end, to.from(t), slot + t, next);
  }
  if constexpr (kMostTokens >= 2) {
    for (; t + 2 <= count; t += 2)
      integer_output_range<kBits, kPlanes, 2>(task, record, block, begin, end, to.from(t), slot + t, next);
  }
  for (; t < count; ++t)
    integer_output_range<kBits, kPlanes, 1>(task, record, block, begin, end, to.from(t), slot + t, next);
}

template <int kBits, int kPlanes>
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
    block_outputs_of<kBits, kPlanes>(task, entry, begin, end, result_rows(task, entry),
                                     reinterpret_cast<const unsigned char*>(task.block_ptr[following]));
  }
}

// The whole block of entry `local` of the chunk; the thread reads the record `next` afterwards.
template <int kBits, int kPlanes>
void integer_block_of(const ForwardTask& task, std::int64_t local, bool stored, const unsigned char* next) {
  const BlockLayout& layout = *task.layout;
  const std::int64_t span = layout.groups * layout.group_bytes;
  const std::int64_t span_sz = layout.groups * kScaleBytes;
  const std::int64_t entry = task.entry_begin + local;
  const auto [record, block, item, slot, count] = entry_of(task, entry);
  (void)block;
  const bool one_stream = task.reading.one_stream && count == 1;
  if (one_stream) block_neurons_of<kBits, kPlanes>(task, record, item, slot);
  for (int tile = 0; !one_stream && tile < kTilesPerBlock; ++tile) {
    TileStream streams[2] = {
        {record + layout.gate_q + tile * span, record + layout.gate_sz + tile * span_sz, nullptr, nullptr},
        {record + layout.up_q + tile * span, record + layout.up_sz + tile * span_sz, nullptr, nullptr}};
    for (int s = 0; s < 2; ++s) {
      const bool last = tile + 1 == kTilesPerBlock;
      streams[s].next_q = last ? record + layout.down_q + s * task.reading.ahead : streams[s].q + span;
      streams[s].next_sz = last ? record + layout.down_sz + s * kScaleBytes : streams[s].sz + span_sz;
    }
    neuron_tiles_of<kBits, kPlanes>(task, record, tile, item, slot, count, streams);
  }
  quantise_activations(task, slot, count);
  block_outputs_of<kBits, kPlanes>(task, entry, 0, output_tiles(layout),
                                   stored ? partial_rows(task, slot) : result_rows(task, entry), next);
}

// Rows of kTiles tiles, `apart` from each other, for kTokens tokens. `more`: the tiles after them follow.
template <int kBits, int kPlanes, int kTiles, int kTokens>
MOECHAT_INLINE void linear_tiles_of(const LinearTask& task, std::int64_t first, std::int64_t apart, bool more,
                                    std::int64_t token) {
  constexpr std::int64_t kBytes = 16 * 64 * kBits / 8;
  const std::int64_t span = task.groups * kBytes;
  const std::int64_t span_sz = task.groups * kScaleBytes;
  TileStream streams[kTiles];
  TokenInputs inputs[kTokens];
  for (int i = 0; i < kTiles; ++i) {
    const std::int64_t tile = first + i * apart;
    streams[i].q = task.q + tile * span;
    streams[i].sz = task.sz + tile * span_sz;
    streams[i].next_q = streams[i].q + (more ? span : 0);
    streams[i].next_sz = streams[i].sz + (more ? span_sz : 0);
  }
  for (int t = 0; t < kTokens; ++t) inputs[t] = inputs_of(task.x_quantised, kPlanes, task.groups, token + t);
  Vec acc[kTiles][kTokens];
  tile_sums<kBits, kPlanes>(streams, task.groups, inputs, task.reading.ahead, acc);
  for (int i = 0; i < kTiles; ++i) {
    const std::int64_t row = (first + i * apart) * kTileRows;
    for (int t = 0; t < kTokens; ++t) store_rows(task, token + t, row, acc[i][t]);
  }
}

// Two halves of the range side by side: each stream of codes and scales is then read in order from beginning
// to end, so that the processor's prefetchers never start anew.
template <int kBits, int kPlanes, int kTokens>
void linear_range_of(const LinearTask& task, std::int64_t begin, std::int64_t end, std::int64_t token) {
  constexpr int kTiles = kTokens <= 2 ? 2 : 1;
  if (kTiles == 2 && task.reading.one_stream) {
    for (std::int64_t tile = begin; tile < end; ++tile) {
      linear_tiles_of<kBits, kPlanes, 1, kTokens>(task, tile, 0, tile + 1 < end, token);
    }
    return;
  }
  const std::int64_t part = (end - begin) / kTiles;
  for (std::int64_t i = 0; i < part; ++i) {
    linear_tiles_of<kBits, kPlanes, kTiles, kTokens>(task, begin + i, part, i + 1 < part, token);
  }
  for (std::int64_t tile = begin + kTiles * part; tile < end; ++tile) {
    linear_tiles_of<kBits, kPlanes, 1, kTokens>(task, tile, 0, false, token);
  }
}

template <int kBits, int kPlanes>
void integer_linear_of(const LinearTask& task, std::int64_t begin, std::int64_t end) {
  std::int64_t t = 0;
  if constexpr (kMostTokens == 4) {
    for (; t + 4 <= task.tokens; t += 4) linear_range_of<kBits, kPlanes, 4>(task, begin, end, t);
  }
  if constexpr (kMostTokens >= 2) {
    for (; t + 2 <= task.tokens; t += 2) linear_range_of<kBits, kPlanes, 2>(task, begin, end, t);
  }
  for (; t < task.tokens; ++t) linear_range_of<kBits, kPlanes, 1>(task, begin, end, t);
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
  MOECHAT_BY_BITS(integer_neurons_of, task.layout->bits, task.activation_bits, task, begin, end, then)
}
void integer_outputs(const ForwardTask& task, std::int64_t begin, std::int64_t end) {
  const ManyTiles tiles(task.many_x != nullptr ? task.many : nullptr);
  MOECHAT_BY_BITS(integer_outputs_of, task.layout->bits, task.activation_bits, task, begin, end)
}
void integer_block(const ForwardTask& task, std::int64_t local, bool stored, const unsigned char* next) {
  MOECHAT_BY_BITS(integer_block_of, task.layout->bits, task.activation_bits, task, local, stored, next)
}
void integer_linear(const LinearTask& task, std::int64_t begin, std::int64_t end) {
  if (task.many_x != nullptr) {
    const ManyTiles tiles(task.many);
    return task.many->linear(task, begin, end);
  }
  MOECHAT_BY_BITS(integer_linear_of, task.bits, task.activation_bits, task, begin, end)
}
