// Launches a kernel that another library has built and loaded, such as one of Triton.
//
// Triton's own launch goes through its Python: it takes the host several times as long as the driver needs,
// for each of the two or three kernels of every expert layer of every decoded token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/driver.h"

namespace moechat::cuda {

class Kernel {
 public:
  // More than any kernel of moechat has.
  static constexpr std::size_t kMostParameters = 64;
  // The value of a parameter, by its kind.
  union Value {
    Pointer pointer;
    std::int32_t integer;
    float real;
  };
  struct Grid {
    unsigned x, y, z;
  };

  // function: CUfunction, in a module that stays loaded. threads: of a block. shared_bytes: dynamic shared
  // memory. kinds: of each parameter, 'p' (pointer), 'i' (int32) or 'f' (float). Throws
  // std::invalid_argument if the function takes other parameters, or if this driver cannot tell (it can from
  // CUDA 12.4 on).
  Kernel(void* function, unsigned threads, unsigned shared_bytes, std::string kinds);

  const std::string& kinds() const { return kinds_; }
  // Launches it; REQUIRES: the function's context is current, values has one element for each kind. Throws
  // Error.
  void launch(Stream stream, Grid grid, const Value* values) const;

 private:
  void* function_;
  unsigned threads_;
  unsigned shared_bytes_;
  std::string kinds_;
};

}  // namespace moechat::cuda
