// Tests of the link into a GPU's memory, and of the expert runner over it, with the driver in fake_cuda.cc.
// Copies and kernels are ordered only by events on the GPU; random delays on both sides expose missing
// order. For runs under the sanitizers, see scripts/sanitize.
//
//   native_cuda_test [--seconds S] [--seed N] [--alarm N]
//
// A run that hangs is ended by an alarm N seconds (60) after --seconds. Prints how many transfers were made.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/driver.h"
#include "link/cuda_link.h"
#include "offload/runner.h"

extern "C" {
void fake_cuda_set(const char* name, double value);
double fake_cuda_get(const char* name);
void fake_cuda_reset();
int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data);
}

namespace moechat {
namespace {

#define EXPECT(condition)                                                  \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                       \
    }                                                                      \
  } while (false)

using Clock = std::chrono::steady_clock;
using Random = std::mt19937_64;
using std::chrono::microseconds;
using std::chrono::milliseconds;

std::atomic<std::int64_t> operations{0};

std::int64_t between(Random& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}
bool chance(Random& random, double share) { return std::uniform_real_distribution<double>()(random) < share; }

// Device memory and a stream.
class Gpu {
 public:
  explicit Gpu(std::int64_t bytes) : current_(cuda::primary_context(0)) {
    const cuda::Driver& driver = cuda::driver();
    cuda::check(driver.memory_alloc(&memory_, static_cast<std::size_t>(bytes)), "cuMemAlloc");
    cuda::check(driver.stream_create(&stream_, cuda::kStreamNonBlocking, 0), "cuStreamCreate");
  }
  ~Gpu() {
    EXPECT(cuda::driver().stream_destroy(stream_) == cuda::kSuccess);
    EXPECT(cuda::driver().memory_free(memory_) == cuda::kSuccess);
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  unsigned char* memory() const {
    return reinterpret_cast<unsigned char*>(static_cast<std::uintptr_t>(memory_));
  }
  cuda::Stream stream() const { return stream_; }
  // Queues a function in the stream.
  void run(std::function<void()> kernel) {
    kernels_.push_back(std::make_unique<std::function<void()>>(std::move(kernel)));
    const auto call = [](void* data) { (*static_cast<std::function<void()>*>(data))(); };
    EXPECT(cuLaunchHostFunc(stream_, call, kernels_.back().get()) == 0);
  }
  void wait() { EXPECT(cuda::driver().stream_synchronize(stream_) == cuda::kSuccess); }

 private:
  cuda::Current current_;
  cuda::Pointer memory_ = 0;
  cuda::Stream stream_ = nullptr;
  std::vector<std::unique_ptr<std::function<void()>>> kernels_;
};

// Records [layers][experts, blocks] of random bytes, pinned or not.
class Far {
 public:
  Far(Random& random, std::int32_t layers, std::int64_t records, std::int64_t record_bytes, bool pinned)
      : record_bytes_(record_bytes), pinned_(pinned) {
    for (std::int32_t layer = 0; layer < layers; ++layer) {
      layers_.emplace_back(static_cast<std::size_t>(records * record_bytes));
      for (unsigned char& byte : layers_.back()) byte = static_cast<unsigned char>(random());
      if (!pinned) continue;
      const cuda::Current current(cuda::primary_context(0));
      std::vector<unsigned char>& all = layers_.back();
      cuda::check(cuda::driver().host_register(all.data(), all.size(), 0), "cuMemHostRegister");
    }
  }
  ~Far() {
    for (std::vector<unsigned char>& layer : layers_) {
      if (pinned_) EXPECT(cuda::driver().host_unregister(layer.data()) == cuda::kSuccess);
    }
  }
  Far(const Far&) = delete;
  Far& operator=(const Far&) = delete;
  std::vector<CudaRegion> regions() const {
    std::vector<CudaRegion> list;
    for (const auto& layer : layers_) {
      CudaRegion region;
      region.parts.push_back({static_cast<std::int64_t>(layer.size()), layer.data(), pinned_});
      list.push_back(region);
    }
    return list;
  }
  const unsigned char* record(std::int32_t layer, std::int64_t number) const {
    return layers_[static_cast<std::size_t>(layer)].data() + number * record_bytes_;
  }

 private:
  std::int64_t record_bytes_;
  bool pinned_;
  std::vector<std::vector<unsigned char>> layers_;
};

void draw_delays(Random& random) {
  fake_cuda_reset();
  if (chance(random, 0.3)) return;
  fake_cuda_set("seed", static_cast<double>(between(random, 1, 1 << 20)));
  fake_cuda_set("jitter", 1e-6 * static_cast<double>(between(random, 0, 200)));
  fake_cuda_set("latency", 1e-6 * static_cast<double>(between(random, 0, 50)));
  fake_cuda_set("no_batches", chance(random, 0.2) ? 1 : 0);
  fake_cuda_set("piece", chance(random, 0.5) ? 512 : 0);
}

std::unique_ptr<EvictionPolicy> lru(std::int32_t layers, std::int32_t experts) {
  PolicySpec spec;
  spec.name = "lru";
  spec.layers = layers;
  spec.experts = experts;
  return make_policy(spec);
}

// Reads a page twice, a pause apart.
bool holds(const unsigned char* page, const unsigned char* expected, std::int64_t bytes, microseconds pause) {
  const auto size = static_cast<std::size_t>(bytes);
  const bool before = std::memcmp(page, expected, size) == 0;
  if (pause.count() > 0) std::this_thread::sleep_for(pause);
  return before && std::memcmp(page, expected, size) == 0;
}

// A slot is filled, read, and filled again without synchronisation by the host.
void page_reuse_follows_stream_order(Random& random) {
  constexpr std::int64_t kPage = 4096, kRecords = 32;
  draw_delays(random);
  const bool pinned = chance(random, 0.7);
  const Far far(random, 2, kRecords, kPage, pinned);
  const auto slots = static_cast<std::uint32_t>(between(random, 1, 6));
  Gpu gpu(slots * kPage);
  CudaLinkOptions options;
  options.buffer_bytes = kPage;
  options.buffers = static_cast<int>(between(random, 1, 3));
  options.threads = static_cast<int>(between(random, 1, 3));
  const std::unique_ptr<Link> link = make_cuda_link(far.regions(), options);
  StreamOrder* const order = link->stream_order();
  link->open(slots);
  std::vector<bool> busy(slots, false);
  std::vector<Completion> done;
  std::atomic<bool> right{true};
  for (int turn = 0; turn < 120; ++turn) {
    std::vector<Transfer> transfers;
    std::vector<std::uint32_t> chosen;
    std::vector<const unsigned char*> expected;
    for (std::uint32_t slot = 0; slot < slots; ++slot) {
      if (busy[slot] || chance(random, 0.5)) continue;
      const auto region = static_cast<std::int32_t>(between(random, 0, 1));
      const std::int64_t record = between(random, 0, kRecords - 1);
      const auto priority = static_cast<Priority>(between(random, 0, 2));
      transfers.push_back({slot, region, record * kPage, kPage, gpu.memory() + slot * kPage, priority});
      chosen.push_back(slot);
      expected.push_back(far.record(region, record));
      busy[slot] = true;
    }
    if (!transfers.empty()) {
      link->submit(transfers.data(), static_cast<std::int64_t>(transfers.size()));
      operations += static_cast<std::int64_t>(transfers.size());
      for (const std::uint32_t slot : chosen) link->promote(slot, Priority::kDemand);
      EXPECT(order->fills_first(gpu.stream(), chosen.data(), static_cast<std::int64_t>(chosen.size()),
                                std::chrono::seconds(20)));
      const microseconds pause(between(random, 0, 100));
      const unsigned char* const memory = gpu.memory();
      gpu.run([=, &right] {
        for (std::size_t i = 0; i < chosen.size(); ++i) {
          if (!holds(memory + chosen[i] * kPage, expected[i], kPage, pause)) right = false;
        }
      });
      order->reads_first(gpu.stream(), chosen.data(), static_cast<std::int64_t>(chosen.size()));
    }
    if (std::all_of(busy.begin(), busy.end(), [](bool one) { return one; })) link->wait(milliseconds(100));
    done.clear();
    link->poll(&done);
    for (const Completion& completion : done) {
      EXPECT(completion.error == 0);
      busy[completion.slot] = false;
    }
  }
  gpu.wait();
  EXPECT(right);
  EXPECT(link->stop(milliseconds(5000)));
}

// Layers over a cache that is too small for them: every block is launched once, rows and blocks ascending,
// and stays in its page while the GPU reads it; the CPU may compute the last blocks of a row instead.
void layers_compute_from_fetched_blocks(Random& random) {
  draw_delays(random);
  const auto layers = static_cast<std::int32_t>(between(random, 1, 3));
  const auto experts = static_cast<std::int32_t>(between(random, 2, 8));
  const std::int64_t blocks = between(random, 1, 5);
  const BlockLayout layout = make_block_layout(16, blocks * kBlockNeurons, 2, false, false);
  const std::int64_t page = layout.record_bytes;
  const bool pinned = chance(random, 0.7);
  const Far far(random, layers, experts * blocks, page, pinned);
  RunnerOptions options;
  options.layout = layout;
  options.layers = layers;
  options.experts = experts;
  options.top_k = std::min(2, experts);
  options.pages = between(random, 2, chance(random, 0.5) ? 6 : layers * experts * blocks + 2);
  options.targets.assign(static_cast<std::size_t>(layers), LayerTarget{0, 1});
  options.whole_experts = chance(random, 0.2);
  Gpu gpu(options.pages * page);
  options.near_memory = gpu.memory();
  const bool shares = chance(random, 0.6);
  const double held = chance(random, 0.5) ? 1 : 0.6;  // of the experts, by the CPU
  for (std::int32_t layer = 0; shares && layer < layers; ++layer) {
    for (std::int32_t expert = 0; expert < experts; ++expert) {
      options.far_records.push_back(chance(random, held) ? far.record(layer, expert * blocks) : nullptr);
    }
  }
  CudaLinkOptions link;
  link.buffer_bytes = page;
  link.buffers = 2;
  link.in_flight_bytes = chance(random, 0.5) ? 2 * page : 0;
  ExpertRunner runner(options, lru(layers, experts), make_cuda_link(far.regions(), link));
  std::atomic<bool> right{true};
  for (int pass = 0; pass < 12; ++pass) {
    const std::int64_t tokens = chance(random, 0.7) ? 1 : between(random, 2, 5);
    for (std::int32_t layer = 0; layer < layers; ++layer) {
      std::vector<std::int64_t> index;
      for (std::int64_t i = 0; i < tokens * 2; ++i) index.push_back(between(random, 0, experts - 1));
      const std::vector<float> weight(index.size(), 1.0f);
      const Miss miss = static_cast<Miss>(between(random, 0, 2));
      runner.begin(layer, index.data(), weight.data(), tokens, 2, miss);
      if (chance(random, 0.7)) {
        std::vector<float> scores(static_cast<std::size_t>(experts));
        for (float& score : scores) score = static_cast<float>(between(random, 0, 100));
        runner.prefetch((layer + 1) % layers, scores.data(), experts, between(random, 0, 20),
                        Priority::kNext);
      }
      const Grouped rows = runner.rows();
      std::vector<std::int32_t> next(rows.experts.size(), 0);
      const microseconds pause(chance(random, 0.5) ? between(random, 0, 60) : 0);
      const auto launch = [&](const DeviceLaunch& launched) {
        EXPECT(launched.rows == rows.rows());
        std::vector<std::pair<const unsigned char*, const unsigned char*>> read;
        for (std::int64_t row = 0; row < launched.rows; ++row) {
          const auto at = static_cast<std::size_t>(row);
          const std::int32_t count = launched.row_entry[row + 1] - launched.row_entry[row];
          EXPECT(count == 0 || launched.row_block[row] == next[at]);
          for (std::int32_t i = 0; i < count; ++i) {
            const PageId from = launched.page[launched.row_entry[row] + i];
            read.emplace_back(gpu.memory() + from * page,
                              far.record(layer, rows.experts[at] * blocks + next[at] + i));
          }
          next[at] += count;
          operations += count;
        }
        gpu.run([read, page, pause, &right] {
          for (const auto& [found, expected] : read) {
            if (!holds(found, expected, page, pause)) right = false;
          }
        });
      };
      const std::vector<float> x(static_cast<std::size_t>(tokens * layout.hidden_size), 0.5f);
      std::vector<float> out(x.size());
      runner.finish_on_device(gpu.stream(), tokens, between(random, 1, 40), launch, {},
                              {x.data(), out.data()});
      std::int64_t launched_blocks = 0;
      for (const std::int32_t count : next) launched_blocks += count;
      const std::int64_t of_cpu = runner.far_blocks();
      EXPECT(of_cpu == 0 || (shares && miss != Miss::kFetch));
      for (std::size_t row = 0; row < next.size(); ++row) {
        const std::size_t expert = static_cast<std::size_t>(layer * experts + rows.experts[row]);
        EXPECT(next[row] == blocks || options.far_records[expert] != nullptr);
      }
      EXPECT(launched_blocks + of_cpu == rows.rows() * blocks);
    }
  }
  gpu.wait();
  EXPECT(right);
  runner.drain({});
  EXPECT(runner.check().empty());
}

// Kernels that look pages up by themselves, up to three layers ahead of the host, while the host evicts,
// fetches and prefetches: a page that they find in the table holds its block, and keeps it while they read.
void lookups_run_ahead_of_the_host(Random& random) {
  draw_delays(random);
  const auto layers = static_cast<std::int32_t>(between(random, 2, 3));
  const auto experts = static_cast<std::int32_t>(between(random, 3, 4));
  const std::int64_t blocks = between(random, 1, 3);
  const BlockLayout layout = make_block_layout(16, blocks * kBlockNeurons, 2, false, false);
  const std::int64_t page = layout.record_bytes;
  const Far far(random, layers, experts * blocks, page, chance(random, 0.7));
  RunnerOptions options;
  options.layout = layout;
  options.layers = layers;
  options.experts = experts;
  options.top_k = 2;
  const std::int64_t all = layers * experts * blocks;
  // About two experts of a layer: a prefetch then evicts what is read ahead.
  options.pages = between(random, 2 * layers * blocks, 2 * layers * blocks + 2);
  options.targets.assign(static_cast<std::size_t>(layers), LayerTarget{0, 1});
  Gpu gpu(options.pages * page);
  options.near_memory = gpu.memory();
  CudaLinkOptions link;
  link.buffer_bytes = page;
  link.buffers = 2;
  ExpertRunner runner(options, lru(layers, experts), make_cuda_link(far.regions(), link));
  EXPECT(runner.keep_page_table(0));

  // Of the GPU: read and written in the order of its stream alone.
  std::vector<std::int32_t> table(static_cast<std::size_t>(all), PageTable::kNone);
  bool stop = false;
  std::atomic<bool> right{true};
  struct Layer {
    std::vector<std::int32_t> report;  // experts, weights, scores of the next layer
    std::atomic<int> found{-1};        // by the GPU: 1, all blocks; 0, not
  };
  constexpr std::int64_t kPicks = 2;
  const std::int64_t stride = 2 * kPicks + experts;
  std::vector<Prediction> place;
  for (std::int32_t layer = 0; layer < layers; ++layer) {
    place.push_back({1, (layer + 1) % layers});
  }
  // As a rule experts that are there now: they may be gone when they are read.
  const auto draw = [&](std::vector<std::int32_t>* report, std::int32_t layer) {
    report->assign(static_cast<std::size_t>(stride), 0);
    const std::vector<std::int16_t> resident = runner.residency();
    std::vector<std::int32_t> from;
    for (std::int32_t expert = 0; expert < experts; ++expert) {
      if (resident[static_cast<std::size_t>(layer * experts + expert)] == blocks) from.push_back(expert);
    }
    if (from.size() < 2 || chance(random, 0.1)) {
      from.resize(static_cast<std::size_t>(experts));
      std::iota(from.begin(), from.end(), 0);
    }
    std::shuffle(from.begin(), from.end(), random);
    std::copy_n(from.begin(), kPicks, report->begin());
    for (std::int32_t expert = 0; expert < experts; ++expert) {
      const auto score = static_cast<float>(between(random, 0, 100));
      std::memcpy(&(*report)[static_cast<std::size_t>(2 * kPicks + expert)], &score, sizeof score);
    }
  };
  std::vector<std::unique_ptr<Layer>> kept;
  // Gives changes to the GPU until there are none; ahead: as look_ahead, else as page_changes.
  const auto update = [&](std::int32_t layer) {
    const std::int64_t room = between(random, 1, 20);
    std::vector<std::int32_t> index(static_cast<std::size_t>(room)), to(static_cast<std::size_t>(room));
    for (bool first = true;; first = false) {
      const std::int64_t count = first ? runner.look_ahead(layer, gpu.stream(), index.data(), to.data(), room)
                                       : runner.page_changes(index.data(), to.data(), room);
      EXPECT(count >= 0);
      gpu.run([&table, index, to, count] {
        for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
          table[static_cast<std::size_t>(index[i])] = to[i];
        }
      });
      if (count < room) return;
    }
  };
  const auto look_up = [&](Layer* one, std::int32_t layer, microseconds pause) {
    gpu.run([=, &table, &stop, &right, &far, &gpu] {
      std::vector<std::pair<const unsigned char*, const unsigned char*>> read;
      for (std::int64_t pick = 0; pick < kPicks && !stop; ++pick) {
        const std::int64_t expert = layer * experts + one->report[static_cast<std::size_t>(pick)];
        for (std::int64_t block = 0; block < blocks && !stop; ++block) {
          const std::int32_t from = table[static_cast<std::size_t>(expert * blocks + block)];
          stop = from == PageTable::kNone;
          read.emplace_back(gpu.memory() + from * page,
                            far.record(layer, (expert - layer * experts) * blocks + block));
        }
      }
      std::this_thread::sleep_for(pause);
      for (const auto& [found, expected] : read) {
        if (!stop && !holds(found, expected, page, pause)) right = false;
      }
      one->found = stop ? 0 : 1;
    });
  };
  const auto by_host = [&](const std::vector<std::int32_t>& report, std::int32_t layer) {
    const std::int64_t index[kPicks] = {report[0], report[1]};
    const float weight[kPicks] = {1, 1};
    runner.begin(layer, index, weight, 1, kPicks);
    runner.prefetch((layer + 1) % layers, reinterpret_cast<const float*>(report.data()) + 2 * kPicks, experts,
                    between(random, 0, 6), Priority::kNext);
    runner.finish_on_device(gpu.stream(), 1, 100, [](const DeviceLaunch&) {}, {});
  };
  for (int token = 0; token < 24; ++token) {
    for (std::int32_t layer = 0; layer < layers;) {
      const auto ahead =
          static_cast<std::int32_t>(std::min<std::int64_t>(between(random, 0, 3), layers - layer));
      std::vector<Layer*> launched;
      gpu.run([&stop] { stop = false; });
      for (std::int32_t i = 0; i < ahead; ++i) {
        kept.push_back(std::make_unique<Layer>());
        launched.push_back(kept.back().get());
        draw(&launched.back()->report, layer + i);
        update(layer + i);
        look_up(launched.back(), layer + i, microseconds(i == 0 ? 0 : between(random, 0, 600)));
      }
      bool hit = ahead > 0;
      for (std::int32_t i = 0; i < ahead && hit; ++i, ++layer) {
        while (launched[static_cast<std::size_t>(i)]->found < 0) std::this_thread::yield();
        hit = launched[static_cast<std::size_t>(i)]->found == 1;
        if (!hit) break;
        if (i + 1 == ahead) runner.end_ahead();
        std::vector<std::int32_t> reports(static_cast<std::size_t>(layers * stride));
        std::copy_n(launched[static_cast<std::size_t>(i)]->report.begin(), stride,
                    reports.begin() + layer * stride);
        const std::int64_t bytes = runner.account({layer,
                                                   1,
                                                   reports.data(),
                                                   stride,
                                                   kPicks,
                                                   place.data(),
                                                   1,
                                                   {1, experts, between(random, 1, 6), {}},
                                                   Miss::kFetch});
        EXPECT(bytes == kPicks * blocks * page);
        operations += kPicks * blocks;
      }
      if (hit) continue;
      runner.end_ahead();
      std::vector<std::int32_t> report;
      draw(&report, layer);
      by_host(report, layer++);
    }
  }
  gpu.wait();
  EXPECT(right);
  runner.drain({});
  EXPECT(runner.check().empty());
}

// The GPU fails during a layer: the layer raises an error, and all resources can be released.
void gpu_failure_raises(Random& random) {
  fake_cuda_reset();
  const BlockLayout layout = make_block_layout(16, 3 * kBlockNeurons, 4, false, false);
  const Far far(random, 1, 4 * 3, layout.record_bytes, true);
  {
    RunnerOptions options;
    options.layout = layout;
    options.layers = 1;
    options.experts = 4;
    options.pages = 4;
    options.targets = {LayerTarget{0, 1}};
    Gpu gpu(options.pages * layout.record_bytes);
    options.near_memory = gpu.memory();
    ExpertRunner runner(options, lru(1, 4), make_cuda_link(far.regions(), {}));
    fake_cuda_set("fail_after", static_cast<double>(between(random, 0, 20)));
    std::string message;
    for (int pass = 0; pass < 200 && message.empty(); ++pass) {
      const std::int64_t index[2] = {pass % 4, (pass + 1) % 4};
      const float weight[2] = {1, 1};
      try {
        runner.begin(0, index, weight, 1, 2);
        runner.finish_on_device(gpu.stream(), 1, 100, [](const DeviceLaunch&) {}, {});
      } catch (const DeviceLostError& error) {
        message = error.what();
      } catch (const LinkError& error) {
        std::fprintf(stderr, "a link error: %s\n", error.what());
        std::_Exit(1);
      }
    }
    EXPECT(message.find("CUDA_ERROR_ILLEGAL_ADDRESS (700)") != std::string::npos);
  }
  fake_cuda_reset();
}

int run(int count, char** arguments) {
  double seconds = 1;
  std::uint64_t seed = 1;
  unsigned alarm_after = 60;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = arguments[i];
    if (name == "--seconds") {
      seconds = std::atof(arguments[i + 1]);
    } else if (name == "--seed") {
      seed = std::strtoull(arguments[i + 1], nullptr, 10);
    } else if (name == "--alarm") {
      alarm_after = static_cast<unsigned>(std::atoi(arguments[i + 1]));
    } else {
      std::fprintf(stderr, "unknown argument %s\n", arguments[i]);
      return 2;
    }
  }
  setenv("MOECHAT_CUDA_DRIVER", MOECHAT_FAKE_CUDA, 1);
  alarm(alarm_after + static_cast<unsigned>(seconds));
  Random random(seed);
  const Clock::time_point end =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  do {
    page_reuse_follows_stream_order(random);
    layers_compute_from_fetched_blocks(random);
    for (int i = 0; i < 3; ++i) lookups_run_ahead_of_the_host(random);
    if (chance(random, 0.2)) gpu_failure_raises(random);
  } while (Clock::now() < end);
  EXPECT(fake_cuda_get("pinned") == 0);
  EXPECT(fake_cuda_get("allocated") == 0);
  EXPECT(fake_cuda_get("events") == 0);
  std::printf("operations %lld\n", static_cast<long long>(operations.load()));
  return 0;
}

}  // namespace
}  // namespace moechat

int main(int count, char** arguments) { return moechat::run(count, arguments); }
