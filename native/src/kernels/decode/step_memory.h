// Scratch memory of the steps of a decoded token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/isa/decode_api.h"

namespace moechat {

constexpr std::int64_t kLine = 64;

inline std::int64_t element_bytes(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

// Scratch memory of the decoding thread. Every step allocates from its beginning.
class Arena {
 public:
  explicit Arena(std::int64_t bytes) {
    static thread_local std::vector<unsigned char> memory;
    const auto wanted = static_cast<std::size_t>(bytes + kLine);
    if (memory.size() < wanted) memory.resize(wanted);
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    next_ = memory.data() + (kLine - static_cast<std::int64_t>(address % kLine)) % kLine;
  }
  static std::int64_t bytes_of(std::int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

  template <class T = void>
  T* take(std::int64_t bytes) {
    unsigned char* found = next_;
    next_ += bytes_of(bytes);
    return reinterpret_cast<T*>(found);
  }

 private:
  unsigned char* next_;
};

}  // namespace moechat
