// Python bindings of the native core: check arrays, drop the GIL, call.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/gate.h"
#include "bindings/gil.h"
#include "bindings/matrices.h"
#include "bindings/packing.h"
#include "kernels/experts/forward.h"
#include "kernels/experts/pack.h"
#include "kernels/isa/dispatch.h"
#include "kernels/layout/block_layout.h"
#include "kernels/layout/kept_encodings.h"
#include "kernels/layout/scale_words.h"
#include "kernels/threads/cpu_info.h"
#include "kernels/threads/stream_read.h"
#include "kernels/threads/thread_pool.h"
#include "memory/huge_memory.h"
#include "memory/read_ahead.h"

namespace moechat {
namespace {

// Importances [cols] and factors [blocks, width, width].
using FeedbackArrays = std::tuple<py::array, py::array>;

ColumnFeedback checked_feedback(const char* name, const FeedbackArrays& arrays, std::int64_t cols) {
  const auto& [importance, factors] = arrays;
  const std::string prefix(name);
  ColumnFeedback feedback;
  feedback.width = factors.ndim() == 3 ? factors.shape(2) : 0;
  if (feedback.width < kGroupColumns || feedback.width % kGroupColumns != 0) {
    refuse(prefix + " factors must be [blocks, width, width] with a width that is a multiple of " +
           std::to_string(kGroupColumns));
  }
  const std::int64_t blocks = (cols + feedback.width - 1) / feedback.width;
  feedback.importance = checked<float>((prefix + " importance").c_str(), importance, {cols});
  feedback.factors =
      checked<float>((prefix + " factors").c_str(), factors, {blocks, feedback.width, feedback.width});
  return feedback;
}

void pack_expert_py(const BlockLayout& layout, const py::array& gate, const std::optional<py::array>& up,
                    const py::array& down, const BiasArrays& biases, py::array out,
                    std::optional<int> threads, const std::string& solver,
                    const std::optional<std::pair<FeedbackArrays, FeedbackArrays>>& feedback) {
  const Solver chosen = solver_of(solver);
  if (feedback && (!layout.quantised() || chosen != Solver::kLeastSquares)) {
    refuse("feedback needs the least-squares solver and fewer than 16 bits");
  }
  require_up(layout, up);
  const auto bias = checked_biases(layout, biases);
  const std::int64_t rows = layout.intermediate_size;
  const ExpertSource source{matrix_source("gate", gate, rows, layout.hidden_size),
                            up ? matrix_source("up", *up, rows, layout.hidden_size) : MatrixSource{},
                            matrix_source("down", down, layout.hidden_size, layout.intermediate_size),
                            bias ? &*bias : nullptr};
  auto* records = checked_writable<std::uint8_t>("out", out, {layout.blocks, layout.record_bytes});
  const int limit = checked_threads(threads);
  ExpertFeedback measured;
  if (feedback) {
    measured.inputs = checked_feedback("input", feedback->first, layout.hidden_size);
    measured.neurons = checked_feedback("neuron", feedback->second, layout.intermediate_size);
  }
  const ReleaseGil released;
  if (feedback) {
    pack_expert_with_feedback(layout, source, measured, records, limit);
  } else {
    pack_expert(layout, source, records, limit, chosen);
  }
}

QuantisedMatrix quantised_matrix(const std::string& name, const py::array& codes, const py::array& scales,
                                 std::int64_t rows, std::int64_t cols) {
  const std::int64_t groups = (cols + kGroupColumns - 1) / kGroupColumns;
  return {checked<std::uint8_t>((name + "_q").c_str(), codes, {rows, cols}),
          checked<std::uint32_t>((name + "_s").c_str(), scales, {rows, groups})};
}

void pack_quantized_py(const BlockLayout& layout, const py::array& gate_q, const py::array& gate_s,
                       const std::optional<py::array>& up_q, const std::optional<py::array>& up_s,
                       const py::array& down_q, const py::array& down_s, const BiasArrays& biases,
                       py::array out, std::optional<int> threads) {
  const std::int64_t neurons = layout.intermediate_size;
  const std::int64_t hidden = layout.hidden_size;
  require_up(layout, up_q);
  require_up(layout, up_s);
  const auto bias = checked_biases(layout, biases);
  const QuantisedExpert source{
      quantised_matrix("gate", gate_q, gate_s, neurons, hidden),
      up_q ? quantised_matrix("up", *up_q, *up_s, neurons, hidden) : QuantisedMatrix{},
      quantised_matrix("down", down_q, down_s, hidden, neurons), bias ? &*bias : nullptr};
  auto* records = checked_writable<std::uint8_t>("out", out, {layout.blocks, layout.record_bytes});
  const int limit = checked_threads(threads);
  const ReleaseGil released;
  pack_quantised(layout, source, records, limit);
}

py::array_t<std::uint32_t> fit_scale_words_py(int bits, const py::array& scales, const py::array& zeros) {
  if (bits < 2 || bits > 4) refuse("bits is " + std::to_string(bits) + "; it must be 2, 3 or 4");
  if (scales.ndim() != 2) refuse("scales must have two dimensions");
  const std::vector<std::int64_t> shape = {scales.shape(0), 2};
  const auto* scale = checked<float>("scales", scales, shape);
  const auto* zero = checked<float>("zeros", zeros, shape);
  py::array_t<std::uint32_t> words(shape[0]);
  for (std::int64_t i = 0; i < shape[0]; ++i, scale += 2, zero += 2) {
    for (int half = 0; half < 2; ++half) {
      const bool fits = scale[half] >= 0.0f && scale[half] <= kMostScale;  // false for NaN
      if (!fits || !std::isfinite(zero[half])) {
        refuse("scale or zero " + std::to_string(i) + " is out of range");
      }
    }
    words.mutable_data()[i] = fit_scale_word({{scale[0], scale[1]}, {zero[0], zero[1]}}, bits);
  }
  return words;
}

py::tuple read_scale_words_py(const py::array& words) {
  if (words.ndim() != 1) refuse("words must have one dimension");
  const auto* from = checked<std::uint32_t>("words", words, shape_of(words));
  const std::int64_t count = words.shape(0);
  py::array_t<float> steps(count);
  py::array_t<std::int32_t> factors({count, std::int64_t{2}});
  py::array_t<std::int32_t> offsets({count, std::int64_t{2}});
  for (std::int64_t i = 0; i < count; ++i) {
    const ScaleWord word = read_scale_word(from[i]);
    steps.mutable_data()[i] = word.step;
    for (int half = 0; half < 2; ++half) {
      factors.mutable_data()[2 * i + half] = word.factor[half];
      offsets.mutable_data()[2 * i + half] = word.offset[half];
    }
  }
  return py::make_tuple(steps, factors, offsets);
}

// An array for up, or None if the layout is not gated.
py::object or_none(const BlockLayout& layout, const py::array& of_up) {
  return layout.gated ? py::object(of_up) : py::none();
}

py::tuple unpack_expert_py(const BlockLayout& layout, const py::array& records) {
  const auto* from = checked<std::uint8_t>("records", records, {layout.blocks, layout.record_bytes});
  py::array_t<float> gate({layout.intermediate_size, layout.hidden_size});
  const std::int64_t ups = layout.gated ? layout.intermediate_size : 0;
  py::array_t<float> up({ups, layout.hidden_size});
  py::array_t<float> down({layout.hidden_size, layout.intermediate_size});
  ExpertTarget target{gate.mutable_data(), up.mutable_data(), down.mutable_data(), nullptr, nullptr, nullptr};
  py::object biases = py::none();
  if (layout.has_bias) {
    py::array_t<float> gate_bias(layout.intermediate_size);
    py::array_t<float> up_bias(ups);
    py::array_t<float> down_bias(layout.hidden_size);
    target.gate_bias = gate_bias.mutable_data();
    target.up_bias = up_bias.mutable_data();
    target.down_bias = down_bias.mutable_data();
    biases = py::make_tuple(gate_bias, or_none(layout, up_bias), down_bias);
  }
  {
    const ReleaseGil released;
    unpack_expert(layout, from, target);
  }
  return py::make_tuple(gate, or_none(layout, up), down, biases);
}

// Copies of the indices from which kernels compute addresses, so that they stay as checked: the caller's
// arrays may share memory with out, or change in another thread while the GIL is released. Reused between
// calls of a thread, so that decoding does not allocate.
struct IndexCopies {
  std::vector<std::uint64_t> block_ptr;
  std::vector<std::int32_t> block_index, block_row, row_start, row_token;
};

template <class T>
const T* copied(const T* from, std::int64_t count, std::vector<T>* to) {
  to->assign(from, from + count);
  return to->data();
}

void moe_forward_py(const BlockLayout& layout, const GateSpec& gate, const py::array& x,
                    const py::array& block_ptr, const py::array& block_index, const py::array& block_row,
                    const py::array& row_start, const py::array& row_token, const py::array& row_weight,
                    py::array out, int activation_bits) {
  ForwardCall call{};
  call.layout = &layout;
  call.gate = gate;
  call.activation_bits = activation_bits;
  if (x.ndim() != 2) refuse("x has " + std::to_string(x.ndim()) + " dimensions; it must be [tokens, hidden]");
  if (block_ptr.ndim() != 1 || row_start.ndim() != 1 || row_token.ndim() != 1) {
    refuse("block_ptr, row_start and row_token must have one dimension");
  }
  call.tokens = x.shape(0);
  call.entries = block_ptr.shape(0);
  call.rows = row_start.shape(0) - 1;
  call.nonzeros = row_token.shape(0);
  if (call.rows < 0) refuse("row_start is empty; it must be [rows + 1]");
  call.x = checked<float>("x", x, {call.tokens, layout.hidden_size});
  call.block_ptr = checked<std::uint64_t>("block_ptr", block_ptr, {call.entries});
  call.block_index = checked<std::int32_t>("block_index", block_index, {call.entries});
  call.block_row = checked<std::int32_t>("block_row", block_row, {call.entries});
  call.row_start = checked<std::int32_t>("row_start", row_start, {call.rows + 1});
  call.row_token = checked<std::int32_t>("row_token", row_token, {call.nonzeros});
  call.row_weight = checked<float>("row_weight", row_weight, {call.nonzeros});
  call.out = checked_writable<float>("out", out, {call.tokens, layout.hidden_size});
  const std::int64_t values = call.tokens * layout.hidden_size;
  if (values > 0 && call.x < call.out + values && call.out < call.x + values) refuse("out overlaps x");
  static thread_local IndexCopies copies;
  call.block_ptr = copied(call.block_ptr, call.entries, &copies.block_ptr);
  call.block_index = copied(call.block_index, call.entries, &copies.block_index);
  call.block_row = copied(call.block_row, call.entries, &copies.block_row);
  call.row_start = copied(call.row_start, call.rows + 1, &copies.row_start);
  call.row_token = copied(call.row_token, call.nonzeros, &copies.row_token);
  const ReleaseGil released;
  moe_forward(call);
}

py::array_t<float> apply_gate_py(const GateSpec& spec, const py::array& gate, const py::array& up) {
  if (gate.ndim() != 1) refuse("gate must have one dimension");
  const std::int64_t count = gate.shape(0);
  const float* g = checked<float>("gate", gate, {count});
  const float* u = checked<float>("up", up, {count});
  py::array_t<float> result(count);
  float* to = result.mutable_data();
  const KernelTable& kernel = kernels();
  const std::int64_t whole = count / 16 * 16;
  kernel.activate(spec, g, u, to, whole);
  if (whole < count) {
    float lanes[3][16] = {};
    for (std::int64_t i = whole; i < count; ++i) {
      lanes[0][i - whole] = g[i];
      lanes[1][i - whole] = u[i];
    }
    kernel.activate(spec, lanes[0], lanes[1], lanes[2], 16);
    for (std::int64_t i = whole; i < count; ++i) to[i] = lanes[2][i - whole];
  }
  return result;
}

py::array_t<std::uint8_t> huge_empty_py(std::int64_t nbytes) {
  if (nbytes < 0) refuse("nbytes is " + std::to_string(nbytes) + "; it must be at least 0");
  auto memory = std::make_unique<HugeMemory>(static_cast<std::size_t>(nbytes));
  if (memory->data() == nullptr) return py::array_t<std::uint8_t>(py::ssize_t{0});
  const py::capsule owner(memory.get(), [](void* held) { delete static_cast<HugeMemory*>(held); });
  return py::array_t<std::uint8_t>(py::ssize_t{nbytes}, memory.release()->data(), owner);
}

void prefer_huge_pages_py(const py::array& data) {
  prefer_huge_pages(checked<std::uint8_t>("data", data, shape_of(data)),
                    static_cast<std::size_t>(data.nbytes()));
}

void read_ahead_py(const py::array& data) {
  const auto* from = checked<std::uint8_t>("data", data, shape_of(data));
  const auto bytes = static_cast<std::size_t>(data.nbytes());
  const ReleaseGil released;
  read_ahead(from, bytes);
}

double stream_read_rate_py(const py::array& data, int threads, double seconds) {
  const auto* from = checked<std::uint8_t>("data", data, shape_of(data));
  const std::int64_t bytes = data.nbytes();
  const ReleaseGil released;
  return stream_read_rate(from, bytes, threads, seconds, [] {
    check_signals();
    return true;
  });
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native core of moechat: block layout, packing and CPU expert kernels.";
  m.attr("BLOCK_FORMAT_VERSION") = kBlockFormatVersion;

  py::class_<GateSpec>(m, "Gate").def(
      py::init(&gate_spec), py::arg("activation") = "silu", py::kw_only(), py::arg("alpha") = 1.0f,
      py::arg("limit") = std::numeric_limits<float>::infinity(), py::arg("offset") = 0.0f,
      py::arg("clamps_result") = false, py::arg("gated") = true);
  py::class_<BlockLayout>(m, "BlockLayout")
      .def(py::init(&make_block_layout), py::arg("hidden_size"), py::arg("intermediate_size"),
           py::arg("bits"), py::arg("fp16") = false, py::arg("has_bias") = false, py::arg("gated") = true)
      .def_readonly("hidden_size", &BlockLayout::hidden_size)
      .def_readonly("intermediate_size", &BlockLayout::intermediate_size)
      .def_readonly("bits", &BlockLayout::bits)
      .def_readonly("kept", &BlockLayout::kept)
      .def_property_readonly("encoding",
                             [](const BlockLayout& layout) { return encoding_name(layout.encoding); })
      .def_property_readonly("down_encoding",
                             [](const BlockLayout& layout) { return encoding_name(layout.down_encoding); })
      .def_readonly("fp16", &BlockLayout::fp16)
      .def_readonly("has_bias", &BlockLayout::has_bias)
      .def_readonly("gated", &BlockLayout::gated)
      .def_readonly("hidden_padded", &BlockLayout::hidden_padded)
      .def_readonly("blocks", &BlockLayout::blocks)
      .def_readonly("record_bytes", &BlockLayout::record_bytes)
      .def_readonly("payload_bytes", &BlockLayout::payload_bytes)
      .def_readonly("gate_q", &BlockLayout::gate_q)
      .def_readonly("up_q", &BlockLayout::up_q)
      .def_readonly("down_q", &BlockLayout::down_q)
      .def_readonly("gate_sz", &BlockLayout::gate_sz)
      .def_readonly("up_sz", &BlockLayout::up_sz)
      .def_readonly("down_sz", &BlockLayout::down_sz)
      .def_readonly("gate_super", &BlockLayout::gate_super)
      .def_readonly("up_super", &BlockLayout::up_super)
      .def_readonly("down_super", &BlockLayout::down_super)
      .def_readonly("gate_bias", &BlockLayout::gate_bias)
      .def_readonly("up_bias", &BlockLayout::up_bias)
      .def_readonly("down_bias", &BlockLayout::down_bias)
      .def_readonly("down_bias_rows", &BlockLayout::down_bias_rows)
      .def("__repr__", [](const BlockLayout& layout) {
        return "BlockLayout(hidden_size=" + std::to_string(layout.hidden_size) +
               ", intermediate_size=" + std::to_string(layout.intermediate_size) + ", " +
               (layout.kept
                    ? std::string("encodings=") + encoding_name(layout.encoding) + "/" +
                          encoding_name(layout.down_encoding)
                    : "bits=" + std::to_string(layout.bits) + ", fp16=" + (layout.fp16 ? "True" : "False")) +
               ", has_bias=" + (layout.has_bias ? "True" : "False") + (layout.gated ? "" : ", gated=False") +
               ")";
      });

  m.def("cpu_features", [] {
    py::dict features;
    for (const auto& [name, present] : cpu_features()) features[name] = present;
    return features;
  });
  m.def("available_isas", &available_isas);
  m.def("built_isas", &built_isas);
  m.def("active_isa", [] { return std::string(kernels().name); });
  m.def("available_cores", &available_cores);
  m.def("set_num_threads", &ThreadPool::set_num_threads, py::arg("n"));
  m.def("set_weight_streams", &set_weight_streams, py::arg("n"));
  m.def("num_threads", &ThreadPool::num_threads);
  m.def("pack_expert", &pack_expert_py, py::arg("layout"), py::arg("gate"), py::arg("up"), py::arg("down"),
        py::arg("biases"), py::arg("out"), py::arg("threads") = py::none(),
        py::arg("solver") = "least-squares", py::arg("feedback") = py::none());
  m.def("pack_quantized", &pack_quantized_py, py::arg("layout"), py::arg("gate_q"), py::arg("gate_s"),
        py::arg("up_q"), py::arg("up_s"), py::arg("down_q"), py::arg("down_s"), py::arg("biases"),
        py::arg("out"), py::arg("threads") = py::none());
  m.def("max_quantisable", &max_quantisable, py::arg("bits"));
  m.def("fit_scale_words", &fit_scale_words_py, py::arg("bits"), py::arg("scales"), py::arg("zeros"));
  m.def("read_scale_words", &read_scale_words_py, py::arg("words"));
  m.def("unpack_expert", &unpack_expert_py, py::arg("layout"), py::arg("records"));
  m.def("moe_forward", &moe_forward_py, py::arg("layout"), py::arg("gate"), py::arg("x"),
        py::arg("block_ptr"), py::arg("block_index"), py::arg("block_row"), py::arg("row_start"),
        py::arg("row_token"), py::arg("row_weight"), py::arg("out"),
        py::arg("activation_bits") = kDefaultActivationBits);
  m.def("apply_gate", &apply_gate_py, py::arg("spec"), py::arg("gate"), py::arg("up"));
  m.def("huge_empty", &huge_empty_py, py::arg("nbytes"));
  m.def("prefer_huge_pages", &prefer_huge_pages_py, py::arg("data"));
  m.def("read_ahead", &read_ahead_py, py::arg("data"));
  m.def("prewake", &ThreadPool::prewake);
  m.def("stream_read_rate", &stream_read_rate_py, py::arg("data"), py::arg("threads"), py::arg("seconds"));
  bind_kept(m);
  bind_linear(m);
  bind_link(m);
  bind_cuda(m);
  bind_cache(m);
  bind_offload(m);
  bind_device_layers(m);
  bind_routing(m);
  bind_simulate(m);
  bind_draws(m);
  bind_layer_plan(m);
  bind_checks(m);
  bind_dense(m);
  bind_decode(m);
  bind_layer_step(m);
  bind_token_pass(m);
}

}  // namespace moechat
