// Least-squares quantisation of the columns of one half of a group, of one tile (16 rows, lane = row), at 2
// to 4 bits. Included inside the anonymous namespace of one instruction set, after hqq_solver.inc.h.
//
// A row keeps the scale and zero with the smallest sum of squared errors, each times the importance of its
// column if there is one, that these steps find:
//   1. spans from kNarrowest to all of the range, around its middle;
//   2. from the best one, in turns: codes q = round(clip(w / scale + zero)) for the scale and zero, then the
//      scale and zero that minimise this error for these codes (linear regression of w on q), until the error
//      no longer falls.
// fit_scale_word() then makes a word of those of both halves, and codes are computed with that.
//
// Without importances and with scales for 64 columns, on the dense weights of the demo model, perplexity rose
// by 0.8, 2.5 and 14 % at 4, 3 and 2 bits; with the half-quadratic solver, whose norm of 0.7 neglects large
// errors, by 1.6, 5.2 and 55 %.

constexpr int kSpans = 16;
constexpr float kNarrowest[] = {0.0f, 0.0f, 0.4f, 0.6f, 0.7f};  // by bits, relative to the range
constexpr int kRegressions = 6;

struct LeastSquares {
  Vec scale;
  Vec zero;
  Vec error;  // sum of squares
};

// Sums over the columns for a scale and zero. Each term is multiplied by the importance of its
// column; without importances all are 1.
struct CodeSums {
  Vec squares;  // of errors
  Vec q, qq, qw;
};

// importance: 32 numbers whose sum is 32, or null.
inline CodeSums sum_codes(const float* weights, const float* importance, Vec scale, Vec zeros, Vec top) {
  const Vec inverse = div(set1(1.0f), scale);
  // Two chains each, because with one the latency of the additions would bound the loop.
  Vec squares[2] = {zero(), zero()};
  Vec q[2] = {zero(), zero()};
  Vec qq[2] = {zero(), zero()};
  Vec qw[2] = {zero(), zero()};
  const auto add_column = [&](int c, const auto& times) {
    const Vec weight = load(weights + c * 16);
    const Vec place = add(mul(weight, inverse), zeros);
    const Vec code = round_small(min(top, max(zero(), place)));
    const Vec distance = sub(code, place);
    const Vec share = times(code);
    squares[c % 2] = fma(times(distance), distance, squares[c % 2]);
    q[c % 2] = add(q[c % 2], share);
    qq[c % 2] = fma(share, code, qq[c % 2]);
    qw[c % 2] = fma(share, weight, qw[c % 2]);
  };
  if (importance == nullptr) {
#pragma GCC unroll 2
    for (int c = 0; c < kHalfColumns; ++c) add_column(c, [](Vec x) { return x; });
  } else {
#pragma GCC unroll 2
    for (int c = 0; c < kHalfColumns; ++c) {
      add_column(c, [factor = set1(importance[c])](Vec x) { return mul(x, factor); });
    }
  }
  return {mul(add(squares[0], squares[1]), mul(scale, scale)), add(q[0], q[1]), add(qq[0], qq[1]),
          add(qw[0], qw[1])};
}

// Improves on a start, in place.
inline void fit_least_squares(const float* weights, const float* importance, Vec low, Vec range, int bits,
                              LeastSquares* best) {
  const Vec top = set1(static_cast<float>((1 << bits) - 1));
  const Vec middle = fma(range, set1(0.5f), low);
  Vec total = zero();
  for (int c = 0; c < kHalfColumns; ++c) {
    const Vec weight = load(weights + c * 16);
    total = add(total, importance == nullptr ? weight : mul(weight, set1(importance[c])));
  }
  const auto keep = [best](Mask candidates, const LeastSquares& other) {
    const Mask better = both(candidates, less(other.error, best->error));
    best->scale = select(better, other.scale, best->scale);
    best->zero = select(better, other.zero, best->zero);
    best->error = select(better, other.error, best->error);
    return better;
  };
  const auto try_grid = [&](Vec scale, Vec zeros) {
    LeastSquares found{scale, zeros, zero()};
    found.error = sum_codes(weights, importance, scale, zeros, top).squares;
    return found;
  };
  const Mask ranged = less(zero(), range);
  const Vec unit = div(range, top);
  for (int i = 0; i < kSpans; ++i) {
    const float width = kNarrowest[bits] + (1.0f - kNarrowest[bits]) * static_cast<float>(i) / (kSpans - 1);
    const Vec scale = select(ranged, fma(unit, set1(width), set1(kScaleMargin)), best->scale);
    const Vec zeros = half_range(fnma(middle, div(set1(1.0f), scale), mul(top, set1(0.5f))));
    keep(ranged, try_grid(scale, zeros));
  }
  Mask active = ranged;
  for (int i = 0; i < kRegressions && any(active); ++i) {
    const CodeSums sums = sum_codes(weights, importance, best->scale, best->zero, top);
    // Slope of the regression of w on q; 32 times covariance and variance.
    const Vec mean = mul(sums.q, set1(1.0f / kHalfColumns));
    const Vec covariance = fnma(mean, total, sums.qw);
    const Vec variance = fnma(mean, sums.q, sums.qq);
    active = both(active, both(less(set1(0.5f), variance), less(zero(), covariance)));
    const Vec slope = div(covariance, max(set1(0.5f), variance));
    const Vec scale = select(active, add(slope, set1(kScaleMargin)), best->scale);
    const Vec centre = mul(total, set1(1.0f / kHalfColumns));
    const Vec zeros = half_range(fnma(centre, div(set1(1.0f), scale), mean));
    active = keep(active, try_grid(scale, select(active, zeros, best->zero)));
  }
}
