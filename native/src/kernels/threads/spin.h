// Waits of some microseconds that keep the core.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace moechat {

inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Waits for about a microsecond at most; returns early once *word differs from `seen`. See spin.cc.
void spin_briefly(const std::atomic<std::uint64_t>* word, std::uint64_t seen);

// Computes how long a worker may spin for the next region before it sleeps: the smallest of
//
// - twice the longest recent gap between regions that spinning could have bridged (at most kLongest). This
//   covers the gap between two layers, and spends nothing where gaps are longer;
// - a share of the time worked: kShare nanoseconds for each nanosecond of work, accumulated up to kSavings;
// - kShortest during kSkipped regions after the clock jumped, which means that another program wanted the
// core
//   and the scheduler suspended this thread. Sleeping is better for both then, because the scheduler prefers
//   a thread that has just woken to one that kept running.
class SpinBudget {
 public:
  static constexpr std::int64_t kShortest = 15'000;
  static constexpr std::int64_t kLongest = 1'000'000;
  static constexpr std::int64_t kShare = 3;
  static constexpr std::int64_t kSavings = 4 * kLongest;
  // A jump between two readings of the clock that should be a microsecond apart. A timer interrupt in a
  // virtual machine takes up to 150'000.
  static constexpr std::int64_t kJump = 250'000;
  static constexpr std::int64_t kSkipped = 32;  // regions for which a jump is remembered

  std::int64_t budget() const {
    std::int64_t most = expected_ * 2 < kLongest ? expected_ * 2 : kLongest;
    if (most < kShortest || skip_ > 0) most = kShortest;
    return most < savings_ ? most : savings_;
  }
  void spun(std::int64_t ns) { savings_ = ns < savings_ ? savings_ - ns : 0; }
  void jumped() { skip_ = kSkipped; }
  // Records that a region began `gap` nanoseconds after the end of the last one.
  void began(std::int64_t gap) {
    if (skip_ > 0) --skip_;
    expected_ -= expected_ / 32;
    if (gap <= kLongest && gap > expected_) expected_ = gap;
  }
  void worked(std::int64_t ns) {
    const std::int64_t earned = ns < kSavings / kShare ? ns * kShare : kSavings;
    savings_ = savings_ + earned < kSavings ? savings_ + earned : kSavings;
  }

 private:
  std::int64_t expected_ = 0;
  std::int64_t savings_ = kSavings;
  std::int64_t skip_ = 0;
};

}  // namespace moechat
