// Arguments of kernels, from Python.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "cuda/kernel.h"

namespace moechat {

// kind: of the parameter, as cuda::Kernel::kinds. Throws pybind11::cast_error.
inline cuda::Kernel::Value value_of(char kind, pybind11::handle given) {
  cuda::Kernel::Value value{};
  if (kind == 'p') {
    value.pointer = given.cast<std::uint64_t>();
  } else if (kind == 'i') {
    value.integer = given.cast<std::int32_t>();
  } else {
    value.real = given.cast<float>();
  }
  return value;
}

}  // namespace moechat
