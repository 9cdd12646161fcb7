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
  Storage* out = static_cast<Storage*>(task.out) + head * task.out_head + begin;
  std::int64_t c = 0;
  for (; c + 16 <= count; c += 16) Elements<kType>::put(out + c, load(sums + c));
  if (c < count) put_part<kType>(out + c, load(sums + c), count - c);
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

void latent_queries(const LatentTask& task, std::int64_t head, std::int64_t begin, std::int64_t end) {
  for_type(task.type, [&](auto tag) { latent_queries_of<decltype(tag)::kType>(task, head, begin, end); });
}
void latent_values(const LatentTask& task, std::int64_t head, std::int64_t begin, std::int64_t end) {
  for_type(task.type, [&](auto tag) { latent_values_of<decltype(tag)::kType>(task, head, begin, end); });
}
