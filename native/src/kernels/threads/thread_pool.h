// One pool of worker threads for the whole process.
//
// - Parallel regions are serialised: a Session holds the pool exclusively, from any thread.
// - The calling thread works too, so n threads means n - 1 workers. A region does not wait for workers to
// wake
//   up: threads take its parts as they arrive, and the calling thread runs the parts that no worker has
//   taken.
// - Between regions workers spin for about as long as the next region usually takes to start (SpinBudget: at
//   most a millisecond, and a share of the time), then sleep. No worker spins if there are more threads than
//   cores, or if a control group limits the CPU time. System calls are made only to wake sleeping workers.
// - The scheduler places the workers. Pinning would break a taskset that is changed later, and would leave a
//   worker waiting on a core that another program uses. The scheduler makes one costly mistake: it may put a
//   worker that is woken while no core is idle on the caller's core, which the caller does not leave. Such a
//   worker moves away as soon as it runs.
// - A child process after fork() has no workers. It starts with a fresh pool and never touches the old one,
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

#include "kernels/threads/spin.h"
#include "kernels/threads/wait_word.h"
#include "memory/huge_memory.h"

namespace moechat {

constexpr int kMaxThreads = 1024;
// Distance between data of different threads: processors fetch cache lines of 64 bytes in pairs.
constexpr std::size_t kApart = 128;

class ThreadPool {
 public:
  static ThreadPool& instance();

  // Threads of the next region. Throws std::invalid_argument outside 1..kMaxThreads.
  static void set_num_threads(int threads);
  static int num_threads();

  // Announces a region within some tens of microseconds: sleeping workers wake and spin for it. Costs one
  // system call if a worker sleeps, else nothing. Needs no Session.
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

    // Returns 64-byte aligned memory, valid until the next request for the same slot. It grows and is never
    // freed.
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

  // A region: its number (32 bits), its threads (16) and the next free part (16). Adding 1 takes a part. A
  // late worker may take a part of a later region than it meant to, which is equally good: the number says
  // which region, and the fields below belong to that region.
  alignas(kApart) std::atomic<std::uint64_t> ticket_{0};
  // Written by the caller before ticket_, read by threads that have taken a part. The caller writes again
  // only after all parts that workers took are done.
  Function function_ = nullptr;
  const void* context_ = nullptr;

  // Parts of this region that workers have finished, and the number the caller sleeps for (0: awake).
  alignas(kApart) WaitWord done_;
  std::atomic<std::uint32_t> joining_{0};

  // Workers that sleep or are about to. A worker adds itself before it last reads ticket_, and the caller
  // reads the number after it has written ticket_, so at least one of the two sees the other.
  alignas(kApart) WaitWord wake_;
  std::atomic<int> sleepers_{0};

  alignas(kApart) std::atomic<bool> spins_{false};
  std::atomic<int> caller_cpu_{-1};  // where the region began
  std::atomic<bool> stop_{false};
  std::mutex mutex_;  // guards error_
  std::exception_ptr error_;
};

}  // namespace moechat
