// Half-quadratic quantisation of some columns of one tile (16 rows, lane = row): a group at 6 and 8 bits, a
// half of one below. Included inside the anonymous namespace of one instruction set.
//
// Source: H. Badri and A. Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023, with
// the settings that the hqq package uses by default (p = 0.7, beta = 10, kappa = 1.01, 20 iterations). For
// one group with codes q = round(clip(w * k + z)), k = 1/scale, it alternates
//   e = shrink_p(w - (q - z) / k, beta),   z = mean(q - (w - e) * k),   beta = kappa * beta
// where shrink_p(x, beta) = sign(x) * max(0, |x| - |x|^(p-1) / beta).
//
// Differences from the source:
// - the stopping rule and the best zero so far are kept per group, not for the whole matrix. The best zero
//   has the smallest product of mean absolute error and root mean square error, so that neither error falls
//   at the cost of the other;
// - at 6 and 8 bits scale and zero are rounded to their stored fp16 values before codes and errors are
//   computed, so storage adds no error; below, fit_scale_word() makes a word of those of both halves, and
//   codes are computed with that;
// - at 8 bits, where rounding the scale to fp16 matters, the neighbouring fp16 values of the scale are solved
//   too and the best is kept. At fewer bits only the published start is used, the scale that spans the whole
//   range: narrower scales gave up to 28 % less mean error at 2 bits, but they clip the outermost weights,
//   and the perplexity of a trained model became worse;
// - shrink_p is 0 below |x| = beta^(-1/(2-p)); its powers are not computed while the whole tile is below;
// - columns whose range hits a guard of the initialisation (range under 1e-4, scale clamp 2e4) or does not
//   contain 0 (then zero is large and fp16 is coarse; at 6 and 8 bits only, because below them ranges are
//   widened to 0) get one more start that avoids the problem.

constexpr int kSolverIterations = 20;
constexpr int kProbeIterations = 3;  // of each start, before the best one continues
constexpr float kShrinkPower = 0.7f;
constexpr float kBetaStart = 10.0f;
constexpr float kBetaGrowth = 1.01f;
// Below |x| = beta^(-1/(2-p)) the shrinkage gives 0.
constexpr float kThresholdStart = 0.1701254280f;   // 10^(-1/1.3)
constexpr float kThresholdGrowth = 0.9923751174f;  // 1.01^(-1/1.3)

// Added to a scale that may be an fp16 subnormal, so that rounding makes it neither 0 nor too narrow: 0.6 *
// 2^-24.
constexpr float kScaleMargin = 3.6e-8f;

// Widths of the other starts at 8 bits, relative to the range of the group: fp16 values have 11 significant
// bits.
constexpr float kNeighbours[] = {1.0f - 2.0f / 2048, 1.0f - 1.0f / 2048, 1.0f + 1.0f / 2048,
                                 1.0f + 2.0f / 2048, 1.0f + 3.0f / 2048, 1.0f + 4.0f / 2048};

struct GroupSolution {
  Vec scale;  // at 6 and 8 bits fp16 values
  Vec zero;   // at 6 and 8 bits fp16 values
  Vec error;  // sum of |w - dequantised| times the root of the sum of its squares
};

MOECHAT_INLINE Vec through_fp16(Vec x) {
  unsigned char stored[32];
  store_fp16(stored, x);
  return load_fp16(stored);
}

// A scale or zero as it will be stored, as far as that is decided here.
MOECHAT_INLINE Vec as_stored(Vec x, int bits) { return has_halves(bits) ? x : through_fp16(x); }

MOECHAT_INLINE Vec codes(Vec scaled, Vec zeros, Vec top) {
  return round_small(min(top, max(zero(), add(scaled, zeros))));
}

// Sum over the group of e = shrink_p(w - dequantised, beta), which is 0 for errors up to the threshold.
inline Vec shrunk_sum(const float* scaled, int columns, Vec zeros, Vec scale, Vec top, float beta,
                      float threshold) {
  Vec sum = zero();
  for (int c = 0; c < columns; ++c) {
    const Vec place = add(load(scaled + c * 16), zeros);
    const Vec residual = mul(sub(place, round_small(min(top, max(zero(), place)))), scale);
    const Vec size = max(set1(1e-20f), absolute(residual));
    if (!any(less(set1(threshold), size))) continue;
    const Vec power = exp(mul(log2(size), set1((kShrinkPower - 1.0f) * 0.69314718055994531f)));
    const Vec kept = max(zero(), fnma(power, set1(1.0f / beta), size));
    sum = add(sum, select(less(residual, zero()), negative(kept), kept));
  }
  return sum;
}

MOECHAT_INLINE Vec half_range(Vec x) { return min(set1(65504.0f), max(set1(-65504.0f), x)); }

// Iterates on all rows from a scale and a zero, with at most `iterations` updates of the zero.
inline GroupSolution descend(const float* weights, int columns, Vec scale, Vec start, int bits,
                             int iterations) {
  const Vec top = set1(static_cast<float>((1 << bits) - 1));
  const Vec inverse = div(set1(1.0f), scale);
  float scaled[64 * 16];
  for (int c = 0; c < columns; ++c) store(scaled + c * 16, mul(load(weights + c * 16), inverse));

  const float share = 1.0f / static_cast<float>(columns);
  Vec zeros = as_stored(half_range(start), bits);
  GroupSolution best{scale, zeros, set1(3.4e38f)};
  Mask active = equal(inverse, inverse);
  float beta = kBetaStart;
  float threshold = kThresholdStart;
  for (int iteration = 0;; ++iteration) {
    // Distances are in steps of the grid: q - z - w * k = q - (w * k + z). Two chains each, because with one
    // the latency of the additions would bound the loop.
    Vec sizes[2] = {zero(), zero()};
    Vec squares[2] = {zero(), zero()};
    Vec sums[2] = {zero(), zero()};
#pragma GCC unroll 4
    for (int c = 0; c < columns; ++c) {
      const Vec place = add(load(scaled + c * 16), zeros);
      const Vec distance = sub(round_small(min(top, max(zero(), place))), place);
      sizes[c % 2] = add(sizes[c % 2], absolute(distance));
      squares[c % 2] = fma(distance, distance, squares[c % 2]);
      sums[c % 2] = add(sums[c % 2], distance);
    }
    const Vec root = mul(sqrt(add(squares[0], squares[1])), scale);  // upper bound of every single error
    const Vec error = mul(mul(add(sizes[0], sizes[1]), scale), root);
    const Mask better = both(active, less(error, best.error));
    best.zero = select(better, zeros, best.zero);
    best.error = select(better, error, best.error);
    if (iteration == iterations || !any(better)) return best;

    Vec shift = add(sums[0], sums[1]);  // sum of q - w * k - z
    if (any(less(set1(threshold), root)))
      shift = fma(shrunk_sum(scaled, columns, zeros, scale, top, beta, threshold), inverse, shift);
    const Vec next = as_stored(half_range(fma(shift, set1(share), zeros)), bits);
    // A group is done when its error did not fall or its zero did not change.
    active = both(better, negate(equal(next, zeros)));
    if (!any(active)) return best;
    zeros = next;
    beta *= kBetaGrowth;
    threshold *= kThresholdGrowth;
  }
}

MOECHAT_INLINE void keep_better(Mask candidates, const GroupSolution& other, GroupSolution* best) {
  const Mask better = both(candidates, less(other.error, best->error));
  best->scale = select(better, other.scale, best->scale);
  best->zero = select(better, other.zero, best->zero);
  best->error = select(better, other.error, best->error);
}

// Finds scale and zero of weights [columns][16]. `iterations` of 0 takes the best start.
inline GroupSolution solve_group(const float* weights, int columns, Vec low, Vec high, int bits,
                                 int iterations) {
  const Vec top = set1(static_cast<float>((1 << bits) - 1));
  const Vec range = sub(high, low);
  const Mask tiny = less(range, set1(1.0000001e-4f));
  const Mask flat = equal(range, zero());
  const Vec natural = div(top, select(flat, set1(1.0f), range));
  const Vec multiplier =
      min(set1(2e4f), select(tiny, set1(1.0f), natural));  // hqq's scale, inverse of the stored one
  const auto probe = [&](Vec step, Vec lowest) {           // lowest: the weight that starts with code 0
    const Vec scale = as_stored(step, bits);
    return descend(weights, columns, scale, div(negative(lowest), scale), bits, kProbeIterations);
  };
  const Vec step = div(set1(1.0f), multiplier);
  GroupSolution best = probe(step, low);
  if (bits == 8) {
    for (const float width : kNeighbours) {
      const Vec lowest = fma(range, set1(0.5f * (1.0f - width)), low);
      keep_better(negate(flat), probe(mul(step, set1(width)), lowest), &best);
    }
  }
  const Mask guarded = both(negate(flat), either(tiny, less(set1(2e4f), natural)));
  if (any(guarded))
    keep_better(guarded, probe(fma(range, div(set1(1.0f), top), set1(kScaleMargin)), low), &best);
  const Mask one_sided = either(less(zero(), low), less(high, zero()));
  if (any(one_sided)) {
    const Vec from = min(low, zero());
    const Vec span = sub(max(high, zero()), from);
    keep_better(one_sided, probe(fma(span, div(set1(1.0f), top), set1(kScaleMargin)), from), &best);
  }
  if (iterations == 0) return best;
  const GroupSolution last = descend(weights, columns, best.scale, best.zero, bits, iterations);
  keep_better(less(last.error, best.error), last, &best);
  return best;
}
