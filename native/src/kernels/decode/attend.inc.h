// Attention of few tokens over a context; see decode_api.h. Included inside the anonymous namespace of the
// files isa/*.cc, after packed_rows.inc.h.

MOECHAT_INLINE float largest_lane(Vec x) {
  float lanes[16];
  store(lanes, x);
  float most = lanes[0];
  for (int i = 1; i < 16; ++i) most = lanes[i] > most ? lanes[i] : most;
  return most;
}

template <ElementType kType>
void attend_queries_of(const AttendTask& task, const AttendShape& shape, float* rows) {
  using Storage = typename Elements<kType>::Storage;
  for (std::int64_t h = 0; h < task.kv_heads * task.group; ++h) {
    for (std::int64_t t = 0; t < task.tokens; ++t) {
      const Storage* from =
          static_cast<const Storage*>(task.query) + h * task.query_head + t * task.query_token;
      widen<kType>(from, task.key_dim + task.tail_dim, rows + (h * task.tokens + t) * shape.query_width,
                   shape.query_width);
    }
  }
}

constexpr std::int64_t kRowsInPlace = 2;

// Rows: PlainRows or PackedRows.
template <class Rows>
void attend_unit_of(const AttendTask& task, const AttendShape& shape, const float* queries, std::int64_t head,
                    std::int64_t index, float* scratch, float* partials) {
  using Storage = typename Rows::Storage;
  constexpr float kHidden = -3.0e38f;
  const std::int64_t begin = index * kAttendKeys;
  const std::int64_t count = begin + kAttendKeys < task.context ? kAttendKeys : task.context - begin;
  float* keys = scratch;
  float* values = keys + 16 * shape.query_width;
  float* weights = values + 16 * shape.value_width;  // [rows, kAttendKeys]
  const Storage* key = static_cast<const Storage*>(task.key) + head * task.key_head + begin * task.key_token;
  const Storage* tail =
      static_cast<const Storage*>(task.tail) + head * task.tail_head + begin * task.tail_token;
  const Storage* value =
      static_cast<const Storage*>(task.value) + head * task.value_head + begin * task.value_token;
  // Read in place where each is needed only once or twice, or is float32; else converted once for all rows.
  const bool in_place = Rows::kFree || shape.rows <= kRowsInPlace;
  const bool plain_keys = in_place && task.tail_dim == 0 && Rows::reads(task.key_dim);
  const bool plain_values = in_place && Rows::reads(task.value_dim);
  const float* own = queries + head * shape.rows * shape.query_width;

  for (std::int64_t k = 0; k < count; k += 16) {
    const std::int64_t present = count - k < 16 ? count - k : 16;
    const bool plain = plain_keys && present == 16;
    if (!plain) {
      for (std::int64_t i = 0; i < 16; ++i) {
        float* to = keys + i * shape.query_width;
        // Past the last key, repeat it; the softmax below hides its products.
        const std::int64_t from = k + (i < present ? i : present - 1);
        Rows::fetch(key + (from + kFetchedAhead) * task.key_token, task.key_dim);
        Rows::widen_row(key + from * task.key_token, task.key_dim, to, shape.query_width);
        if (task.tail_dim > 0) {
          Rows::widen_row(tail + from * task.tail_token, task.tail_dim, to + task.key_dim,
                          shape.query_width - task.key_dim);
        }
      }
    }
    for (std::int64_t r = 0; r < shape.rows; ++r) {
      const float* query = own + r * shape.query_width;
      Vec products = plain
                         ? Rows::products(query, key + k * task.key_token, task.key_token, shape.query_width)
                         : sixteen_products<ElementType::kFloat32, false>(query, keys, shape.query_width,
                                                                          shape.query_width);
      products = mul(products, set1(task.scale));
      float* to = weights + r * kAttendKeys + k;
      store(to, products);
      for (std::int64_t i = present; i < 16; ++i) to[i] = kHidden;
      if (task.causal) {
        const std::int64_t seen = task.context - task.tokens + 1 + r % task.tokens - (begin + k);
        for (std::int64_t i = seen > 0 ? seen : 0; i < present; ++i) to[i] = kHidden;
      }
      if (task.visible != nullptr) {
        const unsigned char* seen = task.visible + (r % task.tokens) * task.visible_token + begin + k;
        for (std::int64_t i = 0; i < present; ++i) {
          if (seen[i] == 0) to[i] = kHidden;
        }
      }
    }
  }
  const std::int64_t padded = (count + 15) / 16 * 16;
  for (std::int64_t r = 0; r < shape.rows; ++r) {
    float* row = weights + r * kAttendKeys;
    Vec most = set1(kHidden);
    for (std::int64_t k = 0; k < padded; k += 16) most = max(most, load(row + k));
    const float maximum = largest_lane(most);
    Vec sum = zero();
    for (std::int64_t k = 0; k < padded; k += 16) {
      const Vec products = load(row + k);
      // exp() never returns 0, so hidden keys get weight 0 explicitly.
      const Vec weight = select(equal(products, set1(kHidden)), zero(), exp(sub(products, set1(maximum))));
      store(row + k, weight);
      sum = add(sum, weight);
    }
    float* partial = partials + r * shape.partial;
    for (std::int64_t d = 0; d < shape.value_width; d += 16) store(partial + d, zero());
    partial[shape.value_width] = maximum;
    partial[shape.value_width + 1] = lane_sum(sum);
  }
  for (std::int64_t k = 0; k < count; k += 16) {
    const std::int64_t present = count - k < 16 ? count - k : 16;
    if (!plain_values) {
      for (std::int64_t i = 0; i < present; ++i) {
        Rows::fetch(value + (k + i + kFetchedAhead) * task.value_token, task.value_dim);
        Rows::widen_row(value + (k + i) * task.value_token, task.value_dim, values + i * shape.value_width,
                        shape.value_width);
      }
    }
    const auto add_to = [&](auto rows, std::int64_t r) __attribute__((always_inline)) {
      constexpr int kRows = decltype(rows)::value;
      const float* weight = weights + r * kAttendKeys + k;
      float* sum = partials + r * shape.partial;
      if (plain_values) {
        Rows::template add_rows<kRows>(weight, value + k * task.value_token, task.value_token, present, sum,
                                       shape.partial, shape.value_width);
      } else {
        add_values<ElementType::kFloat32, false, kRows>(weight, values, shape.value_width, present, sum,
                                                        shape.partial, shape.value_width);
      }
    };
    std::int64_t r = 0;
    for (; r + kRowsAtOnce <= shape.rows; r += kRowsAtOnce) {
      add_to(std::integral_constant<int, kRowsAtOnce>{}, r);
    }
    for (; r < shape.rows; ++r) add_to(std::integral_constant<int, 1>{}, r);
  }
}

MOECHAT_INLINE float exponential(float x) {
  float lanes[16];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

template <ElementType kType>
void attend_sum_of(const AttendTask& task, const AttendShape& shape, float* partials) {
  using Storage = typename Elements<kType>::Storage;
  const std::int64_t unit = shape.rows * shape.partial;
  for (std::int64_t head = 0; head < task.kv_heads; ++head) {
    float* first = partials + head * shape.units * unit;
    for (std::int64_t r = 0; r < shape.rows; ++r) {
      float* row = first + r * shape.partial;
      const std::int64_t query_head = head * task.group + r / task.tokens;
      float maximum = row[shape.value_width];
      for (std::int64_t u = 1; u < shape.units; ++u) {
        const float other = row[u * unit + shape.value_width];
        maximum = other > maximum ? other : maximum;
      }
      float sum = 0.0f;
      if (task.sinks != nullptr) {
        const float sink = task.sinks[query_head];
        maximum = sink > maximum ? sink : maximum;
        sum = exponential(sink - maximum);
      }
      for (std::int64_t u = 0; u < shape.units; ++u) {
        float* part = row + u * unit;
        const float share = exponential(part[shape.value_width] - maximum);
        sum += share * part[shape.value_width + 1];
        const Vec factor = set1(share);
        for (std::int64_t d = 0; d < shape.value_width; d += 16) {
          const Vec weighted = mul(factor, load(part + d));
          store(row + d, u == 0 ? weighted : add(load(row + d), weighted));
        }
      }
      Storage* out = static_cast<Storage*>(task.out) +
                     ((r % task.tokens) * task.kv_heads * task.group + query_head) * task.value_dim;
      // If every key is hidden the output is 0, as in torch. A NaN sum stays NaN.
      const Vec inverse = set1(sum == 0.0f ? 0.0f : 1.0f / sum);
      std::int64_t d = 0;
      for (; d + 16 <= task.value_dim; d += 16) Elements<kType>::put(out + d, mul(inverse, load(row + d)));
      if (d < task.value_dim) put_part<kType>(out + d, mul(inverse, load(row + d)), task.value_dim - d);
    }
  }
}
