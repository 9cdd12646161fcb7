// Compares the routing counter with a direct count by definition, for every policy. Runs with and without
// sanitizers:
//
//   native_routing_test [--seconds S] [--seed N]    prints the number of accesses
//   native_routing_test --bench                     prints nanoseconds a layer
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cache/policy.h"
#include "cache/routing_counter.h"

namespace moechat {
namespace {

#define EXPECT(condition)                                                  \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

using Clock = std::chrono::steady_clock;
using Random = std::mt19937_64;
using Experts = std::vector<std::int32_t>;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::int32_t below(Random& random, std::int32_t end) {
  return static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(end));
}

std::unique_ptr<EvictionPolicy> policy_of(const std::string& name, std::int32_t layers,
                                          std::int32_t experts) {
  PolicySpec spec;
  spec.name = name;
  spec.layers = layers;
  spec.experts = experts;
  // Only three distinct ranks, to produce ties.
  for (std::int32_t i = 0; name == "static" && i < layers * experts; ++i) spec.ranks.push_back(i % 3);
  return make_policy(spec);
}

Experts shuffled(Random& random, std::int32_t experts) {
  Experts all(at(experts));
  std::iota(all.begin(), all.end(), 0);
  // Experts with low numbers are chosen more often.
  for (std::int32_t i = 0; i < experts; ++i) {
    const std::int32_t reach = below(random, 3) == 0 ? experts - i : std::min(4, experts - i);
    std::swap(all[at(i)], all[at(i + below(random, reach))]);
  }
  return all;
}

bool better(const double* keys, std::int32_t a, std::int32_t b) {
  return keys[a] != keys[b] ? keys[a] > keys[b] : a > b;
}

// Counts one layer by definition, with a separate cache for every number of experts.
struct Plain {
  Plain(std::int32_t count, std::int32_t places, const double* keys)
      : experts(count),
        depth(places),
        cached(at(count) + 1),
        activations(at(count)),
        ranks(at(count)),
        hits(at(places)),
        ranks_of_prediction(at(std::int64_t{count} * places)) {
    Experts all(at(count));
    std::iota(all.begin(), all.end(), 0);
    for (std::int32_t size = 0; size <= count; ++size) cached[at(size)] = best(all, size, keys);
  }

  static Experts best(Experts from, std::int32_t size, const double* keys) {
    std::sort(from.begin(), from.end(),
              [keys](std::int32_t a, std::int32_t b) { return better(keys, a, b); });
    from.resize(at(size));
    return from;
  }

  std::int32_t rank(std::int32_t expert) const {
    std::int32_t size = 0;
    while (std::count(cached[at(size + 1)].begin(), cached[at(size + 1)].end(), expert) == 0) ++size;
    return size;
  }

  void access(const Experts& chosen, const Experts& ranked) {
    for (const std::int32_t expert : chosen) {
      ++activations[at(expert)];
      ++ranks[at(rank(expert))];
    }
    predicted += ranked.empty() ? 0 : 1;
    for (std::int32_t y = 0; y < std::min<std::int64_t>(depth, static_cast<std::int64_t>(ranked.size()));
         ++y) {
      const std::int32_t expert = ranked[at(y)];
      hits[at(y)] += std::count(chosen.begin(), chosen.end(), expert);
      ++ranks_of_prediction[at(std::int64_t{y} * experts + rank(expert))];
    }
  }

  void keep(const double* keys, const Experts& chosen) {
    for (std::int32_t size = 0; size <= experts; ++size) {
      Experts candidates = cached[at(size)];
      for (const std::int32_t expert : chosen) {
        if (std::count(candidates.begin(), candidates.end(), expert) == 0) candidates.push_back(expert);
      }
      cached[at(size)] = best(candidates, size, keys);
    }
  }

  std::int32_t experts, depth;
  std::int64_t predicted = 0;
  std::vector<Experts> cached;  // by number
  std::vector<std::int64_t> activations, ranks, hits;
  std::vector<std::uint32_t> ranks_of_prediction;
};

template <class Value>
bool same(const std::vector<Value>& all, std::int32_t layer, const std::vector<Value>& one) {
  return std::equal(one.begin(), one.end(), all.begin() + layer * static_cast<std::ptrdiff_t>(one.size()));
}

std::int64_t compare(const std::string& name, Random& random, std::int32_t tokens) {
  const std::int32_t layers = 1 + below(random, 3);
  const std::int32_t experts = 1 + below(random, 70);
  const std::int32_t top_k = 1 + below(random, std::min(experts, 12));
  const auto policy = policy_of(name, layers, experts);
  RoutingCounter counter(layers, experts, top_k);
  std::vector<Plain> plain;
  for (std::int32_t i = 0; i < layers; ++i) plain.emplace_back(experts, counter.depth(), policy->keys(i));
  std::int64_t seen = 0;
  for (std::int32_t token = 0; token < tokens; ++token) {
    const std::int32_t pass = below(random, 8) == 0 ? 5 : 1;
    seen += pass == 1 ? 1 : 0;
    for (std::int32_t layer = 0; layer < layers; ++layer) {
      Experts chosen = shuffled(random, experts);
      chosen.resize(at(top_k));
      Experts ranked;
      if (below(random, 4) != 0) {
        ranked = shuffled(random, experts);
        ranked.resize(at(1 + below(random, experts)));
        counter.predict(layer, ranked.data(), static_cast<std::int64_t>(ranked.size()));
      }
      const Experts times(at(top_k), 1);
      if (pass == 1) plain[at(layer)].access(chosen, ranked);
      counter.access(layer, policy->keys(layer), chosen.data(), top_k, pass);
      policy->access(layer, chosen.data(), times.data(), top_k, pass);
      counter.keep(layer, policy->keys(layer), chosen.data(), top_k);
      plain[at(layer)].keep(policy->keys(layer), chosen);
    }
  }
  const RoutingCounts& counts = counter.counts();
  EXPECT(counts.tokens == seen);
  for (std::int32_t layer = 0; layer < layers; ++layer) {
    EXPECT(counts.predicted[at(layer)] == plain[at(layer)].predicted);
    EXPECT(same(counts.activations, layer, plain[at(layer)].activations));
    EXPECT(same(counts.ranks, layer, plain[at(layer)].ranks));
    EXPECT(same(counts.hits_of_prediction, layer, plain[at(layer)].hits));
    EXPECT(same(counts.ranks_of_prediction, layer, plain[at(layer)].ranks_of_prediction));
  }
  counter.reset();
  EXPECT(counts.tokens == 0 && same(counts.ranks, 0, std::vector<std::int64_t>(at(experts))));
  return std::int64_t{tokens} * layers;
}

std::int64_t run_random(double seconds, std::uint64_t seed) {
  Random random(seed);
  std::int64_t accesses = 0;
  const Clock::time_point start = Clock::now();
  do {
    for (const std::string& name : policy_names()) {
      if (name != "belady") accesses += compare(name, random, 40);  // which needs the future
    }
  } while (seconds_since(start) < seconds);
  return accesses;
}

// Routing with predictions whose first ranks are correct, the usual case.
void bench() {
  const struct {
    std::int32_t layers, experts, top_k;
  } shapes[] = {{48, 128, 8}, {26, 64, 6}, {24, 32, 4}, {61, 256, 8}};
  for (const auto& shape : shapes) {
    Random random(1);
    RoutingCounter counter(shape.layers, shape.experts, shape.top_k);
    const auto policy = policy_of("blend", shape.layers, shape.experts);
    const Experts times(at(shape.top_k), 1);
    std::vector<double> taken;
    for (int token = 0; token < 400; ++token) {
      for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
        const Experts chosen = shuffled(random, shape.experts);
        const Clock::time_point start = Clock::now();
        counter.predict(layer, chosen.data(), shape.experts);
        counter.access(layer, policy->keys(layer), chosen.data(), shape.top_k, 1);
        const double before = seconds_since(start);
        policy->access(layer, chosen.data(), times.data(), shape.top_k, 1);
        const Clock::time_point again = Clock::now();
        counter.keep(layer, policy->keys(layer), chosen.data(), shape.top_k);
        taken.push_back((before + seconds_since(again)) * 1e9);
      }
    }
    std::sort(taken.begin(), taken.end());
    std::printf("%d layers x %d experts, top %d, %d places: %.0f ns a layer (tenth %.0f, with the clock)\n",
                shape.layers, shape.experts, shape.top_k, counter.depth(), taken[taken.size() / 2],
                taken[taken.size() / 10]);
  }
}

}  // namespace
}  // namespace moechat

int main(int argc, char** argv) {
  double seconds = 2;
  std::uint64_t seed = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--bench") {
      moechat::bench();
      return 0;
    }
    if (i + 1 < argc && option == "--seconds") {
      seconds = std::atof(argv[++i]);
    } else if (i + 1 < argc && option == "--seed") {
      seed = std::strtoull(argv[++i], nullptr, 10);
    } else {
      std::fprintf(stderr, "usage: %s [--seconds S] [--seed N] | --bench\n", argv[0]);
      return 2;
    }
  }
  std::printf("operations %lld\n", static_cast<long long>(moechat::run_random(seconds, seed)));
  return 0;
}
