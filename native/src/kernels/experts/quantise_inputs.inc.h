// Quantisation of the inputs of the integer kernels, see kernel_api.h. Included inside the anonymous
// namespace of one instruction set.

// Columns of the 16 bytes of a quarter of a plane, in their order.
MOECHAT_INLINE const unsigned char* byte_order(Encoding encoding) {
  static const unsigned char orders[3][16] = {{0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15},
                                              {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15},
                                              {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};
  if (encoding == Encoding::kBits4 || encoding == Encoding::kBits6) return orders[1];
  return orders[encoding == Encoding::kBits2 || encoding == Encoding::kBits3 ? 0 : 2];
}

// Compares bit patterns: those of positive floats have the order of their values, with NaN above infinity.
MOECHAT_INLINE std::int32_t largest_pattern(const Vec (&x)[4]) {
  const VecI mask = seti(0x7fffffffu);
  const VecI top = maxi(maxi(andi(as_int(x[0]), mask), andi(as_int(x[1]), mask)),
                        maxi(andi(as_int(x[2]), mask), andi(as_int(x[3]), mask)));
  std::int32_t lanes[16];
  storei(lanes, top);
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] < lanes[i + width] ? lanes[i + width] : lanes[i];
  }
  return lanes[0];
}

MOECHAT_INLINE std::int32_t integer_sum(VecI values) {
  std::int32_t lanes[16];
  storei(lanes, values);
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

MOECHAT_INLINE void quantise_group_inputs(const Vec (&x)[4], int activation_bits, const unsigned char* order,
                                          std::int8_t* planes, float* scale, InputSums* sums) {
  const std::int32_t pattern = largest_pattern(x);
  float largest;
  __builtin_memcpy(&largest, &pattern, sizeof largest);
  const bool finite = pattern < 0x7f800000;
  if (!finite || largest < kSmallestInput) {
    __builtin_memset(planes, 0, static_cast<unsigned>(activation_bits) * 8u);
    *scale = finite ? 0.0f : __builtin_nanf("");
    *sums = InputSums{};
    return;
  }
  const float range = input_range(activation_bits);
  const Vec inverse = set1(range / largest);
  *scale = largest / range;
  VecI values[4];
  for (int i = 0; i < 4; ++i) {
    const VecI value = to_int(round_small(mul(x[i], inverse)));
    values[i] = value;
    if (activation_bits == 16) {
      const VecI high = shr_signed(addi(value, seti(128)), 8);
      store_bytes(planes + 16 * i, high, order);
      store_bytes(planes + 64 + 16 * i, subi(value, shl(high, 8)), order);
    } else {
      store_bytes(planes + 16 * i, value, order);
    }
  }
  std::int32_t quarters[4];
  for (int i = 0; i < 4; ++i) {
    quarters[i] = integer_sum(values[i]);
    sums->quarter[i] = static_cast<float>(quarters[i]);
  }
  for (int half = 0; half < 2; ++half) sums->half[half] = quarters[2 * half] + quarters[2 * half + 1];
  sums->pair =
      (static_cast<std::uint32_t>(sums->half[0]) & 0xffffu) | static_cast<std::uint32_t>(sums->half[1]) << 16;
  sums->total = static_cast<float>(sums->half[0] + sums->half[1]);
}

void quantise_rows(Encoding encoding, int activation_bits, const float* x, std::int64_t cols,
                   std::int64_t count, const QuantisedRows& to) {
  const unsigned char* order = byte_order(encoding);
  const std::int64_t groups = (cols + kGroupColumns - 1) / kGroupColumns;
  const std::int64_t bytes = std::int64_t{8} * activation_bits;
  for (std::int64_t t = 0; t < count; ++t) {
    for (std::int64_t g = 0; g < groups; ++g) {
      float padded[64];
      const float* columns = x + t * cols + g * 64;
      const std::int64_t valid = cols - g * 64;
      if (valid < 64) {
        for (std::int64_t c = 0; c < 64; ++c) padded[c] = c < valid ? columns[c] : 0.0f;
        columns = padded;
      }
      const Vec part[4] = {load(columns), load(columns + 16), load(columns + 32), load(columns + 48)};
      const std::int64_t at = t * groups + g;
      quantise_group_inputs(part, activation_bits, order, to.planes + at * bytes, to.scales + at,
                            to.sums + at);
    }
  }
}
