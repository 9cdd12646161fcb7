// A 32-bit number that threads sleep on until it changes.
//
// - wait(seen) returns once the number differs from `seen`; it may return early. The comparison and the start
//   of sleeping are one atomic step, so a change followed by wake() is never missed.
// - A change alone wakes no thread: the thread that changes the number must call wake(). Neither call
// allocates
//   or throws.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace moechat {

// An implementation with std::mutex and std::condition_variable; waiting takes two locks.
class PortableWaitWord {
 public:
  std::atomic<std::uint32_t> value{0};

  void wait(std::uint32_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return value.load(std::memory_order_seq_cst) != seen; });
  }
  void wake(int most) {
    // A thread that compared the number under the lock is asleep once the lock is free.
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
// An implementation with a process-private futex: one system call to sleep, one to wake.
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
