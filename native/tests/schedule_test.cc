// Compares the engine's schedule with the simulator's on one clock: random layers, budgets, splits, policies,
// predictions and costs, every treatment of missing blocks, on the host and on a card. The engine side is its
// DeviceExecutor with a link, kernels and CPU that only advance the clock, so that sharing by measured rates
// is compared too. Decisions, counters and times must be equal.
//
//   native_schedule_test [--seconds S] [--seed N] [--alarm N]
//
// A run that hangs is ended by an alarm N seconds (60) after --seconds. Prints the number of layers run.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "offload/executors.h"
#include "simulate/timeline.h"

namespace moechat {
namespace {

#define EXPECT(condition)                                                  \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

using Random = std::mt19937_64;

std::int64_t layers_run = 0;

std::int64_t between(Random& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}
bool chance(Random& random, double share) { return std::uniform_real_distribution<double>()(random) < share; }

// A virtual link with a card's stream order: copies and kernels wait for each other on the clock.
class ClockedLink final : public Link, public StreamOrder {
 public:
  ClockedLink(std::int32_t regions, const VirtualLinkOptions& options, double* now)
      : link_(regions, options, now), card_(options.card), now_(now) {}

  const char* name() const override { return link_.name(); }
  std::string describe(std::int32_t region, std::int64_t offset) const override {
    return link_.describe(region, offset);
  }
  std::int64_t region_bytes(std::int32_t region) const override { return link_.region_bytes(region); }
  std::int32_t regions() const override { return link_.regions(); }
  void open(std::uint32_t slots) override { link_.open(slots); }
  void submit(const Transfer* transfers, std::int64_t count) override { link_.submit(transfers, count); }
  bool cancel(std::uint32_t slot) override { return link_.cancel(slot); }
  void promote(std::uint32_t slot, Priority priority) override { link_.promote(slot, priority); }
  std::int64_t poll(std::vector<Completion>* out) override { return link_.poll(out); }
  bool wait(std::chrono::microseconds) override {
    EXPECT(std::isfinite(link_.next_end()));
    *now_ = std::max(*now_, link_.next_end());
    return true;
  }
  StreamOrder* stream_order() override { return card_ ? this : nullptr; }
  std::string failure() const override { return {}; }
  LinkStats stats() const override { return link_.stats(); }
  double now() const override { return link_.now(); }
  bool stop(std::chrono::milliseconds limit) override { return link_.stop(limit); }

  bool fills_first(void*, const std::uint32_t* slots, std::int64_t count,
                   std::chrono::microseconds limit) override {
    double copied = 0;
    for (std::int64_t i = 0; i < count; ++i) copied = std::max(copied, link_.end_of(slots[i]));
    if (!std::isfinite(copied)) return wait(limit), false;
    card_until = std::max(card_until, copied);
    return true;
  }
  void reads_first(void*, const std::uint32_t* slots, std::int64_t count) override {
    for (std::int64_t i = 0; i < count; ++i) link_.move_after(slots[i], card_until);
  }
  VirtualLink& base() { return link_; }

  double card_until = 0;

 private:
  VirtualLink link_;
  const bool card_;
  double* const now_;
};

// The engine's executor on the virtual clock.
class ClockedExecutor final : public DeviceExecutor {
 public:
  ClockedExecutor(ClockedLink* link, const ComputeCosts& costs, const Grouped* rows, double* now)
      : DeviceExecutor(link, 1.0, FarKernels(LayerForms{}, kDefaultActivationBits, 1, {})),
        clocked_(link),
        costs_(costs),
        rows_(rows),
        now_(now) {}

  double now() override { return *now_; }
  std::int64_t far_threads() const override { return costs_.far_threads; }
  void far_compute(const std::vector<FarPiece>& pieces) override {
    double pairs = 0;
    for (const FarPiece& piece : pieces) {
      pairs += static_cast<double>(rows_->tokens_of[static_cast<std::size_t>(piece.row)]) *
               (piece.end - piece.begin);
    }
    *now_ = clocked_->base().compute_beside(pairs * costs_.far_block, pairs * costs_.far_block_shared);
  }

 private:
  ClockedLink* const clocked_;
  const ComputeCosts costs_;
  const Grouped* const rows_;
  double* const now_;
};

struct Case {
  TimelineOptions options;
  std::string policy;
  std::int32_t top_k;
  std::vector<std::int64_t> starts;
  std::vector<std::int32_t> experts;   // [tokens, layers, top_k]
  std::vector<std::int32_t> rankings;  // [lookahead, tokens, layers, experts]

  std::int64_t tokens() const { return starts.back(); }
  std::unique_ptr<EvictionPolicy> make() const {
    PolicySpec spec;
    spec.name = policy;
    spec.layers = options.layers;
    spec.experts = options.experts;
    return make_policy(spec);
  }
};

Case draw(Random& random) {
  Case drawn;
  TimelineOptions& options = drawn.options;
  options.layers = static_cast<std::int32_t>(between(random, 1, 5));
  options.experts = static_cast<std::int32_t>(between(random, 2, 9));
  options.blocks = static_cast<std::int32_t>(between(random, 1, 6));
  options.record_bytes = between(random, 1, 40) * 50000;
  const std::int64_t all = std::int64_t{options.layers} * options.experts * options.blocks;
  options.pages = chance(random, 0.3) ? between(random, 2, 8) : between(random, 2, all + 8);
  options.reserve = between(random, 1, options.pages);
  std::int64_t left = options.pages - options.reserve;
  for (std::int32_t layer = 0; layer < options.layers; ++layer) {
    const auto blocks = static_cast<std::int32_t>(between(random, 1, options.blocks));
    const auto most = std::min<std::int64_t>(options.experts, left / blocks);
    const auto kept = static_cast<std::int32_t>(between(random, 0, most));
    options.targets.push_back({kept, blocks});
    left -= std::int64_t{kept} * blocks;
  }
  options.whole_experts = chance(random, 0.3);
  constexpr Miss kMisses[] = {Miss::kFetch, Miss::kCompute, Miss::kBoth, Miss::kBoth};
  options.loading.miss = kMisses[between(random, 0, 3)];
  options.launch = chance(random, 0.5) ? LaunchPattern::kCard : LaunchPattern::kHost;
  constexpr Ahead kAheads[] = {Ahead::kNone, Ahead::kPrompts, Ahead::kRanked, Ahead::kRanked,
                               Ahead::kWholeLayer};
  options.loading.speculation = {kAheads[between(random, 0, 4)],
                                 static_cast<std::int32_t>(between(random, 1, 3)), between(random, 0, 4)};
  options.loading.ahead_experts = static_cast<std::int32_t>(between(random, 1, options.experts));
  options.loading.ahead_blocks = chance(random, 0.5) ? between(random, 0, 6) : 1000000;
  const auto time = [&](double most) { return std::uniform_real_distribution<double>(0, most)(random); };
  options.attention = time(300e-6);
  options.head = time(1e-3);
  options.costs.call = chance(random, 0.5) ? 0 : time(30e-6);
  for (int i = 0; i < 3; ++i) {
    const double before = options.costs.compute.empty() ? 0 : options.costs.compute.back();
    options.costs.compute.push_back(before + time(30e-6));
  }
  // The CPU takes 0.1 to 10 times as long for a block as the link.
  const double block = static_cast<double>(options.record_bytes) / 10e9;
  options.costs.far_block = block * std::pow(10.0, time(2) - 1);
  options.costs.far_block_shared = options.costs.far_block * (1 + time(1));
  options.costs.far_threads = between(random, 1, 8);
  VirtualLinkOptions& link = options.link;
  link.block_bytes = options.record_bytes;
  link.latency = chance(random, 0.5) ? 0 : time(100e-6);
  const double slowdown = 1 + time(1);
  for (std::int64_t i = 1; i <= between(random, 1, 4); ++i) {
    link.seconds.push_back(block * static_cast<double>(i) * (0.5 + time(0.1)));
    link.seconds_shared.push_back(link.seconds.back() * slowdown);
  }
  link.in_flight_bytes = between(random, 1, 12) * options.record_bytes;
  link.card = options.launch == LaunchPattern::kCard;

  constexpr const char* kPolicies[] = {"lru", "lcp", "lfu", "blend"};
  drawn.policy = kPolicies[between(random, 0, 3)];
  drawn.top_k = static_cast<std::int32_t>(between(random, 1, std::min<std::int64_t>(3, options.experts)));
  const std::int64_t longest = chance(random, 0.5) ? 1 : 12;
  drawn.starts.push_back(0);
  for (int pass = 0; pass < 12; ++pass)
    drawn.starts.push_back(drawn.starts.back() + between(random, 1, longest));
  std::vector<std::int32_t> order;
  for (std::int32_t expert = 0; expert < options.experts; ++expert) order.push_back(expert);
  for (std::int64_t i = 0; i < drawn.tokens() * options.layers; ++i) {
    std::shuffle(order.begin(), order.end(), random);
    drawn.experts.insert(drawn.experts.end(), order.begin(), order.begin() + drawn.top_k);
  }
  for (std::int64_t i = 0; i < options.loading.speculation.lookahead * drawn.tokens() * options.layers; ++i) {
    std::shuffle(order.begin(), order.end(), random);
    drawn.rankings.insert(drawn.rankings.end(), order.begin(), order.end());
  }
  return drawn;
}

struct Outcome {
  ScheduleStats stats;
  double now;
  std::vector<std::int16_t> residency;
};

Outcome simulate(const Case& drawn) {
  Timeline timeline(drawn.options, drawn.make());
  Passes passes;
  passes.experts = drawn.experts.data();
  passes.tokens = drawn.tokens();
  passes.k = drawn.top_k;
  passes.starts = drawn.starts.data();
  passes.passes = static_cast<std::int64_t>(drawn.starts.size()) - 1;
  passes.rankings = drawn.rankings.data();
  passes.depths = drawn.options.loading.speculation.lookahead;
  passes.width = drawn.options.experts;
  std::vector<PassFigures> figures(static_cast<std::size_t>(passes.passes));
  timeline.run(passes, 0, passes.passes, false, figures.data(), {});
  const double now = timeline.now();
  timeline.drain();
  EXPECT(timeline.check().empty());
  return {timeline.stats(), now, timeline.residency()};
}

void speculate(const Case& drawn, LayerSchedule& schedule, std::int64_t token, std::int64_t tokens) {
  const TimelineOptions& options = drawn.options;
  const SpeculationPlan plan =
      plan_speculation(options.loading.speculation, schedule.layer(), options.layers, tokens);
  if (plan.whole >= 0) {
    std::vector<std::int32_t> all;
    for (std::int32_t expert = 0; expert < options.experts; ++expert) all.push_back(expert);
    schedule.prefetch(plan.whole, all.data(), options.experts, options.loading.ahead_blocks, Priority::kNext);
  }
  for (const Prediction& one : plan.ranked) {
    const std::int64_t of = token + (schedule.layer() + one.ahead) / options.layers;
    if (of >= drawn.tokens()) continue;
    const std::int64_t place = ((one.ahead - 1) * drawn.tokens() + of) * options.layers + one.layer;
    const std::int32_t* const ranked = drawn.rankings.data() + place * options.experts;
    schedule.policy().predict(one.layer, ranked, options.loading.ahead_experts);
    schedule.prefetch(one.layer, ranked, options.loading.ahead_experts, options.loading.ahead_blocks,
                      one.ahead > 1 ? Priority::kLater : Priority::kNext);
  }
}

Outcome run_engine(const Case& drawn) {
  const TimelineOptions& options = drawn.options;
  double now = 0;
  auto owned = std::make_unique<ClockedLink>(options.layers, options.link, &now);
  ClockedLink* const link = owned.get();
  ScheduleOptions sizes = options;
  sizes.near_memory = Slab::no_memory();
  LayerSchedule schedule(sizes, drawn.make(), std::move(owned), nullptr);
  ClockedExecutor executor(link, options.costs, &schedule.rows(), &now);
  const auto cost = [&](std::int64_t pairs) {
    const std::vector<double>& curve = options.costs.compute;
    const auto known = static_cast<std::int64_t>(curve.size());
    const double step = curve.back() - curve[curve.size() - 2];
    const auto index = static_cast<std::size_t>(std::min(pairs, known) - 1);
    return options.costs.call + curve[index] +
           step * static_cast<double>(std::max<std::int64_t>(0, pairs - known));
  };
  const DeviceExecutor::Launch launch = [&](const DeviceLaunch& blocks) {
    std::int64_t pairs = 0;
    for (std::int64_t row = 0; row < blocks.rows; ++row) {
      pairs += std::int64_t{blocks.row_entry[row + 1] - blocks.row_entry[row]} *
               blocks.items->tokens_of[static_cast<std::size_t>(row)];
    }
    if (options.link.card) {
      link->card_until = std::max(link->card_until, now) + cost(pairs);
    } else {
      now += cost(pairs);
    }
  };
  // As the clocks of the simulator: see HostExecutor for the work of a call on the host.
  const std::int64_t work = std::int64_t{1} << 18;
  for (std::size_t pass = 0; pass + 1 < drawn.starts.size(); ++pass) {
    const std::int64_t first = drawn.starts[pass];
    const std::int64_t tokens = drawn.starts[pass + 1] - first;
    for (std::int32_t layer = 0; layer < options.layers; ++layer) {
      now += options.attention;
      std::vector<std::int64_t> index;
      for (std::int64_t token = first; token < first + tokens; ++token) {
        const std::int32_t* chosen = drawn.experts.data() + (token * options.layers + layer) * drawn.top_k;
        index.insert(index.end(), chosen, chosen + drawn.top_k);
      }
      const std::vector<float> weight(index.size(), 1.0f);
      schedule.begin(layer, index.data(), weight.data(), tokens, drawn.top_k, options.loading.miss);
      speculate(drawn, schedule, first + tokens - 1, tokens);
      executor.start(nullptr, &schedule.rows(), nullptr, work, &launch);
      schedule.finish(&executor);
      now = std::max(now, link->card_until);
      ++layers_run;
    }
    now += options.head;
  }
  const double ended = now;
  schedule.drain(&executor);
  EXPECT(schedule.check().empty());
  return {schedule.stats(), ended, schedule.residency()};
}

void compare(const Case& drawn) {
  const Outcome engine = run_engine(drawn);
  const Outcome simulated = simulate(drawn);
  const CacheCounters& a = engine.stats.cache;
  const CacheCounters& b = simulated.stats.cache;
  for (int kind = 0; kind < 4; ++kind) {
    EXPECT(a.hits[kind] == b.hits[kind]);
    EXPECT(a.prefill_hits[kind] == b.prefill_hits[kind]);
  }
  EXPECT(a.blocks_resident == b.blocks_resident && a.blocks_prefetched == b.blocks_prefetched);
  EXPECT(a.fetched_demand == b.fetched_demand && a.fetched_prefetch == b.fetched_prefetch);
  EXPECT(a.prefetch_wasted == b.prefetch_wasted && a.evicted == b.evicted && a.admitted == b.admitted);
  for (int priority = 0; priority < kPriorities; ++priority) {
    EXPECT(engine.stats.link.bytes[priority] == simulated.stats.link.bytes[priority]);
  }
  EXPECT(engine.stats.link.cancelled == simulated.stats.link.cancelled);
  EXPECT(engine.stats.blocks_far == simulated.stats.blocks_far);
  EXPECT(engine.stats.blocks_staged == simulated.stats.blocks_staged);
  EXPECT(engine.stats.kernel_calls == simulated.stats.kernel_calls);
  EXPECT(engine.stats.bytes_computed == simulated.stats.bytes_computed);
  EXPECT(engine.residency == simulated.residency);
  EXPECT(std::abs(engine.now - simulated.now) <= 1e-9);
}

int run(int count, char** arguments) {
  double limit = 1.0;
  std::uint64_t seed = 1;
  int patience = 60;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = arguments[i];
    if (name == "--seconds") limit = std::atof(arguments[i + 1]);
    if (name == "--seed") seed = std::strtoull(arguments[i + 1], nullptr, 10);
    if (name == "--alarm") patience = std::atoi(arguments[i + 1]);
  }
  alarm(static_cast<unsigned>(limit) + static_cast<unsigned>(patience));
  Random random(seed);
  const auto begun = std::chrono::steady_clock::now();
  do {
    compare(draw(random));
  } while (std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count() < limit);
  std::printf("operations %lld\n", static_cast<long long>(layers_run));
  return 0;
}

}  // namespace
}  // namespace moechat

int main(int count, char** arguments) { return moechat::run(count, arguments); }
