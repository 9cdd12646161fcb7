// Linear attention by the gated delta rule over the Vec of one instruction set; see decode_api.h. Included
// inside the anonymous namespace of the files isa/*.cc, after convolve.inc.h.

// Columns of a state that are computed at a time: eight Vecs stay in registers.
static constexpr std::int64_t kDeltaColumns = 128;

// x * factor / |x|.
inline void to_unit(float* x, std::int64_t count, float factor) {
  Vec sums = zero();
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) sums = fma(load(x + i), load(x + i), sums);
  if (i < count) {
    const Vec part = get_part<ElementType::kFloat32>(x + i, count - i);
    sums = fma(part, part, sums);
  }
  const float scale = factor / ::sqrtf(lane_sum(sums) + kDeltaUnitEps);
  for (i = 0; i < count; ++i) x[i] *= scale;
}

// `vecs` Vecs of columns of a state: decays it, adds what the token changes, and reads it.
template <int kVecs>
void change_state(float* state, std::int64_t stride, const float* q, const float* k, std::int64_t rows,
                  const float* v, float kept, float beta, float* out) {
  Vec found[kVecs];
  for (int i = 0; i < kVecs; ++i) found[i] = zero();
  for (std::int64_t row = 0; row < rows; ++row) {
    const Vec key = set1(k[row]);
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) found[i] = fma(load(state + row * stride + 16 * i), key, found[i]);
  }
  Vec change[kVecs], read[kVecs];
  const Vec factor = set1(kept), share = set1(beta);
  for (int i = 0; i < kVecs; ++i) {
    change[i] = mul(fnma(found[i], factor, load(v + 16 * i)), share);
    read[i] = zero();
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    const Vec key = set1(k[row]), query = set1(q[row]);
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) {
      float* place = state + row * stride + 16 * i;
      const Vec next = fma(key, change[i], mul(load(place), factor));
      store(place, next);
      read[i] = fma(next, query, read[i]);
    }
  }
  for (int i = 0; i < kVecs; ++i) store(out + 16 * i, read[i]);
}

// The same with a decay for each row.
template <int kVecs>
void change_rows(float* state, std::int64_t stride, const float* q, const float* k, const float* kept,
                 std::int64_t rows, const float* v, float beta, float* out) {
  Vec found[kVecs];
  for (int i = 0; i < kVecs; ++i) found[i] = zero();
  for (std::int64_t row = 0; row < rows; ++row) {
    const Vec key = set1(k[row] * kept[row]);
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) found[i] = fma(load(state + row * stride + 16 * i), key, found[i]);
  }
  Vec change[kVecs], read[kVecs];
  const Vec share = set1(beta);
  for (int i = 0; i < kVecs; ++i) {
    change[i] = mul(sub(load(v + 16 * i), found[i]), share);
    read[i] = zero();
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    const Vec key = set1(k[row]), query = set1(q[row]), factor = set1(kept[row]);
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) {
      float* place = state + row * stride + 16 * i;
      const Vec next = fma(key, change[i], mul(load(place), factor));
      store(place, next);
      read[i] = fma(next, query, read[i]);
    }
  }
  for (int i = 0; i < kVecs; ++i) store(out + 16 * i, read[i]);
}

// What a head keeps of each row of its state.
template <ElementType kType>
void kept_rows(const DeltaTask& task, std::int64_t head, float* kept) {
  const float rate = ::expf(static_cast<const float*>(task.log_rates)[head]);
  const float* biases = static_cast<const float*>(task.biases) + head * task.k_dim;
  const std::int64_t from = task.decay.start + head * task.decay.stride;
  for (std::int64_t i = 0; i < task.k_dim; ++i) {
    const float a = element_of<kType>(task.decay_row, from + i) + biases[i];
    kept[i] = ::expf(-rate * (a > 20.0f ? a : ::log1pf(::expf(a))));
  }
}

template <ElementType kType>
void delta_of(const DeltaTask& task, std::int64_t begin, std::int64_t end, float* scratch) {
  using Type = Elements<kType>;
  using Storage = typename Type::Storage;
  const std::int64_t k_dim = task.k_dim, v_dim = task.v_dim, group = task.group;
  float* q = scratch;
  float* k = q + k_dim;
  float* v = k + k_dim;
  float* made = v + v_dim;
  float* kept_of = made + v_dim;  // of the rows of a state
  const ConvolveTask taps{task.taps, task.mixed, task.weights, nullptr, task.before};
  for (std::int64_t head = begin; head < end; ++head) {
    const std::int64_t keys = task.k_heads * k_dim;
    convolve_of<kType>(taps, task.q.start + head * task.q.stride, head * k_dim, k_dim, q);
    convolve_of<kType>(taps, task.k.start + head * task.k.stride, keys + head * k_dim, k_dim, k);
    to_unit(q, k_dim, 1.0f / ::sqrtf(static_cast<float>(k_dim)));
    to_unit(k, k_dim, 1.0f);
    for (std::int64_t inner = 0; inner < group; ++inner) {
      const std::int64_t value = head * group + inner;
      const std::int64_t from = task.v.start + head * task.v.stride + inner * v_dim;
      convolve_of<kType>(taps, from, 2 * keys + value * v_dim, v_dim, v);
      const float b = element_of<kType>(task.beta_row, task.beta.start + head * task.beta.stride + inner);
      float lanes[16];
      store(lanes, Type::rounded(set1(1.0f / (1.0f + ::expf(-b)))));
      float kept = 0.0f;
      if (task.by_channel) {
        kept_rows<kType>(task, head, kept_of);
      } else {
        const std::int64_t at = task.decay.start + head * task.decay.stride + inner;
        const float a = element_of<kType>(task.decay_row, at) + element_of<kType>(task.biases, value);
        const float rate = ::expf(element_of<kType>(task.log_rates, value));
        kept = ::expf(-rate * (a > 20.0f ? a : ::log1pf(::expf(a))));
      }
      float* state = task.state + value * k_dim * v_dim;
      for (std::int64_t column = 0; column < v_dim; column += kDeltaColumns) {
        std::int64_t done = column;
        if (column + kDeltaColumns <= v_dim) {
          if (task.by_channel) {
            change_rows<8>(state + done, v_dim, q, k, kept_of, k_dim, v + done, lanes[0], made + done);
          } else {
            change_state<8>(state + done, v_dim, q, k, k_dim, v + done, kept, lanes[0], made + done);
          }
          continue;
        }
        for (; done < v_dim; done += 16) {
          if (task.by_channel) {
            change_rows<1>(state + done, v_dim, q, k, kept_of, k_dim, v + done, lanes[0], made + done);
          } else {
            change_state<1>(state + done, v_dim, q, k, k_dim, v + done, kept, lanes[0], made + done);
          }
        }
      }
      Vec squares = zero();
      for (std::int64_t i = 0; i < v_dim; i += 16) {
        const Vec part = Type::rounded(load(made + i));
        store(made + i, part);
        squares = fma(part, part, squares);
      }
      const float mean = lane_sum(squares) / static_cast<float>(v_dim);
      const Vec factor = set1(1.0f / ::sqrtf(mean + task.eps));
      const Storage* norm = static_cast<const Storage*>(task.norm);
      const Storage* gate = static_cast<const Storage*>(task.gate_row) + task.gate.start +
                            head * task.gate.stride + inner * v_dim;
      Storage* out = static_cast<Storage*>(task.out) + value * v_dim;
      for (std::int64_t i = 0; i < v_dim; i += 16) {
        const Vec z = Type::get(gate + i);
        if (task.by_channel) {
          const Vec whole = mul(Type::get(norm + i), mul(load(made + i), factor));
          Type::put(out + i, mul(whole, sigmoid(z)));
          continue;
        }
        const Vec normed = Type::rounded(mul(load(made + i), factor));
        Type::put(out + i, mul(Type::rounded(mul(Type::get(norm + i), normed)), mul(z, sigmoid(z))));
      }
    }
  }
}

void delta(const DeltaTask& task, std::int64_t begin, std::int64_t end, float* scratch) {
  for_type(task.type, [&](auto tag) { delta_of<decltype(tag)::kType>(task, begin, end, scratch); });
}
