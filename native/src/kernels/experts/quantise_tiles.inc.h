// Quantises tiles of a matrix. Included inside the anonymous namespace of one instruction set, after the
// solvers.

// Scale and zero of 16 rows.
struct Scales {
  Vec scale;
  Vec zero;
};

MOECHAT_INLINE void find_range(const float* weights, int columns, Vec* low, Vec* high) {
  *low = *high = load(weights);
  for (int c = 1; c < columns; ++c) {
    *low = min(*low, load(weights + c * 16));
    *high = max(*high, load(weights + c * 16));
  }
}

// Of a half of a group, weights [32][16]; scale 0 where all are 0. importance: as for sum_codes.
inline Scales fit_half(const float* weights, const float* importance, int bits, Solver solver) {
  const Vec top = set1(static_cast<float>((1 << bits) - 1));
  Vec low;
  Vec high;
  find_range(weights, kHalfColumns, &low, &high);
  // Offsets cannot be below 0.
  low = min(low, zero());
  high = max(high, zero());
  const bool regress = solver == Solver::kLeastSquares;
  const GroupSolution start =
      solve_group(weights, kHalfColumns, low, high, bits, regress ? 0 : kSolverIterations);
  LeastSquares best{start.scale, start.zero, zero()};
  if (regress) {
    best.error = sum_codes(weights, importance, best.scale, best.zero, top).squares;
    fit_least_squares(weights, importance, low, sub(high, low), bits, &best);
  }
  return {select(less(low, high), best.scale, zero()), best.zero};
}

// Writes the sz of one (tile, group) of weights [64][16] and returns what it stands for in each half;
// importance: as for sum_codes, for each half, or null.
inline void fit_group(const float* weights, const float* importance, int bits, Solver solver,
                      unsigned char* sz, Scales (&halves)[2]) {
  if (!has_halves(bits)) {
    Vec low;
    Vec high;
    find_range(weights, 64, &low, &high);
    // At 8 bits the solvers would differ by less than the rounding of the scale. At 6 both move the zero
    // only: the best of ranges from 0.92 of the whole one on would make errors smaller by 2 %.
    const int iterations = bits == 8 && solver == Solver::kLeastSquares ? 0 : kSolverIterations;
    const GroupSolution best = solve_group(weights, 64, low, high, bits, iterations);
    const Vec zeros = add(best.zero, zero());  // -0 becomes +0
    store_fp16(sz, best.scale);
    store_fp16(sz + 32, zeros);
    halves[0] = halves[1] = Scales{best.scale, zeros};
    return;
  }
  float scales[2][16];
  float zeros[2][16];
  for (int half = 0; half < 2; ++half) {
    const Scales fitted =
        fit_half(weights + half * kHalfColumns * 16,
                 importance == nullptr ? nullptr : importance + half * kHalfColumns, bits, solver);
    store(scales[half], fitted.scale);
    store(zeros[half], fitted.zero);
  }
  std::uint32_t words[16];
  for (int row = 0; row < kTileRows; ++row) {
    words[row] = fit_scale_word({{scales[0][row], scales[1][row]}, {zeros[0][row], zeros[1][row]}}, bits);
  }
  __builtin_memcpy(sz, words, sizeof words);
  const HalfScales stored = HalfScales::read(sz);
  for (int half = 0; half < 2; ++half) {
    const Vec factor = to_float(stored.factor(half));
    halves[half] = {mul(stored.step(), factor), div(to_float(stored.offset(half)), factor)};
  }
}

// The column that stands in for column c of a group with `valid_cols`. Padding repeats real columns of its
// half, or of the other if it has none, so that it neither widens the range nor shifts the zero.
MOECHAT_INLINE int repeated(int c, int valid_cols) {
  if (c < valid_cols) return c;
  if (valid_cols <= kHalfColumns) return c % valid_cols;
  return kHalfColumns + (c - kHalfColumns) % (valid_cols - kHalfColumns);
}

// Writes the codes [64] of a group into its q field.
inline void write_codes(const VecI* codes, int bits, unsigned char* q) {
  if (bits == 3) {
    VecI high_words[2] = {seti(0), seti(0)};
    for (int unit = 0; unit < 4; ++unit) {
      VecI low_words = seti(0);
      for (int c = 0; c < 16; ++c) {
        const VecI value = codes[unit * 16 + c];
        low_words = ori(low_words, shl(andi(value, seti(3)), 2 * c));
        high_words[unit / 2] = ori(high_words[unit / 2], shl(shr(value, 2), 16 * (unit % 2) + c));
      }
      storei(q + unit * kStepBytes, low_words);
    }
    storei(q + 4 * kStepBytes, high_words[0]);
    storei(q + 5 * kStepBytes, high_words[1]);
    return;
  }
  if (bits == 6) {
    for (int unit = 0; unit < 4; ++unit) {
      VecI high_words = seti(0);
      for (int step = 0; step < 2; ++step) {
        VecI low_words = seti(0);
        for (int c = 0; c < 8; ++c) {
          const VecI value = codes[unit * 16 + step * 8 + c];
          low_words = ori(low_words, shl(andi(value, seti(15)), 4 * c));
          high_words = ori(high_words, shl(shr(value, 4), 8 * (c / 2) + 4 * step + 2 * (c % 2)));
        }
        storei(q + (2 * unit + step) * kStepBytes, low_words);
      }
      storei(q + (8 + unit) * kStepBytes, high_words);
    }
    return;
  }
  const int columns = 32 / bits;
  for (int unit = 0; unit < 64 / columns; ++unit) {
    VecI words = seti(0);
    for (int c = 0; c < columns; ++c) words = ori(words, shl(codes[unit * columns + c], bits * c));
    storei(q + unit * kStepBytes, words);
  }
}

// Quantises one (tile, group): weights [64][16] -> q bytes of the group and its sz. Columns from valid_cols
// on get code 0. importance: as for sum_codes.
inline void quantise_group(const float* weights, const float* importance, int valid_cols, int bits,
                           Solver solver, unsigned char* q, unsigned char* sz) {
  const Vec top = set1(static_cast<float>((1 << bits) - 1));
  Scales halves[2];
  fit_group(weights, importance, bits, solver, sz, halves);
  const Vec inverse[2] = {div(set1(1.0f), halves[0].scale), div(set1(1.0f), halves[1].scale)};
  VecI found[64];
  for (int c = 0; c < 64; ++c) {
    const int half = c / kHalfColumns;
    found[c] = c < valid_cols
                   ? to_int(codes(mul(load(weights + c * 16), inverse[half]), halves[half].zero, top))
                   : seti(0);
  }
  write_codes(found, bits, q);
}

// Takes errors[i] * factors[i][j] from columns j in [first, last), for errors [count][16] of columns i.
// factors points to the row of the first error; its rows are `width` apart.
inline void take_errors(const float* errors, int count, const float* factors, std::int64_t width,
                        std::int64_t first, std::int64_t last, float* columns) {
  std::int64_t j = first;
  for (; j + 4 <= last; j += 4) {
    Vec sums[4];
    for (int k = 0; k < 4; ++k) sums[k] = load(columns + (j + k) * 16);
    for (int i = 0; i < count; ++i) {
      const Vec error = load(errors + i * 16);
      const float* row = factors + i * width + j;
      for (int k = 0; k < 4; ++k) sums[k] = fnma(error, set1(row[k]), sums[k]);
    }
    for (int k = 0; k < 4; ++k) store(columns + (j + k) * 16, sums[k]);
  }
  for (; j < last; ++j) {
    Vec sum = load(columns + j * 16);
    for (int i = 0; i < count; ++i) {
      sum = fnma(load(errors + i * 16), set1(factors[i * width + j]), sum);
    }
    store(columns + j * 16, sum);
  }
}

// As quantise_group by least squares, but rounds the columns one after the other and takes the error of each
// from those after it, up to column `last` of the block. columns: [last][16], of the whole block, changed;
// factors [width, width]: see ColumnFeedback. first: column of the block at which the group begins.
inline void quantise_group_with_feedback(float* columns, const float* factors, std::int64_t width,
                                         std::int64_t first, std::int64_t last, const float* importance,
                                         int bits, unsigned char* q, unsigned char* sz) {
  const Vec top = set1(static_cast<float>((1 << bits) - 1));
  float* group = columns + first * 16;
  const int valid_cols = static_cast<int>(last - first < 64 ? last - first : 64);
  for (int c = valid_cols; c < 64; ++c) store(group + c * 16, load(group + repeated(c, valid_cols) * 16));
  Scales halves[2];
  fit_group(group, importance, bits, Solver::kLeastSquares, sz, halves);
  const Vec inverse[2] = {div(set1(1.0f), halves[0].scale), div(set1(1.0f), halves[1].scale)};
  VecI found[64];
  float errors[64 * 16];
  for (int c = 0; c < valid_cols; ++c) {
    const Vec weight = load(group + c * 16);
    const Scales& scales = halves[c / kHalfColumns];
    const Vec code = codes(mul(weight, inverse[c / kHalfColumns]), scales.zero, top);
    found[c] = to_int(code);
    store(errors + c * 16, sub(weight, mul(sub(code, scales.zero), scales.scale)));
    take_errors(errors + c * 16, 1, factors + (first + c) * width, width, first + c + 1, first + valid_cols,
                columns);
  }
  for (int c = valid_cols; c < 64; ++c) found[c] = seti(0);
  write_codes(found, bits, q);
  take_errors(errors, valid_cols, factors + first * width, width, first + valid_cols, last, columns);
}

MOECHAT_INLINE float read_weight(const unsigned char* at, SourceType type) {
  if (type == SourceType::kFloat32) {
    float value;
    __builtin_memcpy(&value, at, sizeof value);
    return value;
  }
  std::uint16_t pattern;
  __builtin_memcpy(&pattern, at, sizeof pattern);
  return type == SourceType::kBfloat16 ? half::from_bf16(pattern) : half::from_fp16(pattern);
}

// Reads 64 adjacent columns of one row whose elements are contiguous.
MOECHAT_INLINE void read_row(const unsigned char* from, SourceType type, float* to) {
  for (int c = 0; c < 64; c += 16) {
    if (type == SourceType::kFloat32) {
      store(to + c, load(from + c * 4));
    } else if (type == SourceType::kFloat16) {
      store(to + c, load_fp16(from + c * 2));
    } else {
      for (int i = 0; i < 16; ++i) to[c + i] = read_weight(from + (c + i) * 2, SourceType::kBfloat16);
    }
  }
}

// Gathers columns [64][16] of the rows and columns that exist. Padding rows are zero.
inline void gather_group(const MatrixSource& source, std::int64_t row, std::int64_t col, int valid_rows,
                         int valid_cols, float* columns) {
  const std::int64_t element = source.type == SourceType::kFloat32 ? 4 : 2;
  const unsigned char* origin = source.data + row * source.row_stride + col * source.col_stride;
  if (valid_rows == 16 && valid_cols == 64 && source.col_stride == element) {
    float rows[16 * 64];
    for (int r = 0; r < 16; ++r) read_row(origin + r * source.row_stride, source.type, rows + r * 64);
    transpose_tile(rows, columns);
    return;
  }
  for (int c = 0; c < 64; ++c) {
    const unsigned char* from = origin + (valid_cols > 0 ? repeated(c, valid_cols) : 0) * source.col_stride;
    for (int r = 0; r < 16; ++r) {
      const bool real = r < valid_rows && valid_cols > 0;
      columns[c * 16 + r] = real ? read_weight(from + r * source.row_stride, source.type) : 0.0f;
    }
  }
}

// Returns whether all magnitudes are at most max_quantisable(bits); false for NaN and infinities.
MOECHAT_INLINE bool quantisable(const float* columns, int bits) {
  const Vec beyond = set1(max_quantisable(bits) * (1.0f + 1e-6f));
  Mask fine = less(absolute(load(columns)), beyond);
  for (int c = 1; c < 64; ++c) fine = both(fine, less(absolute(load(columns + c * 16)), beyond));
  return all(fine);
}

// Least importance of a column, relative to the mean of its half of a group.
constexpr float kLeastImportance = 1.0f / 64.0f;

// Writes the importances of a group's columns, each half with a sum of 32; padding columns repeat real ones.
// Returns false if a half has none: all are 0, or one is not finite.
MOECHAT_INLINE bool scale_importances(const float* from, int valid_cols, float* to) {
  for (int half = 0; half < 2; ++half) {
    const int begin = half * kHalfColumns;
    const int end = begin + kHalfColumns;
    float sum = 0.0f;
    for (int c = begin; c < end; ++c) sum += to[c] = from[repeated(c, valid_cols)];
    if (!(sum > 0.0f && sum < 3.4e38f)) return false;
    float total = 0.0f;
    for (int c = begin; c < end; ++c) {
      const float relative = to[c] * (kHalfColumns / sum);
      total += to[c] = relative > kLeastImportance ? relative : kLeastImportance;
    }
    for (int c = begin; c < end; ++c) to[c] *= kHalfColumns / total;
  }
  return true;
}

bool quantise_tile(const MatrixSource& source, const float* importance, std::int64_t row, std::int64_t col,
                   std::int64_t groups, int bits, Solver solver, unsigned char* q, unsigned char* sz) {
  const std::int64_t left = source.rows - row;
  const int valid_rows = static_cast<int>(left < 0 ? 0 : (left < kTileRows ? left : kTileRows));
  const std::int64_t group_bytes = std::int64_t{kTileRows} * kGroupColumns * bits / 8;
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::int64_t first = col + g * 64;
    const std::int64_t right = source.cols - first;
    const int valid_cols = static_cast<int>(right < 0 ? 0 : (right < 64 ? right : 64));
    float columns[64 * 16];
    gather_group(source, row, first, valid_rows, valid_cols, columns);
    if (!quantisable(columns, bits)) return false;

    float scaled[64];
    const bool weighted =
        importance != nullptr && valid_cols > 0 && scale_importances(importance + first, valid_cols, scaled);
    quantise_group(columns, weighted ? scaled : nullptr, valid_cols, bits, solver, q + g * group_bytes,
                   sz + g * kScaleBytes);
  }
  return true;
}

// See kernel_api.h.
bool quantise_rows(const MatrixSource& source, const ColumnFeedback& feedback, std::int64_t row, int bits,
                   const GroupPlaces& to, float* columns) {
  const std::int64_t left = source.rows - row;
  const int valid_rows = static_cast<int>(left < 0 ? 0 : (left < kTileRows ? left : kTileRows));
  const std::int64_t width = feedback.width;
  const float* factors = feedback.factors;
  for (std::int64_t block = 0; block < source.cols; block += width, factors += width * width) {
    const std::int64_t size = source.cols - block < width ? source.cols - block : width;
    for (std::int64_t first = 0; first < size; first += 64) {
      const int valid_cols = static_cast<int>(size - first < 64 ? size - first : 64);
      gather_group(source, row, block + first, valid_rows, valid_cols, columns + first * 16);
      if (!quantisable(columns + first * 16, bits)) return false;
    }
    for (std::int64_t first = 0; first < size; first += 64) {
      const int valid_cols = static_cast<int>(size - first < 64 ? size - first : 64);
      const std::int64_t group = (block + first) / 64;
      float scaled[64];
      const bool weighted = scale_importances(feedback.importance + block + first, valid_cols, scaled);
      quantise_group_with_feedback(columns, factors, width, first, size, weighted ? scaled : nullptr, bits,
                                   to.q + group * to.q_stride, to.sz + group * to.sz_stride);
    }
  }
  return true;
}

// Writes the sums of squares of rows [row, row + 16) of two matrices of one shape, and of their products.
void row_products(const MatrixSource& a, const MatrixSource& b, std::int64_t row, RowProducts* out) {
  const std::int64_t left = a.rows - row;
  const int valid_rows = static_cast<int>(left < kTileRows ? left : kTileRows);
  Vec aa = zero();
  Vec bb = zero();
  Vec ab = zero();
  for (std::int64_t col = 0; col < a.cols; col += 64) {
    const int cols = static_cast<int>(a.cols - col < 64 ? a.cols - col : 64);
    float of_a[64 * 16];
    float of_b[64 * 16];
    gather_group(a, row, col, valid_rows, cols, of_a);
    gather_group(b, row, col, valid_rows, cols, of_b);
    for (int c = 0; c < cols; ++c) {
      const Vec x = load(of_a + c * 16);
      const Vec y = load(of_b + c * 16);
      aa = fma(x, x, aa);
      bb = fma(y, y, bb);
      ab = fma(x, y, ab);
    }
  }
  store(out->aa, aa);
  store(out->bb, bb);
  store(out->ab, ab);
}
