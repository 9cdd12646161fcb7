// Python bindings of the steps of decoder layers. Callers pass addresses of memory that they have checked, as
// for its parts (decode.cc).
#include "kernels/decode/layer_step.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/decode_parts.h"
#include "bindings/gate.h"
#include "bindings/gil.h"
#include "bindings/pass_parts.h"
#include "kernels/decode/delta_mixer.h"
#include "kernels/decode/feed_step.h"
#include "kernels/decode/latent_step.h"
#include "kernels/decode/mamba_mixer.h"
#include "kernels/decode/short_conv.h"

namespace moechat {
namespace {

// A product and the arrays that it reads.
struct Product {
  StepProduct task;
  std::vector<py::object> kept;

  void run(const std::string& type, Address x, std::int64_t tokens, Address out) const {
    const ElementType element = element_type(type);
    const ReleaseGil released;
    multiply_elements(task, element, at(x), tokens, at(out));
  }
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
    if (held < 0) refuse("held is negative");
    found.push_back({at(keys), key_head, at(values), value_head, held, packed});
  }
  return found;
}

struct MlpObject : PassMlp {
  Mlp task;
  std::vector<Product> kept;

  const Mlp& mlp() const override { return task; }

  void run(Address x, std::int64_t tokens, Address out) const {
    const ReleaseGil released;
    run_mlp(task, at(x), tokens, at(out));
  }
};

MlpObject make_mlp(const std::string& type, std::optional<Product> gate, Product up, Product down,
                   const std::string& activation, bool joined) {
  if (gate && joined) refuse("a gate beside one that is joined");
  MlpObject mlp{};
  mlp.task.type = element_type(type);
  mlp.task.gated = gate.has_value() || joined;
  mlp.task.joined = joined;
  if (gate) {
    mlp.task.gate = gate->task;
    mlp.kept.push_back(std::move(*gate));
  }
  mlp.task.up = up.task;
  mlp.task.down = down.task;
  mlp.task.activation = activation_of(activation);
  check_mlp(mlp.task);
  mlp.kept.push_back(std::move(up));
  mlp.kept.push_back(std::move(down));
  return mlp;
}

// What follows the mixer of a layer.
struct Feed {
  FeedStep task;
  std::vector<Product> kept;

  void add(Address x, Address shared, Address residual, std::int64_t tokens) const {
    add_experts(task, tokens, at<const float>(x), at(shared), at(residual));
  }
};

// Norms of the experts' inputs, of both results and of their sum, and the address of the layer's factor.
using MoreNorms = std::tuple<Norm, Norm, Norm, Norm, Address>;

Feed make_feed(const Norm& after, const std::optional<RouterStep>& routing,
               const std::optional<MlpObject>& shared, std::optional<Product> gate,
               const std::optional<MoreNorms>& norms, float routed_scale, bool ends, float whole_scale) {
  Feed feed{};
  feed.task.scale = whole_scale;
  feed.task.ends = ends;
  feed.task.routed_scale = routed_scale;
  if (norms) {
    const auto& [experts, shared_result, experts_result, result, scale] = *norms;
    feed.task.norms =
        FeedNorms{experts.task, shared_result.task, experts_result.task, result.task, at(scale)};
  }
  feed.task.after = after.task;
  feed.task.routes = routing.has_value();
  if (routing) {
    feed.task.routing = routing->task;
    feed.task.rule = routing->rule;
    feed.task.scales = routing->scales;
  }
  feed.task.shares = shared.has_value();
  if (shared) {
    feed.task.shared = shared->task;
    feed.kept = shared->kept;
  }
  feed.task.gates = gate.has_value();
  if (gate) {
    feed.task.gate = gate->task;
    feed.kept.push_back(std::move(*gate));
  }
  check_feed_step(feed.task);
  return feed;
}

// The clocks of a step, while measured.
struct Clocks {
  std::shared_ptr<StepTimes> times;

  StepTimes* measure(bool on) {
    times = on ? std::make_shared<StepTimes>() : nullptr;
    return times.get();
  }
  py::dict seconds() const {
    py::dict found;
    if (times == nullptr) return found;
    constexpr double kNanosecond = 1e-9;
    const auto set = [&](const char* name, std::int64_t value) {
      found[name] = static_cast<double>(value) * kNanosecond;
    };
    set("norms", times->norms);
    set("projections", times->projections);
    set("cache", times->cache);
    set("attention", times->attention);
    set("router", times->router);
    set("shared", times->shared);
    return found;
  }
};

// Where the results of a step go: x, index, weights and shared with a router, else normed.
FeedRows routed_rows(Address x, Address index, Address weights, Address shared) {
  return {nullptr, at<float>(x), at<std::int64_t>(index), at<float>(weights), at(shared), nullptr};
}
FeedRows normed_rows(Address normed) { return {nullptr, nullptr, nullptr, nullptr, nullptr, at(normed)}; }

void require_router(const FeedStep& feed, bool wanted) {
  if (feed.routes != wanted) refuse(feed.routes ? "this step has a router" : "this step has no router");
  if (feed.ends) refuse("this step ends with its mixer");
}
void require_end(const FeedStep& feed) {
  if (!feed.ends) refuse("this step has more parts than its mixer");
}

// A layer whose tokens go to places of attention caches, and the products that it uses.
template <class Task, void (*kStep)(const Task&, const LayerStepCall&)>
struct PlacedStep : PassStep {
  Task task;
  std::vector<Product> kept;
  Clocks clocks;

  const FeedStep& feed_of() const override { return task.feed; }
  TokenPlaces places_of(const py::sequence& given) const override {
    return {cache_places(given.cast<std::vector<Place>>()), {}};
  }
  std::shared_ptr<StepTimes> times() const override { return clocks.times; }
  void run(std::int64_t tokens, const void* hidden, const void* cos, const void* sin,
           const TokenPlaces& places, void* residual, const FeedRows& rows) const override {
    kStep(task, {tokens, hidden, cos, sin, places.keys.data(), residual, rows});
  }

  void call(Address hidden, Address cos, Address sin, const std::vector<Place>& given, Address residual,
            const FeedRows& rows) const {
    const TokenPlaces places{cache_places(given), {}};
    const auto running = clocks.times;  // measure() may end meanwhile
    const ReleaseGil released;
    run(static_cast<std::int64_t>(given.size()), at(hidden), at(cos), at(sin), places, at(residual), rows);
  }
  void route(Address hidden, Address cos, Address sin, const std::vector<Place>& places, Address residual,
             Address x, Address index, Address weights, Address shared) const {
    require_router(task.feed, true);
    call(hidden, cos, sin, places, residual, routed_rows(x, index, weights, shared));
  }
  void normalise(Address hidden, Address cos, Address sin, const std::vector<Place>& places, Address residual,
                 Address normed) const {
    require_router(task.feed, false);
    call(hidden, cos, sin, places, residual, normed_rows(normed));
  }
  void mix(Address hidden, Address cos, Address sin, const std::vector<Place>& places,
           Address residual) const {
    require_end(task.feed);
    call(hidden, cos, sin, places, residual, {});
  }
  void measure(bool on) { task.times = clocks.measure(on); }
};

// The methods of such a step in Python.
template <class Step>
void define_placed(py::class_<Step, PassStep>& step) {
  step.def("route", &Step::route, py::arg("hidden"), py::arg("cos"), py::arg("sin"), py::arg("places"),
           py::arg("residual"), py::arg("x"), py::arg("index"), py::arg("weights"), py::arg("shared"))
      .def("normalise", &Step::normalise, py::arg("hidden"), py::arg("cos"), py::arg("sin"),
           py::arg("places"), py::arg("residual"), py::arg("normed"))
      .def("mix", &Step::mix, py::arg("hidden"), py::arg("cos"), py::arg("sin"), py::arg("places"),
           py::arg("residual"))
      .def("measure", &Step::measure, py::arg("on"))
      .def("seconds", [](const Step& own) { return own.clocks.seconds(); });
}

using Step = PlacedStep<LayerStep, &layer_step>;
using LatentLayer = PlacedStep<LatentStep, &latent_step>;

Step make_step(const std::string& type, const Norm& before, Product query, Product key,
               std::optional<Product> value, Product output, bool gated,
               const std::optional<std::pair<Norm, Norm>>& head_norms, const Attention& attention,
               std::int64_t angles, std::int64_t width, const Feed& feed,
               const std::optional<Norm>& value_norm, const std::optional<Norm>& output_norm,
               std::optional<std::pair<Product, bool>> gate, float scale) {
  Step step{};
  LayerStep& task = step.task;
  task.scale = scale;
  task.type = element_type(type);
  task.hidden = before.task.cols;
  task.before = before.task;
  task.query = query.task;
  task.key = key.task;
  task.shares_keys = !value.has_value();
  if (value) task.value = value->task;
  task.output = output.task;
  task.gated = gated;
  task.norms_heads = head_norms.has_value();
  if (head_norms) {
    task.query_norm = head_norms->first.task;
    task.key_norm = head_norms->second.task;
  }
  if (value_norm) task.value_norm = value_norm->task;
  if (output_norm) task.output_norm = output_norm->task;
  if (gate) task.gate = AttentionGate{gate->first.task, gate->second};
  task.attention = attention.task;
  task.angles = angles;
  task.width = width;
  task.feed = feed.task;
  check_layer_step(task);
  step.kept = feed.kept;
  for (Product* product : {&query, &key, &output}) step.kept.push_back(std::move(*product));
  if (value) step.kept.push_back(std::move(*value));
  if (gate) step.kept.push_back(std::move(gate->first));
  return step;
}

LatentLayer make_latent(const Norm& before, std::optional<std::pair<Product, Norm>> shortened, Product query,
                        Product latent, const Norm& latent_norm, const LatentHeads& attention,
                        std::int64_t angles, bool neighbours, Product output, const Feed& feed) {
  LatentLayer step{};
  LatentStep& task = step.task;
  task.hidden = before.task.cols;
  task.before = before.task;
  task.shortens = shortened.has_value();
  step.kept = feed.kept;
  if (shortened) {
    task.short_query = shortened->first.task;
    task.short_norm = shortened->second.task;
    step.kept.push_back(std::move(shortened->first));
  }
  task.query = query.task;
  task.latent = latent.task;
  task.latent_norm = latent_norm.task;
  task.attention = attention.task;
  task.angles = angles;
  task.neighbours = neighbours;
  task.output = output.task;
  task.feed = feed.task;
  check_latent_step(task);
  for (Product* product : {&query, &latent, &output}) step.kept.push_back(std::move(*product));
  step.kept.push_back({StepProduct{}, {attention.kept}});
  return step;
}

// A mixer with states, and the products that it uses.
template <class Task>
struct StateMixer {
  Task task;
  std::vector<Product> kept;

  void run(Address hidden, Address before, Address state, Address out) const {
    const ReleaseGil released;
    mixer_alone(task, at(hidden), {at(before), at<float>(state)}, at(out));
  }
};

using Mixer = StateMixer<DeltaMixer>;
using Conv = StateMixer<ShortConvMixer>;

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
  check_mixer(mixer.task);
  mixer.kept = std::move(inputs);
  mixer.kept.push_back(std::move(output));
  return mixer;
}

Conv make_conv(const std::string& type, std::int64_t channels, std::int64_t taps, Address weights,
               Address biases, Product input, Product output) {
  require_positive("channels", channels);
  require_positive("taps", taps);
  if (taps > kMostTaps)
    refuse("taps is " + std::to_string(taps) + ", more than " + std::to_string(kMostTaps));
  Conv conv{};
  conv.task = {{element_type(type), channels, taps, at(weights), at(biases), nullptr, nullptr, nullptr},
               input.task,
               output.task};
  check_mixer(conv.task);
  conv.kept = {std::move(input), std::move(output)};
  return conv;
}

using Mamba = StateMixer<MambaMixer>;

// Tokens of a prompt, between the projections: rows [tokens, input.rows], out [tokens, output.cols].
void mamba_prompt(const Mamba& mixer, std::int64_t tokens, Address rows, Address before, Address state,
                  Address out, std::pair<float, float> limits) {
  require_positive("tokens", tokens);
  MambaTask own = mixer.task.task;
  own.least_step = limits.first;
  own.most_step = limits.second;
  own.tokens = tokens;
  own.row = at(rows);
  own.before = at(before);
  own.state = at<float>(state);
  own.out = at(out);
  const ReleaseGil released;
  mamba(own);
}

Mamba make_mamba(const std::string& type, std::int64_t heads, std::int64_t head_dim, std::int64_t groups,
                 std::int64_t state_size, std::int64_t taps, std::int64_t norm_group, float eps,
                 Address weights, Address conv_biases, Address log_rates, Address step_biases, Address skips,
                 Address norm, Product input, Product output) {
  require_positive("heads", heads);
  require_positive("head_dim", head_dim);
  require_positive("groups", groups);
  require_positive("state_size", state_size);
  require_positive("taps", taps);
  require_positive("norm_group", norm_group);
  if (heads % groups != 0) refuse("heads are not a multiple of groups");
  if (heads * head_dim % norm_group != 0) refuse("the elements are not a multiple of norm_group");
  if (taps > kMostTaps)
    refuse("taps is " + std::to_string(taps) + ", more than " + std::to_string(kMostTaps));
  Mamba mamba{};
  MambaTask& task = mamba.task.task;
  task.type = element_type(type);
  task.heads = heads;
  task.head_dim = head_dim;
  task.groups = groups;
  task.state_size = state_size;
  task.taps = taps;
  task.norm_group = norm_group;
  task.eps = eps;
  task.weights = at(weights);
  task.conv_biases = at(conv_biases);
  task.log_rates = at(log_rates);
  task.step_biases = at(step_biases);
  task.skips = at(skips);
  task.norm = at(norm);
  mamba.task.input = input.task;
  mamba.task.output = output.task;
  check_mixer(mamba.task);
  mamba.kept = {std::move(input), std::move(output)};
  return mamba;
}

// Fields of MixerStates of a token: addresses of its states, or those, of their copies, and the bytes of
// both.
using Copied = std::tuple<Address, Address, Address, Address, std::int64_t, std::int64_t>;
using States = std::variant<std::pair<Address, Address>, Copied>;

std::vector<MixerStates> mixer_states(const std::vector<States>& given) {
  std::vector<MixerStates> found;
  found.reserve(given.size());
  for (const States& one : given) {
    if (const auto* plain = std::get_if<std::pair<Address, Address>>(&one)) {
      found.push_back({at(plain->first), at<float>(plain->second)});
      continue;
    }
    const auto& [before, state, before_copy, state_copy, before_bytes, state_bytes] = std::get<Copied>(one);
    found.push_back(
        {at(before), at<float>(state), at(before_copy), at<float>(state_copy), before_bytes, state_bytes});
  }
  return found;
}

// A layer whose mixer has states, and the products that it uses.
template <class Task>
struct MixedStep : PassStep {
  StateStep<Task> task;
  std::vector<Product> kept;
  Clocks clocks;

  const FeedStep& feed_of() const override { return task.feed; }
  TokenPlaces places_of(const py::sequence& given) const override {
    return {{}, mixer_states(given.cast<std::vector<States>>())};
  }
  std::shared_ptr<StepTimes> times() const override { return clocks.times; }
  void run(std::int64_t tokens, const void* hidden, const void*, const void*, const TokenPlaces& places,
           void* residual, const FeedRows& rows) const override {
    state_step(task, {tokens, hidden, places.states.data(), residual, rows});
  }

  void call(Address hidden, const std::vector<States>& given, Address residual, const FeedRows& rows) const {
    const TokenPlaces places{{}, mixer_states(given)};
    const auto running = clocks.times;  // as above
    const ReleaseGil released;
    run(static_cast<std::int64_t>(given.size()), at(hidden), nullptr, nullptr, places, at(residual), rows);
  }
  void route(Address hidden, const std::vector<States>& states, Address residual, Address x, Address index,
             Address weights, Address shared) const {
    require_router(task.feed, true);
    call(hidden, states, residual, routed_rows(x, index, weights, shared));
  }
  void normalise(Address hidden, const std::vector<States>& states, Address residual, Address normed) const {
    require_router(task.feed, false);
    call(hidden, states, residual, normed_rows(normed));
  }
  void mix(Address hidden, const std::vector<States>& states, Address residual) const {
    require_end(task.feed);
    call(hidden, states, residual, {});
  }
  void measure(bool on) { task.times = clocks.measure(on); }
};

template <class Task>
MixedStep<Task> make_mixed_step(const Norm& before, const StateMixer<Task>& mixer, const Feed& feed,
                                float scale) {
  MixedStep<Task> step{};
  step.task = {before.task, mixer.task, feed.task, nullptr, scale};
  check_state_step(step.task);
  step.kept = mixer.kept;
  step.kept.insert(step.kept.end(), feed.kept.begin(), feed.kept.end());
  return step;
}

// A layer without a mixer.
struct FeedLayer : PassStep {
  FeedStep task;
  std::vector<Product> kept;
  Clocks clocks;

  const FeedStep& feed_of() const override { return task; }
  TokenPlaces places_of(const py::sequence&) const override { return {}; }
  std::shared_ptr<StepTimes> times() const override { return clocks.times; }
  void run(std::int64_t tokens, const void* hidden, const void*, const void*, const TokenPlaces&,
           void* residual, const FeedRows& rows) const override {
    require_step_tokens(tokens);
    StepClock clock(clocks.times.get());
    const std::int64_t bytes = tokens * task.after.cols * element_bytes(task.after.type);
    std::memcpy(residual, hidden, static_cast<std::size_t>(bytes));
    FeedRows own = rows;
    own.residual = residual;
    feed_step(task, tokens, own, clock);
  }

  void call(Address hidden, Address residual, const FeedRows& rows, std::int64_t tokens) const {
    const auto running = clocks.times;  // as above
    const ReleaseGil released;
    run(tokens, at(hidden), nullptr, nullptr, {}, at(residual), rows);
  }
  // places: one for each token, as of other steps; only their number matters.
  void route(Address hidden, const py::sequence& places, Address residual, Address x, Address index,
             Address weights, Address shared) const {
    require_router(task, true);
    call(hidden, residual, routed_rows(x, index, weights, shared), static_cast<std::int64_t>(places.size()));
  }
  void normalise(Address hidden, const py::sequence& places, Address residual, Address normed) const {
    require_router(task, false);
    call(hidden, residual, normed_rows(normed), static_cast<std::int64_t>(places.size()));
  }
  void measure(bool on) { clocks.measure(on); }
};

FeedLayer make_feed_layer(const Feed& feed) {
  if (feed.task.ends) refuse("a layer without parts");
  FeedLayer step{};
  step.task = feed.task;
  step.kept = feed.kept;
  return step;
}

// A step with states in Python.
template <class Task>
void define_mixed(py::module_& m, const char* name) {
  using Made = MixedStep<Task>;
  py::class_<Made, PassStep>(m, name)
      .def(py::init(&make_mixed_step<Task>), py::arg("before"), py::arg("mixer"), py::arg("feed"),
           py::arg("scale") = 1.0f)
      .def("route", &Made::route, py::arg("hidden"), py::arg("states"), py::arg("residual"), py::arg("x"),
           py::arg("index"), py::arg("weights"), py::arg("shared"))
      .def("normalise", &Made::normalise, py::arg("hidden"), py::arg("states"), py::arg("residual"),
           py::arg("normed"))
      .def("mix", &Made::mix, py::arg("hidden"), py::arg("states"), py::arg("residual"))
      .def("measure", &Made::measure, py::arg("on"))
      .def("seconds", [](const Made& step) { return step.clocks.seconds(); });
}

}  // namespace

void bind_layer_step(py::module_& m) {
  py::class_<Product>(m, "DenseProduct")
      .def("__call__", &Product::run, py::arg("type"), py::arg("x"), py::arg("tokens"), py::arg("out"));
  m.def("packed_product", &packed_product, py::arg("layout"), py::arg("data"), py::arg("bias"),
        py::arg("activation_bits"));
  m.def("rows16_product", &rows16_product, py::arg("weights"), py::arg("is_fp16"), py::arg("bias"));

  py::class_<PassStep>(m, "PassStep");
  py::class_<PassMlp>(m, "PassMlp");
  py::class_<MlpObject, PassMlp>(m, "Mlp")
      .def(py::init(&make_mlp), py::arg("type"), py::arg("gate"), py::arg("up"), py::arg("down"),
           py::arg("activation") = "silu", py::arg("joined") = false)
      .def("__call__", &MlpObject::run, py::arg("x"), py::arg("tokens"), py::arg("out"));
  py::class_<Feed>(m, "FeedStep")
      .def(py::init(&make_feed), py::arg("after"), py::arg("routing"), py::arg("shared"), py::arg("gate"),
           py::arg("norms") = py::none(), py::arg("routed_scale") = 1.0f, py::arg("ends") = false,
           py::arg("scale") = 1.0f)
      .def("add", &Feed::add, py::arg("x"), py::arg("shared"), py::arg("residual"), py::arg("tokens"));

  py::class_<Mixer>(m, "DeltaMixer")
      .def(py::init(&make_mixer), py::arg("delta"), py::arg("inputs"), py::arg("sources"), py::arg("output"))
      .def("__call__", &Mixer::run, py::arg("hidden"), py::arg("before"), py::arg("state"), py::arg("out"));
  define_mixed<DeltaMixer>(m, "DeltaStep");
  py::class_<Conv>(m, "ShortConvMixer")
      .def(py::init(&make_conv), py::arg("type"), py::arg("channels"), py::arg("taps"), py::arg("weights"),
           py::arg("biases"), py::arg("input"), py::arg("output"))
      .def("__call__", &Conv::run, py::arg("hidden"), py::arg("before"), py::arg("state"), py::arg("out"));
  define_mixed<ShortConvMixer>(m, "ShortConvStep");
  py::class_<Mamba>(m, "MambaMixer")
      .def(py::init(&make_mamba), py::arg("type"), py::arg("heads"), py::arg("head_dim"), py::arg("groups"),
           py::arg("state_size"), py::arg("taps"), py::arg("norm_group"), py::arg("eps"), py::arg("weights"),
           py::arg("conv_biases"), py::arg("log_rates"), py::arg("step_biases"), py::arg("skips"),
           py::arg("norm"), py::arg("input"), py::arg("output"))
      .def("__call__", &Mamba::run, py::arg("hidden"), py::arg("before"), py::arg("state"), py::arg("out"))
      .def("many", &mamba_prompt, py::arg("tokens"), py::arg("rows"), py::arg("before"), py::arg("state"),
           py::arg("out"), py::arg("limits"));
  define_mixed<MambaMixer>(m, "MambaStep");
  py::class_<FeedLayer, PassStep>(m, "FeedLayer")
      .def(py::init(&make_feed_layer), py::arg("feed"))
      .def("route", &FeedLayer::route, py::arg("hidden"), py::arg("places"), py::arg("residual"),
           py::arg("x"), py::arg("index"), py::arg("weights"), py::arg("shared"))
      .def("normalise", &FeedLayer::normalise, py::arg("hidden"), py::arg("places"), py::arg("residual"),
           py::arg("normed"))
      .def("measure", &FeedLayer::measure, py::arg("on"))
      .def("seconds", [](const FeedLayer& step) { return step.clocks.seconds(); });
  py::class_<Step, PassStep> step(m, "LayerStep");
  step.def(py::init(&make_step), py::arg("type"), py::arg("before"), py::arg("query"), py::arg("key"),
           py::arg("value"), py::arg("output"), py::arg("gated"), py::arg("head_norms"), py::arg("attention"),
           py::arg("angles"), py::arg("width"), py::arg("feed"), py::arg("value_norm") = py::none(),
           py::arg("output_norm") = py::none(), py::arg("gate") = py::none(), py::arg("scale") = 1.0f);
  define_placed(step);
  py::class_<LatentLayer, PassStep> latent(m, "LatentStep");
  latent.def(py::init(&make_latent), py::arg("before"), py::arg("shortened"), py::arg("query"),
             py::arg("latent"), py::arg("latent_norm"), py::arg("attention"), py::arg("angles"),
             py::arg("neighbours"), py::arg("output"), py::arg("feed"));
  define_placed(latent);
  m.attr("MOST_STEP_TOKENS") = kMostStepTokens;
}

}  // namespace moechat
