// Short convolutions over the last tokens, over the Vec of one instruction set; see decode_api.h. Included
// inside the anonymous namespace of the files isa/*.cc, after elements.inc.h.

// Convolution of `count` channels from `channel` on, whose new elements begin at `from`: out = silu(sum of
// the last `taps` elements times their weights, and bias), rounded before and after. The elements before move
// on by one.
template <ElementType kType>
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
    store(results, Type::rounded(mul(total, sigmoid(total))));
    for (std::int64_t lane = 0; lane < lanes; ++lane) out[i + lane] = results[lane];
  }
}

template <ElementType kType>
float element_of(const void* row, std::int64_t index) {
  float lanes[16];
  store(lanes, get_part<kType>(static_cast<const typename Elements<kType>::Storage*>(row) + index, 1));
  return lanes[0];
}
