// Elementary functions over the Vec of one instruction set. Included inside its anonymous namespace.

// e^x within 2 ulp for x in [-87.3, 88.3]. Below, the value at -87.3 (1e-38, never 0); above, infinity. NaN
// stays NaN, because min and max return their second operand then.
MOECHAT_INLINE Vec exp(Vec x) {
  x = min(set1(89.0f), max(set1(-87.3f), x));
  const Vec n = round_small(mul(x, set1(1.44269504088896341f)));
  Vec r = fnma(n, set1(0.693359375f), x);  // ln 2 = 0.693359375 - 2.12194440e-4, n * 0.693359375 is exact
  r = fma(n, set1(2.12194440e-4f), r);
  Vec p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(mul(r, r), p, add(r, set1(1.0f)));
  return mul(p, as_float(shl(addi(to_int(n), seti(127)), 23)));
}

// log2 of positive normal numbers. The error is about 1e-6 relative to the larger of 1 and the result.
MOECHAT_INLINE Vec log2(Vec x) {
  // x = m * 2^k with m in [sqrt(1/2), sqrt(2))
  const VecI offset = subi(as_int(x), seti(0x3f3504f3u));
  const VecI exponent = andi(offset, seti(0xff800000u));
  const Vec m = as_float(subi(as_int(x), exponent));
  const Vec k = mul(to_float(exponent), set1(1.1920928955078125e-7f));
  // ln m = 2 artanh(s), s = (m - 1) / (m + 1), |s| < 0.172
  const Vec s = div(sub(m, set1(1.0f)), add(m, set1(1.0f)));
  const Vec s2 = mul(s, s);
  Vec p = set1(1.0f / 9.0f);
  p = fma(p, s2, set1(1.0f / 7.0f));
  p = fma(p, s2, set1(1.0f / 5.0f));
  p = fma(p, s2, set1(1.0f / 3.0f));
  p = fma(p, s2, set1(1.0f));
  return fma(mul(s, p), set1(2.88539008177792681f), k);
}

MOECHAT_INLINE Vec absolute(Vec x) { return as_float(andi(as_int(x), seti(0x7fffffffu))); }
MOECHAT_INLINE Vec negative(Vec x) { return sub(zero(), x); }
MOECHAT_INLINE Vec sigmoid(Vec x) { return div(set1(1.0f), add(set1(1.0f), exp(negative(x)))); }

// Sum of the lanes in one fixed order, the same for every instruction set.
MOECHAT_INLINE float lane_sum(Vec x) {
  float f[16];
  store(f, x);
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) f[i] += f[i + width];
  }
  return f[0];
}

MOECHAT_INLINE Vec erf(Vec x) {
  float f[16];
  store(f, x);
  for (int i = 0; i < 16; ++i) f[i] = ::erff(f[i]);
  return load(f);
}

// act(x). The formulas are those of the sources (torch.nn.functional, and the modelling code of gpt-oss),
// except that 0.5 * (1 + tanh(y)) is written as the equal sigmoid(2 * y), which is accurate near y = -inf
// too.
MOECHAT_INLINE Vec act_lanes(const GateSpec& spec, Vec x) {
  switch (spec.kind) {
    case Activation::kSilu:
      if (spec.alpha == 1.0f) return div(x, add(set1(1.0f), exp(negative(x))));
      return mul(x, sigmoid(mul(x, set1(spec.alpha))));
    case Activation::kGelu:
      return mul(mul(x, set1(0.5f)), add(set1(1.0f), erf(mul(x, set1(0.70710678118654752f)))));
    case Activation::kGeluTanh: {
      const Vec cube = mul(mul(x, x), x);
      return mul(x, sigmoid(mul(fma(cube, set1(0.044715f), x), set1(2.0f * 0.79788456080286536f))));
    }
    case Activation::kRelu2: {
      const Vec positive = max(zero(), x);  // of two values, one NaN, the second one
      return mul(positive, positive);
    }
  }
  return zero();
}

// The gate of an expert, elementwise.
//
// Not inlined: about 36 instantiations call it, each once per tile.
__attribute__((noinline)) Vec gate_lanes(const GateSpec& spec, Vec gate, Vec up) {
  // min and max return the second of two values if one is NaN.
  const Vec limit = set1(spec.limit);
  if (!spec.clamps_result) gate = min(limit, gate);
  Vec value = act_lanes(spec, gate);
  if (spec.clamps_result) value = min(limit, value);
  if (!spec.gated) return value;
  up = min(limit, max(negative(limit), up));
  return mul(value, spec.offset == 0.0f ? up : add(up, set1(spec.offset)));
}
