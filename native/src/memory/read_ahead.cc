#include "memory/read_ahead.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace moechat {
namespace {

std::uintptr_t page_start(const unsigned char* data) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  return reinterpret_cast<std::uintptr_t>(data) / page * page;
}

// Periods since the process began in which it has waited for pages of files.
std::uint64_t periods_with_faults() {
  // Fewer in a period are those of code that is used for the first time.
  constexpr long kFaults = 16;
  constexpr std::int64_t kPeriodNs = 50'000'000;
  static std::atomic<std::int64_t> looked{0};
  static std::atomic<long> faults{0};
  static std::atomic<std::uint64_t> periods{0};
  const std::int64_t now = std::chrono::duration_cast<std::chrono::nanoseconds>(
                               std::chrono::steady_clock::now().time_since_epoch())
                               .count();
  std::int64_t last = looked.load(std::memory_order_relaxed);
  if (now - last >= kPeriodNs && looked.compare_exchange_strong(last, now)) {
    rusage usage{};
    if (getrusage(RUSAGE_SELF, &usage) == 0) {
      const long before = faults.exchange(usage.ru_majflt);
      if (last != 0 && usage.ru_majflt - before >= kFaults) ++periods;
    }
  }
  return periods.load(std::memory_order_relaxed);
}

}  // namespace

void prefer_huge_pages(const unsigned char* data, std::size_t bytes) {
#if defined(MADV_HUGEPAGE)
  const std::uintptr_t first = page_start(data);
  madvise(reinterpret_cast<void*>(first), reinterpret_cast<std::uintptr_t>(data) + bytes - first,
          MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

void read_ahead(const unsigned char* data, std::size_t bytes) {
  constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, which older headers lack
  // Short enough that signals are handled promptly between two pieces.
  constexpr std::uintptr_t kPiece = std::uintptr_t{8} << 20;
  // The system truncates requests above the limit of the device; every device accepts this size.
  constexpr std::uintptr_t kRequest = std::uintptr_t{128} << 10;
  const std::uintptr_t first = page_start(data);
  const std::uintptr_t end = reinterpret_cast<std::uintptr_t>(data) + bytes;
  std::uintptr_t at = first;
#if defined(__linux__)
  while (at < end && madvise(reinterpret_cast<void*>(at), std::min(kPiece, end - at), kPopulateRead) == 0)
    at += kPiece;
#endif
  for (; at < end; at += kRequest)
    madvise(reinterpret_cast<void*>(at), std::min(kRequest, end - at), MADV_WILLNEED);
}

void PartsInUse::begin() {
  if (used_.empty()) return;
  const std::uint64_t waits = periods_with_faults();
  if (waits_.load(std::memory_order_relaxed) == waits || waits_.exchange(waits) == waits) return;
  for (auto& used : used_) used.store(false, std::memory_order_relaxed);
}

}  // namespace moechat
