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

// Tokens of one head of values.
struct DeltaRows {
  std::int64_t tokens, k_dim, v_dim;
  const float* q;     // [tokens, k_dim]
  const float* k;     // [tokens, k_dim]
  const float* v;     // [tokens, v_dim]
  const float* kept;  // [tokens], or by channel [tokens, k_dim]
  const float* beta;  // [tokens]
  float* made;        // [tokens, v_dim]
};

// Changes kVecs Vecs of columns of a state by token `t`, and reads them. With `kMore` also makes what they
// have for the key of the next token, in the same pass.
template <int kVecs, bool kByChannel, bool kMore>
void change_columns(float* state, std::int64_t stride, const DeltaRows& rows, std::int64_t t,
                    const Vec (&change)[kVecs], Vec (&read)[kVecs], Vec (&found)[kVecs]) {
  const float* q = rows.q + t * rows.k_dim;
  const float* k = rows.k + t * rows.k_dim;
  const float* kept = rows.kept + (kByChannel ? t * rows.k_dim : t);
  Vec factor = set1(kept[0]);
  for (int i = 0; i < kVecs; ++i) read[i] = found[i] = zero();
  for (std::int64_t row = 0; row < rows.k_dim; ++row) {
    const Vec key = set1(k[row]), query = set1(q[row]);
    if (kByChannel) factor = set1(kept[row]);
    Vec next_key = zero();
    if (kMore)
      next_key = set1(kByChannel ? k[rows.k_dim + row] * kept[rows.k_dim + row] : k[rows.k_dim + row]);
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) {
      float* place = state + row * stride + 16 * i;
      const Vec next = fma(key, change[i], mul(load(place), factor));
      store(place, next);
      read[i] = fma(next, query, read[i]);
      if (kMore) found[i] = fma(next, next_key, found[i]);
    }
  }
}

// kVecs Vecs of columns of a state, which are those from `column` on of values and results: for each token
// decays them, adds what the token changes, and reads them.
template <int kVecs, bool kByChannel>
void change_state(float* state, std::int64_t stride, const DeltaRows& rows, std::int64_t column) {
  Vec found[kVecs], change[kVecs], read[kVecs];
  for (int i = 0; i < kVecs; ++i) found[i] = zero();
  for (std::int64_t row = 0; row < rows.k_dim; ++row) {
    const Vec key = set1(kByChannel ? rows.k[row] * rows.kept[row] : rows.k[row]);
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) found[i] = fma(load(state + row * stride + 16 * i), key, found[i]);
  }
  for (std::int64_t t = 0; t < rows.tokens; ++t) {
    const float* v = rows.v + t * rows.v_dim + column;
    const Vec share = set1(rows.beta[t]), factor = set1(kByChannel ? 1.0f : rows.kept[t]);
    for (int i = 0; i < kVecs; ++i) {
      const Vec value = load(v + 16 * i);
      change[i] = mul(kByChannel ? sub(value, found[i]) : fnma(found[i], factor, value), share);
    }
    if (t + 1 < rows.tokens) {
      change_columns<kVecs, kByChannel, true>(state, stride, rows, t, change, read, found);
    } else {
      change_columns<kVecs, kByChannel, false>(state, stride, rows, t, change, read, found);
    }
    float* made = rows.made + t * rows.v_dim + column;
    for (int i = 0; i < kVecs; ++i) store(made + 16 * i, read[i]);
  }
}

// The same on a copy of the columns, whose lines do not compete for the same sets of the first cache.
template <int kVecs, bool kByChannel>
void change_copy(float* state, const DeltaRows& rows, std::int64_t column, float* copy) {
  constexpr std::int64_t kWidth = 16 * kVecs;
  for (std::int64_t row = 0; row < rows.k_dim; ++row) {
    for (std::int64_t i = 0; i < kWidth; i += 16) {
      store(copy + row * kWidth + i, load(state + row * rows.v_dim + column + i));
    }
  }
  change_state<kVecs, kByChannel>(copy, kWidth, rows, column);
  for (std::int64_t row = 0; row < rows.k_dim; ++row) {
    for (std::int64_t i = 0; i < kWidth; i += 16) {
      store(state + row * rows.v_dim + column + i, load(copy + row * kWidth + i));
    }
  }
}

// A whole state. copy: kDeltaPart * k_dim floats, of several tokens.
template <bool kByChannel>
void change_head(float* state, const DeltaRows& rows, float* copy) {
  std::int64_t column = 0;
  if (rows.tokens == 1) {
    for (; column + kDeltaColumns <= rows.v_dim; column += kDeltaColumns) {
      change_state<kDeltaColumns / 16, kByChannel>(state + column, rows.v_dim, rows, column);
    }
    for (; column < rows.v_dim; column += 16) {
      change_state<1, kByChannel>(state + column, rows.v_dim, rows, column);
    }
    return;
  }
  for (; column + kDeltaPart <= rows.v_dim; column += kDeltaPart) {
    change_copy<kDeltaPart / 16, kByChannel>(state, rows, column, copy);
  }
  for (; column < rows.v_dim; column += 16) change_copy<1, kByChannel>(state, rows, column, copy);
}

// What a head keeps of each row of its state.
template <ElementType kType>
void kept_rows(const DeltaTask& task, const void* decays, std::int64_t head, float* kept) {
  const float rate = ::expf(static_cast<const float*>(task.log_rates)[head]);
  const float* biases = static_cast<const float*>(task.biases) + head * task.k_dim;
  const std::int64_t from = task.decay.start + head * task.decay.stride;
  for (std::int64_t i = 0; i < task.k_dim; ++i) {
    const float a = element_of<kType>(decays, from + i) + biases[i];
    kept[i] = ::expf(-rate * (a > 20.0f ? a : ::log1pf(::expf(a))));
  }
}

// The same of a state without decays of channels.
template <ElementType kType>
float kept_state(const DeltaTask& task, const void* decays, std::int64_t head, std::int64_t inner) {
  const std::int64_t value = head * task.group + inner;
  const float a = element_of<kType>(decays, task.decay.start + head * task.decay.stride + inner) +
                  element_of<kType>(task.biases, value);
  const float rate = ::expf(element_of<kType>(task.log_rates, value));
  return ::expf(-rate * (a > 20.0f ? a : ::log1pf(::expf(a))));
}

// out [v_dim]: the norm of what a state gave, times its gates. Overwrites made.
template <ElementType kType>
void delta_norm(const DeltaTask& task, float* made, const typename Elements<kType>::Storage* gate,
                typename Elements<kType>::Storage* out) {
  using Type = Elements<kType>;
  const std::int64_t v_dim = task.v_dim;
  Vec squares = zero();
  for (std::int64_t i = 0; i < v_dim; i += 16) {
    const Vec part = Type::rounded(load(made + i));
    store(made + i, part);
    squares = fma(part, part, squares);
  }
  const float mean = lane_sum(squares) / static_cast<float>(v_dim);
  const Vec factor = set1(1.0f / ::sqrtf(mean + task.eps));
  const auto* norm = static_cast<const typename Type::Storage*>(task.norm);
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

template <ElementType kType>
void delta_of(const DeltaTask& task, std::int64_t begin, std::int64_t end, float* scratch) {
  using Type = Elements<kType>;
  using Storage = typename Type::Storage;
  const std::int64_t k_dim = task.k_dim, v_dim = task.v_dim, group = task.group;
  const std::int64_t most = task.tokens < kDeltaTokens ? task.tokens : kDeltaTokens;
  float* copy = scratch;
  float* v = copy + (task.tokens > 1 ? kDeltaPart * k_dim : 0);
  float* made = v + most * v_dim;
  float* q = made + most * v_dim;
  float* k = q + most * k_dim;
  float* kept = k + most * k_dim;  // room for those of channels
  float* beta = kept + most * k_dim;
  const auto row_of = [](const void* rows, std::int64_t at) {
    return static_cast<const Storage*>(rows) + at;
  };
  for (std::int64_t head = begin; head < end; ++head) {
    const std::int64_t keys = task.k_heads * k_dim;
    for (std::int64_t first = 0; first < task.tokens; first += most) {
      const std::int64_t tokens = task.tokens - first < most ? task.tokens - first : most;
      const ConvolveTask taps{task.taps, row_of(task.mixed, first * task.mixed_cols), task.weights, nullptr,
                              task.before};
      const auto convolve = [&](std::int64_t from, std::int64_t channel, std::int64_t count, float* out) {
        convolve_rows_of<kType>(taps, from, channel, count, tokens, task.mixed_cols, out, count);
      };
      convolve(task.q.start + head * task.q.stride, head * k_dim, k_dim, q);
      convolve(task.k.start + head * task.k.stride, keys + head * k_dim, k_dim, k);
      for (std::int64_t t = 0; t < tokens; ++t) {
        to_unit(q + t * k_dim, k_dim, 1.0f / ::sqrtf(static_cast<float>(k_dim)));
        to_unit(k + t * k_dim, k_dim, 1.0f);
      }
      for (std::int64_t inner = 0; inner < group; ++inner) {
        const std::int64_t value = head * group + inner;
        convolve(task.v.start + head * task.v.stride + inner * v_dim, 2 * keys + value * v_dim, v_dim, v);
        for (std::int64_t t = 0; t < tokens; ++t) {
          const std::int64_t beta_at = task.beta.start + head * task.beta.stride + inner;
          const float b = element_of<kType>(task.beta_row, (first + t) * task.beta_cols + beta_at);
          float lanes[16];
          store(lanes, Type::rounded(set1(1.0f / (1.0f + ::expf(-b)))));
          beta[t] = lanes[0];
          const Storage* decays = row_of(task.decay_row, (first + t) * task.decay_cols);
          if (task.by_channel) {
            kept_rows<kType>(task, decays, head, kept + t * k_dim);
          } else {
            kept[t] = kept_state<kType>(task, decays, head, inner);
          }
        }
        const DeltaRows rows{tokens, k_dim, v_dim, q, k, v, kept, beta, made};
        float* state = task.state + value * k_dim * v_dim;
        if (task.by_channel) {
          change_head<true>(state, rows, copy);
        } else {
          change_head<false>(state, rows, copy);
        }
        for (std::int64_t t = 0; t < tokens; ++t) {
          const std::int64_t gate = task.gate.start + head * task.gate.stride + inner * v_dim;
          delta_norm<kType>(
              task, made + t * v_dim, row_of(task.gate_row, (first + t) * task.gate_cols + gate),
              static_cast<Storage*>(task.out) + ((first + t) * task.k_heads * group + value) * v_dim);
        }
      }
    }
  }
}

void delta(const DeltaTask& task, std::int64_t begin, std::int64_t end, float* scratch) {
  for_type(task.type, [&](auto tag) { delta_of<decltype(tag)::kType>(task, begin, end, scratch); });
}
