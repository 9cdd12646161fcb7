// Matrices of weights as arguments.
#pragma once

#include <string>

#include "bindings/arrays.h"
#include "kernels/isa/kernel_api.h"

namespace moechat {

inline bool is_float16(const py::array& array) {
  return array.dtype().kind() == 'f' && array.itemsize() == 2 && array.dtype().byteorder() != '>';
}

// Throws ValueError.
inline Solver solver_of(const std::string& name) {
  if (name == "least-squares") return Solver::kLeastSquares;
  if (name == "half-quadratic") return Solver::kHalfQuadratic;
  refuse("solver is \"" + name + "\"; it must be \"least-squares\" or \"half-quadratic\"");
}

// Throws ValueError.
inline MatrixSource matrix_source(const char* name, const py::array& array, std::int64_t rows,
                                  std::int64_t cols) {
  MatrixSource source{};
  if (py::isinstance<py::array_t<float>>(array)) {
    source.type = SourceType::kFloat32;
  } else if (is_float16(array)) {
    source.type = SourceType::kFloat16;
  } else if (py::isinstance<py::array_t<std::uint16_t>>(array)) {
    source.type = SourceType::kBfloat16;
  } else {
    refuse(std::string(name) + " has dtype " + py::str(array.dtype()).cast<std::string>() +
           "; it must be float32, float16 or uint16 (bfloat16 patterns)");
  }
  require_shape(name, array, {rows, cols});
  source.data = static_cast<const unsigned char*>(array.data());
  source.rows = rows;
  source.cols = cols;
  source.row_stride = array.strides(0);
  source.col_stride = array.strides(1);
  return source;
}

}  // namespace moechat
