// Short convolutions over the last tokens, over the Vec of one instruction set; see decode_api.h. Included
// inside the anonymous namespace of the files isa/*.cc, after elements.inc.h.

// Convolution of `count` channels from `channel` on, whose new elements begin at `from`: out = the sum of the
// last `taps` elements times their weights, and bias, rounded; if `kActivates` its silu, rounded. The
// elements before move on by one.
template <ElementType kType, bool kActivates = true>
void convolve_of(const ConvolveTask& task, std::int64_t from, std::int64_t channel, std::int64_t count,
                 float* out) {
  using Type = Elements<kType>;
  using Storage = typename Type::Storage;
  const std::int64_t taps = task.taps;
  const Storage* x = static_cast<const Storage*>(task.row) + from;
  const Storage* weights = static_cast<const Storage*>(task.weights) + channel * taps;
  const Storage* biases =
      task.biases == nullptr ? nullptr : static_cast<const Storage*>(task.biases) + channel;
  Storage* before = static_cast<Storage*>(task.before) + channel * taps;
  for (std::int64_t i = 0; i < count; ++i) {
    Storage* window = before + i * taps;
    for (std::int64_t t = 0; t + 1 < taps; ++t) window[t] = window[t + 1];
    window[taps - 1] = x[i];
  }
  float products[16 * kMostTaps];
  for (std::int64_t i = 0; i < count; i += 16) {
    const std::int64_t lanes = count - i < 16 ? count - i : 16;
    const std::int64_t all = lanes * taps;
    const Storage* windows = before + i * taps;
    const Storage* factors = weights + i * taps;
    std::int64_t c = 0;
    for (; c + 16 <= all; c += 16) store(products + c, mul(Type::get(windows + c), Type::get(factors + c)));
    if (c < all) {
      store(products + c, mul(get_part<kType>(windows + c, all - c), get_part<kType>(factors + c, all - c)));
    }
    float sums[16] = {};
    for (std::int64_t lane = 0; lane < lanes; ++lane) {
      float sum = 0.0f;
      for (std::int64_t t = 0; t < taps; ++t) sum += products[lane * taps + t];
      sums[lane] = sum;
    }
    Vec total = load(sums);
    if (biases != nullptr) total = add(total, get_part<kType>(biases + i, lanes));
    total = Type::rounded(total);
    float results[16];
    store(results, kActivates ? Type::rounded(mul(total, sigmoid(total))) : total);
    for (std::int64_t lane = 0; lane < lanes; ++lane) out[i + lane] = results[lane];
  }
}

// The same for several tokens, whose rows are `cols` elements apart: out [tokens, out_cols]. kTaps:
// task.taps, or 0: any number of them.
template <ElementType kType, int kTaps>
void convolve_lanes_of(const ConvolveTask& task, const typename Elements<kType>::Storage* x,
                       std::int64_t channel, std::int64_t lanes, std::int64_t tokens, std::int64_t cols,
                       float* out, std::int64_t out_cols) {
  using Type = Elements<kType>;
  using Storage = typename Type::Storage;
  const int taps = kTaps > 0 ? kTaps : static_cast<int>(task.taps);
  Storage* before = static_cast<Storage*>(task.before) + channel * taps;
  // Element `tap` of each channel.
  const auto column = [&](const Storage* rows, int tap) {
    Storage found[16] = {};
    for (std::int64_t lane = 0; lane < lanes; ++lane) found[lane] = rows[lane * taps + tap];
    return Type::get(found);
  };
  Vec factors[kMostTaps], window[kMostTaps + 1];
  for (int tap = 0; tap < taps; ++tap) {
    factors[tap] = column(static_cast<const Storage*>(task.weights) + channel * taps, tap);
    window[tap + 1] = column(before, tap);
  }
  const Vec bias = task.biases == nullptr
                       ? zero()
                       : get_part<kType>(static_cast<const Storage*>(task.biases) + channel, lanes);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (int tap = 0; tap < taps; ++tap) window[tap] = window[tap + 1];
    window[taps] = lanes == 16 ? Type::get(x + t * cols) : get_part<kType>(x + t * cols, lanes);
    Vec total = zero();
    for (int tap = 0; tap < taps; ++tap) total = add(total, mul(window[tap + 1], factors[tap]));
    if (task.biases != nullptr) total = add(total, bias);
    total = Type::rounded(total);
    total = Type::rounded(mul(total, sigmoid(total)));
    if (lanes == 16) {
      store(out + t * out_cols, total);
    } else {
      put_part<ElementType::kFloat32>(out + t * out_cols, total, lanes);
    }
  }
  for (int tap = 0; tap < taps; ++tap) {
    Storage found[16];
    Type::put(found, window[tap + 1]);
    for (std::int64_t lane = 0; lane < lanes; ++lane) before[lane * taps + tap] = found[lane];
  }
}

template <ElementType kType>
void convolve_rows_of(const ConvolveTask& task, std::int64_t from, std::int64_t channel, std::int64_t count,
                      std::int64_t tokens, std::int64_t cols, float* out, std::int64_t out_cols) {
  if (tokens == 1) return convolve_of<kType>(task, from, channel, count, out);
  const auto* x = static_cast<const typename Elements<kType>::Storage*>(task.row) + from;
  const auto run = task.taps == 4 ? convolve_lanes_of<kType, 4> : convolve_lanes_of<kType, 0>;
  for (std::int64_t i = 0; i < count; i += 16) {
    run(task, x + i, channel + i, count - i < 16 ? count - i : 16, tokens, cols, out + i, out_cols);
  }
}

template <ElementType kType>
float element_of(const void* row, std::int64_t index) {
  float lanes[16];
  store(lanes, get_part<kType>(static_cast<const typename Elements<kType>::Storage*>(row) + index, 1));
  return lanes[0];
}

template <ElementType kType>
void short_convolve_of(const ShortConvTask& task, std::int64_t begin, std::int64_t end) {
  using Type = Elements<kType>;
  using Storage = typename Type::Storage;
  const Storage* gate = static_cast<const Storage*>(task.row);
  const Storage* last = gate + task.channels;
  const Storage* x = last + task.channels;
  Storage* out = static_cast<Storage*>(task.out);
  for (std::int64_t c = begin; c < end; c += 16) {
    const std::int64_t lanes = end - c < 16 ? end - c : 16;
    Storage gated[16];
    float sums[16];
    put_part<kType>(gated, mul(get_part<kType>(gate + c, lanes), get_part<kType>(x + c, lanes)), lanes);
    const ConvolveTask taps{task.taps, gated, task.weights, task.biases, task.before};
    convolve_of<kType, false>(taps, 0, c, lanes, sums);
    const Vec total = get_part<ElementType::kFloat32>(sums, lanes);
    put_part<kType>(out + c, mul(get_part<kType>(last + c, lanes), total), lanes);
  }
}

void short_convolve(const ShortConvTask& task, std::int64_t begin, std::int64_t end) {
  for_type(task.type, [&](auto tag) { short_convolve_of<decltype(tag)::kType>(task, begin, end); });
}
