// Drives the split-expert cache with random operations and a simulated link whose transfers finish in any
// order, fail, or are cancelled. Each page holds a tag of its block, which detects pages that are reassigned
// while a pinned expert uses them. Runs with and without sanitizers:
//
//   native_cache_test [--seconds S] [--seed N]    prints the number of operations
//   native_cache_test --bench                     prints nanoseconds of bookkeeping a layer
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cache/policy.h"
#include "cache/split_cache.h"
#include "memory/slab.h"

namespace moechat {
namespace {

#define EXPECT(condition)                                                  \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

constexpr std::int64_t kPageBytes = 4096;
constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Shape {
  std::int32_t layers, experts, blocks, top_k;
  std::int64_t pages, reserve;
  const char* policy;
};

PolicySpec spec_of(const Shape& shape) {
  PolicySpec spec;
  spec.name = shape.policy;
  spec.layers = shape.layers;
  spec.experts = shape.experts;
  spec.omega = 8;
  return spec;
}

std::vector<LayerTarget> even_targets(const Shape& shape, double theta) {
  const auto blocks = std::max(1, static_cast<std::int32_t>(theta * shape.blocks + 0.5));
  const std::int64_t each = (shape.pages - shape.reserve) / (std::int64_t{shape.layers} * blocks);
  const auto count = static_cast<std::int32_t>(std::min<std::int64_t>(shape.experts, each));
  return {static_cast<std::size_t>(shape.layers), LayerTarget{count, blocks}};
}

class Driver {
 public:
  Driver(const Shape& shape, std::uint64_t seed, std::int64_t check_every)
      : shape_(shape),
        check_every_(check_every),
        random_(seed),
        slab_(shape.pages, kPageBytes),
        policy_(make_policy(spec_of(shape))),
        cache_(shape.layers, shape.experts, shape.blocks, &slab_, policy_.get(), even_targets(shape, 0.5),
               shape.reserve) {}

  void step() {
    const std::uint32_t choice = draw(100);
    if (choice < 14) {
      access();
    } else if (choice < 26) {
      demand();
    } else if (choice < 38) {
      prefetch();
    } else if (choice < 62) {
      land();
    } else if (choice < 66) {
      cancel_any();
    } else if (choice < 70) {
      cancel_stale();
    } else if (choice < 90) {
      release();
    } else if (choice < 95) {
      take_staging();
    } else if (choice < 98) {
      give_staging();
    } else if (choice < 99) {
      set_targets();
    } else {
      set_impossible_targets();
    }
    if (operations_ >= next_check_) {
      next_check_ = operations_ + check_every_;
      verify();
    }
  }

  // Finishes all transfers and releases all experts; nothing may be left over.
  void drain() {
    while (!flying_.empty()) land();
    while (!pinned_.empty()) release();
    while (!staging_.empty()) give_staging();
    verify();
    EXPECT(cache_.in_flight() == 0 && cache_.orphans() == 0 && cache_.staging() == 0);
    std::int64_t held = 0;
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
      for (std::int32_t expert = 0; expert < shape_.experts; ++expert) held += cache_.resident(layer, expert);
    }
    EXPECT(held + slab_.free_pages() == slab_.pages());
    const CacheCounters& counters = cache_.counters();
    EXPECT(counters.fetched_demand == landed_demand_ && counters.fetched_prefetch == landed_prefetch_);
    EXPECT(counters.prefetch_wasted <= prefetched_);
  }

  std::int64_t operations() const { return operations_; }

 private:
  struct Flight {
    PageId page;
    std::uint32_t generation;
    std::uint64_t tag;  // 0: staging
    bool prefetch;
    bool orphan;  // its expert has given the page up
  };
  struct Pin {
    std::int32_t layer, expert;
    std::int32_t assigned;  // least number of blocks that must stay, unless a transfer of the expert fails
  };

  std::uint32_t draw(std::uint32_t below) { return static_cast<std::uint32_t>(random_() % below); }
  // Draws small numbers more often than large ones: routers prefer some experts too.
  std::int32_t draw_expert() {
    const auto count = static_cast<std::uint32_t>(shape_.experts);
    return static_cast<std::int32_t>(std::min(draw(count), draw(count)));
  }
  std::uint64_t tag_of(std::int32_t layer, std::int32_t expert, std::int32_t block) const {
    const std::int64_t expert_index = std::int64_t{layer} * shape_.experts + expert;
    return static_cast<std::uint64_t>(expert_index * shape_.blocks + block + 1);
  }
  void write(PageId page, std::uint64_t tag) { std::memcpy(slab_.data(page), &tag, sizeof tag); }
  std::uint64_t read(PageId page) const {
    std::uint64_t tag;
    std::memcpy(&tag, slab_.data(page), sizeof tag);
    return tag;
  }

  void draw_experts() {
    chosen_.clear();
    const std::uint32_t count = 1 + draw(static_cast<std::uint32_t>(shape_.top_k));
    while (chosen_.size() < count) {
      const std::int32_t expert = draw_expert();
      if (std::find(chosen_.begin(), chosen_.end(), expert) == chosen_.end()) chosen_.push_back(expert);
    }
  }

  void access() {
    if (pinned_.size() > 3 * static_cast<std::size_t>(shape_.top_k)) return release();
    layer_ = draw(8) == 0 ? static_cast<std::int32_t>(draw(static_cast<std::uint32_t>(shape_.layers)))
                          : (layer_ + 1) % shape_.layers;
    draw_experts();
    const std::int64_t pass = draw(4) == 0 ? 5 : 1;
    std::vector<std::int32_t> tokens;
    std::vector<HitKind> kinds(chosen_.size());
    for (std::size_t i = 0; i < chosen_.size(); ++i) {
      tokens.push_back(1 + static_cast<std::int32_t>(draw(static_cast<std::uint32_t>(pass))));
    }
    const auto count = static_cast<std::int64_t>(chosen_.size());
    cache_.access(layer_, chosen_.data(), tokens.data(), count, pass, kinds.data());
    ++operations_;
    for (std::size_t i = 0; i < chosen_.size(); ++i) {
      const std::int32_t assigned = cache_.assigned(layer_, chosen_[i]);
      const std::int32_t resident = cache_.resident(layer_, chosen_[i]);
      EXPECT((kinds[i] == HitKind::kMiss) == (assigned == 0));
      EXPECT(kinds[i] != HitKind::kFull || resident == shape_.blocks);
      EXPECT(kinds[i] != HitKind::kPrefetch || assigned == shape_.blocks);
      pinned_.push_back({layer_, chosen_[i], assigned});
    }
    const double* keys = policy_->keys(layer_);
    for (std::int32_t expert = 0; expert < shape_.experts; ++expert) {
      EXPECT(keys[expert] > -1e301 && keys[expert] < 1e301);
    }
  }

  // Plans twice and compares all visible state: planning changes nothing and is deterministic.
  void move(const Want& want) {
    const std::uint64_t version = cache_.version();
    const std::int64_t available = cache_.available();
    cache_.plan(want, &plan_);
    cache_.plan(want, &again_);
    operations_ += 2;
    EXPECT(cache_.version() == version && cache_.available() == available && plan_.version == version);
    EXPECT(plan_.fetches.size() == again_.fetches.size() && plan_.victims.size() == again_.victims.size());
    const auto fetched = static_cast<std::int64_t>(plan_.fetches.size());
    EXPECT(fetched <= want.max_blocks && fetched <= available);
    std::int64_t freed = 0;
    for (const Victim& victim : plan_.victims) {
      EXPECT(cache_.pins(victim.layer, victim.expert) == 0);
      EXPECT(cache_.resident(victim.layer, victim.expert) == cache_.assigned(victim.layer, victim.expert));
      freed += victim.blocks;
    }
    EXPECT(freed == std::max<std::int64_t>(0, fetched - slab_.free_pages()));
    for (std::size_t i = 0; want.whole && i < plan_.fetches.size(); ++i) {
      const bool last =
          i + 1 == plan_.fetches.size() || plan_.fetches[i + 1].expert != plan_.fetches[i].expert;
      EXPECT(!last || plan_.fetches[i].block + 1 == shape_.blocks);
    }
    if (!want.whole && !want.prefetch) {
      std::int64_t missing = 0;
      for (std::int64_t i = 0; i < want.count; ++i) {
        missing += shape_.blocks - cache_.assigned(want.layer, want.experts[i]);
      }
      EXPECT(fetched == std::min({missing, available, want.max_blocks}));
    }
    if (draw(16) == 0) return;  // a plan that is not committed
    if (draw(16) == 0 && change_something()) {
      bool refused = false;
      try {
        cache_.commit(&plan_);
      } catch (const std::logic_error&) {
        refused = true;
      }
      EXPECT(refused);
      return;
    }
    cache_.commit(&plan_);
    ++operations_;
    for (const Fetch& fetch : plan_.fetches) {
      EXPECT(cache_.page(fetch.layer, fetch.expert, fetch.block) == fetch.page && cache_.filling(fetch.page));
      write(fetch.page, 0);
      flying_.push_back({fetch.page, slab_.generation(fetch.page),
                         tag_of(fetch.layer, fetch.expert, fetch.block), want.prefetch, false});
      prefetched_ += want.prefetch ? 1 : 0;
    }
    for (std::int64_t i = 0; i < plan_.satisfied; ++i) {
      EXPECT(cache_.assigned(want.layer, want.experts[i]) == shape_.blocks);
    }
    note_pins();
  }

  bool change_something() {
    if (flying_.empty()) return false;
    land();
    return true;
  }

  void demand() {
    if (pinned_.empty()) return;
    const std::int32_t layer = pinned_[draw(static_cast<std::uint32_t>(pinned_.size()))].layer;
    chosen_.clear();
    for (const Pin& pin : pinned_) {
      const bool named = std::find(chosen_.begin(), chosen_.end(), pin.expert) != chosen_.end();
      if (pin.layer == layer && !named) chosen_.push_back(pin.expert);
    }
    const auto count = static_cast<std::int64_t>(chosen_.size());
    const std::int64_t most = draw(3) == 0 ? draw(8) : kNoLimit;
    move({layer, draw(4) == 0 ? layer_ : layer, chosen_.data(), count, false, most, draw(2) == 0});
  }

  void prefetch() {
    const auto ahead = 1 + static_cast<std::int32_t>(draw(3));
    draw_experts();
    const auto count = static_cast<std::int64_t>(chosen_.size());
    const std::int64_t most = draw(3) == 0 ? draw(8) : kNoLimit;
    const std::int32_t to = (layer_ + ahead) % shape_.layers;
    if (draw(2) == 0) policy_->predict(to, chosen_.data(), count);
    move({to, layer_, chosen_.data(), count, true, most, draw(2) == 0});
  }

  // Finishes a transfer, with success or with an error.
  void land() {
    if (flying_.empty()) return;
    const Flight flight = take_flight(draw(static_cast<std::uint32_t>(flying_.size())));
    const int error = draw(25) == 0 ? 5 : 0;
    if (error == 0) {
      write(flight.page, flight.tag);
      ++(flight.prefetch ? landed_prefetch_ : landed_demand_);
    }
    EXPECT(slab_.generation(flight.page) == flight.generation);  // the page was not reassigned
    EXPECT(cache_.landed(flight.page, error) == (flight.tag != 0 && !flight.orphan));
    ++operations_;
    if (error != 0) after_loss();
    note_pins();
  }

  void cancel_any() {
    if (flying_.empty()) return;
    const Flight flight = take_flight(draw(static_cast<std::uint32_t>(flying_.size())));
    cache_.cancelled(flight.page);
    ++operations_;
    after_loss();
  }

  void cancel_stale() {
    const auto layer = static_cast<std::int32_t>(draw(static_cast<std::uint32_t>(shape_.layers)));
    cache_.stale_prefetches(layer, &stale_);
    ++operations_;
    std::int32_t expert = -1, stopped = -1;
    std::int32_t block = 0;
    for (const Fetch& fetch : stale_) {
      EXPECT(fetch.layer == layer && cache_.pins(layer, fetch.expert) == 0 && cache_.filling(fetch.page));
      EXPECT(fetch.expert != expert || fetch.block < block);
      expert = fetch.expert;
      block = fetch.block;
      if (expert == stopped) continue;
      if (draw(8) == 0) {  // the transfer has already started
        stopped = expert;
        continue;
      }
      const auto is_it = [&](const Flight& flight) { return flight.page == fetch.page; };
      const auto found = std::find_if(flying_.begin(), flying_.end(), is_it);
      EXPECT(found != flying_.end() && found->prefetch);
      take_flight(static_cast<std::size_t>(found - flying_.begin()));
      cache_.cancelled(fetch.page);
      ++operations_;
      EXPECT(cache_.assigned(layer, expert) == block);
    }
    after_loss();
  }

  void release() {
    if (pinned_.empty()) return;
    const std::size_t which = draw(static_cast<std::uint32_t>(pinned_.size()));
    const Pin pin = pinned_[which];
    pinned_[which] = pinned_.back();
    pinned_.pop_back();
    for (std::int32_t block = 0; block < cache_.resident(pin.layer, pin.expert); ++block) {
      EXPECT(read(cache_.page(pin.layer, pin.expert, block)) == tag_of(pin.layer, pin.expert, block));
    }
    cache_.release(pin.layer, pin.expert);
    ++operations_;
  }

  void take_staging() {
    if (cache_.staging() > shape_.reserve) return;
    const std::int64_t available = cache_.available();
    const PageId page = cache_.take_staging(layer_);
    ++operations_;
    EXPECT((page == kNoPage) == (available == 0));
    if (page == kNoPage) return;
    staging_.push_back(page);
    flying_.push_back({page, slab_.generation(page), 0, false, false});
  }

  void give_staging() {
    if (staging_.empty()) return;
    const PageId page = staging_.back();
    staging_.pop_back();
    cache_.give_staging(page);
    ++operations_;
    after_loss();
  }

  void set_targets() {
    std::vector<LayerTarget> targets(static_cast<std::size_t>(shape_.layers));
    std::int64_t left = shape_.pages - shape_.reserve;
    for (LayerTarget& target : targets) {
      target.blocks = 1 + static_cast<std::int32_t>(draw(static_cast<std::uint32_t>(shape_.blocks)));
      const std::int64_t most = std::min<std::int64_t>(shape_.experts, left / target.blocks);
      target.experts = static_cast<std::int32_t>(draw(static_cast<std::uint32_t>(most) + 1));
      left -= std::int64_t{target.experts} * target.blocks;
    }
    cache_.set_targets(targets);
    ++operations_;
  }

  void set_impossible_targets() {
    const std::uint64_t version = cache_.version();
    std::vector<LayerTarget> targets(static_cast<std::size_t>(shape_.layers),
                                     {shape_.experts, shape_.blocks});
    if (draw(2) == 0) targets.assign(targets.size(), {1, shape_.blocks + 1});
    bool refused = false;
    try {
      cache_.set_targets(targets);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    ++operations_;
    EXPECT(refused && cache_.version() == version);
  }

  Flight take_flight(std::size_t which) {
    const Flight flight = flying_[which];
    flying_[which] = flying_.back();
    flying_.pop_back();
    return flight;
  }

  // Updates the test's state after blocks may have been lost: new orphans, and lower bounds of pinned blocks.
  void after_loss() {
    for (Flight& flight : flying_) {
      if (flight.tag == 0 || flight.orphan) continue;
      const std::int64_t index = static_cast<std::int64_t>(flight.tag) - 1;
      const std::int64_t expert = index / shape_.blocks;
      flight.orphan = cache_.page(static_cast<std::int32_t>(expert / shape_.experts),
                                  static_cast<std::int32_t>(expert % shape_.experts),
                                  static_cast<std::int32_t>(index % shape_.blocks)) != flight.page;
    }
    for (Pin& pin : pinned_) pin.assigned = std::min(pin.assigned, cache_.assigned(pin.layer, pin.expert));
  }
  void note_pins() {
    for (Pin& pin : pinned_) {
      const std::int32_t assigned = cache_.assigned(pin.layer, pin.expert);
      EXPECT(assigned >= pin.assigned);
      pin.assigned = assigned;
    }
  }

  void verify() {
    const std::string wrong = cache_.check();
    if (!wrong.empty()) std::fprintf(stderr, "%s\n", wrong.c_str());
    EXPECT(wrong.empty());
    EXPECT(cache_.in_flight() == static_cast<std::int64_t>(flying_.size()));
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
      for (std::int32_t expert = 0; expert < shape_.experts; ++expert) {
        for (std::int32_t block = 0; block < cache_.resident(layer, expert); ++block) {
          EXPECT(read(cache_.page(layer, expert, block)) == tag_of(layer, expert, block));
        }
      }
    }
  }

  Shape shape_;
  std::int64_t check_every_;
  std::mt19937_64 random_;
  Slab slab_;
  std::unique_ptr<EvictionPolicy> policy_;
  SplitExpertCache cache_;
  std::int32_t layer_ = 0;
  std::vector<std::int32_t> chosen_;
  std::vector<Flight> flying_;
  std::vector<Pin> pinned_;
  std::vector<PageId> staging_;
  std::vector<Fetch> stale_;
  Plan plan_, again_;
  std::int64_t operations_ = 0;
  std::int64_t next_check_ = 0;
  std::int64_t landed_demand_ = 0;
  std::int64_t landed_prefetch_ = 0;
  std::int64_t prefetched_ = 0;
};

std::int64_t run_random(double seconds, std::uint64_t seed) {
  const struct {
    Shape shape;
    std::int64_t check_every;
  } cases[] = {
      {{2, 3, 2, 2, 5, 2, "lru"}, 1},
      {{3, 4, 3, 2, 14, 3, "lcp"}, 1},
      {{1, 6, 4, 3, 16, 4, "two_level_lru"}, 1},
      {{4, 16, 5, 4, 90, 12, "lfu"}, 64},
      {{8, 32, 12, 8, 900, 100, "discount"}, 4096},
      {{5, 12, 4, 3, 60, 9, "forecast"}, 16},
      {{16, 64, 12, 8, 4000, 200, "lcp"}, 32768},
  };
  const double share = seconds / static_cast<double>(std::size(cases));
  std::int64_t operations = 0;
  for (const auto& test : cases) {
    const Clock::time_point start = Clock::now();
    for (std::uint64_t round = 0; round == 0 || seconds_since(start) < share; ++round) {
      Driver driver(test.shape, seed * 1000003 + round, test.check_every);
      for (int step = 0; step < 20000; ++step) driver.step();
      driver.drain();
      operations += driver.operations();
    }
  }
  return operations;
}

// Bookkeeping of one layer: access, plan, commit, landed, release, with `misses` of top_k experts absent.
struct Timing {
  double nanoseconds, blocks;  // a layer
};

Timing bench_layer(const Shape& shape, std::int32_t misses, double theta) {
  Slab slab(shape.pages, kPageBytes);
  PolicySpec spec = spec_of(shape);
  spec.omega = 128;
  const auto policy = make_policy(spec);
  SplitExpertCache cache(shape.layers, shape.experts, shape.blocks, &slab, policy.get(),
                         even_targets(shape, theta), shape.reserve);
  const std::int32_t hits = shape.top_k - misses;
  std::vector<std::int32_t> experts(static_cast<std::size_t>(shape.top_k));
  const std::vector<std::int32_t> tokens(experts.size(), 1);
  Plan plan;
  std::int64_t fetched = 0, layers = 0;
  std::int32_t turn = 0;
  const auto token = [&] {
    // Hits rotate among the first experts. Misses cycle through the rest, which are evicted before they
    // recur.
    const std::int32_t others = shape.experts - 2 * hits;
    for (std::int32_t i = 0; i < shape.top_k; ++i) {
      const bool hot = i < hits;
      const std::int32_t rest = others > 0 ? 2 * hits + (turn * misses + i - hits) % std::max(1, others) : i;
      experts[static_cast<std::size_t>(i)] = hot ? 2 * i + turn % 2 : rest;
    }
    ++turn;
    for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
      cache.access(layer, experts.data(), tokens.data(), shape.top_k, 1, nullptr);
      cache.plan({layer, layer, experts.data(), shape.top_k, false, kNoLimit, true}, &plan);
      EXPECT(plan.satisfied == shape.top_k);
      cache.commit(&plan);
      for (const Fetch& fetch : plan.fetches) cache.landed(fetch.page, 0);
      for (const std::int32_t expert : experts) cache.release(layer, expert);
      fetched += static_cast<std::int64_t>(plan.fetches.size());
      ++layers;
    }
  };
  for (int i = 0; i < 400; ++i) token();
  fetched = layers = 0;
  cache.reset_counters();
  double best = 1e9;
  for (int repeat = 0; repeat < 20; ++repeat) {
    const std::int64_t before = layers;
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < 100; ++i) token();
    best = std::min(best, seconds_since(start) / static_cast<double>(layers - before));
  }
  EXPECT((fetched > 0) == (misses > 0) && cache.check().empty());
  return {best * 1e9, static_cast<double>(fetched) / static_cast<double>(layers)};
}

void bench() {
  // Pages for half of the experts, plus twice the blocks of one layer's experts in flight.
  const Shape shapes[] = {{48, 128, 12, 8, 48 * 64 * 12 + 192, 192, "lcp"},
                          {48, 128, 12, 8, 48 * 64 * 12 + 192, 192, "forecast"},
                          {32, 8, 224, 2, 32 * 4 * 224 + 896, 896, "lcp"},
                          {32, 8, 224, 2, 32 * 4 * 224 + 896, 896, "forecast"}};
  for (const Shape& shape : shapes) {
    const std::int32_t misses = std::max(1, shape.top_k / 4);
    for (const double theta : {1.0, 0.5}) {
      const Timing hit = bench_layer(shape, 0, theta);
      const Timing miss = bench_layer(shape, misses, theta);
      std::printf("%s, %d layers x %d experts x %d blocks, top %d, theta %.2f: all hit %.0f ns a layer; ",
                  shape.policy, shape.layers, shape.experts, shape.blocks, shape.top_k, theta,
                  hit.nanoseconds);
      std::printf("%d cold, %.0f blocks fetched: %.0f ns a layer\n", misses, miss.blocks, miss.nanoseconds);
    }
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
