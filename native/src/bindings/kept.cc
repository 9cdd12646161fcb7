#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "bindings/packing.h"
#include "kernels/layout/gguf_blocks.h"
#include "kernels/layout/grids.h"
#include "kernels/layout/half.h"
#include "kernels/layout/kept_encodings.h"
#include "kernels/threads/thread_pool.h"

namespace moechat {

Encoding kept_encoding_of(const std::string& name) {
  for (int i = 0; i < kKeptEncodings; ++i) {
    const auto encoding = static_cast<Encoding>(static_cast<int>(Encoding::kQ4_0) + i);
    if (name == encoding_name(encoding)) return encoding;
  }
  refuse("encoding \"" + name + "\" is unknown");
}

FileMatrix file_matrix(const char* name, const py::array& rows, Encoding encoding, std::int64_t count,
                       std::int64_t columns) {
  const std::int64_t bytes = file_row_bytes(encoding, columns);
  if (!py::isinstance<py::array_t<std::uint8_t>>(rows) || rows.ndim() != 2 || rows.shape(0) != count ||
      rows.shape(1) != bytes || rows.strides(1) != 1) {
    refuse(std::string(name) + " must be uint8 [" + std::to_string(count) + ", " + std::to_string(bytes) +
           "] with rows that are not strided");
  }
  return {static_cast<const unsigned char*>(rows.data()), rows.strides(0)};
}

namespace {

BlockLayout kept_layout_py(std::int64_t hidden_size, std::int64_t intermediate_size,
                           const std::string& gate_up, const std::string& down, bool has_bias,
                           std::int64_t record_bytes, bool gated) {
  return make_kept_layout(hidden_size, intermediate_size, kept_encoding_of(gate_up), kept_encoding_of(down),
                          has_bias, record_bytes, gated);
}

void pack_kept_py(const BlockLayout& layout, const py::array& gate, const std::optional<py::array>& up,
                  const py::array& down, const BiasArrays& biases, py::array out,
                  std::optional<int> threads) {
  if (!layout.kept) refuse("this layout does not keep the values of files");
  require_up(layout, up);
  const auto bias = checked_biases(layout, biases);
  const std::int64_t neurons = layout.intermediate_size;
  const std::int64_t hidden = layout.hidden_size;
  const FileExpert source{file_matrix("gate", gate, layout.encoding, neurons, hidden),
                          up ? file_matrix("up", *up, layout.encoding, neurons, hidden) : FileMatrix{},
                          file_matrix("down", down, layout.down_encoding, hidden, neurons),
                          bias ? &*bias : nullptr};
  auto* records = checked_writable<std::uint8_t>("out", out, {layout.blocks, layout.record_bytes});
  const int limit = checked_threads(threads);
  const ReleaseGil released;
  pack_kept(layout, source, records, limit);
}

// Decodes rows of a file into float32 or float16 [rows, columns]; groups with a scale that is not finite
// become NaN. Returns the largest magnitude, NaN if there is one.
template <class T, class Store>
float decode_rows(Encoding encoding, const FileMatrix& matrix, std::int64_t rows, std::int64_t columns,
                  T* out, const Store& to_element) {
  const std::int64_t groups = (columns + kGroupColumns - 1) / kGroupColumns;
  std::atomic<float> most{0.0f};
  ThreadPool::Session session;
  session.parallel_for(kMaxThreads, rows, 16, [&](std::int64_t begin, std::int64_t end) {
    float largest = 0.0f;
    for (std::int64_t row = begin; row < end; ++row) {
      for (std::int64_t group = 0; group < groups; ++group) {
        FileGroup read;
        float values[kGroupColumns];
        if (read_file_group(encoding, matrix.rows + row * matrix.row_stride, columns, group, &read)) {
          file_group_values(encoding, read, values);
        } else {
          std::fill_n(values, kGroupColumns, std::numeric_limits<float>::quiet_NaN());
        }
        const std::int64_t first = group * kGroupColumns;
        const std::int64_t count = std::min<std::int64_t>(kGroupColumns, columns - first);
        T* to = out + row * columns + first;
        for (std::int64_t c = 0; c < count; ++c) {
          to[c] = to_element(values[c]);
          const float magnitude = std::fabs(values[c]);
          if (!(magnitude <= largest) && !std::isnan(largest)) largest = magnitude;
        }
      }
    }
    float before = most.load();
    while (!std::isnan(before) && !(largest <= before) && !most.compare_exchange_weak(before, largest)) {
    }
  });
  return most.load();
}

float decode_file_rows_py(const std::string& name, const py::array& rows, py::array out) {
  const Encoding encoding = kept_encoding_of(name);
  if (out.ndim() != 2) refuse("out must have two dimensions");
  const std::int64_t count = out.shape(0);
  const std::int64_t columns = out.shape(1);
  if (columns % kept_form(encoding).file_columns != 0) {
    refuse("out has " + std::to_string(columns) + " columns, which are no whole blocks");
  }
  const FileMatrix matrix = file_matrix("rows", rows, encoding, count, columns);
  const bool in_halves = py::isinstance<py::array_t<std::uint16_t>>(out);
  auto* const halves = in_halves ? checked_writable<std::uint16_t>("out", out, {count, columns}) : nullptr;
  auto* const floats = in_halves ? nullptr : checked_writable<float>("out", out, {count, columns});
  const ReleaseGil released;
  if (in_halves) return decode_rows(encoding, matrix, count, columns, halves, half::to_fp16);
  return decode_rows(encoding, matrix, count, columns, floats, [](float value) { return value; });
}

void check_file_rows_py(const std::string& name, const py::array& rows) {
  const Encoding encoding = kept_encoding_of(name);
  const KeptForm form = kept_form(encoding);
  if (rows.ndim() != 2 || rows.shape(1) % form.file_bytes != 0) refuse("rows are no whole blocks");
  const std::int64_t columns = rows.shape(1) / form.file_bytes * form.file_columns;
  const std::int64_t count = rows.shape(0);
  const FileMatrix matrix = file_matrix("rows", rows, encoding, count, columns);
  const ReleaseGil released;
  std::atomic<bool> fine{true};
  {
    ThreadPool::Session session;
    session.parallel_for(kMaxThreads, count, 16, [&](std::int64_t begin, std::int64_t end) {
      if (!scales_are_finite(encoding, matrix.rows + begin * matrix.row_stride, matrix.row_stride,
                             end - begin, columns)) {
        fine.store(false, std::memory_order_relaxed);
      }
    });
  }
  if (!fine.load()) refuse_scale("rows", encoding, matrix, count, columns);
}

py::dict kept_encodings_py() {
  py::dict encodings;
  for (int i = 0; i < kKeptEncodings; ++i) {
    const auto encoding = static_cast<Encoding>(static_cast<int>(Encoding::kQ4_0) + i);
    const KeptForm form = kept_form(encoding);
    encodings[encoding_name(encoding)] = py::make_tuple(form.code_bits, form.file_columns, form.file_bytes);
  }
  return encodings;
}

const char* table_name(CodeTable table) {
  constexpr const char* kNames[] = {"none", "iq4", "e2m1", "e4m3", "grid"};
  static_assert(sizeof kNames / sizeof *kNames == static_cast<int>(CodeTable::kGrid) + 1, "a name each");
  return kNames[static_cast<int>(table)];
}

const char* words_name(ScaleWords words) {
  constexpr const char* kNames[] = {"halves",  "mins",   "exponents", "signed2", "signed4", "factors",
                                    "nibbles", "floats", "e4m3",      "wholes",  "odd"};
  static_assert(sizeof kNames / sizeof *kNames == static_cast<int>(ScaleWords::kOdd) + 1, "a name each");
  return kNames[static_cast<int>(words)];
}

py::dict kept_form_py(const std::string& encoding) {
  const KeptForm form = kept_form(kept_encoding_of(encoding));
  std::vector<int> values;
  const bool lists = form.table == CodeTable::kIq4 || form.table == CodeTable::kE2m1;
  for (int code = 0; lists && code < 16; ++code) {
    values.push_back(kept_value(form.table, code) - form.zero);
  }
  py::dict found;
  found["code_bits"] = form.code_bits;
  found["steps"] = form.steps();
  found["table"] = table_name(form.table);
  found["values"] = values;
  found["subs"] = form.subs;
  found["words"] = words_name(form.words);
  found["unit"] = form.words == ScaleWords::kOdd ? odd_scales(kept_encoding_of(encoding)).unit : 1.0f;
  found["zero"] = form.zero;
  found["super_halves"] = form.super_halves;
  found["super_groups"] = form.super_groups;
  return found;
}

py::array_t<std::uint32_t> kept_grid_py(const std::string& name) {
  const Encoding encoding = kept_encoding_of(name);
  if (kept_form(encoding).table != CodeTable::kGrid) refuse("encoding \"" + name + "\" has no grid");
  const Grid grid = grid_of(encoding);
  return py::array_t<std::uint32_t>({grid.numbers, grid.dwords()}, grid.codes);
}

}  // namespace

void bind_kept(py::module_& m) {
  m.def("kept_layout", &kept_layout_py, py::arg("hidden_size"), py::arg("intermediate_size"),
        py::arg("gate_up"), py::arg("down"), py::arg("has_bias") = false, py::arg("record_bytes") = 0,
        py::arg("gated") = true);
  m.def("decode_file_rows", &decode_file_rows_py, py::arg("encoding"), py::arg("rows"), py::arg("out"));
  m.def("check_file_rows", &check_file_rows_py, py::arg("encoding"), py::arg("rows"));
  m.def("kept_encodings", &kept_encodings_py);
  m.def("kept_form", &kept_form_py, py::arg("encoding"));
  m.def("kept_grid", &kept_grid_py, py::arg("encoding"));
  m.def("pack_kept", &pack_kept_py, py::arg("layout"), py::arg("gate"), py::arg("up"), py::arg("down"),
        py::arg("biases"), py::arg("out"), py::arg("threads") = py::none());
}

}  // namespace moechat
