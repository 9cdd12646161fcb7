// Anonymous memory in huge pages, if the system provides them, for weights and large buffers that are read
// from end to end. With 4 KiB pages such a read needs a new address translation every 64 cache lines.
#pragma once

#include <cstddef>

namespace moechat {

constexpr std::size_t kHugePageBytes = std::size_t{1} << 21;

// One zero-initialised mapping; the first write to each page commits it. It begins at a multiple of 4096, or
// of kHugePageBytes if it is at least that long. Unlike a Slab, it also exists in a child process after
// fork().
class HugeMemory {
 public:
  HugeMemory() = default;
  // Throws std::invalid_argument for more than 2^46 bytes; if the system refuses, a std::bad_alloc whose
  // what() gives the number of bytes.
  explicit HugeMemory(std::size_t bytes);
  ~HugeMemory();
  HugeMemory(HugeMemory&& other) noexcept;
  HugeMemory& operator=(HugeMemory&& other) noexcept;
  HugeMemory(const HugeMemory&) = delete;
  HugeMemory& operator=(const HugeMemory&) = delete;

  unsigned char* data() const { return data_; }  // null if bytes() is 0
  std::size_t bytes() const { return bytes_; }

 private:
  unsigned char* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t mapped_ = 0;
};

}  // namespace moechat
