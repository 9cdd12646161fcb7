// One pool of worker threads for the whole process.
//
// - Parallel regions are serialised: a Session holds the pool, whoever calls from whichever thread.
// - The calling thread works too, so n threads means n - 1 workers. A region does not wait for a worker to
//   wake up: its parts go to whoever comes, and the calling thread does those that nobody has taken.
// - Between regions workers spin for as long as the next one usually takes to come (SpinBudget: at most a
//   millisecond, and a share of the time), then sleep. Nothing spins when there are more threads than cores,
//   or when a control group counts the CPU time. A system call is made only to wake who sleeps.
// - The scheduler places the workers. Pinning them would break a taskset that is changed later and leave a
//   worker waiting where another program computes. It errs in one way that costs: a worker that is woken
//   while no core is idle may be put on the caller's, and the caller does not leave it. Such a worker moves
//   away as soon as it runs.
// - A child process after fork() has no workers; it starts with a fresh pool and leaves the old one alone,
//   whose locks may be in any state.
// - The pool is never destroyed: at exit, sleeping workers end with the process and nothing waits for them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/spin.h"
#include "kernels/wait_word.h"
#include "memory/huge_memory.h"

namespace moechat {

constexpr int kMaxThreads = 1024;
// What one thread writes and others read lies this far apart: processors fetch lines of 64 bytes in pairs.
constexpr std::size_t kApart = 128;

class ThreadPool {
 public:
  static ThreadPool& instance();

  // Threads of the next region. Throws std::invalid_argument outside 1..kMaxThreads.
  static void set_num_threads(int threads);
  static int num_threads();

  // A region will come within some tens of microseconds: workers that sleep begin to spin for it. Costs a
  // system call if one sleeps, else nothing. Needs no Session.
  static void prewake();

  // Exclusive use of the workers and of the scratch memory.
  class Session {
   public:
    Session() : pool_(instance()), lock_(pool_.session_) {}

    // Runs body(thread, threads) once for every thread of [0, threads), threads = min(limit, num_threads()),
    // and returns when all are done. One thread may run several of them one after another, so they must not
    // wait for each other. The first exception of a body is rethrown.
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
      alignas(kApart) Counter next;
      const std::int64_t pieces = (count + grain - 1) / grain;
      parallel(static_cast<int>(pieces < limit ? pieces : limit), [&](int, int) {
        for (;;) {
          const std::int64_t begin = next.value.fetch_add(grain, std::memory_order_relaxed);
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
    struct Counter {
      std::atomic<std::int64_t> value{0};
      char apart[kApart - sizeof(std::atomic<std::int64_t>)];
    };
    ThreadPool& pool_;
    std::lock_guard<std::mutex> lock_;
  };

 private:
  using Function = void (*)(const void* context, int thread, int threads);
  struct FreeAligned {
    void operator()(void* memory) const;
  };
  struct Buffer {  // one of the two
    std::unique_ptr<void, FreeAligned> small;
    HugeMemory large;
    std::size_t bytes = 0;
  };

  ThreadPool() = default;
  void run(int limit, Function function, const void* context);
  void resize(int workers);
  void publish(int threads);
  void join(std::uint32_t workers_done, std::int64_t started);
  void work(std::uint32_t seen);
  std::uint64_t next_region(std::uint32_t seen, SpinBudget* budget);
  bool spin(std::uint32_t seen, std::int64_t most, SpinBudget* budget);
  void run_part(int thread, int threads) noexcept;
  void* scratch_bytes(int slot, std::size_t bytes);

  std::mutex session_;  // held by the Session; guards workers_ and scratch_
  std::vector<std::thread> workers_;
  std::vector<Buffer> scratch_;

  // A region: its number (32 bits), its threads (16) and the next part that nobody has taken (16). Parts are
  // taken by adding 1. A worker that is late adds to a later region than it meant to, which is as good: the
  // number says which, and the fields below are those of that region.
  alignas(kApart) std::atomic<std::uint64_t> ticket_{0};
  // Written by the caller before ticket_, read by who has taken a part; the caller writes again only when
  // all parts that workers took are done.
  Function function_ = nullptr;
  const void* context_ = nullptr;

  // Parts of this region that workers have done, and how many the caller sleeps for (0: it does not).
  alignas(kApart) WaitWord done_;
  std::atomic<std::uint32_t> joining_{0};

  // Workers that sleep or are about to. Each adds itself before its last look at ticket_, and the caller
  // reads the number after it has written ticket_: one of the two sees the other.
  alignas(kApart) WaitWord wake_;
  std::atomic<int> sleepers_{0};

  alignas(kApart) std::atomic<bool> spins_{false};
  std::atomic<int> caller_cpu_{-1};  // where the region began
  std::atomic<bool> stop_{false};
  std::mutex mutex_;  // guards error_
  std::exception_ptr error_;
};

}  // namespace moechat
