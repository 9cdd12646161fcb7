#include "kernels/thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels/cpu_info.h"

namespace moechat {
namespace {

std::atomic<ThreadPool*> g_pool{nullptr};
std::atomic<int> g_threads{0};  // 0: not chosen yet

constexpr int kSpins = 2000;  // of a pause each, 20 to 80 microseconds
constexpr std::size_t kScratchAlignment = 64;

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

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
  if (buffer.bytes < bytes || !buffer.memory) {
    buffer.bytes = 0;
    buffer.memory.reset();
    const std::size_t size = std::max<std::size_t>(bytes, 4096);
    buffer.memory.reset(::operator new(size, std::align_val_t{kScratchAlignment}));
    buffer.bytes = size;
  }
  return buffer.memory.get();
}

// Called from a catch block.
void ThreadPool::fail() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!error_) error_ = std::current_exception();
}

void ThreadPool::work(int index, std::uint64_t seen) {
  for (;;) {
    std::uint64_t epoch = seen;
    for (int spin = 0; spin < kSpins && epoch == seen; ++spin) {
      epoch = epoch_.load(std::memory_order_acquire);
      if (epoch == seen) relax();
    }
    if (epoch == seen) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return epoch_.load(std::memory_order_acquire) != seen; });
      epoch = epoch_.load(std::memory_order_acquire);
    }
    seen = epoch;
    if (stop_) return;
    if (index < threads_) {
      try {
        function_(context_, index, threads_);
      } catch (...) {
        fail();
      }
    }
    if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      const std::lock_guard<std::mutex> lock(mutex_);
      done_.notify_one();
    }
  }
}

// Ends or starts workers until there are `workers`. On failure there are none.
void ThreadPool::resize(int workers) {
  if (static_cast<int>(workers_.size()) == workers) return;
  const auto end_all = [this] {
    stop_ = true;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      epoch_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stop_ = false;
  };
  end_all();
  // Signals belong to the interpreter's threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    workers_.reserve(static_cast<std::size_t>(workers));
    for (int i = 1; i <= workers; ++i) {
      workers_.emplace_back(&ThreadPool::work, this, i, epoch_.load(std::memory_order_relaxed));
    }
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    end_all();
    throw std::runtime_error("could not start " + std::to_string(workers) + " worker threads");
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
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
  threads_ = threads;
  pending_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    epoch_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  try {
    function(context, 0, threads);
  } catch (...) {
    fail();
  }
  for (int spin = 0; spin < kSpins && pending_.load(std::memory_order_acquire) != 0; ++spin) relax();
  std::exception_ptr error;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return pending_.load(std::memory_order_acquire) == 0; });
    error = std::exchange(error_, nullptr);
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace moechat
