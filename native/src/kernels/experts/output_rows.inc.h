// Parts shared by the kernels: choice of an instantiation, prefetching, the term of one group of integers,
// and adding or storing 16 output rows. Included inside the anonymous namespace of one instruction set.

// Returns function<bits, planes of the activations>(...).
#define MOECHAT_BY_BITS(function, bits, activation_bits, ...)                                   \
  switch (bits) {                                                                               \
    case 2:                                                                                     \
      return activation_bits == 16 ? function<2, 2>(__VA_ARGS__) : function<2, 1>(__VA_ARGS__); \
    case 3:                                                                                     \
      return activation_bits == 16 ? function<3, 2>(__VA_ARGS__) : function<3, 1>(__VA_ARGS__); \
    case 4:                                                                                     \
      return activation_bits == 16 ? function<4, 2>(__VA_ARGS__) : function<4, 1>(__VA_ARGS__); \
    default:                                                                                    \
      return activation_bits == 16 ? function<8, 2>(__VA_ARGS__) : function<8, 1>(__VA_ARGS__); \
  }

MOECHAT_INLINE void prefetch_bytes(const unsigned char* at, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 3);
}

// Returns acc + the term of one group for 16 rows, see QuantisedRows in kernel_api.h.
MOECHAT_INLINE Vec group_term(Vec scale, Vec zeros, VecI isum, float x_scale, float x_sum, Vec acc) {
  return fma(mul(scale, set1(x_scale)), fnma(zeros, set1(x_sum), to_float(isum)), acc);
}

// add_output() for the last tile of a row. Not inlined, so that every instantiation calls the same code.
__attribute__((noinline)) void add_last_output(float* out, std::int64_t valid, float weight,
                                               const float (&partial)[16]) {
  float lanes[16] = {};
  for (std::int64_t i = 0; i < valid; ++i) lanes[i] = out[i];
  store(lanes, fma(set1(weight), load(partial), load(lanes)));
  for (std::int64_t i = 0; i < valid; ++i) out[i] = lanes[i];
}

// out[0, 16) += weight * partial for one item; only the first `valid` rows exist.
MOECHAT_INLINE void add_output(float* out, std::int64_t valid, float weight, Vec partial) {
  if (valid >= kTileRows) {
    store(out, fma(set1(weight), partial, load(out)));
    return;
  }
  float lanes[16];
  store(lanes, partial);
  add_last_output(out, valid, weight, lanes);
}

// Stores rows [row, row + 16) of a linear_forward for one token; the last tile may have fewer rows.
void store_rows(const LinearTask& task, std::int64_t token, std::int64_t row, Vec value) {
  float* out = task.out + token * task.rows + row;
  const std::int64_t valid = task.rows - row;
  if (valid >= kTileRows) {
    store(out, task.bias != nullptr ? add(value, load(task.bias + row)) : value);
    return;
  }
  float lanes[16];
  store(lanes, value);
  for (std::int64_t i = 0; i < valid; ++i)
    out[i] = task.bias != nullptr ? lanes[i] + task.bias[row + i] : lanes[i];
}
