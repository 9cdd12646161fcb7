#include "memory/read_ahead.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

namespace moechat {
namespace {

std::uintptr_t page_start(const unsigned char* data) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  return reinterpret_cast<std::uintptr_t>(data) / page * page;
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

}  // namespace moechat
