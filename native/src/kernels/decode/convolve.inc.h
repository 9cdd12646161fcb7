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
