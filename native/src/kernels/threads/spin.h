// How a thread waits for some microseconds without leaving its core.
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

// Waits for up to about a microsecond, less if *word is no longer `seen`; see spin.cc.
void spin_briefly(const std::atomic<std::uint64_t>* word, std::uint64_t seen);

// How long a worker may spin for the next region before it sleeps.
//
// - As long as twice the longest of the recent gaps that spinning could have bridged, so that a gap as long
// as
//   between two layers is bridged and nothing is spent where gaps are longer than kLongest.
// - A share of the time: kShare nanoseconds for every one of work, with kSavings put by.
// - Next to nothing, for a time, on a core that others want: whoever spins there is put off it, and sees the
// clock
//   jump. Being asleep is then better for both: a thread that wakes up goes before those that have been
//   running.
class SpinBudget {
 public:
  static constexpr std::int64_t kShortest = 15'000;
  static constexpr std::int64_t kLongest = 1'000'000;
  static constexpr std::int64_t kShare = 3;
  static constexpr std::int64_t kSavings = 4 * kLongest;
  // Between two looks at the clock, a microsecond apart; a timer's interrupt takes up to 150'000 in a virtual
  // machine.
  static constexpr std::int64_t kJump = 250'000;
  static constexpr std::int64_t kSkipped = 32;  // regions before which the clock's jump is remembered

  std::int64_t budget() const {
    std::int64_t most = expected_ * 2 < kLongest ? expected_ * 2 : kLongest;
    if (most < kShortest || skip_ > 0) most = kShortest;
    return most < savings_ ? most : savings_;
  }
  void spun(std::int64_t ns) { savings_ = ns < savings_ ? savings_ - ns : 0; }
  void jumped() { skip_ = kSkipped; }
  // A region began `gap` after the last one had ended.
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
