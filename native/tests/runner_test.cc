// Tests of the expert runner over simulated links: random layers, budgets, splits, policies, prefetches,
// delays, faults and threads, with every result bitwise equal to resident_forward; then stalls, failures,
// interruptions and a link that cannot be stopped. For runs under the sanitizers, see scripts/sanitize.
//
//   native_runner_test [--seconds S] [--seed N] [--alarm N] [--only NAME] [--bench]
//
// A run that hangs is ended by an alarm N seconds (60) after --seconds. --only runs one case. Prints the
// number of runner calls made.
#include "offload/runner.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/threads/thread_pool.h"
#include "link/sim_link.h"

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

std::atomic<std::int64_t> operations{0};

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::int64_t between(Random& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}
bool chance(Random& random, double share) { return std::uniform_real_distribution<double>()(random) < share; }

// A model of random 4-bit records with plausible scales, zeros and biases.
struct Model {
  BlockLayout layout;
  std::int32_t layers;
  std::int32_t experts;
  std::vector<std::vector<unsigned char>> records;  // by layer

  Model(Random& random, std::int32_t layer_count, std::int32_t expert_count, std::int64_t hidden,
        std::int64_t blocks)
      : layout(make_block_layout(hidden, blocks * kBlockNeurons, 4, false, false)),
        layers(layer_count),
        experts(expert_count) {
    const auto bytes = static_cast<std::size_t>(layout.record_bytes);
    for (std::int32_t layer = 0; layer < layers; ++layer) {
      records.emplace_back(static_cast<std::size_t>(experts * layout.blocks) * bytes);
      std::vector<unsigned char>& all = records.back();
      for (std::size_t i = 0; i + 8 <= all.size(); i += 8) {
        const std::uint64_t value = random();
        std::memcpy(all.data() + i, &value, 8);
      }
      for (std::size_t at = 0; at < all.size(); at += bytes) {
        for (const std::int64_t field : {layout.gate_sz, layout.up_sz, layout.down_sz}) {
          const std::int64_t tiles =
              field == layout.down_sz ? layout.hidden_padded / kTileRows : kTilesPerBlock * layout.groups;
          for (std::int64_t i = 0; i < tiles; ++i) {
            std::uint32_t words[16];
            for (std::uint32_t& word : words) {  // scales of about 0.06 to 0.12, zeros 7
              const auto factor = static_cast<std::uint32_t>(between(random, 8, 16));
              word = 17u << 27 | factor * 7u << 16 | factor << 12 | factor << 8 | factor * 7u;
            }
            std::memcpy(all.data() + at + static_cast<std::size_t>(field + i * kScaleBytes), words, 64);
          }
        }
      }
    }
  }
  std::int64_t blocks() const { return layout.blocks; }
  std::vector<SimRegion> regions() const {
    std::vector<SimRegion> list;
    for (const auto& layer : records) list.push_back({layer.data(), static_cast<std::int64_t>(layer.size())});
    return list;
  }
  std::vector<LayerTarget> no_targets() const {
    return std::vector<LayerTarget>(static_cast<std::size_t>(layers), LayerTarget{0, 1});
  }
};

constexpr GateSpec kSilu;

// Tokens with their experts, and the expected result.
struct Pass {
  std::int32_t layer;
  std::int64_t tokens;
  std::int64_t k;
  std::vector<std::int64_t> index;
  std::vector<float> weight, x, expected, out;

  Pass(Random& random, const Model& model, std::int32_t at, std::int64_t token_count)
      : layer(at), tokens(token_count), k(between(random, 1, std::min(model.experts, 5))) {
    std::normal_distribution<float> normal(0.0f, 1.0f);
    const bool repeats = chance(random, 0.1);
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::vector<std::int64_t> all;
      for (std::int64_t e = 0; e < model.experts; ++e) all.push_back(e);
      std::shuffle(all.begin(), all.end(), random);
      for (std::int64_t i = 0; i < k; ++i) {
        const std::int64_t drawn =
            repeats ? between(random, -1, model.experts) : all[static_cast<std::size_t>(i)];
        index.push_back(drawn);
        weight.push_back(normal(random));
      }
    }
    x.resize(static_cast<std::size_t>(tokens * model.layout.hidden_size));
    for (float& value : x) value = normal(random);
    out.assign(x.size(), -1.0f);
    expected.assign(x.size(), -2.0f);
    resident_forward(model.layout, kSilu, model.records[static_cast<std::size_t>(layer)].data(),
                     model.experts, x.data(), index.data(), weight.data(), tokens, k, expected.data());
  }
  void begin(ExpertRunner& runner) const {
    ++operations;
    runner.begin(layer, index.data(), weight.data(), tokens, k);
  }
  void finish(ExpertRunner& runner, const ExpertRunner::Interrupted& interrupted = {}) {
    ++operations;
    runner.finish(x.data(), tokens, out.data(), interrupted);
    EXPECT(out.empty() || std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)) == 0);
  }
  void run(ExpertRunner& runner) {
    begin(runner);
    finish(runner);
  }
};

RunnerOptions options_for(const Model& model, std::int64_t pages) {
  RunnerOptions options;
  options.layout = model.layout;
  options.gate = kSilu;
  options.layers = model.layers;
  options.experts = model.experts;
  options.pages = pages;
  options.targets = model.no_targets();
  return options;
}

std::unique_ptr<EvictionPolicy> lru(const Model& model) {
  PolicySpec spec;
  spec.name = "lru";
  spec.layers = model.layers;
  spec.experts = model.experts;
  return make_policy(spec);
}

std::unique_ptr<EvictionPolicy> any_policy(Random& random, const Model& model) {
  const std::vector<std::string> names = policy_names();
  PolicySpec spec;
  spec.name = names[random() % names.size()];
  spec.layers = model.layers;
  spec.experts = model.experts;
  for (std::int32_t i = 0; i < model.layers * model.experts; ++i) {
    spec.ranks.push_back(static_cast<double>(random() % 100));
  }
  spec.future_tokens = 20;
  spec.future_top_k = 2;
  for (std::int32_t i = 0; i < 20 * model.layers * 2; ++i) {
    spec.future.push_back(static_cast<std::int32_t>(between(random, 0, model.experts - 1)));
  }
  if (spec.name != "static") spec.ranks.clear();
  if (spec.name != "belady") {
    spec.future.clear();
    spec.future_tokens = 0;
    spec.future_top_k = 0;
  }
  return make_policy(spec);
}

std::vector<LayerTarget> any_targets(Random& random, const Model& model, std::int64_t most) {
  std::vector<LayerTarget> targets = model.no_targets();
  for (LayerTarget& target : targets) {
    const auto blocks = static_cast<std::int32_t>(between(random, 1, model.blocks()));
    const std::int64_t room = std::min<std::int64_t>(model.experts, most / blocks);
    target = {static_cast<std::int32_t>(between(random, 0, room)), blocks};
    most -= target.experts * target.blocks;
  }
  return targets;
}

SimLinkOptions any_link(Random& random) {
  SimLinkOptions link;
  link.bandwidth = chance(random, 0.5) ? 0 : static_cast<double>(between(random, 50, 2000)) * 1e6;
  link.latency = chance(random, 0.5) ? 0 : static_cast<double>(between(random, 1, 200)) * 1e-6;
  link.jitter = chance(random, 0.5) ? 0 : static_cast<double>(between(random, 1, 200)) * 1e-6;
  link.seed = random();
  link.reorder = static_cast<int>(between(random, 1, 5));
  link.in_flight_bytes = between(random, 1, 40) * 4096;
  return link;
}

void expect_consistent(const ExpertRunner& runner) {
  const std::string wrong = runner.check();
  if (!wrong.empty()) std::fprintf(stderr, "%s\n", wrong.c_str());
  EXPECT(wrong.empty());
}

void prefetch_something(Random& random, const Model& model, ExpertRunner& runner) {
  std::vector<float> scores(static_cast<std::size_t>(model.experts));
  for (float& score : scores) {
    score = chance(random, 0.05) ? std::nanf("") : static_cast<float>(between(random, 0, 5));
  }
  ++operations;
  runner.prefetch(static_cast<std::int32_t>(between(random, 0, model.layers - 1)),
                  chance(random, 0.2) ? nullptr : scores.data(),
                  static_cast<std::int32_t>(between(random, 0, model.experts)), between(random, 0, 30),
                  chance(random, 0.3) ? Priority::kLater : Priority::kNext);
}

// Records of some experts, as if they were mapped from a file; or of none.
std::vector<const unsigned char*> any_mapped(Random& random, const Model& model) {
  std::vector<const unsigned char*> found;
  if (chance(random, 0.6)) return found;
  for (std::int32_t layer = 0; layer < model.layers; ++layer) {
    const auto& records = model.records[static_cast<std::size_t>(layer)];
    const std::int64_t bytes = static_cast<std::int64_t>(records.size()) / model.experts;
    for (std::int32_t expert = 0; expert < model.experts; ++expert) {
      found.push_back(chance(random, 0.4) ? records.data() + expert * bytes : nullptr);
    }
  }
  return found;
}

// Mapped experts are there from the beginning to the end.
void expect_mapped(const ExpertRunner& runner) {
  const std::vector<std::int16_t> resident = runner.residency();
  for (std::size_t place = 0; place < runner.options().mapped_records.size(); ++place) {
    if (runner.options().mapped_records[place] == nullptr) continue;
    EXPECT(resident[place] == runner.options().blocks);
  }
}

// Asks for experts while nothing else is done, some in place of others.
void preload_something(Random& random, const Model& model, ExpertRunner& runner) {
  std::vector<std::pair<std::int32_t, std::int32_t>> all;
  for (std::int32_t layer = 0; layer < model.layers; ++layer) {
    for (std::int32_t expert = 0; expert < model.experts; ++expert) all.emplace_back(layer, expert);
  }
  std::shuffle(all.begin(), all.end(), random);
  const auto cut = all.begin() + between(random, 0, static_cast<std::int64_t>(all.size()));
  ++operations;
  runner.preload({all.begin(), cut}, between(random, 1, 40), {cut, all.end()}, chance(random, 0.5));
}

// Some passes over a runner with random options.
void random_layers(Random& random) {
  const Model model(random, static_cast<std::int32_t>(between(random, 1, 4)),
                    static_cast<std::int32_t>(between(random, 1, 9)), chance(random, 0.5) ? 64 : 40,
                    between(random, 1, 6));
  const std::int64_t all = model.layers * model.experts * model.blocks();
  RunnerOptions options = options_for(model, 0);
  options.pages = chance(random, 0.3) ? between(random, 2, 8) : between(random, 2, all + 4);
  options.reserve = between(random, 1, options.pages);
  options.targets = any_targets(random, model, options.pages - options.reserve);
  options.whole_experts = chance(random, 0.3);
  options.stall_seconds = 20;
  // Groups of one row, of some, of all.
  const std::int64_t row = model.layout.hidden_size * static_cast<std::int64_t>(sizeof(float));
  options.accumulator_bytes = chance(random, 0.3) ? ExpertSum::kBytes : between(random, 1, 20) * row;
  SimLinkOptions link = any_link(random);
  const bool faulty = chance(random, 0.3);
  if (faulty) link.fault_rate = 0.03;
  options.mapped_records = any_mapped(random, model);
  ThreadPool::set_num_threads(static_cast<int>(between(random, 1, 3)));
  ExpertRunner runner(options, any_policy(random, model), make_sim_link(model.regions(), link));

  std::int64_t withheld = 0;
  const std::int64_t passes = between(random, 1, 12);
  for (std::int64_t i = 0; i < passes; ++i) {
    const std::int64_t tokens = chance(random, 0.6) ? 1 : between(random, 0, 40);
    for (std::int32_t layer = 0; layer < model.layers; ++layer) {
      Pass pass(random, model, layer, tokens);
      pass.begin(runner);
      if (chance(random, 0.6)) prefetch_something(random, model, runner);
      if (chance(random, 0.1)) {
        ++operations;
        runner.abort();
        EXPECT(runner.begun_tokens() == -1);
        continue;
      }
      if (chance(random, 0.05)) continue;  // the next begin aborts it
      // Retries until it succeeds: each attempt has other random faults.
      for (int attempt = 0;; ++attempt) {
        try {
          pass.finish(runner);
          break;
        } catch (const LinkError& error) {
          EXPECT(faulty && std::strstr(error.what(), "could not be read") != nullptr);
          EXPECT(runner.begun_tokens() == -1);
          if (attempt > 3) break;
          pass.begin(runner);
        }
      }
      if (chance(random, 0.1)) prefetch_something(random, model, runner);
      if (chance(random, 0.05)) {
        runner.set_targets(any_targets(random, model, options.pages - withheld - options.reserve));
      }
      if (chance(random, 0.1)) {
        // Two pages are enough to make progress.
        const std::int64_t most =
            std::max<std::int64_t>(0, options.pages - std::max<std::int64_t>(options.reserve, 2));
        const std::int64_t wanted = between(random, 0, most);
        ++operations;
        runner.set_targets(model.no_targets());
        const std::int64_t before = withheld;
        withheld = runner.withhold(wanted);
        EXPECT(withheld <= std::max(wanted, before));
        runner.set_targets(any_targets(random, model, options.pages - withheld - options.reserve));
      }
      if (chance(random, 0.1)) preload_something(random, model, runner);
      if (chance(random, 0.2)) {
        expect_consistent(runner);
        expect_mapped(runner);
      }
    }
  }
  runner.abort();
  runner.drain({});
  expect_consistent(runner);
  expect_mapped(runner);
  runner.set_targets(model.no_targets());
  // Without transfers under way nothing keeps its page.
  const std::int64_t most = options.pages - options.reserve;
  EXPECT(runner.withhold(most) == most && runner.withhold(0) == 0);
  expect_consistent(runner);
  const ScheduleStats stats = runner.stats();
  EXPECT(stats.pages_peak <= options.pages);
  EXPECT(faulty || stats.link.errors == 0);
}

// Two pages for experts of six blocks, prefetches holding one of them, groups of one row and of all rows.
void two_pages() {
  Random random(7);
  const Model model(random, 2, 6, 64, 6);
  for (const bool whole : {false, true}) {
    for (const std::int64_t bytes : {std::int64_t{1}, ExpertSum::kBytes}) {
      SimLinkOptions link;
      link.latency = 100e-6;
      link.jitter = 200e-6;
      link.reorder = 3;
      RunnerOptions options = options_for(model, 2);
      options.accumulator_bytes = bytes;
      options.whole_experts = whole;
      options.stall_seconds = 5;
      ExpertRunner runner(options, lru(model), make_sim_link(model.regions(), link));
      for (int i = 0; i < 3; ++i) {
        for (std::int32_t layer = 0; layer < model.layers; ++layer) {
          Pass pass(random, model, layer, i == 0 ? 1 : 20);
          pass.begin(runner);
          prefetch_something(random, model, runner);
          pass.finish(runner);
          prefetch_something(random, model, runner);
          expect_consistent(runner);
        }
      }
      EXPECT(runner.stats().blocks_staged > 0);
      EXPECT(runner.stats().pages_peak == 2);
    }
  }
}

double thread_cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// A stalled link: an error that names the block within the limit, with the CPU idle until then.
void stall() {
  Random random(8);
  const Model model(random, 2, 4, 64, 4);
  SimLinkOptions link;
  link.stall_after = 3;
  RunnerOptions options = options_for(model, 20);
  options.stall_seconds = 0.4;
  ExpertRunner runner(options, lru(model), make_sim_link(model.regions(), link));
  Pass pass(random, model, 1, 4);
  pass.begin(runner);
  const Clock::time_point start = Clock::now();
  const double cpu = thread_cpu_seconds();
  int asked = 0;
  std::string message;
  try {
    pass.finish(runner, [&asked] { ++asked; });
  } catch (const LinkError& error) {
    message = error.what();
  }
  EXPECT(message.find("expert layer 1") != std::string::npos);
  EXPECT(message.find("simulated region 1 at byte") != std::string::npos);
  EXPECT(message.find("for 0.") != std::string::npos);
  EXPECT(since(start) >= 0.4 && since(start) < 2.0);
  EXPECT(thread_cpu_seconds() - cpu < 0.2);
  EXPECT(asked >= 2 && asked < 40);
  expect_consistent(runner);
  EXPECT(runner.stats().stall_seconds >= 0.3);

  // drain has the same limit.
  const double drain_cpu = thread_cpu_seconds();
  pass.begin(runner);
  try {
    runner.drain({});
    EXPECT(false);
  } catch (const LinkError&) {
    EXPECT(thread_cpu_seconds() - drain_cpu < 0.2);
  }
}

// An exception of `interrupted` is rethrown, drops the layer and leaves the runner usable; `interrupted` may
// not call the runner.
void interruption() {
  Random random(9);
  const Model model(random, 1, 4, 64, 4);
  SimLinkOptions link;
  link.latency = 0.3;
  ExpertRunner runner(options_for(model, 20), lru(model), make_sim_link(model.regions(), link));
  Pass pass(random, model, 0, 2);
  pass.begin(runner);
  const Clock::time_point start = Clock::now();
  bool refused = false;
  try {
    pass.finish(runner, [&] {
      try {
        runner.abort();
      } catch (const std::logic_error&) {
        refused = true;
      }
      throw 42;
    });
    EXPECT(false);
  } catch (int number) {
    EXPECT(number == 42 && refused && since(start) < 0.25);
  }
  EXPECT(runner.begun_tokens() == -1);
  expect_consistent(runner);
  pass.run(runner);
  try {
    pass.finish(runner);
    EXPECT(false);
  } catch (const std::logic_error&) {
  }
  pass.begin(runner);
  try {
    runner.finish(pass.x.data(), pass.tokens + 1, pass.out.data(), {});
    EXPECT(false);
  } catch (const std::invalid_argument&) {
  }
  pass.finish(runner);
}

// A link that fails as a whole: every demand fails at once; resident layers are still computed.
void failure() {
  Random random(10);
  const Model model(random, 2, 4, 64, 4);
  SimLinkOptions link;
  link.fail_after = 18;
  ExpertRunner runner(options_for(model, 40), lru(model), make_sim_link(model.regions(), link));
  Pass resident(random, model, 0, 1);
  resident.run(runner);
  for (int attempt = 0; attempt < 3; ++attempt) {
    Pass pass(random, model, 1, 20);
    const Clock::time_point start = Clock::now();
    std::string message;
    try {
      pass.begin(runner);
      pass.finish(runner);
    } catch (const LinkError& error) {
      message = error.what();
    }
    // The link may finish some more transfers after the first pass before it fails.
    EXPECT(attempt == 0 || message.find("failed after 18 transfers") != std::string::npos);
    EXPECT(since(start) < 1.0);
    expect_consistent(runner);
    resident.run(runner);
    prefetch_something(random, model, runner);
  }
}

// Random read faults: the error names the block, and the next attempt reads it again.
void faults() {
  Random random(11);
  const Model model(random, 1, 6, 64, 4);
  SimLinkOptions link;
  link.fault_rate = 0.2;
  link.reorder = 3;
  link.seed = 5;
  // Half of the layer, so that every pass has something to read.
  ExpertRunner runner(options_for(model, 12), lru(model), make_sim_link(model.regions(), link));
  int failed = 0;
  for (int i = 0; i < 40; ++i) {
    Pass pass(random, model, 0, 3);
    prefetch_something(random, model, runner);
    for (bool again = true; again;) {
      again = false;
      try {
        pass.run(runner);
      } catch (const LinkError& error) {
        EXPECT(std::strstr(error.what(), "simulated region 0 at byte") != nullptr);
        ++failed;
        again = true;
      }
      expect_consistent(runner);
    }
  }
  EXPECT(failed > 3);
}

// After drain nothing is in flight, and prefetched blocks are resident.
void drained() {
  Random random(12);
  const Model model(random, 2, 4, 64, 4);
  SimLinkOptions link;
  link.latency = 0.02;
  ExpertRunner runner(options_for(model, 40), lru(model), make_sim_link(model.regions(), link));
  const float scores[] = {1, 4, 2, 3};
  EXPECT(runner.prefetch(1, scores, 2, 7, Priority::kNext) == 7);
  runner.drain({});
  EXPECT(runner.stats().link.queued == 0 && runner.stats().link.in_flight == 0);
  const std::vector<std::int16_t> resident = runner.residency();
  EXPECT(resident[4 + 1] == 4 && resident[4 + 3] == 3 && resident[4 + 2] == 0);
  Pass pass(random, model, 1, 1);
  pass.run(runner);
}

// Two concurrent threads: one computes, one reads statistics and prefetches.
void two_threads() {
  Random random(13);
  const Model model(random, 2, 6, 64, 4);
  RunnerOptions options = options_for(model, 30);
  SimLinkOptions link;
  link.latency = 20e-6;
  link.jitter = 50e-6;
  ExpertRunner runner(options, lru(model), make_sim_link(model.regions(), link));
  std::atomic<bool> ended{false};
  std::thread other([&] {
    Random own(14);
    while (!ended) {
      prefetch_something(own, model, runner);
      expect_consistent(runner);
      runner.residency();
      runner.stats();
    }
  });
  for (int i = 0; i < 150; ++i) {
    Pass pass(random, model, i % 2, 1 + i % 3);
    pass.run(runner);
  }
  ended = true;
  other.join();
}

void in_a_child() {
  Random random(15);
  const Model model(random, 1, 4, 64, 4);
  auto runner = std::make_unique<ExpertRunner>(options_for(model, 30), lru(model),
                                               make_sim_link(model.regions(), SimLinkOptions{}));
  Pass pass(random, model, 0, 1);
  pass.run(*runner);
  pass.begin(*runner);
  const pid_t child = fork();
  if (child == 0) {
    bool refused = false;
    try {
      runner->abort();
    } catch (const std::runtime_error& error) {
      refused = std::strstr(error.what(), "forked child") != nullptr;
    }
    runner.reset();
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child);
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  pass.finish(*runner);
}

// A transfer that cannot be stopped and writes after the runner has been destroyed.
class StuckLink final : public Link {
 public:
  StuckLink(std::int64_t bytes, std::vector<Transfer>* taken) : bytes_(bytes), taken_(taken) {}
  const char* name() const override { return "stuck"; }
  std::string describe(std::int32_t, std::int64_t) const override { return "nowhere"; }
  std::int64_t region_bytes(std::int32_t) const override { return bytes_; }
  std::int32_t regions() const override { return 1; }
  void open(std::uint32_t) override {}
  void submit(const Transfer* transfers, std::int64_t count) override {
    taken_->insert(taken_->end(), transfers, transfers + count);
  }
  bool cancel(std::uint32_t) override { return false; }
  void promote(std::uint32_t, Priority) override {}
  std::int64_t poll(std::vector<Completion>*) override { return 0; }
  bool wait(std::chrono::microseconds) override { return false; }
  std::string failure() const override { return ""; }
  LinkStats stats() const override { return {}; }
  double now() const override { return 0; }
  bool stop(std::chrono::milliseconds) override { return false; }

 private:
  std::int64_t bytes_;
  std::vector<Transfer>* taken_;
};

void stuck_link() {
  Random random(16);
  const Model model(random, 1, 2, 64, 4);
  std::vector<Transfer> taken;
  {
    const auto bytes = static_cast<std::int64_t>(model.records[0].size());
    ExpertRunner runner(options_for(model, 8), lru(model), std::make_unique<StuckLink>(bytes, &taken));
    Pass pass(random, model, 0, 1);
    pass.begin(runner);
  }
  EXPECT(!taken.empty());
  for (const Transfer& transfer : taken) {
    std::memset(transfer.to, 0x5a, static_cast<std::size_t>(transfer.bytes));
  }
}

// The sum by its definition, one expert after the other.
void definition() {
  Random random(17);
  for (int i = 0; i < 30; ++i) {
    const Model model(random, 1, 7, chance(random, 0.5) ? 64 : 40, between(random, 1, 4));
    const Pass pass(random, model, 0, between(random, 1, 50));
    const std::int64_t hidden = model.layout.hidden_size;
    std::vector<float> sum(pass.x.size(), 0.0f);
    for (std::int32_t expert = 0; expert < model.experts; ++expert) {
      for (std::int64_t item = 0; item < pass.tokens * pass.k; ++item) {
        if (pass.index[static_cast<std::size_t>(item)] != expert) continue;
        const std::int64_t token = item / pass.k;
        std::vector<float> acc(static_cast<std::size_t>(hidden), 0.0f);
        for (std::int32_t block = 0; block < model.blocks(); ++block) {
          const std::uint64_t record = reinterpret_cast<std::uintptr_t>(
              model.records[0].data() + (expert * model.blocks() + block) * model.layout.record_bytes);
          const std::int32_t zero = 0;
          const std::int32_t starts[] = {0, 1};
          ForwardCall call{};
          call.layout = &model.layout;
          call.gate = kSilu;
          call.x = pass.x.data() + token * hidden;
          call.tokens = 1;
          call.block_ptr = &record;
          call.block_index = &block;
          call.block_row = &zero;
          call.entries = 1;
          call.row_start = starts;
          call.row_token = &zero;
          call.row_weight = &pass.weight[static_cast<std::size_t>(item)];
          call.rows = 1;
          call.nonzeros = 1;
          call.out = acc.data();
          moe_forward(call);
        }
        for (std::int64_t c = 0; c < hidden; ++c) {
          sum[static_cast<std::size_t>(token * hidden + c)] += acc[static_cast<std::size_t>(c)];
        }
      }
    }
    ++operations;
    EXPECT(std::memcmp(sum.data(), pass.expected.data(), sum.size() * sizeof(float)) == 0);
  }
}

// A pass longer than the kernels' scratch and than one group's accumulators equals its halves; indices out of
// range are refused.
void long_passes() {
  Random random(19);
  const Model model(random, 1, 2, 64, 1);
  constexpr std::int64_t kTokens = 70000;
  const std::int64_t hidden = model.layout.hidden_size;
  std::vector<std::int64_t> index(kTokens);
  std::vector<float> weight(kTokens, 0.5f);
  std::vector<float> x(static_cast<std::size_t>(kTokens * hidden));
  for (std::int64_t& one : index) one = chance(random, 0.9) ? 0 : 1;
  for (float& value : x) value = static_cast<float>(between(random, -100, 100)) * 0.01f;
  std::vector<float> whole(x.size());
  std::vector<float> halves(x.size());
  const auto run = [&](std::int64_t first, std::int64_t count, std::vector<float>* out) {
    ++operations;
    resident_forward(model.layout, kSilu, model.records[0].data(), 2, x.data() + first * hidden,
                     index.data() + first, weight.data() + first, count, 1, out->data() + first * hidden);
  };
  run(0, kTokens, &whole);
  run(0, kTokens / 2, &halves);
  run(kTokens / 2, kTokens - kTokens / 2, &halves);
  EXPECT(std::memcmp(whole.data(), halves.data(), whole.size() * sizeof(float)) == 0);

  const std::uint64_t record = reinterpret_cast<std::uintptr_t>(model.records[0].data());
  const std::int32_t zero = 0;
  const std::int32_t starts[] = {0, 1};
  for (const std::int32_t target : {-1, 2}) {
    std::vector<float> out(static_cast<std::size_t>(2 * hidden), 0.0f);
    ForwardCall call{};
    call.layout = &model.layout;
    call.gate = kSilu;
    call.x = x.data();
    call.tokens = 1;
    call.block_ptr = &record;
    call.block_index = &zero;
    call.block_row = &zero;
    call.entries = 1;
    call.row_start = starts;
    call.row_token = &zero;
    call.row_out = &target;
    call.row_weight = weight.data();
    call.rows = 1;
    call.nonzeros = 1;
    call.out = out.data();
    call.out_rows = 2;
    bool refused = false;
    try {
      moe_forward(call);
    } catch (const std::invalid_argument& error) {
      refused = std::strstr(error.what(), "row_out[0] is") != nullptr;
    }
    EXPECT(refused);
  }
}

// Times the bookkeeping for 8 of 128 resident experts, and the cost of the sum beyond one kernel call.
void bench() {
  Random random(18);
  const Model model(random, 4, 128, 64, 12);
  const std::int64_t all = model.layers * model.experts * model.blocks();
  ExpertRunner runner(options_for(model, all), lru(model), make_sim_link(model.regions(), SimLinkOptions{}));
  for (std::int32_t layer = 0; layer < model.layers; ++layer) {
    while (runner.prefetch(layer, nullptr, 128, all, Priority::kNext) > 0) runner.drain({});
  }
  ThreadPool::set_num_threads(1);
  constexpr std::int64_t kPicks = 8;
  constexpr int kRounds = 20000;
  std::vector<std::int64_t> index(static_cast<std::size_t>(kRounds) * kPicks);
  for (int i = 0; i < kRounds; ++i) {
    const std::size_t at = static_cast<std::size_t>(i) * kPicks;
    for (std::size_t j = 0; j < kPicks; ++j) {
      std::int64_t drawn = 0;
      do {
        drawn = between(random, 0, 127);
      } while (std::count(index.begin() + static_cast<std::ptrdiff_t>(at),
                          index.begin() + static_cast<std::ptrdiff_t>(at + j), drawn) > 0);
      index[at + j] = drawn;
    }
  }
  const std::vector<float> weight(kPicks, 0.1f);
  std::vector<float> x(64, 0.5f);
  std::vector<float> out(64);
  double begin_seconds = 0;
  double finish_seconds = 0;
  runner.reset_stats();
  for (int i = 0; i < kRounds; ++i) {
    const Clock::time_point start = Clock::now();
    runner.begin(i % model.layers, index.data() + static_cast<std::size_t>(i) * kPicks, weight.data(), 1,
                 kPicks);
    begin_seconds += since(start);
    const Clock::time_point middle = Clock::now();
    runner.finish(x.data(), 1, out.data(), {});
    finish_seconds += since(middle);
  }
  const ScheduleStats stats = runner.stats();
  const double finish_books = finish_seconds - stats.compute_seconds;
  std::printf(
      "8 of 128 experts, 12 blocks each, all resident: begin %.2f us, finish without computing %.2f us, "
      "together %.2f us a layer\n",
      begin_seconds / kRounds * 1e6, finish_books / kRounds * 1e6,
      (begin_seconds + finish_books) / kRounds * 1e6);
  std::vector<float> scores(128);
  for (float& score : scores) score = static_cast<float>(random() % 1000);
  const Clock::time_point start = Clock::now();
  for (int i = 0; i < kRounds; ++i) runner.prefetch(i % 4, scores.data(), 8, all, Priority::kNext);
  std::printf("prefetch that finds everything resident: %.2f us\n", since(start) / kRounds * 1e6);

  const Model large(random, 1, 8, 2048, 12);
  const std::int64_t picks[] = {0, 1, 2, 3, 4, 5, 6, 7};
  std::vector<float> wide(2048, 0.5f);
  std::vector<float> sum(2048);
  std::vector<std::uint64_t> records;
  std::vector<std::int32_t> blocks, rows, starts{0}, tokens(8, 0);
  for (std::int32_t row = 0; row < 8; ++row) {
    starts.push_back(row + 1);
    for (std::int32_t block = 0; block < 12; ++block) {
      records.push_back(reinterpret_cast<std::uintptr_t>(large.records[0].data() +
                                                         (row * 12 + block) * large.layout.record_bytes));
      blocks.push_back(block);
      rows.push_back(row);
    }
  }
  ForwardCall call{};
  call.layout = &large.layout;
  call.gate = kSilu;
  call.x = wide.data();
  call.tokens = 1;
  call.block_ptr = records.data();
  call.block_index = blocks.data();
  call.block_row = rows.data();
  call.entries = 96;
  call.row_start = starts.data();
  call.row_token = tokens.data();
  call.row_weight = weight.data();
  call.rows = 8;
  call.nonzeros = 8;
  call.out = sum.data();
  ThreadPool::set_num_threads(2);
  std::vector<double> kernel, forward;
  for (int i = 0; i < 200; ++i) {
    const Clock::time_point first = Clock::now();
    moe_forward(call);
    kernel.push_back(since(first));
    const Clock::time_point second = Clock::now();
    resident_forward(large.layout, kSilu, large.records[0].data(), 8, wide.data(), picks, weight.data(), 1, 8,
                     sum.data());
    forward.push_back(since(second));
  }
  std::sort(kernel.begin(), kernel.end());
  std::sort(forward.begin(), forward.end());
  std::printf(
      "8 experts of 12 blocks at hidden 2048, two threads: one kernel call %.1f us, resident_forward "
      "%.1f us (medians of 200)\n",
      kernel[100] * 1e6, forward[100] * 1e6);
}

struct Case {
  const char* name;
  void (*run)();
};

constexpr Case kCases[] = {
    {"definition", definition},     {"two_pages", two_pages},     {"stall", stall},
    {"interruption", interruption}, {"failure", failure},         {"faults", faults},
    {"drained", drained},           {"two_threads", two_threads}, {"in_a_child", in_a_child},
    {"stuck_link", stuck_link},     {"long_passes", long_passes},
};

int run(int count, char** arguments) {
  double limit = 1.0;
  std::uint64_t seed = 1;
  int patience = 60;
  std::string only;
  for (int i = 1; i < count; ++i) {
    const std::string name = arguments[i];
    if (name == "--bench") {
      bench();
      return 0;
    }
    if (i + 1 == count) {
      std::fprintf(stderr, "%s needs a value\n", name.c_str());
      return 2;
    }
    const char* value = arguments[++i];
    if (name == "--seconds") {
      limit = std::atof(value);
    } else if (name == "--seed") {
      seed = std::strtoull(value, nullptr, 10);
    } else if (name == "--alarm") {
      patience = std::atoi(value);
    } else if (name == "--only") {
      only = value;
    } else {
      std::fprintf(stderr, "unknown argument %s\n", name.c_str());
      return 2;
    }
  }
  alarm(static_cast<unsigned>(patience + static_cast<int>(limit)));
  for (const Case& each : kCases) {
    if (only.empty() || only == each.name) each.run();
  }
  const Clock::time_point start = Clock::now();
  if (only.empty() || only == "random_layers") {
    // Several in parallel, since a runner mostly waits for its link.
    std::atomic<std::uint64_t> next{seed};
    std::vector<std::thread> drivers;
    for (int i = 0; i < 3; ++i) {
      drivers.emplace_back([&] {
        do {
          Random random(next++);
          random_layers(random);
        } while (since(start) < limit);
      });
    }
    for (std::thread& driver : drivers) driver.join();
  }
  std::printf("operations %lld\n", static_cast<long long>(operations.load()));
  return 0;
}

}  // namespace
}  // namespace moechat

int main(int count, char** arguments) { return moechat::run(count, arguments); }
