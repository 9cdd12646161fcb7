#include "cuda/kernel.h"

#include <array>
#include <stdexcept>
#include <utility>

namespace moechat::cuda {
namespace {

std::size_t size_of(char kind) {
  if (kind == 'p') return sizeof(Pointer);
  if (kind == 'i') return sizeof(std::int32_t);
  if (kind == 'f') return sizeof(float);
  throw std::invalid_argument(std::string("a parameter cannot be of the kind '") + kind +
                              "'; there are p, i and f");
}

}  // namespace

Kernel::Kernel(void* function, unsigned threads, unsigned shared_bytes, std::string kinds)
    : function_(function), threads_(threads), shared_bytes_(shared_bytes), kinds_(std::move(kinds)) {
  if (kinds_.size() > kMostParameters) {
    throw std::invalid_argument(std::to_string(kinds_.size()) + " parameters; a kernel may have " +
                                std::to_string(kMostParameters));
  }
  const auto info = driver().parameter_info;
  if (info == nullptr || driver().launch_kernel == nullptr)
    throw std::invalid_argument("this driver does not tell a kernel's parameters");
  std::size_t offset = 0, size = 0;
  for (std::size_t at = 0; at < kinds_.size(); ++at) {
    if (info(function_, at, &offset, &size) != kSuccess || size != size_of(kinds_[at])) {
      throw std::invalid_argument("parameter " + std::to_string(at) + " of the kernel is not of the kind '" +
                                  kinds_[at] + "'");
    }
  }
  if (info(function_, kinds_.size(), &offset, &size) == kSuccess) {
    throw std::invalid_argument("the kernel has more than " + std::to_string(kinds_.size()) + " parameters");
  }
}

void Kernel::launch(Stream stream, Grid grid, const Value* values) const {
  std::array<void*, kMostParameters> places;
  for (std::size_t at = 0; at < kinds_.size(); ++at) {
    places[at] = const_cast<Value*>(values + at);  // the driver only reads them
  }
  check(driver().launch_kernel(function_, grid.x, grid.y, grid.z, threads_, 1, 1, shared_bytes_, stream,
                               places.data(), nullptr),
        "cuLaunchKernel");
}

}  // namespace moechat::cuda
