// Python bindings of dense products over 16-bit weights.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "kernels/dense/rows16.h"

namespace moechat {
namespace {

void rows16_forward_py(const py::array& weights, bool is_fp16, const py::array& x,
                       const std::optional<py::array>& bias, py::array out) {
  if (weights.ndim() != 2 || x.ndim() != 2) {
    refuse("weights and x have " + std::to_string(weights.ndim()) + " and " + std::to_string(x.ndim()) +
           " dimensions; they must be [rows, cols] and [tokens, cols]");
  }
  Rows16Call call{};
  call.rows = weights.shape(0);
  call.cols = weights.shape(1);
  call.tokens = x.shape(0);
  call.fp16 = is_fp16;
  call.weights = checked<std::uint16_t>("weights", weights, {call.rows, call.cols});
  call.x = checked<float>("x", x, {call.tokens, call.cols});
  call.bias = bias ? checked<float>("bias", *bias, {call.rows}) : nullptr;
  call.out = checked_writable<float>("out", out, {call.tokens, call.rows});
  refuse_overlap("x", x, out);
  refuse_overlap("weights", weights, out);
  if (bias) refuse_overlap("bias", *bias, out);
  const ReleaseGil released;
  rows16_forward(call);
}

}  // namespace

void bind_dense(py::module_& m) {
  m.attr("ROWS16_MAX_TOKENS") = kRows16MaxTokens;
  m.def("rows16_forward", &rows16_forward_py, py::arg("weights"), py::arg("is_fp16"), py::arg("x"),
        py::arg("bias"), py::arg("out"));
}

}  // namespace moechat
