// Python bindings of quantised dense matrices: projections and output heads.
#include "kernels/dense/linear.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <new>
#include <optional>
#include <string>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "bindings/matrices.h"
#include "bindings/packing.h"
#include "kernels/threads/thread_pool.h"

namespace moechat {
namespace {

void require_kept(const LinearLayout& layout, bool kept) {
  if (layout.kept() == kept) return;
  refuse(kept ? "this layout does not keep the values of files"
              : "this layout keeps the values of files; pack_kept_linear fills it");
}

py::array_t<std::uint8_t> pack_linear_py(const LinearLayout& layout, const py::array& matrix, int threads,
                                         const std::string& solver) {
  require_kept(layout, false);
  const Solver chosen = solver_of(solver);
  const MatrixSource source = matrix_source("matrix", matrix, layout.rows, layout.cols);
  if (threads < 0 || threads > kMaxThreads) {
    refuse("threads is " + std::to_string(threads) + "; it must be between 0 and " +
           std::to_string(kMaxThreads));
  }
  // numpy aligns to 16 bytes only; vectors that span two cache lines load at half the speed.
  constexpr std::align_val_t kLine{64};
  auto* to = static_cast<std::uint8_t*>(::operator new(static_cast<std::size_t>(layout.nbytes), kLine));
  const py::capsule owner(to, [](void* memory) { ::operator delete(memory, kLine); });
  py::array_t<std::uint8_t> data({layout.nbytes}, {std::int64_t{1}}, to, owner);
  const ReleaseGil released;
  pack_linear(layout, source, to, threads, chosen);
  return data;
}

void pack_kept_linear_py(const LinearLayout& layout, const py::array& rows, py::array out) {
  require_kept(layout, true);
  const FileMatrix source = file_matrix("rows", rows, layout.encoding, layout.rows, layout.cols);
  auto* to = checked_writable<std::uint8_t>("out", out, {layout.nbytes});
  refuse_overlap("rows", rows, out);
  const ReleaseGil released;
  pack_kept_linear(layout, source, to, 0);
}

py::array_t<float> unpack_linear_py(const LinearLayout& layout, const py::array& data) {
  const auto* from = checked<std::uint8_t>("data", data, {layout.nbytes});
  py::array_t<float> matrix({layout.rows, layout.cols});
  float* to = matrix.mutable_data();
  const ReleaseGil released;
  unpack_linear(layout, from, to);
  return matrix;
}

void linear_forward_py(const LinearLayout& layout, const py::array& data, const py::array& x,
                       const std::optional<py::array>& bias, py::array out, int activation_bits) {
  if (x.ndim() != 2) refuse("x has " + std::to_string(x.ndim()) + " dimensions; it must be [tokens, cols]");
  LinearCall call{};
  call.layout = &layout;
  call.tokens = x.shape(0);
  call.data = checked<std::uint8_t>("data", data, {layout.nbytes});
  call.x = checked<float>("x", x, {call.tokens, layout.cols});
  if (bias) call.bias = checked<float>("bias", *bias, {layout.rows});
  call.out = checked_writable<float>("out", out, {call.tokens, layout.rows});
  call.activation_bits = activation_bits;
  refuse_overlap("x", x, out);
  refuse_overlap("data", data, out);
  if (bias) refuse_overlap("bias", *bias, out);
  const ReleaseGil released;
  linear_forward(call);
}

}  // namespace

void bind_linear(py::module_& m) {
  py::class_<LinearLayout>(m, "LinearLayout")
      .def(py::init(&make_linear_layout), py::arg("rows"), py::arg("cols"), py::arg("bits"))
      .def(py::init([](std::int64_t rows, std::int64_t cols, const std::string& encoding) {
             return make_kept_linear_layout(rows, cols, kept_encoding_of(encoding));
           }),
           py::arg("rows"), py::arg("cols"), py::arg("encoding"))
      .def_readonly("rows", &LinearLayout::rows)
      .def_readonly("cols", &LinearLayout::cols)
      .def_readonly("bits", &LinearLayout::bits)
      .def_property_readonly("encoding",
                             [](const LinearLayout& layout) -> std::optional<std::string> {
                               if (!layout.kept()) return std::nullopt;
                               return encoding_name(layout.encoding);
                             })
      .def_readonly("sz", &LinearLayout::sz)
      .def_readonly("super", &LinearLayout::super)
      .def_readonly("nbytes", &LinearLayout::nbytes)
      .def(
          "first_rows",
          [](LinearLayout layout, std::int64_t rows) {
            if (rows < 16 || rows > layout.rows || rows % 16 != 0) {
              refuse(std::to_string(rows) + " of " + std::to_string(layout.rows) +
                     " rows are not a number of whole tiles");
            }
            layout.rows = rows;
            layout.tiles = rows / 16;
            return layout;
          },
          py::arg("rows"))
      .def("__repr__", [](const LinearLayout& layout) {
        return "LinearLayout(rows=" + std::to_string(layout.rows) + ", cols=" + std::to_string(layout.cols) +
               (layout.kept() ? std::string(", encoding=") + encoding_name(layout.encoding)
                              : ", bits=" + std::to_string(layout.bits)) +
               ")";
      });
  m.def("pack_linear", &pack_linear_py, py::arg("layout"), py::arg("matrix"), py::arg("threads") = 0,
        py::arg("solver") = "least-squares");
  m.def("pack_kept_linear", &pack_kept_linear_py, py::arg("layout"), py::arg("rows"), py::arg("out"));
  m.def("unpack_linear", &unpack_linear_py, py::arg("layout"), py::arg("data"));
  m.def("linear_forward", &linear_forward_py, py::arg("layout"), py::arg("data"), py::arg("x"),
        py::arg("bias"), py::arg("out"), py::arg("activation_bits") = kDefaultActivationBits);
}

}  // namespace moechat
