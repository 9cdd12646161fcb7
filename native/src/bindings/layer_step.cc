// Python bindings of a decoder layer's step. Callers pass addresses of memory that they have checked, as for
// its parts (decode.cc).
#include "kernels/decode/layer_step.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/decode_parts.h"
#include "bindings/gil.h"
#include "kernels/decode/token_parts.h"

namespace moechat {
namespace {

// A product and the arrays that it reads.
struct Product {
  StepProduct task;
  std::vector<py::object> kept;
};

const float* checked_bias(const std::optional<py::array>& bias, std::int64_t rows, Product& product) {
  if (!bias) return nullptr;
  product.kept.push_back(*bias);
  return checked<float>("bias", *bias, {rows});
}

Product packed_product(const LinearLayout& layout, const py::array& data,
                       const std::optional<py::array>& bias, int activation_bits) {
  check_activation_bits(activation_bits);
  Product product{};
  product.task.rows = layout.rows;
  product.task.cols = layout.cols;
  product.task.weights = checked<std::uint8_t>("data", data, {layout.nbytes});
  product.task.bias = checked_bias(bias, layout.rows, product);
  product.task.packed = true;
  product.task.layout = layout;
  product.task.activation_bits = activation_bits;
  product.kept.push_back(data);
  return product;
}

Product rows16_product(const py::array& weights, bool is_fp16, const std::optional<py::array>& bias) {
  if (weights.ndim() != 2) refuse("weights have " + std::to_string(weights.ndim()) + " dimensions, not 2");
  Product product{};
  product.task.rows = weights.shape(0);
  product.task.cols = weights.shape(1);
  product.task.weights = checked<std::uint16_t>("weights", weights, {product.task.rows, product.task.cols});
  product.task.bias = checked_bias(bias, product.task.rows, product);
  product.task.fp16 = is_fp16;
  product.kept.push_back(weights);
  return product;
}

// As CachePlace.
using Place = std::tuple<Address, std::int64_t, Address, std::int64_t, std::int64_t, bool>;

std::vector<CachePlace> cache_places(const std::vector<Place>& places) {
  std::vector<CachePlace> found;
  found.reserve(places.size());
  for (const auto& [keys, key_head, values, value_head, held, packed] : places) {
    found.push_back({at(keys), key_head, at(values), value_head, held, packed});
  }
  return found;
}

// A step and the products that it uses.
struct Step {
  LayerStep task;
  std::vector<Product> kept;
  std::shared_ptr<StepTimes> times;  // where task.times points, while measured

  void require_router(bool wanted) const {
    if (task.routes != wanted) refuse(task.routes ? "this step has a router" : "this step has no router");
  }
  void call(const LayerStepCall& own) const {
    for (std::int64_t token = 0; token < own.tokens; ++token) {
      if (own.places[token].held < 0) refuse("held is negative");
    }
    const ReleaseGil released;
    layer_step(task, own);
  }
  void route(Address hidden, Address cos, Address sin, Address keys, std::int64_t key_head, Address values,
             std::int64_t value_head, std::int64_t held, bool packed, Address residual, Address x,
             Address index, Address weights) const {
    require_router(true);
    const CachePlace place{at(keys), key_head, at(values), value_head, held, packed};
    call({1, at(hidden), at(cos), at(sin), &place, at(residual), at<float>(x), at<std::int64_t>(index),
          at<float>(weights), nullptr});
  }
  void normalise(Address hidden, Address cos, Address sin, Address keys, std::int64_t key_head,
                 Address values, std::int64_t value_head, std::int64_t held, bool packed, Address residual,
                 Address normed) const {
    require_router(false);
    const CachePlace place{at(keys), key_head, at(values), value_head, held, packed};
    call({1, at(hidden), at(cos), at(sin), &place, at(residual), nullptr, nullptr, nullptr, at(normed)});
  }
  void route_each(Address hidden, Address cos, Address sin, const std::vector<Place>& places,
                  Address residual, Address x, Address index, Address weights) const {
    require_router(true);
    const auto found = cache_places(places);
    call({static_cast<std::int64_t>(found.size()), at(hidden), at(cos), at(sin), found.data(), at(residual),
          at<float>(x), at<std::int64_t>(index), at<float>(weights), nullptr});
  }
  void normalise_each(Address hidden, Address cos, Address sin, const std::vector<Place>& places,
                      Address residual, Address normed) const {
    require_router(false);
    const auto found = cache_places(places);
    call({static_cast<std::int64_t>(found.size()), at(hidden), at(cos), at(sin), found.data(), at(residual),
          nullptr, nullptr, nullptr, at(normed)});
  }
  void measure(bool on) {
    times = on ? std::make_shared<StepTimes>() : nullptr;
    task.times = times.get();
  }
  py::dict seconds() const {
    py::dict found;
    if (times == nullptr) return found;
    constexpr double kNanosecond = 1e-9;
    found["norms"] = static_cast<double>(times->norms) * kNanosecond;
    found["projections"] = static_cast<double>(times->projections) * kNanosecond;
    found["cache"] = static_cast<double>(times->cache) * kNanosecond;
    found["attention"] = static_cast<double>(times->attention) * kNanosecond;
    found["router"] = static_cast<double>(times->router) * kNanosecond;
    return found;
  }
  void add(Address x, Address residual, std::int64_t tokens) const {
    add_rounded(task.type, at<const float>(x), tokens * task.hidden, at(residual));
  }
};

Step make_step(const std::string& type, const Norm& before, Product query, Product key, Product value,
               Product output, const std::optional<std::pair<Norm, Norm>>& head_norms,
               const Attention& attention, std::int64_t angles, std::int64_t width, const Norm& after,
               const std::optional<RouterStep>& routing) {
  Step step{};
  LayerStep& task = step.task;
  task.type = element_type(type);
  task.hidden = before.task.cols;
  task.before = before.task;
  task.query = query.task;
  task.key = key.task;
  task.value = value.task;
  task.output = output.task;
  task.norms_heads = head_norms.has_value();
  if (head_norms) {
    task.query_norm = head_norms->first.task;
    task.key_norm = head_norms->second.task;
  }
  task.attention = attention.task;
  task.angles = angles;
  task.width = width;
  task.after = after.task;
  task.routes = routing.has_value();
  if (routing) {
    task.routing = routing->task;
    task.rule = routing->rule;
  }
  check_layer_step(task);
  step.kept = {std::move(query), std::move(key), std::move(value), std::move(output)};
  return step;
}

// Parts of a layer, and the products that they use.
struct Mixer {
  DeltaMixer task;
  std::vector<Product> kept;

  void run(Address hidden, Address before, Address state, Address out) const {
    const ReleaseGil released;
    delta_mixer(task, at(hidden), at(before), at<float>(state), at(out));
  }
};

Mixer make_mixer(const Delta& delta, std::vector<Product> inputs, std::array<int, 4> sources,
                 Product output) {
  Mixer mixer{};
  mixer.task.task = delta.task;
  for (const Product& input : inputs) mixer.task.inputs.push_back(input.task);
  mixer.task.mixed = sources[0];
  mixer.task.gate = sources[1];
  mixer.task.beta = sources[2];
  mixer.task.decay = sources[3];
  mixer.task.output = output.task;
  check_delta_mixer(mixer.task);
  mixer.kept = std::move(inputs);
  mixer.kept.push_back(std::move(output));
  return mixer;
}

struct MixedStep {
  DeltaStep task;
  std::vector<Product> kept;

  void run(Address hidden, Address before, Address state, Address residual, Address normed) const {
    const ReleaseGil released;
    delta_step(task, at(hidden), at(before), at<float>(state), at(residual), at(normed));
  }
};

MixedStep make_mixed_step(const Norm& before, const Mixer& mixer, const Norm& after) {
  MixedStep step{{before.task, mixer.task, after.task}, mixer.kept};
  check_delta_step(step.task);
  return step;
}

struct Mlp {
  GatedMlp task;
  std::vector<Product> kept;

  void run(Address x, std::int64_t tokens, Address out) const {
    const ReleaseGil released;
    gated_mlp(task, at(x), tokens, at(out));
  }
};

Mlp make_mlp(const std::string& type, Product gate, Product up, Product down) {
  Mlp mlp{};
  mlp.task = {element_type(type), gate.task, up.task, down.task};
  check_gated_mlp(mlp.task);
  mlp.kept = {std::move(gate), std::move(up), std::move(down)};
  return mlp;
}

}  // namespace

void bind_layer_step(py::module_& m) {
  py::class_<Product>(m, "DenseProduct");
  m.def("packed_product", &packed_product, py::arg("layout"), py::arg("data"), py::arg("bias"),
        py::arg("activation_bits"));
  m.def("rows16_product", &rows16_product, py::arg("weights"), py::arg("is_fp16"), py::arg("bias"));

  py::class_<Mixer>(m, "DeltaMixer")
      .def(py::init(&make_mixer), py::arg("delta"), py::arg("inputs"), py::arg("sources"), py::arg("output"))
      .def("__call__", &Mixer::run, py::arg("hidden"), py::arg("before"), py::arg("state"), py::arg("out"));
  py::class_<MixedStep>(m, "DeltaStep")
      .def(py::init(&make_mixed_step), py::arg("before"), py::arg("mixer"), py::arg("after"))
      .def("__call__", &MixedStep::run, py::arg("hidden"), py::arg("before"), py::arg("state"),
           py::arg("residual"), py::arg("normed"));
  py::class_<Mlp>(m, "GatedMlp")
      .def(py::init(&make_mlp), py::arg("type"), py::arg("gate"), py::arg("up"), py::arg("down"))
      .def("__call__", &Mlp::run, py::arg("x"), py::arg("tokens"), py::arg("out"));

  py::class_<Step>(m, "LayerStep")
      .def(py::init(&make_step), py::arg("type"), py::arg("before"), py::arg("query"), py::arg("key"),
           py::arg("value"), py::arg("output"), py::arg("head_norms"), py::arg("attention"),
           py::arg("angles"), py::arg("width"), py::arg("after"), py::arg("routing"))
      .def("route", &Step::route, py::arg("hidden"), py::arg("cos"), py::arg("sin"), py::arg("keys"),
           py::arg("key_head"), py::arg("values"), py::arg("value_head"), py::arg("held"), py::arg("packed"),
           py::arg("residual"), py::arg("x"), py::arg("index"), py::arg("weights"))
      .def("normalise", &Step::normalise, py::arg("hidden"), py::arg("cos"), py::arg("sin"), py::arg("keys"),
           py::arg("key_head"), py::arg("values"), py::arg("value_head"), py::arg("held"), py::arg("packed"),
           py::arg("residual"), py::arg("normed"))
      .def("measure", &Step::measure, py::arg("on"))
      .def("seconds", &Step::seconds)
      .def("route_each", &Step::route_each, py::arg("hidden"), py::arg("cos"), py::arg("sin"),
           py::arg("places"), py::arg("residual"), py::arg("x"), py::arg("index"), py::arg("weights"))
      .def("normalise_each", &Step::normalise_each, py::arg("hidden"), py::arg("cos"), py::arg("sin"),
           py::arg("places"), py::arg("residual"), py::arg("normed"))
      .def("add", &Step::add, py::arg("x"), py::arg("residual"), py::arg("tokens") = 1);
  m.attr("MOST_STEP_TOKENS") = kMostStepTokens;
}

}  // namespace moechat
