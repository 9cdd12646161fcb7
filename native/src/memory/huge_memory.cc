#include "memory/huge_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace moechat {
namespace {

constexpr std::size_t kSmallPage = 4096;
constexpr std::size_t kMostBytes = std::size_t{1} << 46;  // half of the address space of a process

class Refused : public std::bad_alloc {
 public:
  explicit Refused(std::string text) : text_(std::make_shared<std::string>(std::move(text))) {}
  const char* what() const noexcept override { return text_->c_str(); }

 private:
  std::shared_ptr<const std::string> text_;  // an exception must not throw when it is copied
};

}  // namespace

HugeMemory::HugeMemory(std::size_t bytes) {
  if (bytes > kMostBytes) {
    throw std::invalid_argument("a request for " + std::to_string(bytes) +
                                " bytes of memory; the most is 2^46 bytes");
  }
  if (bytes == 0) return;
  const std::size_t length = (bytes + kSmallPage - 1) / kSmallPage * kSmallPage;
  const std::size_t room = length < kHugePageBytes ? 0 : kHugePageBytes - kSmallPage;
  void* const whole =
      mmap(nullptr, length + room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (whole == MAP_FAILED) {
    throw Refused("the system refused " + std::to_string(bytes) +
                  " bytes of memory: " + std::strerror(errno));
  }
  auto* const begin = static_cast<unsigned char*>(whole);
  std::size_t before = 0;
  if (room != 0) {
    before = (kHugePageBytes - reinterpret_cast<std::uintptr_t>(begin) % kHugePageBytes) % kHugePageBytes;
    if (before != 0) munmap(begin, before);
    if (before != room) munmap(begin + before + length, room - before);
  }
  data_ = begin + before;
  bytes_ = bytes;
  mapped_ = length;
#if defined(MADV_HUGEPAGE)
  if (room != 0) madvise(data_, mapped_, MADV_HUGEPAGE);  // a hint
#endif
}

HugeMemory::~HugeMemory() {
  if (data_ != nullptr) munmap(data_, mapped_);
}

HugeMemory::HugeMemory(HugeMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      mapped_(std::exchange(other.mapped_, 0)) {}

HugeMemory& HugeMemory::operator=(HugeMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(mapped_, other.mapped_);
  return *this;
}

}  // namespace moechat
