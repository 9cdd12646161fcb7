#include "kernels/decode/decode.h"

#include <math.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "kernels/decode/step_memory.h"
#include "kernels/isa/dispatch.h"
#include "kernels/layout/half.h"
#include "kernels/threads/thread_pool.h"

namespace moechat {
namespace {

// Work below which waking another thread costs more than it saves: about 20 microseconds of one core.
constexpr std::int64_t kNormElements = 1 << 16;
constexpr std::int64_t kAttendBytes = 1 << 17;  // of keys and values, which come from memory
constexpr std::int64_t kPackElements = 1 << 16;
constexpr std::int64_t kCopyBytes = 1 << 18;
constexpr std::int64_t kDeltaElements = 1 << 15;  // of states, read twice and written once
constexpr std::int64_t kMambaElements = 1 << 15;  // of states, read and written once
constexpr std::int64_t kRouteProducts = 1 << 17;
constexpr std::int64_t kRouteRows = 16;

// Slots of the pool's scratch memory; forward.cc uses lower numbers.
enum Slot { kQueries = 32, kPartials, kUnitScratch, kDeltaScratch, kMambaScratch, kMambaHeads };

std::int64_t padded(std::int64_t count) { return (count + 15) / 16 * 16; }

float element(ElementType type, const void* from, std::int64_t index) {
  switch (type) {
    case ElementType::kFloat32:
      return static_cast<const float*>(from)[index];
    case ElementType::kBfloat16:
      return half::from_bf16(static_cast<const std::uint16_t*>(from)[index]);
    case ElementType::kFloat16:
      return half::from_fp16(static_cast<const std::uint16_t*>(from)[index]);
  }
  return 0.0f;
}

void set_element(ElementType type, void* to, std::int64_t index, float value) {
  switch (type) {
    case ElementType::kFloat32:
      static_cast<float*>(to)[index] = value;
      return;
    case ElementType::kBfloat16:
      static_cast<std::uint16_t*>(to)[index] = half::to_bf16(value);
      return;
    case ElementType::kFloat16:
      static_cast<std::uint16_t*>(to)[index] = half::to_fp16(value);
      return;
  }
}

// Replaces x by e^(x - largest) and returns the sum.
float exponentials_of(const KernelTable& kernel, float* x, std::int64_t count) {
  float most = x[0];
  for (std::int64_t i = 1; i < count; ++i) most = x[i] > most ? x[i] : most;
  kernel.decode->exponentials(x, count, most);
  float sum = 0.0f;
  for (std::int64_t i = 0; i < count; ++i) sum += x[i];
  return sum;
}

// Calls run(begin, end) for the rows of a task, in parts.
template <class Run>
void for_rows(const PackTask& task, const Run& run) {
  const std::int64_t rows = task.heads * task.tokens;
  if (rows * task.dim < kPackElements) return run(0, rows);
  ThreadPool::Session session;
  session.parallel_for(kMaxThreads, rows, kPackElements / task.dim / 4 + 1, run);
}

}  // namespace

void copy_bytes(const void* from, std::int64_t count, void* to) {
  const auto* source = static_cast<const unsigned char*>(from);
  auto* target = static_cast<unsigned char*>(to);
  const auto run = [&](std::int64_t begin, std::int64_t end) {
    std::memcpy(target + begin, source + begin, static_cast<std::size_t>(end - begin));
  };
  if (count < kCopyBytes) return run(0, count);
  ThreadPool::Session session;
  session.parallel_for(kMaxThreads, count, kCopyBytes / 4, run);
}

void pack_rows(const PackTask& task) {
  for_rows(task,
           [&](std::int64_t begin, std::int64_t end) { kernels().decode->pack_rows(task, begin, end); });
}

void unpack_rows(const PackTask& task) {
  for_rows(task,
           [&](std::int64_t begin, std::int64_t end) { kernels().decode->unpack_rows(task, begin, end); });
}

void rms_norm(const NormTask& task, std::int64_t rows) {
  const DecodeKernels& kernel = *kernels().decode;
  if (rows * task.cols < kNormElements) return kernel.rms_norm(task, 0, rows);
  ThreadPool::Session session;
  const std::int64_t grain = kNormElements / task.cols / 4 + 1;
  session.parallel_for(kMaxThreads, rows, grain,
                       [&](std::int64_t begin, std::int64_t end) { kernel.rms_norm(task, begin, end); });
}

void rotate(const RotateTask& task) { kernels().decode->rotate(task); }

void attend(const AttendTask& task) {
  const DecodeKernels& kernel = *kernels().decode;
  AttendShape shape{};
  shape.query_width = padded(task.key_dim + task.tail_dim);
  shape.value_width = padded(task.value_dim);
  shape.rows = task.group * task.tokens;
  shape.units = (task.context + kAttendKeys - 1) / kAttendKeys;
  shape.partial = shape.value_width + 16;

  ThreadPool::Session session;
  float* queries = session.scratch<float>(kQueries, task.kv_heads * shape.rows * shape.query_width);
  float* partials =
      session.scratch<float>(kPartials, task.kv_heads * shape.units * shape.rows * shape.partial);
  const std::int64_t units = task.kv_heads * shape.units;
  const std::int64_t size = task.packed ? 1 : task.type == ElementType::kFloat32 ? 4 : 2;
  const std::int64_t bytes = task.kv_heads * task.context * (shape.query_width + shape.value_width) * size;
  // With more rows a key is multiplied longer than it takes to read.
  int threads = bytes * ((shape.rows + 7) / 8) < kAttendBytes ? 1 : ThreadPool::num_threads();
  if (threads > units) threads = static_cast<int>(units);
  const std::int64_t each = padded(attend_scratch(shape));
  float* scratch = session.scratch<float>(kUnitScratch, each * threads);

  kernel.attend_queries(task, shape, queries);
  std::atomic<std::int64_t> next{0};
  session.parallel(threads, [&](int thread, int) {
    for (;;) {
      const std::int64_t unit = next.fetch_add(1, std::memory_order_relaxed);
      if (unit >= units) return;
      kernel.attend_unit(task, shape, queries, unit / shape.units, unit % shape.units,
                         scratch + each * thread, partials + unit * shape.rows * shape.partial);
    }
  });
  kernel.attend_sum(task, shape, partials);
}

bool attend_prompt(const AttendTask& task) {
  if (task.group > kMostPromptLanes || task.packed || task.tail_dim > 0) return false;
  std::vector<std::int64_t> first(static_cast<std::size_t>(task.tokens));
  std::vector<std::int64_t> end(first.size());
  for (std::int64_t t = 0; t < task.tokens; ++t) {
    std::int64_t from = 0;
    std::int64_t to = task.context - task.tokens + t + 1;
    if (task.visible != nullptr) {
      const unsigned char* seen = task.visible + t * task.visible_token;
      const unsigned char* last = seen + task.context;
      const unsigned char* begin = std::find(seen, last, static_cast<unsigned char>(1));
      const unsigned char* after = std::find(begin, last, static_cast<unsigned char>(0));
      if (std::find(after, last, static_cast<unsigned char>(1)) != last) return false;
      from = begin - seen;
      to = after - seen;
    }
    first[static_cast<std::size_t>(t)] = from;
    end[static_cast<std::size_t>(t)] = to;
  }
  PromptTask prompt{task, first.data(), end.data()};
  prompt.attend.visible = nullptr;
  // Two groups of tokens share the elements of keys and values: of two heads, or else of one.
  const std::int64_t blocks = task.group == 1 ? 2 : 1;
  const std::int64_t each = blocks * kPromptTokens;
  const std::int64_t pieces = (task.tokens + each - 1) / each;
  const DecodeKernels& kernel = *kernels().decode;
  ThreadPool::Session session;
  const int threads = ThreadPool::num_threads();
  const std::int64_t floats = padded(prompt_scratch(task, blocks));
  float* scratch = session.scratch<float>(kUnitScratch, floats * threads);
  std::atomic<std::int64_t> next{0};
  session.parallel(threads, [&](int thread, int) {
    for (;;) {
      const std::int64_t unit = next.fetch_add(1, std::memory_order_relaxed);
      if (unit >= task.kv_heads * pieces) return;
      // The last tokens see most keys: they come first, so that threads end together.
      const std::int64_t token = (pieces - 1 - unit / task.kv_heads) * each;
      const std::int64_t left = (task.tokens - token + kPromptTokens - 1) / kPromptTokens;
      kernel.attend_prompt(prompt, unit % task.kv_heads, token, left < blocks ? left : blocks,
                           scratch + floats * thread);
    }
  });
  return true;
}

void delta(const DeltaTask& task) {
  const DecodeKernels& kernel = *kernels().decode;
  ThreadPool::Session session;
  const std::int64_t elements = task.tokens * task.k_heads * task.group * task.k_dim * task.v_dim;
  int threads = elements < kDeltaElements ? 1 : ThreadPool::num_threads();
  if (threads > task.k_heads) threads = static_cast<int>(task.k_heads);
  const std::int64_t each = padded(delta_scratch(task));
  float* scratch = session.scratch<float>(kDeltaScratch, each * threads);
  std::atomic<std::int64_t> next{0};
  session.parallel(threads, [&](int thread, int) {
    for (;;) {
      const std::int64_t head = next.fetch_add(1, std::memory_order_relaxed);
      if (head >= task.k_heads) return;
      kernel.delta(task, head, head + 1, scratch + each * thread);
    }
  });
}

void mamba(const MambaTask& given) {
  const DecodeKernels& kernel = *kernels().decode;
  ThreadPool::Session session;
  const std::int64_t inner = mamba_inner(given), channels = mamba_channels(given);
  const std::int64_t most = std::min(given.tokens, kMambaTokens), size = element_bytes(given.type);
  MambaTask task = given;
  task.mixed = session.scratch<float>(kMambaScratch, padded(most * channels) + padded(most * inner));
  task.made = task.mixed + padded(most * channels);
  task.tokens = most;
  const std::int64_t each = padded(mamba_scratch(task));
  float* scratch = session.scratch<float>(kMambaHeads, each * ThreadPool::num_threads());
  for (std::int64_t first = 0; first < given.tokens; first += most) {
    task.tokens = std::min(given.tokens - first, most);
    task.row = static_cast<const unsigned char*>(given.row) + first * mamba_cols(given) * size;
    task.out = static_cast<unsigned char*>(given.out) + first * inner * size;
    const int threads =
        task.tokens * inner * task.state_size < kMambaElements ? 1 : ThreadPool::num_threads();
    // Parts of a phase are as many as threads can share evenly, a multiple of 16 channels.
    session.parallel_for(threads, (channels + 15) / 16, 16, [&](std::int64_t begin, std::int64_t end) {
      kernel.mamba_convolve(task, 16 * begin, std::min(16 * end, channels));
    });
    std::atomic<std::int64_t> next{0};
    session.parallel(std::min<int>(threads, static_cast<int>(task.heads)), [&](int thread, int) {
      for (;;) {
        const std::int64_t head = next.fetch_add(1, std::memory_order_relaxed);
        if (head >= task.heads) return;
        kernel.mamba_heads(task, head, head + 1, scratch + each * thread);
      }
    });
    session.parallel_for(threads, task.tokens * inner / task.norm_group, task.tokens,
                         [&](std::int64_t begin, std::int64_t end) { kernel.mamba_norm(task, begin, end); });
  }
}

void router_logits(const RouteTask& task) {
  const KernelTable& kernel = kernels();
  if (task.tokens * task.experts * task.hidden < kRouteProducts) {
    kernel.decode->route(task, 0, task.experts);
  } else {
    ThreadPool::Session session;
    session.parallel_for(kMaxThreads, task.experts, kRouteRows, [&](std::int64_t begin, std::int64_t end) {
      kernel.decode->route(task, begin, end);
    });
  }
}

void route(const RouteTask& task, const RouterRule& rule, std::int64_t* index, void* weights) {
  const KernelTable& kernel = kernels();
  router_logits(task);
  static thread_local std::vector<float> scores, ranks;
  scores.resize(static_cast<std::size_t>(task.experts));
  ranks.resize(static_cast<std::size_t>(task.experts));
  const std::int64_t chosen = rule.chosen;
  for (std::int64_t t = 0; t < task.tokens; ++t) {
    float* score = scores.data();
    float* rank = ranks.data();
    for (std::int64_t e = 0; e < task.experts; ++e) {
      score[e] = element(task.logits_type, task.logits, t * task.experts + e);
    }
    if (rule.scoring == RouterScoring::kSoftmax) {
      const float sum = exponentials_of(kernel, score, task.experts);
      for (std::int64_t e = 0; e < task.experts; ++e) score[e] /= sum;
    } else if (rule.scoring == RouterScoring::kSigmoid) {
      for (std::int64_t e = 0; e < task.experts; ++e) score[e] = -score[e];
      kernel.decode->exponentials(score, task.experts, 0.0f);
      for (std::int64_t e = 0; e < task.experts; ++e) score[e] = 1.0f / (1.0f + score[e]);
    }
    if (rule.rounds_scores && task.logits_type != ElementType::kFloat32) {
      static thread_local std::vector<std::uint16_t> rounded;
      rounded.resize(static_cast<std::size_t>(task.experts));
      kernel.decode->narrow(task.logits_type, score, task.experts, rounded.data());
      kernel.decode->widen(task.logits_type, rounded.data(), task.experts, score);
    }
    for (std::int64_t e = 0; e < task.experts; ++e) {
      const float corrected = rule.correction == nullptr ? score[e] : score[e] + rule.correction[e];
      // NaN ranks first, as in torch, so that it reaches the result.
      rank[e] = corrected == corrected ? corrected : HUGE_VALF;
    }
    std::int64_t* best = index + t * chosen;
    static thread_local std::vector<float> picked;
    picked.resize(static_cast<std::size_t>(chosen));
    for (std::int64_t k = 0; k < chosen; ++k) {
      std::int64_t winner = -1;
      for (std::int64_t e = 0; e < task.experts; ++e) {
        if (rank[e] == rank[e] && (winner < 0 || rank[e] > rank[winner])) winner = e;
      }
      best[k] = winner;
      picked[static_cast<std::size_t>(k)] = score[winner];
      rank[winner] = NAN;  // taken
    }
    float divisor = 1.0f;
    if (rule.scoring == RouterScoring::kSoftmaxChosen) {
      divisor = exponentials_of(kernel, picked.data(), chosen);
    } else if (rule.normalise) {
      divisor = 0.0f;
      for (const float weight : picked) divisor += weight;
    }
    for (std::int64_t k = 0; k < chosen; ++k) {
      set_element(rule.weight_type, weights, t * chosen + k,
                  picked[static_cast<std::size_t>(k)] / divisor * rule.scale);
    }
  }
}

void route_scaled(const RouteTask& task, const RouterRule& rule, const RouterScales& scales,
                  std::int64_t* index, float* weights) {
  const DecodeKernels& kernel = *kernels().decode;
  const std::int64_t elements = task.tokens * task.hidden;
  static thread_local std::vector<float> narrow, wide, factors;
  narrow.resize(static_cast<std::size_t>(elements));  // at least as wide as any element
  wide.resize(static_cast<std::size_t>(elements));
  factors.resize(static_cast<std::size_t>(task.hidden));
  NormTask norm = scales.norm;
  norm.x = task.x;
  norm.out = narrow.data();
  rms_norm(norm, task.tokens);
  kernel.widen(task.type, narrow.data(), elements, wide.data());
  kernel.widen(task.type, scales.inputs, task.hidden, factors.data());
  for (std::int64_t i = 0; i < elements; ++i) {
    wide[static_cast<std::size_t>(i)] *= factors[static_cast<std::size_t>(i % task.hidden)];
  }
  kernel.narrow(task.type, wide.data(), elements, narrow.data());
  kernel.widen(task.type, narrow.data(), elements, wide.data());
  for (float& value : wide) value *= scales.input;
  kernel.narrow(task.type, wide.data(), elements, narrow.data());
  RouteTask scaled = task;
  scaled.x = narrow.data();
  route(scaled, rule, index, weights);
  for (std::int64_t i = 0; i < task.tokens * rule.chosen; ++i) weights[i] *= scales.experts[index[i]];
}

}  // namespace moechat
