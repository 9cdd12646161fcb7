// Parts of a token of a Mamba-2 mixer, over the Vec of one instruction set; see decode_api.h. Included inside
// the anonymous namespace of the files isa/*.cc, after convolve.inc.h.

template <ElementType kType>
void mamba_convolve_of(const MambaTask& task, std::int64_t begin, std::int64_t end) {
  const ConvolveTask taps{task.taps, task.row, task.weights, task.conv_biases, task.before};
  const std::int64_t inner = task.heads * task.head_dim;  // of the gates, which come first
  convolve_of<kType>(taps, inner + begin, begin, end - begin, task.mixed + begin);
}

template <ElementType kType>
void mamba_heads_of(const MambaTask& task, std::int64_t begin, std::int64_t end) {
  using Type = Elements<kType>;
  const std::int64_t inner = task.heads * task.head_dim, size = task.state_size;
  const std::int64_t whole = size / 16 * 16, each = task.heads / task.groups;
  const auto rounded = [](float x) {
    float lanes[16];
    store(lanes, Type::rounded(set1(x)));
    return lanes[0];
  };
  for (std::int64_t head = begin; head < end; ++head) {
    const float* x = task.mixed + head * task.head_dim;
    const float* b = task.mixed + inner + head / each * size;
    const float* c = b + task.groups * size;
    const std::int64_t step_at = 2 * inner + 2 * task.groups * size + head;
    const float a = rounded(element_of<kType>(task.row, step_at) + element_of<kType>(task.step_biases, head));
    const float step = rounded(a > 20.0f ? a : ::log1pf(::expf(a)));
    const float kept = ::expf(-step * ::expf(element_of<kType>(task.log_rates, head)));
    const float skip = element_of<kType>(task.skips, head);
    const Vec factor = set1(kept);
    for (std::int64_t p = 0; p < task.head_dim; ++p) {
      float* row = task.state + (head * task.head_dim + p) * size;
      const float added = step * x[p];
      const Vec change = set1(added);
      Vec sum = zero();
      std::int64_t n = 0;
      for (; n < whole; n += 16) {
        const Vec next = fma(change, load(b + n), mul(load(row + n), factor));
        store(row + n, next);
        sum = fma(next, load(c + n), sum);
      }
      float read = lane_sum(sum);
      for (; n < size; ++n) {
        row[n] = added * b[n] + row[n] * kept;
        read += row[n] * c[n];
      }
      task.made[head * task.head_dim + p] = rounded(rounded(read) + rounded(x[p] * skip));
    }
  }
}

template <ElementType kType>
void mamba_norm_of(const MambaTask& task, std::int64_t begin, std::int64_t end) {
  using Type = Elements<kType>;
  using Storage = typename Type::Storage;
  const Storage* gates = static_cast<const Storage*>(task.row);
  const Storage* weights = static_cast<const Storage*>(task.norm);
  Storage* out = static_cast<Storage*>(task.out);
  const std::int64_t width = task.norm_group;
  for (std::int64_t group = begin; group < end; ++group) {
    const std::int64_t first = group * width;
    float* made = task.made + first;
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
void mamba_heads(const MambaTask& task, std::int64_t begin, std::int64_t end) {
  for_type(task.type, [&](auto tag) { mamba_heads_of<decltype(tag)::kType>(task, begin, end); });
}
void mamba_norm(const MambaTask& task, std::int64_t begin, std::int64_t end) {
  for_type(task.type, [&](auto tag) { mamba_norm_of<decltype(tag)::kType>(task, begin, end); });
}
