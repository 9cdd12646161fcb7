// Kernels for the small parts of a decoding step, over the Vec of one instruction set; see decode_api.h.
// Included inside the anonymous namespace of the files isa/*.cc, after attend.inc.h.

template <ElementType kType>
void rms_norm_of(const NormTask& task, std::int64_t row_begin, std::int64_t row_end) {
  using Type = Elements<kType>;
  using Storage = typename Type::Storage;
  const std::int64_t cols = task.cols;
  const std::int64_t whole = cols / 16 * 16;
  const Storage* weight = static_cast<const Storage*>(task.weight);
  const Vec offset = set1(task.offset);
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const Storage* x = static_cast<const Storage*>(task.x) + row * cols;
    Storage* out = static_cast<Storage*>(task.out) + row * cols;
    Vec sums[4] = {zero(), zero(), zero(), zero()};
    std::int64_t c = 0;
    for (; c + 64 <= cols; c += 64) {
      for (int i = 0; i < 4; ++i) {
        const Vec part = Type::get(x + c + 16 * i);
        sums[i] = fma(part, part, sums[i]);
      }
    }
    for (; c < whole; c += 16) {
      const Vec part = Type::get(x + c);
      sums[0] = fma(part, part, sums[0]);
    }
    if (c < cols) {
      const Vec part = get_part<kType>(x + c, cols - c);
      sums[1] = fma(part, part, sums[1]);
    }
    const float squares = lane_sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    const float mean = squares / static_cast<float>(cols);
    const Vec factor = set1(1.0f / ::sqrtf(mean + task.eps));
    const auto normal = [&](Vec part, Vec scale) __attribute__((always_inline)) {
      Vec y = mul(part, factor);
      if (task.round_first) y = Type::rounded(y);
      return mul(add(offset, scale), y);
    };
    for (c = 0; c < whole; c += 16) Type::put(out + c, normal(Type::get(x + c), Type::get(weight + c)));
    if (c < cols) {
      const Vec y = normal(get_part<kType>(x + c, cols - c), get_part<kType>(weight + c, cols - c));
      put_part<kType>(out + c, y, cols - c);
    }
  }
}

template <ElementType kType>
void rotate_of(const RotateTask& task) {
  using Type = Elements<kType>;
  using Storage = typename Type::Storage;
  const std::int64_t half = task.width / 2;
  const std::int64_t second =
      task.angles == task.width ? half : 0;  // offset of the angle of the second element of a pair
  for (std::int64_t t = 0; t < task.tokens; ++t) {
    const Storage* cos = static_cast<const Storage*>(task.cos) + t * task.angles;
    const Storage* sin = static_cast<const Storage*>(task.sin) + t * task.angles;
    for (std::int64_t h = 0; h < task.heads; ++h) {
      const Storage* x = static_cast<const Storage*>(task.x) + t * task.token_stride + h * task.head_stride;
      Storage* out = static_cast<Storage*>(task.out) + (t * task.heads + h) * task.dim;
      const auto turn = [&](std::int64_t i, auto get, auto put) __attribute__((always_inline)) {
        const Vec a = get(x + i);
        const Vec b = get(x + half + i);
        const Vec low = Type::rounded(mul(a, get(cos + i)));
        const Vec high = Type::rounded(mul(b, get(cos + second + i)));
        put(out + i, sub(low, Type::rounded(mul(b, get(sin + i)))));
        put(out + half + i, add(high, Type::rounded(mul(a, get(sin + second + i)))));
      };
      std::int64_t i = 0;
      for (; i + 16 <= half; i += 16) {
        turn(
            i, [](const Storage* from) { return Type::get(from); },
            [](Storage* to, Vec v) { Type::put(to, v); });
      }
      if (i < half) {
        const std::int64_t left = half - i;
        turn(
            i, [left](const Storage* from) { return get_part<kType>(from, left); },
            [left](Storage* to, Vec v) { put_part<kType>(to, v, left); });
      }
      for (std::int64_t d = task.width; d < task.dim; ++d) out[d] = x[d];
    }
  }
}

template <ElementType kType, ElementType kWeightType>
void route_of(const RouteTask& task, std::int64_t begin, std::int64_t end) {
  using Type = Elements<kType>;
  using Storage = typename Type::Storage;
  using Weight = Elements<kWeightType>;
  using WeightStorage = typename Weight::Storage;
  const std::int64_t hidden = task.hidden;
  for (std::int64_t e = begin; e < end; ++e) {
    const WeightStorage* weight = static_cast<const WeightStorage*>(task.weight) + e * hidden;
    for (std::int64_t t = 0; t < task.tokens; ++t) {
      const Storage* x = static_cast<const Storage*>(task.x) + t * hidden;
      Vec sums[4] = {zero(), zero(), zero(), zero()};
      std::int64_t c = 0;
      for (; c + 64 <= hidden; c += 64) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          sums[i] = fma(Type::get(x + c + 16 * i), Weight::get(weight + c + 16 * i), sums[i]);
        }
      }
      for (; c + 16 <= hidden; c += 16) sums[0] = fma(Type::get(x + c), Weight::get(weight + c), sums[0]);
      if (c < hidden) {
        sums[1] =
            fma(get_part<kType>(x + c, hidden - c), get_part<kWeightType>(weight + c, hidden - c), sums[1]);
      }
      float sum = lane_sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
      if (task.bias != nullptr) {
        float lanes[16];
        store(lanes, get_part<kWeightType>(static_cast<const WeightStorage*>(task.bias) + e, 1));
        sum += lanes[0];
      }
      if (task.logits_type == ElementType::kFloat32) {
        static_cast<float*>(task.logits)[t * task.experts + e] = sum;
      } else {
        put_part<kType>(static_cast<Storage*>(task.logits) + t * task.experts + e, set1(sum), 1);
      }
    }
  }
}

void exponentials(float* x, std::int64_t count, float shift) {
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) store(x + i, exp(sub(load(x + i), set1(shift))));
  if (i < count) {
    const Vec tail = exp(sub(get_part<ElementType::kFloat32>(x + i, count - i), set1(shift)));
    put_part<ElementType::kFloat32>(x + i, tail, count - i);
  }
}

void rms_norm(const NormTask& task, std::int64_t begin, std::int64_t end) {
  for_type(task.type, [&](auto tag) { rms_norm_of<decltype(tag)::kType>(task, begin, end); });
}
void rotate(const RotateTask& task) {
  for_type(task.type, [&](auto tag) { rotate_of<decltype(tag)::kType>(task); });
}
void attend_queries(const AttendTask& task, const AttendShape& shape, float* rows) {
  for_type(task.type, [&](auto tag) { attend_queries_of<decltype(tag)::kType>(task, shape, rows); });
}
void attend_unit(const AttendTask& task, const AttendShape& shape, const float* queries, std::int64_t head,
                 std::int64_t index, float* scratch, float* partials) {
  if (task.packed) return attend_unit_of<PackedRows>(task, shape, queries, head, index, scratch, partials);
  for_type(task.type, [&](auto tag) {
    attend_unit_of<PlainRows<decltype(tag)::kType>>(task, shape, queries, head, index, scratch, partials);
  });
}
void attend_sum(const AttendTask& task, const AttendShape& shape, float* partials) {
  for_type(task.type, [&](auto tag) { attend_sum_of<decltype(tag)::kType>(task, shape, partials); });
}
void route(const RouteTask& task, std::int64_t begin, std::int64_t end) {
  for_type(task.type, [&](auto tag) {
    constexpr ElementType kType = decltype(tag)::kType;
    if (task.weight_type == kType) return route_of<kType, kType>(task, begin, end);
    route_of<kType, ElementType::kFloat32>(task, begin, end);
  });
}

template <ElementType kType>
void widen_of(const void* from, std::int64_t count, float* to) {
  const auto* x = static_cast<const typename Elements<kType>::Storage*>(from);
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) store(to + i, Elements<kType>::get(x + i));
  if (i < count) put_part<ElementType::kFloat32>(to + i, get_part<kType>(x + i, count - i), count - i);
}
template <ElementType kType>
void narrow_of(const float* from, std::int64_t count, void* to) {
  auto* out = static_cast<typename Elements<kType>::Storage*>(to);
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) Elements<kType>::put(out + i, load(from + i));
  if (i < count) put_part<kType>(out + i, get_part<ElementType::kFloat32>(from + i, count - i), count - i);
}
template <ElementType kType>
void add_of(const float* x, std::int64_t count, void* to) {
  using Type = Elements<kType>;
  auto* out = static_cast<typename Type::Storage*>(to);
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) Type::put(out + i, add(Type::get(out + i), Type::rounded(load(x + i))));
  if (i < count) {
    const Vec part = Type::rounded(get_part<ElementType::kFloat32>(x + i, count - i));
    put_part<kType>(out + i, add(get_part<kType>(out + i, count - i), part), count - i);
  }
}
void pack_rows(const PackTask& task, std::int64_t begin, std::int64_t end) {
  for_type(task.type, [&](auto tag) { pack_rows_of<decltype(tag)::kType>(task, begin, end); });
}
void unpack_rows(const PackTask& task, std::int64_t begin, std::int64_t end) {
  for_type(task.type, [&](auto tag) { unpack_rows_of<decltype(tag)::kType>(task, begin, end); });
}
void widen(ElementType type, const void* from, std::int64_t count, float* to) {
  for_type(type, [&](auto tag) { widen_of<decltype(tag)::kType>(from, count, to); });
}
void narrow(ElementType type, const float* from, std::int64_t count, void* to) {
  for_type(type, [&](auto tag) { narrow_of<decltype(tag)::kType>(from, count, to); });
}
void add_elements(ElementType type, const float* x, std::int64_t count, void* out) {
  for_type(type, [&](auto tag) { add_of<decltype(tag)::kType>(x, count, out); });
}

const DecodeKernels kDecode = {rms_norm,      rotate,         attend_queries, attend_unit, attend_sum,
                               attend_prompt, pack_rows,      unpack_rows,    route,       exponentials,
                               widen,         narrow,         add_elements,   delta,       latent_queries,
                               latent_values, mamba_convolve, mamba_heads,    mamba_norm,  short_convolve};
