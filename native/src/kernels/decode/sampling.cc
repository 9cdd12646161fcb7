#include "kernels/decode/sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/isa/dispatch.h"

namespace moechat {
namespace {

constexpr std::int64_t kLanes = 16;
constexpr std::int64_t kBlock = 256;
constexpr std::size_t kSorted = 512;
// Values that share kLanes groups, of which the largest are known, where only the largest are wanted.
constexpr std::int64_t kPart = 1024;
// The nucleus is looked for among weights above this; few are, and the others seldom matter.
constexpr float kNucleus = 0x1p-12f;
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

// The largest of `x`. Writes the largest of every group to `groups` if it is given: value i of a whole part
// of kPart values belongs to group i % kLanes of that part. What is NaN counts for nothing there.
Extreme largest(const float* x, std::int64_t count, float* groups = nullptr) {
  float most[kLanes];
  std::int32_t odd[kLanes] = {};
  for (float& lane : most) lane = -HUGE_VALF;
  std::int64_t i = 0;
  for (; i + kPart <= count; i += kPart) {
    float part[kLanes];
    for (float& lane : part) lane = -HUGE_VALF;
    for (std::int64_t j = i; j < i + kPart; j += kLanes) {
      for (std::int64_t k = 0; k < kLanes; ++k) {
        part[k] = x[j + k] > part[k] ? x[j + k] : part[k];
        odd[k] |= x[j + k] != x[j + k];
      }
    }
    for (std::int64_t k = 0; k < kLanes; ++k) most[k] = part[k] > most[k] ? part[k] : most[k];
    if (groups != nullptr) std::copy_n(part, kLanes, groups + i / kPart * kLanes);
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

bool earlier(const Candidate& a, const Candidate& b) { return a.token < b.token; }

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

// Calls `take` with the index of every value of at least `from`, in ascending order. Where few are, the
// others cost a comparison of kLanes at once.
template <typename Take>
void for_each_from(const float* x, std::int64_t count, float from, const Take& take) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    std::int32_t found = 0;
    for (std::int64_t k = 0; k < kLanes; ++k) found |= x[i + k] >= from ? 1 << k : 0;
    for (std::int64_t k = 0; found != 0; ++k, found >>= 1) {
      if ((found & 1) != 0) take(i + k);
    }
  }
  for (; i < count; ++i) {
    if (x[i] >= from) take(i);
  }
}

// Sums of the weights of each block, in a fixed order; weights below `least` are set to 0. Returns the sum.
double sum_blocks(float* weight, std::int64_t count, float least, std::vector<double>* sums) {
  const std::int64_t blocks = (count + kBlock - 1) / kBlock;
  sums->assign(static_cast<std::size_t>(blocks), 0.0);
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
    double& sum = (*sums)[static_cast<std::size_t>(b)];
    for (const double lane : lanes) sum += lane;
    total += sum;
  }
  return total;
}

// Draws among all weights of at least `least` and sets the others to 0.
std::int64_t draw_all(float* weight, std::int64_t count, float least, double where) {
  static thread_local std::vector<double> sums;
  const double target = where * sum_blocks(weight, count, least, &sums);
  double sum = 0.0;
  std::int64_t last = -1;
  for (std::size_t b = 0; b < sums.size(); ++b) {
    if (sum + sums[b] <= target) {
      sum += sums[b];
      continue;
    }
    const std::int64_t begin = static_cast<std::int64_t>(b) * kBlock;
    for (std::int64_t i = begin; i < std::min(count, begin + kBlock); ++i) {
      if (weight[i] == 0.0f) continue;
      sum += static_cast<double>(weight[i]);
      last = i;
      if (sum > target) return i;
    }
  }
  return last;  // reached if rounding puts the target at the very end
}

// exp(logits / temperature - most), a part at a time that stays in the first-level cache.
void weigh(const float* logits, std::int64_t count, float temperature, float most, float* weight) {
  for (std::int64_t begin = 0; begin < count; begin += kPart) {
    const std::int64_t size = std::min(kPart, count - begin);
    for (std::int64_t i = begin; i < begin + size; ++i) weight[i] = logits[i] / temperature;
    kernels().decode->exponentials(weight + begin, size, most);
  }
}

// Removes candidates below `least`. Applied last, because top_k and top_p count the tokens that it removes.
void drop_light(std::vector<Candidate>* list, float least) {
  list->erase(
      std::remove_if(list->begin(), list->end(), [least](const Candidate& c) { return c.weight < least; }),
      list->end());
}

// Draws among the top k. The k-th of the groups' largest logits is at most the k-th of all, so only logits
// that are no smaller are looked at again, and only their weights are computed.
std::int64_t sample_top(const float* logits, std::int64_t count, const SampleCuts& cuts,
                        const std::vector<float>& groups, float most, float least, double where) {
  static thread_local std::vector<Candidate> list;
  static thread_local std::vector<float> values;
  float from = std::numeric_limits<float>::lowest();  // tokens that are excluded lie below it
  if (static_cast<std::int64_t>(groups.size()) >= cuts.top_k) {
    values = groups;
    const auto kth = values.begin() + (cuts.top_k - 1);
    std::nth_element(values.begin(), kth, values.end(), std::greater<>());
    from = std::max(from, *kth);
  }
  list.clear();
  const auto take = [logits](std::int64_t i) {
    list.push_back({logits[i], 0.0f, static_cast<std::int32_t>(i)});
  };
  const auto size = static_cast<std::int64_t>(groups.size());
  for (std::int64_t group = 0; group < size; ++group) {
    if (groups[static_cast<std::size_t>(group)] < from) continue;
    const std::int64_t begin = group / kLanes * kPart;
    for (std::int64_t i = begin + group % kLanes; i < begin + kPart; i += kLanes) {
      if (logits[i] >= from) take(i);
    }
  }
  for (std::int64_t i = size / kLanes * kPart; i < count; ++i) {
    if (logits[i] >= from) take(i);
  }
  keep_largest(&list, cuts.top_k);
  values.resize(list.size());
  for (std::size_t i = 0; i < list.size(); ++i) values[i] = list[i].logit / cuts.temperature;
  kernels().decode->exponentials(values.data(), static_cast<std::int64_t>(list.size()), most);
  for (std::size_t i = 0; i < list.size(); ++i) list[i].weight = values[i];
  drop_light(&list, kLeast);
  if (cuts.top_p < 1.0) keep_mass(&list, cuts.top_p * mass(list));
  drop_light(&list, least);
  std::sort(list.begin(), list.end(), earlier);
  return draw(list, where);
}

// Weights by bucket, and their sum, of at least `from`.
double fill_buckets(const float* weight, std::int64_t count, float from, std::vector<double>* masses) {
  masses->assign(2 * kBuckets, 0.0);
  // Two alternating tables: adjacent tokens often share a bucket, and the second addition would wait for the
  // first.
  for_each_from(weight, count, from, [&](std::int64_t i) {
    (*masses)[static_cast<std::size_t>(2 * bucket(weight[i]) + (i & 1))] += static_cast<double>(weight[i]);
  });
  double total = 0.0;
  for (const double part : *masses) total += part;
  return total;
}

// Keeps all tokens above the bucket in which the mass of the nucleus is reached, none below it, and the
// heaviest ones in it.
std::int64_t sample_nucleus(float* weight, const float* logits, std::int64_t count, const SampleCuts& cuts,
                            float least, double where) {
  static thread_local std::vector<double> masses, sums;
  static thread_local std::vector<Candidate> list, inside;
  const double needed = cuts.top_p * sum_blocks(weight, count, kLeast, &sums);
  float from = kNucleus;
  if (fill_buckets(weight, count, from, &masses) < needed) {
    from = kLeast;
    fill_buckets(weight, count, from, &masses);
  }
  double above = 0.0;
  int last = kBuckets - 1;
  for (; last > bucket(from); --last) {
    const double own =
        masses[static_cast<std::size_t>(2 * last)] + masses[static_cast<std::size_t>(2 * last + 1)];
    if (above + own >= needed) break;
    above += own;
  }
  list.clear();
  inside.clear();
  for_each_from(weight, count, from, [&](std::int64_t i) {
    const int own = bucket(weight[i]);
    if (own < last) return;
    (own == last ? inside : list).push_back({logits[i], weight[i], static_cast<std::int32_t>(i)});
  });
  keep_mass(&inside, needed - above);
  std::sort(inside.begin(), inside.end(), earlier);
  const auto middle = static_cast<std::ptrdiff_t>(list.size());
  list.insert(list.end(), inside.begin(), inside.end());
  std::inplace_merge(list.begin(), list.begin() + middle, list.end(), earlier);
  drop_light(&list, least);
  return draw(list, where);
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
  static thread_local std::vector<float> groups, weights;
  groups.resize(cuts.top_k > 0 ? static_cast<std::size_t>(count / kPart * kLanes) : 0);
  const Extreme found = largest(logits, count, cuts.top_k > 0 ? groups.data() : nullptr);
  const float most = found.value / cuts.temperature;
  if (!found.number || !std::isfinite(most)) return -1;
  const float least = std::max(kLeast, static_cast<float>(cuts.min_p));
  if (cuts.top_k > 0) return sample_top(logits, count, cuts, groups, most, least, where);
  weights.resize(static_cast<std::size_t>(count));
  weigh(logits, count, cuts.temperature, most, weights.data());
  if (cuts.top_p >= 1.0) return draw_all(weights.data(), count, least, where);
  return sample_nucleus(weights.data(), logits, count, cuts, least, where);
}

}  // namespace moechat
