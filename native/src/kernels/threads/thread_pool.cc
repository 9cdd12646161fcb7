#include "kernels/threads/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels/threads/cpu_info.h"
#include "memory/sent_signals.h"

#if defined(__linux__)
#include <sched.h>
#endif

namespace moechat {
namespace {

std::atomic<ThreadPool*> g_pool{nullptr};
std::atomic<int> g_threads{0};  // 0: not chosen yet

constexpr std::int64_t kPrewoken = 200'000;  // nanoseconds that a worker spins after prewake()
// How long the caller spins for the workers' last parts: as long as the region took, between these. Asleep,
// it leaves its core to a worker that was put off its own.
constexpr std::int64_t kShortestJoin = 20'000;
constexpr std::int64_t kLongestJoin = 200'000;
constexpr std::size_t kScratchAlignment = 64;

// The processor that this thread runs on; -1 where the system does not say.
int current_cpu() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// Moves this thread elsewhere if it runs on that processor and may run on others.
void leave_cpu([[maybe_unused]] int cpu) {
#if defined(__linux__)
  if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getcpu() != cpu) return;
  cpu_set_t all;
  CPU_ZERO(&all);
  if (sched_getaffinity(0, sizeof all, &all) != 0) return;
  cpu_set_t others = all;
  CPU_CLR(static_cast<std::size_t>(cpu), &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return;
  sched_setaffinity(0, sizeof all, &all);
#endif
}

std::uint64_t ticket(std::uint32_t region, int threads, int next) {
  return std::uint64_t{region} << 32 | static_cast<std::uint64_t>(threads) << 16 |
         static_cast<std::uint64_t>(next);
}
std::uint32_t region_of(std::uint64_t ticket) { return static_cast<std::uint32_t>(ticket >> 32); }
int threads_of(std::uint64_t ticket) { return static_cast<int>(ticket >> 16 & 0xffff); }
int next_of(std::uint64_t ticket) { return static_cast<int>(ticket & 0xffff); }
// Every worker takes at most one part too many of a region.
static_assert(2 * kMaxThreads < 0xffff, "taking parts never carries into the number of threads");

}  // namespace

ThreadPool& ThreadPool::instance() {
  ThreadPool* pool = g_pool.load(std::memory_order_acquire);
  if (pool != nullptr) return *pool;
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { g_pool.store(nullptr, std::memory_order_release); });
  (void)registered;
  auto fresh = std::unique_ptr<ThreadPool>(new ThreadPool());
  if (g_pool.compare_exchange_strong(pool, fresh.get(), std::memory_order_acq_rel)) pool = fresh.release();
  return *pool;
}

int ThreadPool::num_threads() {
  int threads = g_threads.load();
  if (threads == 0) {
    const int cores = std::min(available_cores(), kMaxThreads);
    threads = g_threads.compare_exchange_strong(threads, cores) ? cores : threads;
  }
  return threads;
}

void ThreadPool::set_num_threads(int threads) {
  if (threads < 1 || threads > kMaxThreads) {
    throw std::invalid_argument("the number of threads is " + std::to_string(threads) +
                                "; it must be between 1 and " + std::to_string(kMaxThreads));
  }
  g_threads.store(threads);
}

void ThreadPool::FreeAligned::operator()(void* memory) const {
  ::operator delete(memory, std::align_val_t{kScratchAlignment});
}

void* ThreadPool::scratch_bytes(int slot, std::size_t bytes) {
  const auto index = static_cast<std::size_t>(slot);
  if (scratch_.size() <= index) scratch_.resize(index + 1);
  Buffer& buffer = scratch_[index];
  if (buffer.bytes < bytes || buffer.bytes == 0) {
    buffer.bytes = 0;
    buffer.small.reset();
    buffer.large = HugeMemory();
    const std::size_t size = std::max<std::size_t>(bytes, 4096);
    if (size < kHugePageBytes) {
      buffer.small.reset(::operator new(size, std::align_val_t{kScratchAlignment}));
    } else {
      buffer.large = HugeMemory(size);
    }
    buffer.bytes = size;
  }
  return buffer.small ? buffer.small.get() : buffer.large.data();
}

void ThreadPool::prewake() {
  ThreadPool* const pool = g_pool.load(std::memory_order_acquire);
  if (pool == nullptr || pool->sleepers_.load(std::memory_order_relaxed) == 0 ||
      !pool->spins_.load(std::memory_order_relaxed)) {
    return;
  }
  pool->wake_.value.fetch_add(1, std::memory_order_seq_cst);
  pool->wake_.wake(kMaxThreads);
}

void ThreadPool::run_part(int thread, int threads) noexcept {
  try {
    function_(context_, thread, threads);
  } catch (...) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

// True as soon as a region after `seen` has begun; false after `most` nanoseconds, or at once when the core
// turns out to be wanted by others.
bool ThreadPool::spin(std::uint32_t seen, std::int64_t most, SpinBudget* budget) {
  const std::int64_t start = now_ns();
  std::int64_t now = start;
  for (;;) {
    const std::uint64_t last = ticket_.load(std::memory_order_acquire);
    const bool begun = region_of(last) != seen;
    const std::int64_t before = now;
    now = now_ns();
    const bool jumped = now - before > SpinBudget::kJump;
    if (jumped) budget->jumped();
    if (begun || jumped || now - start >= most) {
      budget->spun(now - start);
      return begun;
    }
    spin_briefly(&ticket_, last);
  }
}

// The ticket of the first region after `seen` that is noticed.
std::uint64_t ThreadPool::next_region(std::uint32_t seen, SpinBudget* budget) {
  std::int64_t most = spins_.load(std::memory_order_relaxed) ? budget->budget() : 0;
  for (;;) {
    if (most > 0 && spin(seen, most, budget)) break;
    const std::uint32_t word = wake_.value.load(std::memory_order_seq_cst);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    const bool sleep = region_of(ticket_.load(std::memory_order_seq_cst)) == seen;
    if (sleep) wake_.wait(word);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    if (!sleep || region_of(ticket_.load(std::memory_order_acquire)) != seen) break;
    most = spins_.load(std::memory_order_relaxed) ? kPrewoken : 0;
  }
  return ticket_.load(std::memory_order_acquire);
}

void ThreadPool::work(std::uint32_t seen) {
  SpinBudget budget;
  std::int64_t ended = now_ns();
  for (;;) {
    std::uint64_t mine = next_region(seen, &budget);
    if (spins_.load(std::memory_order_relaxed)) leave_cpu(caller_cpu_.load(std::memory_order_relaxed));
    if (next_of(mine) < threads_of(mine)) mine = ticket_.fetch_add(1, std::memory_order_acq_rel);
    seen = region_of(mine);
    if (stop_.load(std::memory_order_relaxed)) return;
    if (next_of(mine) >= threads_of(mine)) continue;
    const std::int64_t began = now_ns();
    budget.began(began - ended);
    run_part(next_of(mine), threads_of(mine));
    ended = now_ns();
    budget.worked(ended - began);
    const std::uint32_t count = done_.value.fetch_add(1, std::memory_order_seq_cst) + 1;
    if (count == joining_.load(std::memory_order_seq_cst)) done_.wake(1);
  }
}

// Begins a region with as many parts as `threads`, of which the caller has the first.
void ThreadPool::publish(int threads) {
  const std::uint32_t region = region_of(ticket_.load(std::memory_order_relaxed)) + 1;
  ticket_.store(ticket(region, threads, 1), std::memory_order_seq_cst);
  const int sleepers = sleepers_.load(std::memory_order_seq_cst);
  const int awake = static_cast<int>(workers_.size()) - sleepers;
  const int missing = std::min(sleepers, threads - 1 - awake);
  if (missing <= 0) return;
  wake_.value.fetch_add(1, std::memory_order_seq_cst);
  wake_.wake(missing);
}

// Ends or starts workers until there are `workers`. On failure there are none.
void ThreadPool::resize(int workers) {
  if (static_cast<int>(workers_.size()) == workers) return;
  const auto end_all = [this] {
    stop_.store(true, std::memory_order_relaxed);
    publish(kMaxThreads + 1);
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stop_.store(false, std::memory_order_relaxed);
  };
  end_all();
  spins_.store(workers < cores_to_spin_on(), std::memory_order_relaxed);
  const SentSignalsBlocked blocked;
  try {
    workers_.reserve(static_cast<std::size_t>(workers));
    const std::uint32_t seen = region_of(ticket_.load(std::memory_order_relaxed));
    for (int i = 0; i < workers; ++i) workers_.emplace_back(&ThreadPool::work, this, seen);
  } catch (...) {
    end_all();
    throw std::runtime_error("could not start " + std::to_string(workers) + " worker threads");
  }
}

// Returns when workers have done that many parts of the region.
void ThreadPool::join(std::uint32_t parts, std::int64_t started) {
  const auto done = [&] { return done_.value.load(std::memory_order_acquire) == parts; };
  if (done()) return;
  if (spins_.load(std::memory_order_relaxed)) {
    const std::int64_t start = now_ns();
    const std::int64_t end = start + std::clamp(start - started, kShortestJoin, kLongestJoin);
    do {
      for (int look = 0; look < 16; ++look) {
        if (done()) return;
        relax();
      }
    } while (now_ns() < end);
  }
  joining_.store(parts, std::memory_order_seq_cst);
  for (;;) {
    const std::uint32_t seen = done_.value.load(std::memory_order_seq_cst);
    if (seen == parts) break;
    done_.wait(seen);
  }
  joining_.store(0, std::memory_order_seq_cst);
}

void ThreadPool::run(int limit, Function function, const void* context) {
  const int available = num_threads();
  const int threads = std::max(1, std::min(limit, available));
  if (threads == 1) {
    function(context, 0, 1);
    return;
  }
  resize(available - 1);
  function_ = function;
  context_ = context;
  caller_cpu_.store(current_cpu(), std::memory_order_relaxed);
  done_.value.store(0, std::memory_order_relaxed);
  const std::int64_t started = now_ns();
  publish(threads);
  int thread = 0;
  std::uint32_t mine = 0;
  do {
    run_part(thread, threads);
    ++mine;
    thread = next_of(ticket_.load(std::memory_order_relaxed));
    if (thread < threads) thread = next_of(ticket_.fetch_add(1, std::memory_order_acq_rel));
  } while (thread < threads);
  join(static_cast<std::uint32_t>(threads) - mine, started);
  // Workers have done what they took: nobody else looks at error_.
  if (std::exception_ptr error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
}

}  // namespace moechat
