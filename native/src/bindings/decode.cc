// Python bindings of the parts of a decoding step. A call takes a microsecond or two, about as long as
// checking arrays would, so callers pass addresses of memory whose type, size and layout they have checked.
#include "kernels/decode/decode.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/decode_parts.h"
#include "bindings/gil.h"
#include "kernels/decode/sampling.h"

namespace moechat {
namespace {

RouterScoring router_scoring(const std::string& name) {
  if (name == "softmax") return RouterScoring::kSoftmax;
  if (name == "sigmoid") return RouterScoring::kSigmoid;
  if (name == "softmax-chosen") return RouterScoring::kSoftmaxChosen;
  refuse("scoring is '" + name + "'; it must be softmax, sigmoid or softmax-chosen");
}

void rotate_py(const std::string& type, Address x, std::int64_t token_stride, std::int64_t head_stride,
               Address out, std::int64_t tokens, std::int64_t heads, std::int64_t dim, Address cos,
               Address sin, std::int64_t angles, std::int64_t width) {
  if (width < 2 || width % 2 != 0 || width > dim || (angles != width && 2 * angles != width)) {
    refuse("a head of " + std::to_string(dim) + " elements cannot be rotated in its first " +
           std::to_string(width) + " by " + std::to_string(angles) + " angles");
  }
  RotateTask task{};
  task.type = element_type(type);
  task.x = at(x);
  task.token_stride = token_stride;
  task.head_stride = head_stride;
  task.out = at(out);
  task.tokens = tokens;
  task.heads = heads;
  task.dim = dim;
  task.cos = at(cos);
  task.sin = at(sin);
  task.angles = angles;
  task.width = width;
  const ReleaseGil released;
  rotate(task);
}

void check_rows(std::int64_t heads, std::int64_t tokens, std::int64_t dim) {
  require_positive("heads", heads);
  require_positive("tokens", tokens);
  require_positive("dim", dim);
}

void pack_rows_py(const std::string& type, Address plain, std::int64_t plain_head, std::int64_t plain_token,
                  std::int64_t heads, std::int64_t tokens, std::int64_t dim, Address packed,
                  std::int64_t packed_head) {
  check_rows(heads, tokens, dim);
  const PackTask task{element_type(type),       heads,      tokens, dim, at(plain), plain_head, plain_token,
                      at<std::uint8_t>(packed), packed_head};
  const ReleaseGil released;
  pack_rows(task);
}

void unpack_rows_py(const std::string& type, Address packed, std::int64_t packed_head, std::int64_t heads,
                    std::int64_t tokens, std::int64_t dim, Address plain) {
  check_rows(heads, tokens, dim);
  const PackTask task{element_type(type),       heads,      tokens, dim, at(plain), tokens * dim, dim,
                      at<std::uint8_t>(packed), packed_head};
  const ReleaseGil released;
  unpack_rows(task);
}

std::int64_t largest_logit_py(const py::array& logits) {
  const std::int64_t count = logits.size();
  const float* from = checked<float>("logits", logits, {count});
  const ReleaseGil released;
  return largest_logit(from, count);
}

std::int64_t sample_py(const py::array& logits, float temperature, std::int64_t top_k, double top_p,
                       double min_p, double where) {
  const std::int64_t count = logits.size();
  const float* from = checked<float>("logits", logits, {count});
  if (!(temperature > 0.0f) || top_k < 0 || !(top_p > 0.0) || !(min_p >= 0.0 && min_p <= 1.0) ||
      !(where >= 0.0 && where < 1.0)) {
    refuse("temperature and top_p must be above 0, top_k at least 0, min_p in [0, 1] and where in [0, 1)");
  }
  const ReleaseGil released;
  return sample(from, count, {temperature, top_k, top_p, min_p}, where);
}

}  // namespace

void bind_decode(py::module_& m) {
  py::class_<Norm>(m, "RmsNorm")
      .def(py::init([](const std::string& type, Address weight, std::int64_t cols, float eps, float offset,
                       bool round_first) {
             require_positive("cols", cols);
             return Norm{{element_type(type), nullptr, at(weight), nullptr, cols, eps, offset, round_first}};
           }),
           py::arg("type"), py::arg("weight"), py::arg("cols"), py::arg("eps"), py::arg("offset"),
           py::arg("round_first"))
      .def("__call__", &Norm::run, py::arg("x"), py::arg("out"), py::arg("rows"));

  using Places = std::vector<std::pair<std::int64_t, std::int64_t>>;
  m.attr("DELTA_UNIT_EPS") = kDeltaUnitEps;
  py::class_<Delta>(m, "GatedDelta")
      .def(py::init([](const std::string& type, std::int64_t k_heads, std::int64_t group, std::int64_t k_dim,
                       std::int64_t v_dim, std::int64_t taps, const Places& places, float eps,
                       Address weights, Address log_rates, Address biases, Address norm, bool by_channel) {
             if (by_channel && group != 1)
               refuse("decays of channels need one head of values for each of keys");
             require_positive("k_heads", k_heads);
             require_positive("group", group);
             require_positive("k_dim", k_dim);
             require_positive("v_dim", v_dim);
             require_positive("taps", taps);
             if (v_dim % 16 != 0) refuse("v_dim is " + std::to_string(v_dim) + ", not a multiple of 16");
             if (taps > kMostTaps) {
               refuse("taps is " + std::to_string(taps) + ", more than " + std::to_string(kMostTaps));
             }
             if (places.size() != 6) refuse("there are " + std::to_string(places.size()) + " places, not 6");
             DeltaTask task{};
             task.type = element_type(type);
             task.k_heads = k_heads;
             task.group = group;
             task.k_dim = k_dim;
             task.v_dim = v_dim;
             task.taps = taps;
             DeltaTask::Place* const named[] = {&task.q,    &task.k,    &task.v,
                                                &task.gate, &task.beta, &task.decay};
             for (std::size_t i = 0; i < places.size(); ++i) *named[i] = {places[i].first, places[i].second};
             task.by_channel = by_channel;
             task.eps = eps;
             task.weights = at(weights);
             task.log_rates = at(log_rates);
             task.biases = at(biases);
             task.norm = at(norm);
             return Delta{task};
           }),
           py::arg("type"), py::arg("k_heads"), py::arg("group"), py::arg("k_dim"), py::arg("v_dim"),
           py::arg("taps"), py::arg("places"), py::arg("eps"), py::arg("weights"), py::arg("log_rates"),
           py::arg("biases"), py::arg("norm"), py::arg("by_channel") = false)
      .def("__call__", &Delta::run, py::arg("mixed"), py::arg("gate"), py::arg("beta"), py::arg("decay"),
           py::arg("before"), py::arg("state"), py::arg("out"))
      .def("many", &Delta::many, py::arg("tokens"), py::arg("rows"), py::arg("cols"), py::arg("before"),
           py::arg("state"), py::arg("out"));

  py::class_<Attention>(m, "Attention")
      .def(py::init([](const std::string& type, std::int64_t kv_heads, std::int64_t group,
                       std::int64_t key_dim, std::int64_t tail_dim, std::int64_t value_dim, float scale,
                       Address sinks) {
             require_positive("kv_heads", kv_heads);
             require_positive("group", group);
             require_positive("key_dim", key_dim);
             require_positive("value_dim", value_dim);
             if (tail_dim < 0) refuse("tail_dim is negative");
             AttendTask task{};
             task.type = element_type(type);
             task.kv_heads = kv_heads;
             task.group = group;
             task.key_dim = key_dim;
             task.tail_dim = tail_dim;
             task.value_dim = value_dim;
             task.scale = scale;
             task.sinks = at<const float>(sinks);
             return Attention{task};
           }),
           py::arg("type"), py::arg("kv_heads"), py::arg("group"), py::arg("key_dim"), py::arg("tail_dim"),
           py::arg("value_dim"), py::arg("scale"), py::arg("sinks"))
      .def("__call__", &Attention::run, py::arg("query"), py::arg("query_head"), py::arg("query_token"),
           py::arg("tokens"), py::arg("key"), py::arg("key_head"), py::arg("key_token"), py::arg("tail"),
           py::arg("tail_token"), py::arg("value"), py::arg("value_head"), py::arg("value_token"),
           py::arg("context"), py::arg("visible"), py::arg("visible_token"), py::arg("out"),
           py::arg("prompt") = false);

  py::class_<LatentHeads>(m, "LatentAttention")
      .def(py::init([](const std::string& type, std::int64_t heads, std::int64_t plain, std::int64_t rotated,
                       std::int64_t rank, std::int64_t value_dim, Address weight, float scale) {
             require_positive("heads", heads);
             require_positive("plain", plain);
             require_positive("rotated", rotated);
             require_positive("rank", rank);
             require_positive("value_dim", value_dim);
             return LatentHeads{
                 {element_type(type), heads, plain, rotated, rank, value_dim, at(weight), scale}};
           }),
           py::arg("type"), py::arg("heads"), py::arg("plain"), py::arg("rotated"), py::arg("rank"),
           py::arg("value_dim"), py::arg("weight"), py::arg("scale"))
      .def(
          "packed",
          [](const LatentHeads& own, const LinearLayout& layout, const py::array& data, int activation_bits) {
            check_activation_bits(activation_bits);
            LatentHeads made{own.task, data};
            made.task.weight = checked<std::uint8_t>("data", data, {layout.nbytes});
            made.task.packed = true;
            made.task.layout = layout;
            made.task.activation_bits = activation_bits;
            check_latents(made.task);
            return made;
          },
          py::arg("layout"), py::arg("data"), py::arg("activation_bits"))
      .def("__call__", &LatentHeads::run, py::arg("query"), py::arg("query_head"), py::arg("latents"),
           py::arg("latent_token"), py::arg("turned"), py::arg("turned_token"), py::arg("context"),
           py::arg("out"));

  py::class_<RouterStep>(m, "Routing")
      .def(py::init([](const std::string& type, Address weight, Address bias, std::int64_t experts,
                       std::int64_t hidden, const std::string& scoring, std::int64_t chosen,
                       Address correction, bool normalise, float scale, const std::string& weight_type,
                       const std::string& logits_type, bool rounds_scores, bool wide) {
             require_positive("experts", experts);
             require_positive("hidden", hidden);
             if (chosen < 1 || chosen > experts) {
               refuse("chosen is " + std::to_string(chosen) + "; it must be between 1 and " +
                      std::to_string(experts));
             }
             RouterStep routing{};
             routing.task.type = element_type(type);
             routing.task.weight_type = wide ? ElementType::kFloat32 : routing.task.type;
             routing.task.weight = at(weight);
             routing.task.bias = at(bias);
             routing.task.experts = experts;
             routing.task.hidden = hidden;
             routing.task.logits_type = element_type(logits_type);
             if (routing.task.logits_type != routing.task.type && logits_type != "float32") {
               refuse("logits of type " + logits_type + " cannot be made of " + type);
             }
             routing.rule =
                 RouterRule{router_scoring(scoring), chosen, at<const float>(correction), normalise,
                            rounds_scores,           scale,  element_type(weight_type)};
             return routing;
           }),
           py::arg("type"), py::arg("weight"), py::arg("bias"), py::arg("experts"), py::arg("hidden"),
           py::arg("scoring"), py::arg("chosen"), py::arg("correction"), py::arg("normalise"),
           py::arg("scale"), py::arg("weight_type"), py::arg("logits_type"), py::arg("rounds_scores") = false,
           py::arg("wide") = false)
      .def("scaled", &RouterStep::scaled, py::arg("norm"), py::arg("inputs"), py::arg("input"),
           py::arg("experts"))
      .def("__call__", &RouterStep::run, py::arg("x"), py::arg("tokens"), py::arg("logits"), py::arg("index"),
           py::arg("weights"));

  py::class_<Mixing>(m, "HyperConnection")
      .def(
          py::init([](const std::string& type, std::int64_t streams, std::int64_t hidden, Address weight,
                      Address base, Address scale, float norm_eps, float eps, std::int64_t rounds) {
            require_positive("streams", streams);
            require_positive("hidden", hidden);
            require_positive("rounds", rounds);
            if (streams > kMostStreams) {
              refuse("streams is " + std::to_string(streams) + ", more than " + std::to_string(kMostStreams));
            }
            return Mixing{{element_type(type), streams, hidden, at<const float>(weight),
                           at<const float>(base), at<const float>(scale), norm_eps, eps, rounds}};
          }),
          py::arg("type"), py::arg("streams"), py::arg("hidden"), py::arg("weight"), py::arg("base"),
          py::arg("scale"), py::arg("norm_eps"), py::arg("eps"), py::arg("rounds"))
      .def("__call__", &Mixing::run, py::arg("x"), py::arg("post"), py::arg("comb"), py::arg("collapsed"));

  m.def("rotate", &rotate_py, py::arg("type"), py::arg("x"), py::arg("token_stride"), py::arg("head_stride"),
        py::arg("out"), py::arg("tokens"), py::arg("heads"), py::arg("dim"), py::arg("cos"), py::arg("sin"),
        py::arg("angles"), py::arg("width"));
  m.def("packed_row_bytes", &packed_row_bytes, py::arg("dim"));
  m.def("pack_rows", &pack_rows_py, py::arg("type"), py::arg("plain"), py::arg("plain_head"),
        py::arg("plain_token"), py::arg("heads"), py::arg("tokens"), py::arg("dim"), py::arg("packed"),
        py::arg("packed_head"));
  m.def("unpack_rows", &unpack_rows_py, py::arg("type"), py::arg("packed"), py::arg("packed_head"),
        py::arg("heads"), py::arg("tokens"), py::arg("dim"), py::arg("plain"));
  m.def("largest_logit", &largest_logit_py, py::arg("logits"));
  m.def("sample", &sample_py, py::arg("logits"), py::arg("temperature"), py::arg("top_k"), py::arg("top_p"),
        py::arg("min_p"), py::arg("where"));
}

}  // namespace moechat
