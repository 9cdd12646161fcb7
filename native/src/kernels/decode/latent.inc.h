// Products of latent attention with the weights of its heads, over the Vec of one instruction set; see
// decode_api.h. Included inside the anonymous namespace of the files isa/*.cc, after plain_rows.inc.h.

// Adds kRows rows, each times its factor, to `count` sums, which are padded to a multiple of 16.
template <ElementType kType, int kRows>
MOECHAT_INLINE void add_rows_to(const typename Elements<kType>::Storage* rows, std::int64_t stride,
                                const float* factors, std::int64_t count, float* sums) {
  using Type = Elements<kType>;
  Vec each[kRows];
  for (int r = 0; r < kRows; ++r) each[r] = set1(factors[r]);
  std::int64_t c = 0;
  for (; c + 16 <= count; c += 16) {
    Vec sum = load(sums + c);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sum = fma(each[r], Type::get(rows + r * stride + c), sum);
    store(sums + c, sum);
  }
  if (c < count) {
    Vec sum = load(sums + c);
    for (int r = 0; r < kRows; ++r)
      sum = fma(each[r], get_part<kType>(rows + r * stride + c, count - c), sum);
    store(sums + c, sum);
  }
}

// `from` is padded to a multiple of 16.
template <ElementType kType>
MOECHAT_INLINE void put_floats(const float* from, std::int64_t count,
                               typename Elements<kType>::Storage* out) {
  std::int64_t c = 0;
  for (; c + 16 <= count; c += 16) Elements<kType>::put(out + c, load(from + c));
  if (c < count) put_part<kType>(out + c, load(from + c), count - c);
}

template <ElementType kType>
void latent_queries_of(const LatentTask& task, std::int64_t head, std::int64_t begin, std::int64_t end) {
  using Storage = typename Elements<kType>::Storage;
  const std::int64_t count = end - begin;
  const auto* rows =
      static_cast<const Storage*>(task.weight) + head * (task.plain + task.value_dim) * task.rank + begin;
  const float* x = task.x + head * task.plain;
  float sums[kLatentColumns] = {};
  std::int64_t r = 0;
  for (; r + 4 <= task.plain; r += 4) {
    add_rows_to<kType, 4>(rows + r * task.rank, task.rank, x + r, count, sums);
  }
  for (; r < task.plain; ++r) add_rows_to<kType, 1>(rows + r * task.rank, task.rank, x + r, count, sums);
  put_floats<kType>(sums, count, static_cast<Storage*>(task.out) + head * task.out_head + begin);
}

template <ElementType kType>
void latent_values_of(const LatentTask& task, std::int64_t head, std::int64_t begin, std::int64_t end) {
  using Type = Elements<kType>;
  using Storage = typename Type::Storage;
  const std::int64_t rank = task.rank, each = task.plain + task.value_dim;
  const auto* rows = static_cast<const Storage*>(task.weight) + (head * each + task.plain) * rank;
  const float* x = task.x + head * rank;
  Storage* out = static_cast<Storage*>(task.out) + head * task.out_head;
  std::int64_t r = begin;
  for (; rank % 16 == 0 && r + 16 <= end; r += 16) {
    Type::put(out + r, sixteen_products<kType, true>(x, rows + r * rank, rank, rank));
  }
  for (; r < end; ++r) {
    const Storage* row = rows + r * rank;
    Vec sum = zero();
    std::int64_t c = 0;
    for (; c + 16 <= rank; c += 16) sum = fma(load(x + c), Type::get(row + c), sum);
    if (c < rank) {
      const Vec part = get_part<ElementType::kFloat32>(x + c, rank - c);
      sum = fma(part, get_part<kType>(row + c, rank - c), sum);
    }
    put_part<kType>(out + r, set1(lane_sum(sum)), 1);
  }
}

// The sums over a head's rows of keys, each times its input, for the 64 columns of a group. Lane i adds up
// rows i, 16 + i and so on. The offsets of the codes are the same for all columns (of a half), and are
// subtracted at the end.
template <class E>
void packed_column_sums(const LatentTask& task, std::int64_t head, std::int64_t group, Vec factors,
                        float* out) {
  constexpr std::int64_t kAhead = 3;  // tiles that are fetched before they are read
  constexpr int kUnits = E::kUnits / E::kHalves;
  const float* x = task.x + head * task.plain;
  const std::int64_t tiles = task.plain / kTileRows;
  const std::int64_t at = head * (task.plain + task.value_dim) / kTileRows * task.groups + group;
  const unsigned char* q = task.q + at * task.group_bytes;
  const unsigned char* sz = task.sz + at * kScaleBytes;
  const std::int64_t stride = task.groups * task.group_bytes;
  Vec sums[kGroupColumns];
  for (int c = 0; c < kGroupColumns; ++c) sums[c] = zero();
  Vec offsets[E::kHalves];
  for (int half = 0; half < E::kHalves; ++half) offsets[half] = zero();
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    // Behind the last tile comes the first one of the next group.
    const std::int64_t ahead = tile + kAhead < tiles ? tile + kAhead : tile + kAhead - tiles;
    prefetch_bytes(q + (ahead - tile) * stride + (ahead < tile ? task.group_bytes : 0), task.group_bytes);
    const Vec inputs = load(x + tile * kTileRows);
    for (int half = 0; half < E::kHalves; ++half) {
      Vec factor, offset;
      if constexpr (E::kHalves == 2) {
        const HalfScales scales = HalfScales::read(sz);
        const Vec step = mul(scales.step(), inputs);
        factor = mul(to_float(scales.factor(half)), step);
        offset = mul(to_float(scales.offset(half)), step);
      } else {
        factor = mul(load_fp16(sz), inputs);
        offset = mul(load_fp16(sz + 32), factor);
      }
      offsets[half] = add(offsets[half], offset);
      for (int unit = half * kUnits; unit < (half + 1) * kUnits; ++unit) {
        const typename E::Unit words = E::load_unit(q, unit);
        Vec* to = sums + unit * E::kColumns;
#pragma GCC unroll 8
        for (int c = 0; c < E::kColumns; ++c) to[c] = fma(E::column(words, c), factor, to[c]);
      }
    }
    q += stride;
    sz += task.groups * kScaleBytes;
  }
  for (int c = 0; c < kGroupColumns; c += 16) {
    const Vec taken = set1(lane_sum(offsets[c / (kGroupColumns / E::kHalves)]));
    store(out + c, sub(mul(sixteen_sums(sums + c), factors), taken));
  }
}

template <class E>
void packed_queries_of(const LatentTask& task, std::int64_t head, std::int64_t begin, std::int64_t end) {
  const Vec factors = unshift_factors(task.bits);
  float sums[kLatentColumns];
  for (std::int64_t c = begin; c < end; c += kGroupColumns) {
    packed_column_sums<E>(task, head, c / kGroupColumns, factors, sums + (c - begin));
  }
  for_type(task.type, [&](auto tag) {
    constexpr ElementType kType = decltype(tag)::kType;
    auto* out = static_cast<typename Elements<kType>::Storage*>(task.out);
    put_floats<kType>(sums, end - begin, out + head * task.out_head + begin);
  });
}

void latent_queries(const LatentTask& task, std::int64_t head, std::int64_t begin, std::int64_t end) {
  if (task.weight == nullptr) {
    if (task.bits == 4) return packed_queries_of<PackedBits<4>>(task, head, begin, end);
    if (task.bits == 6) return packed_queries_of<Bits6>(task, head, begin, end);
    return packed_queries_of<PackedBits<8>>(task, head, begin, end);
  }
  for_type(task.type, [&](auto tag) { latent_queries_of<decltype(tag)::kType>(task, head, begin, end); });
}
void latent_values(const LatentTask& task, std::int64_t head, std::int64_t begin, std::int64_t end) {
  for_type(task.type, [&](auto tag) { latent_values_of<decltype(tag)::kType>(task, head, begin, end); });
}
