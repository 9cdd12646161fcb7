// One pool of worker threads for the whole process.
//
// - Parallel regions are serialised: a Session holds the pool, whoever calls from whichever thread.
// - The calling thread works too, so n threads means n - 1 workers. Workers spin for some microseconds after
// a region
//   (the next phase usually follows at once), then sleep.
// - A child process after fork() has no workers; it starts with a fresh pool and leaves the old one alone,
// whose locks
//   may be in any state.
// - The pool is never destroyed: at exit, sleeping workers end with the process and nothing waits for them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace moechat {

constexpr int kMaxThreads = 1024;

class ThreadPool {
 public:
  static ThreadPool& instance();

  // Threads of the next region. Throws std::invalid_argument outside 1..kMaxThreads.
  static void set_num_threads(int threads);
  static int num_threads();

  // Exclusive use of the workers and of the scratch memory.
  class Session {
   public:
    Session() : pool_(instance()), lock_(pool_.session_) {}

    // Runs body(thread, threads) on min(limit, num_threads()) threads and returns when all are done. The
    // first exception of a body is rethrown.
    template <class Body>
    void parallel(int limit, const Body& body) {
      pool_.run(
          limit,
          [](const void* context, int thread, int threads) {
            (*static_cast<const Body*>(context))(thread, threads);
          },
          &body);
    }

    // Runs body(begin, end) over [0, count) in pieces of `grain`, handed out as threads become free.
    template <class Body>
    void parallel_for(int limit, std::int64_t count, std::int64_t grain, const Body& body) {
      if (count <= 0) return;
      if (count <= grain || limit <= 1) {
        body(std::int64_t{0}, count);
        return;
      }
      std::atomic<std::int64_t> next{0};
      const std::int64_t pieces = (count + grain - 1) / grain;
      parallel(static_cast<int>(pieces < limit ? pieces : limit), [&](int, int) {
        for (;;) {
          const std::int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
          if (begin >= count) return;
          body(begin, begin + grain < count ? begin + grain : count);
        }
      });
    }

    // 64-byte aligned memory that lives until the next request for the same slot; it grows and is never given
    // back.
    template <class T>
    T* scratch(int slot, std::int64_t count) {
      return static_cast<T*>(pool_.scratch_bytes(slot, static_cast<std::size_t>(count) * sizeof(T)));
    }

   private:
    ThreadPool& pool_;
    std::lock_guard<std::mutex> lock_;
  };

 private:
  using Function = void (*)(const void* context, int thread, int threads);
  struct FreeAligned {
    void operator()(void* memory) const;
  };
  struct Buffer {
    std::unique_ptr<void, FreeAligned> memory;
    std::size_t bytes = 0;
  };

  ThreadPool() = default;
  void run(int limit, Function function, const void* context);
  void resize(int workers);
  void work(int index, std::uint64_t seen);
  void fail() noexcept;
  void* scratch_bytes(int slot, std::size_t bytes);

  std::mutex session_;  // held by the Session; guards workers_ and scratch_
  std::vector<std::thread> workers_;
  std::vector<Buffer> scratch_;

  // A region. Written by the caller before epoch_ rises, read by workers after they see it rise; the caller
  // writes again only when pending_ is 0, which every worker reaches, taking part or not.
  Function function_ = nullptr;
  const void* context_ = nullptr;
  int threads_ = 0;
  bool stop_ = false;
  std::atomic<std::uint64_t> epoch_{0};
  std::atomic<int> pending_{0};

  std::mutex mutex_;  // guards error_ and both waits
  std::condition_variable wake_;
  std::condition_variable done_;
  std::exception_ptr error_;
};

}  // namespace moechat
