#include "kernels/decode/sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/isa/dispatch.h"

namespace moechat {
namespace {

constexpr std::int64_t kLanes = 16;
constexpr std::int64_t kBlock = 256;
constexpr std::size_t kSorted = 512;
// Weights relative to the largest. The search for the top k tries weights above the first, then above the
// next.
constexpr float kThresholds[] = {0x1p-2f, 0x1p-4f, 0x1p-8f, 0x1p-20f, 0.0f};
// Weights are at most 1. A bucket spans an eighth of an octave.
constexpr int kBucketShift = 20;
constexpr int kBuckets = (0x3f800000 >> kBucketShift) + 1;
// exp() never returns 0; weights below this count as underflow.
constexpr float kLeast = 1.5e-38f;

struct Candidate {
  float logit;
  float weight;
  std::int32_t token;
};

struct Extreme {
  float value;
  bool number;  // none of the values is NaN
};

Extreme largest(const float* x, std::int64_t count) {
  float most[kLanes];
  std::int32_t odd[kLanes] = {};
  for (float& lane : most) lane = -HUGE_VALF;
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t k = 0; k < kLanes; ++k) {
      most[k] = x[i + k] > most[k] ? x[i + k] : most[k];
      odd[k] |= x[i + k] != x[i + k];
    }
  }
  for (; i < count; ++i) {
    most[0] = x[i] > most[0] ? x[i] : most[0];
    odd[0] |= x[i] != x[i];
  }
  Extreme result{most[0], true};
  for (std::int64_t k = 0; k < kLanes; ++k) {
    result.value = most[k] > result.value ? most[k] : result.value;
    result.number = result.number && odd[k] == 0;
  }
  return result;
}

bool heavier(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

double mass(const std::vector<Candidate>& list) {
  double sum = 0.0;
  for (const Candidate& item : list) sum += static_cast<double>(item.weight);
  return sum;
}

// Keeps the heaviest candidates whose weights first sum to `needed`, by partitioning in place.
void keep_mass(std::vector<Candidate>* list, double needed) {
  auto low = list->begin();
  auto high = list->end();
  double before = 0.0;
  while (static_cast<std::size_t>(high - low) > kSorted) {
    const auto middle = low + (high - low) / 2;
    std::nth_element(low, middle, high, heavier);
    double upper = 0.0;
    for (auto item = low; item != middle; ++item) upper += static_cast<double>(item->weight);
    if (before + upper >= needed) {
      high = middle;
    } else {
      before += upper;
      low = middle;
    }
  }
  std::sort(low, high, heavier);
  for (; low != high && (before < needed || low == list->begin()); ++low) {
    before += static_cast<double>(low->weight);
  }
  list->erase(low, list->end());
}

void keep_largest(std::vector<Candidate>* list, std::int64_t count) {
  if (static_cast<std::int64_t>(list->size()) <= count) return;
  const auto last = list->begin() + (count - 1);
  std::nth_element(list->begin(), last, list->end(), heavier);
  const float least = last->logit;
  list->erase(
      std::remove_if(list->begin(), list->end(), [least](const Candidate& c) { return c.logit < least; }),
      list->end());
}

std::int64_t draw(const std::vector<Candidate>& list, double where) {
  const double target = where * mass(list);
  double sum = 0.0;
  for (const Candidate& item : list) {
    sum += static_cast<double>(item.weight);
    if (sum > target) return item.token;
  }
  return list.empty() ? -1 : list.back().token;
}

int bucket(float weight) {
  std::int32_t bits;
  std::memcpy(&bits, &weight, sizeof bits);
  return bits >> kBucketShift;
}

// Draws among all weights of at least `least` and sets the others to 0.
std::int64_t draw_all(float* weight, std::int64_t count, float least, double where) {
  static thread_local std::vector<double> sums;
  const std::int64_t blocks = (count + kBlock - 1) / kBlock;
  sums.assign(static_cast<std::size_t>(blocks), 0.0);
  double total = 0.0;
  for (std::int64_t b = 0; b < blocks; ++b) {
    const std::int64_t end = std::min(count, (b + 1) * kBlock);
    double lanes[8] = {};
    std::int64_t i = b * kBlock;
    for (; i + 8 <= end; i += 8) {
      for (std::int64_t k = 0; k < 8; ++k) {
        const float kept = weight[i + k] < least ? 0.0f : weight[i + k];
        weight[i + k] = kept;
        lanes[k] += static_cast<double>(kept);
      }
    }
    for (; i < end; ++i) {
      weight[i] = weight[i] < least ? 0.0f : weight[i];
      lanes[0] += static_cast<double>(weight[i]);
    }
    double& sum = sums[static_cast<std::size_t>(b)];
    for (const double lane : lanes) sum += lane;
    total += sum;
  }
  const double target = where * total;
  double sum = 0.0;
  std::int64_t last = -1;
  for (std::int64_t b = 0; b < blocks; ++b) {
    if (sum + sums[static_cast<std::size_t>(b)] <= target) {
      sum += sums[static_cast<std::size_t>(b)];
      continue;
    }
    const std::int64_t end = std::min(count, (b + 1) * kBlock);
    for (std::int64_t i = b * kBlock; i < end; ++i) {
      if (weight[i] == 0.0f) continue;
      sum += static_cast<double>(weight[i]);
      last = i;
      if (sum > target) return i;
    }
  }
  return last;  // reached if rounding puts the target at the very end
}

}  // namespace

std::int64_t largest_logit(const float* logits, std::int64_t count) {
  const Extreme most = largest(logits, count);
  if (!most.number || !std::isfinite(most.value)) return -1;
  for (std::int64_t i = 0; i < count; ++i) {
    if (logits[i] == most.value) return i;
  }
  return -1;
}

std::int64_t sample(const float* logits, std::int64_t count, const SampleCuts& cuts, double where) {
  static thread_local std::vector<float> weights;
  static thread_local std::vector<Candidate> list;
  weights.resize(static_cast<std::size_t>(count));
  float* weight = weights.data();
  for (std::int64_t i = 0; i < count; ++i) weight[i] = logits[i] / cuts.temperature;
  const Extreme most = largest(weight, count);
  if (!most.number || !std::isfinite(most.value)) return -1;
  kernels().decode->exponentials(weight, count, most.value);

  const float least = std::max(kLeast, static_cast<float>(cuts.min_p));
  if (cuts.top_k > 0) {
    for (const float threshold : kThresholds) {
      list.clear();
      const float from = std::max(threshold, kLeast);
      for (std::int64_t i = 0; i < count; ++i) {
        if (weight[i] >= from) list.push_back({logits[i], weight[i], static_cast<std::int32_t>(i)});
      }
      if (static_cast<std::int64_t>(list.size()) >= cuts.top_k) break;
    }
    keep_largest(&list, cuts.top_k);
    if (cuts.top_p < 1.0) keep_mass(&list, cuts.top_p * mass(list));
    // Applied last, because top_k and top_p count the tokens that it removes.
    list.erase(
        std::remove_if(list.begin(), list.end(), [least](const Candidate& c) { return c.weight < least; }),
        list.end());
    return draw(list, where);
  }
  if (cuts.top_p >= 1.0) return draw_all(weight, count, least, where);

  static thread_local std::vector<double> masses;
  masses.assign(2 * kBuckets, 0.0);
  double total = 0.0;
  for (std::int64_t i = 0; i < count; ++i) {
    // Two alternating tables: adjacent tokens often share a bucket, and the second addition would wait for
    // the first.
    if (weight[i] >= kLeast) masses[static_cast<std::size_t>(2 * bucket(weight[i]) + (i & 1))] += weight[i];
  }
  for (const double part : masses) total += part;
  const double needed = cuts.top_p * total;
  double above = 0.0;
  int last = kBuckets - 1;
  for (; last > 0; --last) {
    const double own =
        masses[static_cast<std::size_t>(2 * last)] + masses[static_cast<std::size_t>(2 * last + 1)];
    if (above + own >= needed) break;
    above += own;
  }
  // Keeps all tokens above the last bucket, none below it, and the heaviest ones in it.
  list.clear();
  for (std::int64_t i = 0; i < count; ++i) {
    if (weight[i] < kLeast || bucket(weight[i]) > last) continue;
    if (bucket(weight[i]) == last) list.push_back({logits[i], weight[i], static_cast<std::int32_t>(i)});
    weight[i] = 0.0f;
  }
  keep_mass(&list, needed - above);
  for (const Candidate& item : list) weight[item.token] = item.weight;
  return draw_all(weight, count, least, where);
}

}  // namespace moechat
