// Learns which experts will be used soon while the model runs (ours).
//
// The forecast. Belady's rule (1966) evicts the expert whose next use is farthest away. The closest quantity
// that can be learned is v = E[gamma^(d - 1)], with d tokens until the expert's next use: 1 for the next
// token, and smaller the longer the wait. v satisfies v = P(used next) + gamma * (not used next) * v', so it
// is learned token by token by temporal differences (Sutton, 1988), without fitting in advance or storing the
// past. The key is the log-odds z of the forecast, v = 1 / (1 + exp(-z)), a sum of four parts:
// 1. How often the expert was chosen recently, over three spans of time: the logarithm of its rates (those of
//    the policy "blend"), as a prior that needs no learning. Long spans count most; short ones matter after
//    a prompt, whose order is not known. As long as fewer tokens are known than a span has, a rate is the
//    mean of all of them.
// 2. What this layer's router just chose: a table [chosen expert, expert] of learned log-odds, initially 0,
//    that corrects only the error of the other parts. MoE-Infinity (section 5) and FineMoE (section 4) record
//    joint activations of whole requests; here it is one step of a token and a correction.
// 3. What all layers chose recently, the layers below for this token and those above for the token before:
//    each choice adds a random vector of signs to a state of a few numbers, older tokens decay, and a learned
//    readout [state, expert] maps the state to log-odds. Random signs preserve distances between states
//    (Johnson and Lindenstrauss, 1984; echo state networks, Jaeger, 2001), at a cost that does not grow with
//    the number of layers.
// 4. How many tokens ago the expert was chosen last: learned log-odds for each span of idle tokens, the same
//    for all experts of the layer (hit density by age: LHD, Beckmann et al., 2018). Every token teaches them
//    as many times as there are experts, so after some tens of them the policy knows whether this layer
//    repeats its choices or avoids them. Parts 2 and 3 learn that one expert at a time.
// Parts 2 and 3 count with a weight between 0 and 1, the trust of the layer, which is learned as well: where
// routing does not follow what was chosen before, they are noise, and the trust falls.
// Parts 2 to 4 learn by normalised least mean squares (Widrow and Hoff, 1960). The step is large at first,
// then decreases to a quarter, so that the policy keeps adapting to its user.
//
// A pass of many tokens gives the chosen experts but not their order. It updates rates, state and idle
// tokens, each expert by its share of the tokens; the learned parts learn nothing from it.
//
// On recorded routing (scripts/policy_table) the constants lie on a plateau: halving or doubling any of them
// changes the share of the gap between LRU and Belady that is closed by at most two points. Only the size of
// the state matters more: halving it costs up to three points, doubling it gains two. Where routing follows
// nothing but popularity and the last token, the learned parts are noise: up to one point of hits.
//
// Cost: an access reads and writes the layer's readout (at most 8192 numbers up to 512 experts, 4096 of 128)
// and top_k rows of its table. The two take at most 96 KiB a layer.
#include "cache/policy_forecast.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

namespace moechat {
namespace {

constexpr double kNever = -1e300;

// Half-lives of the rates in tokens, and the weight of the logarithm of each.
constexpr int kSpans = 3;
constexpr double kHalfLives[kSpans] = {4, 64, 1000};
constexpr float kPrior[kSpans] = {0.1f, 0.2f, 0.8f};
// Tokens that the first rates count for: even ones, or given ones.
constexpr double kEvenTokens = 32;
constexpr double kGivenTokens = 256;
constexpr double kMostKnown = 1e6;
// Added to a rate, to bound its logarithm for experts that have not been chosen for long.
constexpr float kFloor = 0.02f;
constexpr float kGamma = 0.85f;  // discount per token: experts stay for about six tokens between two uses
constexpr float kFade = 0.6f;    // decay of the state per token
constexpr std::int32_t kMostOddsBits = 0x41f00000;  // 30.0f, bound of |z|
// The step is 1 / (1 + n / span) after n steps; n stops at three spans, that of idle tokens at ten.
constexpr std::int32_t kTableSpan = 300;
constexpr std::int32_t kReadoutSpan = 1000;
constexpr std::int32_t kIdleSpan = 100;
constexpr std::int32_t kMostPasses = 4096;  // over which the mean of the state is computed
// Bounds of the tables of a layer, in numbers.
constexpr std::int32_t kReadoutSize = 8192;  // half of it for a layer with more than kFewExperts
constexpr std::int32_t kFewExperts = 64;
constexpr std::int32_t kTableSize = 16384;
constexpr std::int32_t kLeastState = 16;
constexpr std::int32_t kMostState = 128;
// Spans of idle tokens: one each up to 15, then four for each doubling up to 255 and more.
constexpr int kIdleSpans = 32;
constexpr std::int64_t kMostIdle = 255;
// Experts that the mean error of a span counts besides its own, each with no error: a span of few experts
// learns little from one token.
constexpr float kCalmExperts = 4;
constexpr float kFirstTrust = 0.5f;
constexpr float kTrustStep = 0.15f;
// Trust up to here counts as none: where there is nothing to learn, chance alone moves it about so far.
constexpr float kChance = 0.3f;

std::size_t size_of(std::int64_t value) { return static_cast<std::size_t>(value); }

// Spans by idle tokens.
std::array<std::uint8_t, kMostIdle + 1> idle_spans() {
  std::array<std::uint8_t, kMostIdle + 1> spans{};
  for (std::size_t idle = 0; idle < spans.size(); ++idle) {
    int doublings = 0;
    while (idle >> (doublings + 5) != 0) ++doublings;  // of 16
    spans[idle] =
        static_cast<std::uint8_t>(idle < 16 ? idle : 12 + 4 * doublings + (idle >> (doublings + 2)));
  }
  return spans;
}

std::uint64_t mixed(std::uint64_t value) {  // splitmix64 (Steele et al., 2014)
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

#if defined(__GNUC__)
#define MOECHAT_INLINE inline __attribute__((always_inline))
#else
#define MOECHAT_INLINE inline
#endif

// ln(x) for normal x > 0, to 1e-7; written so that loops over it are vectorised.
MOECHAT_INLINE float log_of(float x) {
  std::int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const std::int32_t exponent =
      (bits - 0x3f3504f3) >> 23;  // so that the remainder is in [sqrt(1/2), sqrt(2))
  bits -= exponent * (1 << 23);
  float rest;
  std::memcpy(&rest, &bits, sizeof rest);
  const float t = (rest - 1) / (rest + 1);
  const float t2 = t * t;
  return static_cast<float>(exponent) * 0.69314718f +
         2 * t * (1 + t2 * (0.33333333f + t2 * (0.2f + t2 * 0.14285714f)));
}

// 1 / (1 + exp(-z)) to 1e-6; |z| is limited to 30.
MOECHAT_INLINE float sigmoid(float z) {
  // Limited as an integer, because compilers do not vectorise float comparisons that could trap.
  std::int32_t bits;
  std::memcpy(&bits, &z, sizeof bits);
  const std::int32_t size = bits & 0x7fffffff;
  bits = (size < kMostOddsBits ? size : kMostOddsBits) | (bits & ~0x7fffffff);
  float bounded;
  std::memcpy(&bounded, &bits, sizeof bounded);
  const float scaled = bounded * -1.44269504f;
  const float whole = (scaled + 12582912.0f) - 12582912.0f;  // rounds to an integer
  const float u = (scaled - whole) * 0.69314718f;
  const float c = 0.5f + u * (0.16666667f + u * (0.041666667f + u * (0.0083333333f + u * 0.0013888889f)));
  const float power = 1 + u * (1 + u * c);
  std::memcpy(&bits, &power, sizeof bits);
  bits += static_cast<std::int32_t>(whole) * (1 << 23);
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return 1 / (1 + value);
}

// Loops over a layer's experts, compiled for several instruction sets. All of them give the same numbers,
// because products and sums are not contracted.
struct Spans {
  float* rates[kSpans];  // [experts] each
  float left[kSpans];    // factor of the rates per pass
};

MOECHAT_INLINE void decay_loop(const Spans& spans, std::int64_t experts) {
  constexpr float kTiny = 1e-20f;  // keeps rates from becoming denormal, which is slow
  for (int span = 0; span < kSpans; ++span) {
    float* __restrict rates = spans.rates[span];
    const float left = spans.left[span];
    for (std::int64_t e = 0; e < experts; ++e) rates[e] = rates[e] * left + kTiny;
  }
}

// z = the prior, which is 0 for an expert with the constant rate `even`.
MOECHAT_INLINE void prior_loop(const Spans& spans, float even, float* __restrict z, std::int64_t experts) {
  static_assert(kSpans == 3, "the sum below has three terms");
  const float scale = 1 / (even + kFloor);
  for (std::int64_t e = 0; e < experts; ++e) {
    const float a = (spans.rates[0][e] + kFloor) * scale;
    const float b = (spans.rates[1][e] + kFloor) * scale;
    const float c = (spans.rates[2][e] + kFloor) * scale;
    z[e] = (kPrior[0] * log_of(a) + kPrior[1] * log_of(b)) + kPrior[2] * log_of(c);
  }
}

// readout += old * error, then z += readout * now. `state` is the number of rows, a multiple of 4.
MOECHAT_INLINE void readout_loop(float* readout, const float* old, const float* now,
                                 const float* __restrict error, float* __restrict z, std::int64_t state,
                                 std::int64_t experts) {
  for (std::int64_t j = 0; j < state; j += 4) {
    float* __restrict r0 = readout + j * experts;
    float* __restrict r1 = r0 + experts;
    float* __restrict r2 = r1 + experts;
    float* __restrict r3 = r2 + experts;
    const float o0 = old[j], o1 = old[j + 1], o2 = old[j + 2], o3 = old[j + 3];
    const float n0 = now[j], n1 = now[j + 1], n2 = now[j + 2], n3 = now[j + 3];
    for (std::int64_t e = 0; e < experts; ++e) {
      const float d = error[e];
      const float w0 = r0[e] + o0 * d, w1 = r1[e] + o1 * d, w2 = r2[e] + o2 * d, w3 = r3[e] + o3 * d;
      r0[e] = w0;
      r1[e] = w1;
      r2[e] = w2;
      r3[e] = w3;
      z[e] += (w0 * n0 + w1 * n1) + (w2 * n2 + w3 * n3);
    }
  }
}

MOECHAT_INLINE void add_loop(float factor, const float* __restrict from, float* __restrict to,
                             std::int64_t experts) {
  for (std::int64_t e = 0; e < experts; ++e) to[e] += factor * from[e];
}

// Computes the forecast v and the key from log-odds. error = the target of v before this pass if no expert is
// chosen now, less that v.
MOECHAT_INLINE void forecast_loop(const float* __restrict z, float* __restrict v, float* __restrict error,
                                  double* __restrict keys, std::int64_t experts) {
  for (std::int64_t e = 0; e < experts; ++e) {
    const float now = sigmoid(z[e]);
    error[e] = kGamma * now - v[e];
    v[e] = now;
  }
  for (std::int64_t e = 0; e < experts; ++e) keys[e] = static_cast<double>(z[e]);
}

struct Loops {
  void (*decay)(const Spans&, std::int64_t);
  void (*prior)(const Spans&, float, float*, std::int64_t);
  void (*readout)(float*, const float*, const float*, const float*, float*, std::int64_t, std::int64_t);
  void (*add)(float, const float*, float*, std::int64_t);
  void (*forecast)(const float*, float*, float*, double*, std::int64_t);
};

#define MOECHAT_LOOPS(NAME, TARGET)                                                                    \
  struct NAME {                                                                                        \
    TARGET static void decay(const Spans& spans, std::int64_t experts) { decay_loop(spans, experts); } \
    TARGET static void prior(const Spans& spans, float even, float* z, std::int64_t experts) {         \
      prior_loop(spans, even, z, experts);                                                             \
    }                                                                                                  \
    TARGET static void readout(float* weights, const float* old, const float* now, const float* error, \
                               float* z, std::int64_t state, std::int64_t experts) {                   \
      readout_loop(weights, old, now, error, z, state, experts);                                       \
    }                                                                                                  \
    TARGET static void add(float factor, const float* from, float* to, std::int64_t experts) {         \
      add_loop(factor, from, to, experts);                                                             \
    }                                                                                                  \
    TARGET static void forecast(const float* z, float* v, float* error, double* keys,                  \
                                std::int64_t experts) {                                                \
      forecast_loop(z, v, error, keys, experts);                                                       \
    }                                                                                                  \
    static constexpr Loops kLoops{decay, prior, readout, add, forecast};                               \
  };

MOECHAT_LOOPS(Portable, )
#if defined(__GNUC__) && defined(__x86_64__)
MOECHAT_LOOPS(Avx2, __attribute__((target("avx2"))))
Loops best_loops() { return __builtin_cpu_supports("avx2") ? Avx2::kLoops : Portable::kLoops; }
#else
Loops best_loops() { return Portable::kLoops; }
#endif

// An array that begins on a cache line.
template <class Value>
struct OnLines {
  using value_type = Value;
  OnLines() = default;
  template <class Other>
  explicit OnLines(const OnLines<Other>&) {}
  Value* allocate(std::size_t count) {
    return static_cast<Value*>(::operator new(count * sizeof(Value), std::align_val_t{64}));
  }
  void deallocate(Value* values, std::size_t) { ::operator delete(values, std::align_val_t{64}); }
  template <class Other>
  bool operator==(const OnLines<Other>&) const {
    return true;
  }
  template <class Other>
  bool operator!=(const OnLines<Other>&) const {
    return false;
  }
};
using Floats = std::vector<float, OnLines<float>>;

class Forecast final : public EvictionPolicy {
 public:
  explicit Forecast(const PolicySpec& spec)
      : EvictionPolicy(spec.name, spec.layers, spec.experts), loops_(best_loops()) {
    comparable_ = true;  // v is a matter of tokens alone, whatever the layer
    const std::int32_t size = experts_ > kFewExperts ? kReadoutSize / 2 : kReadoutSize;
    // Multiples of 16, so that loops over four rows at a time have no remainder.
    state_ = std::clamp(size / experts_ / 16 * 16, kLeastState, kMostState);
    rows_ = std::min(experts_, std::max(1, kTableSize / experts_));
    const std::int64_t all = std::int64_t{layers_} * experts_;
    keys_.resize(size_of(all));
    signs_.resize(size_of(all * state_));
    for (std::int64_t at = 0; at < all; ++at) {
      for (std::int32_t j = 0; j < state_; ++j) {
        const std::uint64_t bits = mixed(static_cast<std::uint64_t>(at * kMostState + j) / 64);
        signs_[size_of(at * state_ + j)] = (bits >> (j % 64) & 1) != 0 ? std::int8_t{1} : std::int8_t{-1};
      }
    }
    for (int span = 0; span < kSpans; ++span) gamma_[span] = std::exp2(-1.0 / kHalfLives[span]);
    sum_.resize(size_of(state_));
    z_.resize(size_of(experts_));
    layer_.resize(size_of(layers_));
    for (Layer& layer : layer_) {
      layer.rates.resize(size_of(std::int64_t{kSpans} * experts_));
      layer.table.resize(size_of(std::int64_t{rows_} * experts_));
      layer.uses.resize(size_of(rows_));
      layer.readout.resize(size_of(std::int64_t{state_} * experts_));
      for (auto* part : {&layer.part, &layer.mean, &layer.now, &layer.before, &layer.old}) {
        part->resize(size_of(state_));
      }
      layer.v.resize(size_of(experts_));
      layer.error.resize(size_of(experts_));
      layer.chosen.resize(size_of(experts_));
      layer.learned.resize(size_of(experts_));
      layer.learned_before.resize(size_of(experts_));
      layer.idle.resize(size_of(experts_));
      layer.span.resize(size_of(experts_));
      layer.span_before.resize(size_of(experts_));
    }
    reset();
  }

  void access(std::int32_t index, const std::int32_t* experts, const std::int32_t* tokens, std::int64_t count,
              std::int64_t pass_tokens) override {
    Layer& layer = layer_[size_of(index)];
    const auto pass = static_cast<double>(pass_tokens);
    const auto share = [&](std::int64_t i) {
      return static_cast<float>(std::min(1.0, static_cast<double>(tokens[i]) / pass));
    };
    float even = 0;
    for (std::int64_t i = 0; i < count; ++i) even += share(i);
    even /= static_cast<float>(experts_);

    if (layer.known == 0) {
      std::fill(layer.rates.begin(), layer.rates.end(), even);
      layer.known = kEvenTokens;
    }
    Spans spans{};
    for (int span = 0; span < kSpans; ++span) {
      spans.rates[span] = layer.rates.data() + std::int64_t{span} * experts_;
      const double left = pass_tokens == 1 ? gamma_[span] : std::pow(gamma_[span], pass);
      spans.left[span] = static_cast<float>(std::min(left, layer.known / (layer.known + pass)));
    }
    layer.known = std::min(layer.known + pass, kMostKnown);
    loops_.decay(spans, experts_);
    for (int span = 0; span < kSpans; ++span) {
      for (std::int64_t i = 0; i < count; ++i) {
        spans.rates[span][experts[i]] += share(i) * (1 - spans.left[span]);
      }
    }

    if (layer.passes < kMostPasses) ++layer.passes;
    const double faded = pass_tokens == 1 ? kFade : std::pow(static_cast<double>(kFade), pass);
    take_in(index, experts, count, static_cast<float>(faded), share);
    find_features(index);

    layer.learned_before.swap(layer.learned);
    float* learned = layer.learned.data();
    std::fill_n(learned, experts_, 0.0f);
    loops_.readout(layer.readout.data(), layer.old.data(), layer.now.data(), layer.error.data(), learned,
                   state_, experts_);
    for (std::int64_t i = 0; i < count; ++i) {
      loops_.add(share(i), row(layer, experts[i] % rows_), learned, experts_);
    }
    loops_.prior(spans, even, z_.data(), experts_);
    loops_.add(std::max(0.0f, layer.trust - kChance) / (1 - kChance), learned, z_.data(), experts_);
    add_idle(layer, experts, tokens, count, pass_tokens);
    loops_.forecast(z_.data(), layer.v.data(), layer.error.data(),
                    keys_.data() + std::int64_t{index} * experts_, experts_);
    if (layer.follows && pass_tokens == 1) {
      for (std::int64_t i = 0; i < count; ++i) {
        // The target of v was 1.
        layer.error[size_of(experts[i])] += 1 - kGamma * layer.v[size_of(experts[i])];
      }
      learn(&layer);
    } else {
      std::fill(layer.error.begin(), layer.error.end(), 0.0f);
    }
    layer.follows = pass_tokens == 1;
    layer.count = pass_tokens == 1 ? std::min<std::int64_t>(count, experts_) : 0;
    std::copy_n(experts, layer.count, layer.chosen.begin());
  }

  // Takes the shares as the rates of all three spans: that is the prior of the first forecast, and fades as
  // what the layer really chooses is counted.
  void expect(std::int32_t index, const double* shares) override {
    Layer& layer = layer_[size_of(index)];
    if (layer.passes > 0) return;
    layer.known = kGivenTokens;
    for (std::int32_t expert = 0; expert < experts_; ++expert) {
      const auto share = static_cast<float>(std::clamp(shares[expert], 0.0, 1.0));
      for (int span = 0; span < kSpans; ++span) layer.rates[size_of(span * experts_ + expert)] = share;
      keys_[size_of(std::int64_t{index} * experts_ + expert)] = std::log((share + kFloor) / (1 + kFloor));
    }
  }

  void reset() override {
    std::fill(keys_.begin(), keys_.end(), kNever);
    for (Layer& layer : layer_) {
      for (auto* values : {&layer.rates, &layer.table, &layer.readout, &layer.part, &layer.mean, &layer.now,
                           &layer.before, &layer.old, &layer.learned, &layer.v, &layer.error}) {
        std::fill(values->begin(), values->end(), 0.0f);
      }
      std::fill(layer.uses.begin(), layer.uses.end(), 0);
      std::fill(layer.idle.begin(), layer.idle.end(), static_cast<std::uint8_t>(kMostIdle));
      layer.trust = kFirstTrust;
      layer.idle_odds.fill(0.0f);
      layer.idle_uses.fill(0);
      layer.steps = layer.passes = 0;
      layer.count = 0;
      layer.follows = false;
      layer.known = 0;
    }
    std::fill(sum_.begin(), sum_.end(), 0.0f);
  }

  std::unique_ptr<EvictionPolicy> copy() const override { return std::make_unique<Forecast>(*this); }

 private:
  struct Layer {
    Floats rates;                    // [spans, experts]
    Floats table;                    // [rows, experts]
    std::vector<std::int32_t> uses;  // [rows]: steps of each row, up to a limit
    Floats readout;                  // [state, experts]
    Floats part;                     // [state]: this layer's part of the state
    Floats mean;                     // [state]: mean of the whole state at this layer's accesses
    Floats now;                      // [state]: features of the latest pass, of length at most 1,
    Floats before;                   // [state]: of the pass before,
    Floats old;                      // [state]: and of the one before that
    Floats v;                        // [experts]: forecast of the latest pass
    Floats error;           // [experts]: of the forecast before v; the readout learns it at the next access
    Floats learned;         // [experts]: what table and readout add in the latest pass, without the trust,
    Floats learned_before;  // [experts]: and in the pass before
    float trust = kFirstTrust;
    std::vector<std::uint8_t> idle;         // [experts]: tokens since the expert was chosen, up to a limit
    std::vector<std::uint8_t> span;         // [experts]: its span in the latest pass,
    std::vector<std::uint8_t> span_before;  // [experts]: and in the pass before
    std::array<float, kIdleSpans> idle_odds{};
    std::array<std::int32_t, kIdleSpans> idle_uses{};  // steps of each span, up to a limit
    std::vector<std::int32_t> chosen;  // the first `count`: experts of the latest pass if it had one token
    std::int64_t count = 0;
    std::int32_t steps = 0;   // of the readout, up to a limit
    std::int32_t passes = 0;  // up to a limit
    double known = 0;         // tokens that the rates are of, up to a limit; 0: none
    bool follows = false;     // the latest pass had one token, so the next one can learn from it
  };

  float* row(Layer& layer, std::int32_t index) { return layer.table.data() + std::int64_t{index} * experts_; }

  // Replaces the layer's part of the state by this pass's choices.
  template <class Share>
  void take_in(std::int32_t index, const std::int32_t* experts, std::int64_t count, float faded,
               const Share& share) {
    Floats& part = layer_[size_of(index)].part;
    for (std::size_t j = 0; j < part.size(); ++j) {
      sum_[j] -= part[j];
      part[j] *= faded;
    }
    for (std::int64_t i = 0; i < count; ++i) {
      const float weight = share(i);
      const std::int8_t* signs = signs_.data() + (std::int64_t{index} * experts_ + experts[i]) * state_;
      for (std::size_t j = 0; j < part.size(); ++j) part[j] += weight * static_cast<float>(signs[j]);
    }
    for (std::size_t j = 0; j < part.size(); ++j) sum_[j] += part[j];
    if (index != 0) return;
    // Recomputed once per token from the parts, so that rounding errors do not accumulate.
    std::fill(sum_.begin(), sum_.end(), 0.0f);
    for (const Layer& layer : layer_) {
      for (std::size_t j = 0; j < sum_.size(); ++j) sum_[j] += layer.part[j];
    }
  }

  // Computes the state less its mean, normalised to length 1 (a little less for a state near the mean).
  void find_features(std::int32_t index) {
    Layer& layer = layer_[size_of(index)];
    layer.old.swap(layer.before);
    layer.before.swap(layer.now);
    const float step = 1 / (1 + static_cast<float>(layer.steps) / kReadoutSpan);
    const float part_of_mean = 1 / static_cast<float>(layer.passes);
    float squares = 1e-3f;
    for (std::size_t j = 0; j < sum_.size(); ++j) {
      layer.mean[j] += part_of_mean * (sum_[j] - layer.mean[j]);
      layer.now[j] = sum_[j] - layer.mean[j];
      squares += layer.now[j] * layer.now[j];
      layer.old[j] *= step;
    }
    const float scale = 1 / std::sqrt(squares);
    for (float& value : layer.now) value *= scale;
  }

  // Counts idle tokens, and adds the odds of their spans to z_.
  void add_idle(Layer& layer, const std::int32_t* experts, const std::int32_t* tokens, std::int64_t count,
                std::int64_t pass_tokens) {
    const auto limited = [](std::int64_t idle) {
      return static_cast<std::uint8_t>(std::min<std::int64_t>(idle, kMostIdle));
    };
    const std::int64_t step = std::min(pass_tokens, kMostIdle);
    for (std::uint8_t& idle : layer.idle) idle = limited(idle + step);
    for (std::int64_t i = 0; i < count; ++i) {
      // The last of its tokens, if they are evenly spread over the pass.
      const std::int64_t others = std::max<std::int64_t>(0, pass_tokens - tokens[i]);
      layer.idle[size_of(experts[i])] = limited(others / (std::int64_t{tokens[i]} + 1));
    }
    layer.span_before.swap(layer.span);
    for (std::size_t e = 0; e < layer.idle.size(); ++e) {
      layer.span[e] = span_of_[layer.idle[e]];
      z_[e] += layer.idle_odds[layer.span[e]];
    }
  }

  // Updates table, trust and odds now; the readout is updated at the next access, in the same loop that uses
  // it.
  void learn(Layer* layer) {
    for (std::int64_t i = 0; i < layer->count; ++i) {
      const std::int32_t index = layer->chosen[size_of(i)] % rows_;
      std::int32_t& uses = layer->uses[size_of(index)];
      if (uses < 3 * kTableSpan) ++uses;
      const float step = 1 / (1 + static_cast<float>(uses) / kTableSpan);
      loops_.add(step / static_cast<float>(layer->count), layer->error.data(), row(*layer, index), experts_);
    }
    float gradient = 0, squares = 1e-2f;
    for (std::size_t e = 0; e < layer->learned_before.size(); ++e) {
      gradient += layer->error[e] * layer->learned_before[e];
      squares += layer->learned_before[e] * layer->learned_before[e];
    }
    layer->trust = std::clamp(layer->trust + kTrustStep * gradient / squares, 0.0f, 1.0f);
    std::array<float, kIdleSpans> errors{};
    std::array<std::int32_t, kIdleSpans> counts{};
    for (std::size_t e = 0; e < layer->span_before.size(); ++e) {
      errors[layer->span_before[e]] += layer->error[e];
      ++counts[layer->span_before[e]];
    }
    for (std::size_t span = 0; span < errors.size(); ++span) {
      if (counts[span] == 0) continue;
      if (layer->idle_uses[span] < 10 * kIdleSpan) ++layer->idle_uses[span];
      const float step = 1 / (1 + static_cast<float>(layer->idle_uses[span]) / kIdleSpan);
      layer->idle_odds[span] += step * errors[span] / (static_cast<float>(counts[span]) + kCalmExperts);
    }
    if (layer->steps < 3 * kReadoutSpan) ++layer->steps;
  }

  Loops loops_;
  const std::array<std::uint8_t, kMostIdle + 1> span_of_ = idle_spans();
  std::int32_t state_ = 0;  // numbers in the state
  std::int32_t rows_ = 0;   // of a table; in a layer with many experts, several share a row
  double gamma_[kSpans];
  std::vector<std::int8_t> signs_;  // [layers, experts, state]
  Floats sum_;                      // [state]
  Floats z_;                        // [experts]
  std::vector<Layer> layer_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_forecast(const PolicySpec& spec) {
  return std::make_unique<Forecast>(spec);
}

}  // namespace moechat
