#include "kernels/sampling.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "kernels/dispatch.h"

namespace moechat {
namespace {

constexpr std::int64_t kLanes = 16;
constexpr std::int64_t kBlock = 256;
constexpr std::size_t kSorted = 512;
// Weights relative to the largest: candidates are looked for among those above the first, then the next.
constexpr float kThresholds[] = {0x1p-8f, 0x1p-20f, 0.0f};
// The exponential is never 0; what underflows is.
constexpr float kLeast = 1.5e-38f;

struct Candidate {
  float logit;
  float weight;
  std::int32_t token;
};

struct Extreme {
  float value;
  bool number;  // all are
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

// Keeps the heaviest candidates whose weights first sum up to `needed`, by halving where they lie.
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

}  // namespace

std::int64_t largest_logit(const float* logits, std::int64_t count) {
  const Extreme most = largest(logits, count);
  if (!most.number) return -1;
  for (std::int64_t i = 0; i < count; ++i) {
    if (logits[i] == most.value) return i;
  }
  return -1;
}

std::int64_t sample(const float* logits, std::int64_t count, const SampleCuts& cuts, double where) {
  static thread_local std::vector<float> weights;
  static thread_local std::vector<double> sums;
  static thread_local std::vector<Candidate> list;
  weights.resize(static_cast<std::size_t>(count));
  float* weight = weights.data();
  for (std::int64_t i = 0; i < count; ++i) weight[i] = logits[i] / cuts.temperature;
  const Extreme most = largest(weight, count);
  if (!most.number || !std::isfinite(most.value)) return -1;
  kernels().decode->exponentials(weight, count, most.value);

  const std::int64_t blocks = (count + kBlock - 1) / kBlock;
  sums.assign(static_cast<std::size_t>(blocks), 0.0);
  double total = 0.0;
  for (std::int64_t b = 0; b < blocks; ++b) {
    const std::int64_t end = std::min(count, (b + 1) * kBlock);
    double lanes[8] = {};
    std::int64_t i = b * kBlock;
    for (; i + 8 <= end; i += 8) {
      for (std::int64_t k = 0; k < 8; ++k) {
        const float kept = weight[i + k] < kLeast ? 0.0f : weight[i + k];
        weight[i + k] = kept;
        lanes[k] += static_cast<double>(kept);
      }
    }
    for (; i < end; ++i) {
      weight[i] = weight[i] < kLeast ? 0.0f : weight[i];
      lanes[0] += static_cast<double>(weight[i]);
    }
    for (const double lane : lanes) sums[static_cast<std::size_t>(b)] += lane;
    total += sums[static_cast<std::size_t>(b)];
  }

  if (cuts.top_k == 0 && cuts.top_p >= 1.0 && cuts.min_p <= 0.0) {
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
    return last;  // rounding put the target at the very end
  }

  const float least = static_cast<float>(cuts.min_p);
  const bool by_weight_alone = cuts.top_k == 0 && cuts.top_p >= 1.0;
  for (const float threshold : kThresholds) {
    const float from = by_weight_alone ? least : threshold;
    list.clear();
    for (std::int64_t i = 0; i < count; ++i) {
      if (weight[i] >= from && weight[i] > 0.0f) {
        list.push_back({logits[i], weight[i], static_cast<std::int32_t>(i)});
      }
    }
    if (by_weight_alone) break;
    if (cuts.top_k > 0 ? static_cast<std::int64_t>(list.size()) >= cuts.top_k
                       : mass(list) >= cuts.top_p * total) {
      break;
    }
  }
  if (cuts.top_k > 0) {
    keep_largest(&list, cuts.top_k);
    total = mass(list);
  }
  if (cuts.top_p < 1.0) keep_mass(&list, cuts.top_p * total);
  // Last, as the cuts before it count what it takes away.
  list.erase(
      std::remove_if(list.begin(), list.end(), [least](const Candidate& c) { return c.weight < least; }),
      list.end());
  return draw(list, where);
}

}  // namespace moechat
