// Parts of tokens of a Mamba-2 mixer, over the Vec of one instruction set; see decode_api.h. Included inside
// the anonymous namespace of the files isa/*.cc, after convolve.inc.h.

template <ElementType kType>
void mamba_convolve_of(const MambaTask& task, std::int64_t begin, std::int64_t end) {
  const ConvolveTask taps{task.taps, task.row, task.weights, task.conv_biases, task.before};
  const std::int64_t from = mamba_inner(task) + begin;  // the gates come first
  convolve_rows_of<kType>(taps, from, begin, end - begin, task.tokens, mamba_cols(task), task.mixed + begin,
                          mamba_channels(task));
}

// Vecs of a row of a state that stay in registers.
#if defined(__AVX512F__)
static constexpr int kScanVecs = 4;
#else
static constexpr int kScanVecs = 2;
#endif

// What some tokens do to the states of a head. Keys and queries lie side by side, in the order in which they
// are read: for each part of kScanVecs Vecs of columns, then for each Vec behind these, those of all tokens.
struct MambaScan {
  std::int64_t tokens, size;
  const float* pairs;    // [size / width, tokens, 2, width] for both widths
  const float* changes;  // [head_dim, tokens]: steps times elements
  const float* kept;     // [tokens]
};

// The rest of a state that is no whole Vec.
static constexpr std::int64_t whole_columns(std::int64_t size) { return size / 16 * 16; }

// Calls body(first column, Vecs) for the parts of `size` columns.
template <class Body>
MOECHAT_INLINE void for_columns(std::int64_t size, const Body& body) {
  std::int64_t n = 0;
  for (; n + 16 * kScanVecs <= size; n += 16 * kScanVecs) body(n, kScanVecs);
  for (; n + 16 <= size; n += 16) body(n, 1);
}

// kVecs Vecs from column `n` on of kRows rows, which belong to elements `p` and on: changes them by all
// tokens, and adds to `sums` [kRows, kMambaTokens] what they give.
template <int kRows, int kVecs>
MOECHAT_INLINE void scan_columns(const MambaScan& scan, std::int64_t p, std::int64_t n, float* state,
                                 Vec* sums) {
  Vec held[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVecs; ++i) held[r][i] = load(state + r * scan.size + n + 16 * i);
  }
  const float* pair = scan.pairs + 2 * n * scan.tokens;
  const float* changes = scan.changes + p * scan.tokens;
  for (std::int64_t t = 0; t < scan.tokens; ++t) {
    const Vec factor = set1(scan.kept[t]);
    Vec change[kRows], sum[kRows];
    for (int r = 0; r < kRows; ++r) {
      change[r] = set1(changes[r * scan.tokens + t]);
      sum[r] = sums[r * kMambaTokens + t];
    }
    for (int i = 0; i < kVecs; ++i) {
      const Vec key = load(pair + 16 * i), query = load(pair + 16 * (kVecs + i));
      for (int r = 0; r < kRows; ++r) {
        held[r][i] = fma(change[r], key, mul(held[r][i], factor));
        sum[r] = fma(held[r][i], query, sum[r]);
      }
    }
    for (int r = 0; r < kRows; ++r) sums[r * kMambaTokens + t] = sum[r];
    pair += 2 * 16 * kVecs;
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVecs; ++i) store(state + r * scan.size + n + 16 * i, held[r][i]);
  }
}

// The whole Vecs of kRows rows: what they give, reads [kRows, kMambaTokens].
template <int kRows>
void scan_rows(const MambaScan& scan, std::int64_t p, float* state, float* reads) {
  Vec sums[kRows * kMambaTokens];
  for (Vec& sum : sums) sum = zero();
  for_columns(scan.size, [&](std::int64_t n, int vecs) __attribute__((always_inline)) {
    if (vecs == kScanVecs) {
      scan_columns<kRows, kScanVecs>(scan, p, n, state, sums);
    } else {
      scan_columns<kRows, 1>(scan, p, n, state, sums);
    }
  });
  for (int r = 0; r < kRows; ++r) {
    const std::int64_t from = r * kMambaTokens;
    std::int64_t t = 0;
    for (; t + 16 <= scan.tokens; t += 16) store(reads + from + t, lane_sums(sums + from + t));
    for (; t < scan.tokens; ++t) reads[from + t] = lane_sum(sums[from + t]);
  }
}

template <ElementType kType>
void mamba_heads_of(const MambaTask& task, std::int64_t begin, std::int64_t end, float* scratch) {
  using Type = Elements<kType>;
  using Storage = typename Type::Storage;
  const std::int64_t inner = mamba_inner(task), channels = mamba_channels(task), size = task.state_size;
  const std::int64_t each = task.heads / task.groups, dim = task.head_dim, tokens = task.tokens;
  const auto rounded = [](float x) {
    float lanes[16];
    store(lanes, Type::rounded(set1(x)));
    return lanes[0];
  };
  float kept[kMambaTokens], reads[2 * kMambaTokens];
  float* pairs = scratch;
  float* changes = pairs + 2 * tokens * size;
  float* found = changes + tokens * dim;  // [tokens, head_dim]
  for (std::int64_t head = begin; head < end; ++head) {
    const float* elements = task.mixed + head * dim;  // of the first token
    const float* keys = task.mixed + inner + head / each * size;
    const float* queries = keys + task.groups * size;
    const float bias = element_of<kType>(task.step_biases, head);
    const float rate = ::expf(element_of<kType>(task.log_rates, head));
    for (std::int64_t t = 0; t < tokens; ++t) {
      const Storage* row = static_cast<const Storage*>(task.row) + t * mamba_cols(task);
      const float a = rounded(element_of<kType>(row, inner + channels + head) + bias);
      const float whole = rounded(a > 20.0f ? a : ::log1pf(::expf(a)));
      const float step = whole < task.least_step ? rounded(task.least_step)
                                                 : rounded(whole > task.most_step ? task.most_step : whole);
      kept[t] = ::expf(-step * rate);
      for (std::int64_t p = 0; p < dim; ++p) changes[p * tokens + t] = step * elements[t * channels + p];
    }
    const float* const both[] = {keys, queries};
    for_columns(size, [&](std::int64_t n, int vecs) {
      float* pair = pairs + 2 * n * tokens;
      for (std::int64_t t = 0; t < tokens; ++t) {
        for (const float* from : both) {
          for (int i = 0; i < vecs; ++i, pair += 16) store(pair, load(from + t * channels + n + 16 * i));
        }
      }
    });
    const MambaScan scan{tokens, size, pairs, changes, kept};
    for (std::int64_t p = 0; p < dim; p += 2) {
      const std::int64_t rows = p + 2 <= dim ? 2 : 1;
      float* state = task.state + (head * dim + p) * size;
      if (rows == 2) {
        scan_rows<2>(scan, p, state, reads);
      } else {
        scan_rows<1>(scan, p, state, reads);
      }
      for (std::int64_t r = 0; r < rows; ++r) {
        float* row = state + r * size;
        for (std::int64_t t = 0; t < tokens; ++t) {
          float read = reads[r * kMambaTokens + t];
          for (std::int64_t n = whole_columns(size); n < size; ++n) {
            row[n] = changes[(p + r) * tokens + t] * keys[t * channels + n] + row[n] * kept[t];
            read += row[n] * queries[t * channels + n];
          }
          found[t * dim + p + r] = read;
        }
      }
    }
    const Vec skip = set1(element_of<kType>(task.skips, head));
    const auto skipped = [&](Vec read, Vec part) __attribute__((always_inline)) {
      return Type::rounded(add(Type::rounded(read), Type::rounded(mul(part, skip))));
    };
    for (std::int64_t t = 0; t < tokens; ++t) {
      const float* x = elements + t * channels;
      const float* row = found + t * dim;
      float* out = task.made + t * inner + head * dim;
      std::int64_t p = 0;
      for (; p + 16 <= dim; p += 16) store(out + p, skipped(load(row + p), load(x + p)));
      if (p < dim) {
        constexpr ElementType kFloat = ElementType::kFloat32;
        const Vec read = get_part<kFloat>(row + p, dim - p), part = get_part<kFloat>(x + p, dim - p);
        put_part<kFloat>(out + p, skipped(read, part), dim - p);
      }
    }
  }
}

template <ElementType kType>
void mamba_norm_of(const MambaTask& task, std::int64_t begin, std::int64_t end) {
  using Type = Elements<kType>;
  using Storage = typename Type::Storage;
  const std::int64_t width = task.norm_group, inner = mamba_inner(task), groups = inner / width;
  for (std::int64_t unit = begin; unit < end; ++unit) {
    const std::int64_t t = unit / groups, first = unit % groups * width;
    const Storage* gates = static_cast<const Storage*>(task.row) + t * mamba_cols(task);
    const Storage* weights = static_cast<const Storage*>(task.norm);
    Storage* out = static_cast<Storage*>(task.out) + t * inner;
    float* made = task.made + t * inner + first;
    Vec squares = zero();
    std::int64_t i = 0;
    const auto gated = [&](Vec x, Vec gate)
                           __attribute__((always_inline)) { return mul(x, mul(gate, sigmoid(gate))); };
    for (; i + 16 <= width; i += 16) {
      const Vec part = gated(load(made + i), Type::get(gates + first + i));
      store(made + i, part);
      squares = fma(part, part, squares);
    }
    if (i < width) {
      const Vec part = gated(get_part<ElementType::kFloat32>(made + i, width - i),
                             get_part<kType>(gates + first + i, width - i));
      put_part<ElementType::kFloat32>(made + i, part, width - i);
      squares = fma(part, part, squares);
    }
    const float mean = lane_sum(squares) / static_cast<float>(width);
    const Vec factor = set1(1.0f / ::sqrtf(mean + task.eps));
    for (i = 0; i + 16 <= width; i += 16) {
      const Vec normed = Type::rounded(mul(load(made + i), factor));
      Type::put(out + first + i, mul(Type::get(weights + first + i), normed));
    }
    if (i < width) {
      const std::int64_t left = width - i;
      const Vec normed = Type::rounded(mul(get_part<ElementType::kFloat32>(made + i, left), factor));
      put_part<kType>(out + first + i, mul(get_part<kType>(weights + first + i, left), normed), left);
    }
  }
}

void mamba_convolve(const MambaTask& task, std::int64_t begin, std::int64_t end) {
  for_type(task.type, [&](auto tag) { mamba_convolve_of<decltype(tag)::kType>(task, begin, end); });
}
void mamba_heads(const MambaTask& task, std::int64_t begin, std::int64_t end, float* scratch) {
  for_type(task.type, [&](auto tag) { mamba_heads_of<decltype(tag)::kType>(task, begin, end, scratch); });
}
void mamba_norm(const MambaTask& task, std::int64_t begin, std::int64_t end) {
  for_type(task.type, [&](auto tag) { mamba_norm_of<decltype(tag)::kType>(task, begin, end); });
}
