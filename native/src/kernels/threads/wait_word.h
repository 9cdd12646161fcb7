// A 32-bit number that threads sleep on until it changes.
//
// - wait(seen) returns once the number is not `seen`, and may return early. The check and falling asleep are
//   one step: a change with a wake after it is never missed.
// - A change wakes nobody: who changes the number calls wake. Neither call allocates or throws.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace moechat {

// With std::mutex and std::condition_variable; two locks for a wait.
class PortableWaitWord {
 public:
  std::atomic<std::uint32_t> value{0};

  void wait(std::uint32_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return value.load(std::memory_order_seq_cst) != seen; });
  }
  void wake(int most) {
    // Whoever has checked the number under the lock is asleep when the lock can be had.
    {
      const std::lock_guard<std::mutex> lock(mutex_);
    }
    if (most == 1) {
      changed_.notify_one();
    } else {
      changed_.notify_all();
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
};

#if defined(__linux__)
// With a futex of this process: one system call to sleep, one to wake.
class FutexWaitWord {
 public:
  std::atomic<std::uint32_t> value{0};

  void wait(std::uint32_t seen);
  void wake(int most);
};
using WaitWord = FutexWaitWord;
#else
using WaitWord = PortableWaitWord;
#endif

}  // namespace moechat
