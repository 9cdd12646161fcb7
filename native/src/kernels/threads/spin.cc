#include "kernels/threads/spin.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace moechat {
namespace {

constexpr int kPauses = 4;  // between two looks at the word; 100 to 200 ns
constexpr int kLooks = 8;

#if defined(__x86_64__) && defined(__GNUC__)
#define MOECHAT_UMWAIT 1
// The processor dozes on the cache line of the word until it is written, or for this many ticks: 5 to 10 us,
// so that its own waking and what the system allows do not matter.
constexpr std::uint64_t kDoze = 20'000;

__attribute__((target("waitpkg"))) void doze(const std::atomic<std::uint64_t>* word, std::uint64_t seen) {
  _umonitor(const_cast<std::atomic<std::uint64_t>*>(word));
  if (word->load(std::memory_order_relaxed) == seen) _umwait(1, __rdtsc() + kDoze);  // 1: the lighter state
}

bool has_waitpkg() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & (1u << 5)) != 0;
}
#endif

}  // namespace

void spin_briefly(const std::atomic<std::uint64_t>* word, std::uint64_t seen) {
#if defined(MOECHAT_UMWAIT)
  static const bool can_doze = has_waitpkg();
  if (can_doze) {
    doze(word, seen);
    return;
  }
#endif
  for (int look = 0; look < kLooks && word->load(std::memory_order_relaxed) == seen; ++look) {
    for (int i = 0; i < kPauses; ++i) relax();
  }
}

}  // namespace moechat
