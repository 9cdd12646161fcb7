// One token of each of several conversations through all layers of a model, without Python between them; see
// moechat/models/decode/native_pass.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/decode_parts.h"
#include "bindings/pass_parts.h"
#include "kernels/decode/step_memory.h"
#include "kernels/decode/step_product.h"
#include "kernels/isa/dispatch.h"
#include "kernels/threads/spin.h"

namespace py = pybind11;

namespace moechat {
namespace {

constexpr std::int64_t kSignals = 100'000'000;  // ns between looks for Ctrl-C

// Addresses of cosines and sines; 0 for a layer that does not rotate.
using Angles = std::pair<Address, Address>;

// Invariants, which the constructor verifies: all parts have one type and one hidden size; a step with a
// router has experts, one without a feed-forward part, unless it ends with its mixer.
class TokenPass {
 public:
  explicit TokenPass(const std::vector<std::pair<py::object, py::object>>& layers) {
    if (layers.empty()) refuse("there are no layers");
    for (const auto& [step, after] : layers) {
      Layer layer{};
      layer.step = step.cast<const PassStep*>();
      const NormTask& norm = layer.step->feed_of().after;
      if (layers_.empty()) {
        type_ = norm.type;
        hidden_ = norm.cols;
      }
      bool fits = norm.type == type_ && norm.cols == hidden_;
      if (layer.step->feed_of().routes) {
        layer.experts = after.cast<PassExperts*>();
        fits = fits && layer.experts->hidden_size() == hidden_;
      } else if (!layer.step->feed_of().ends) {
        layer.mlp = &after.cast<const PassMlp*>()->mlp();
        fits = fits && layer.mlp->type == type_ && layer.mlp->up.cols == hidden_ &&
               layer.mlp->down.rows == hidden_;
      }
      if (!fits) refuse("layer " + std::to_string(layers_.size()) + " has another type or hidden size");
      layers_.push_back(layer);
      kept_.push_back(step);
      kept_.push_back(after);
    }
  }

  std::int64_t run(Address hidden, const std::vector<Angles>& angles, const py::sequence& places,
                   std::int64_t tokens, Address out) {
    if (angles.size() != layers_.size() || places.size() != layers_.size()) {
      refuse("there are " + std::to_string(layers_.size()) + " layers, angles for " +
             std::to_string(angles.size()) + " and places of " + std::to_string(places.size()));
    }
    require_step_tokens(tokens);
    std::vector<TokenPlaces> all;
    std::vector<std::shared_ptr<StepTimes>> running;  // measure() of a step may end meanwhile
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      const auto given = py::reinterpret_borrow<py::sequence>(places[i]);
      if (static_cast<std::int64_t>(given.size()) != tokens) refuse("a layer has another number of places");
      try {
        all.push_back(layers_[i].step->places_of(given));
      } catch (const py::cast_error&) {
        refuse("the places of layer " + std::to_string(i) + " are not those of its step");
      }
      running.push_back(layers_[i].step->times());
    }
    reserve(tokens);
    const bool measured = measured_;
    std::int64_t bytes = 0, experts_ns = 0, mlp_ns = 0;
    {
      const ReleaseGil released;
      const void* from = at(hidden);
      std::int64_t looked = now_ns();
      for (std::size_t i = 0; i < layers_.size(); ++i) {
        void* to = i + 1 == layers_.size() ? at(out) : between_[i % 2].data();
        bytes += layer(layers_[i], all[i], tokens, from, at(angles[i].first), at(angles[i].second), to,
                       measured ? &experts_ns : nullptr, measured ? &mlp_ns : nullptr);
        from = to;
        const std::int64_t now = now_ns();
        if (now - looked > kSignals) {
          check_signals();
          looked = now;
        }
      }
    }
    experts_ns_ += experts_ns;
    mlp_ns_ += mlp_ns;
    return bytes;
  }

  void measure(bool on) {
    measured_ = on;
    experts_ns_ = mlp_ns_ = 0;
  }
  py::dict seconds() const {
    constexpr double kNanosecond = 1e-9;
    py::dict found;
    found["experts"] = static_cast<double>(experts_ns_) * kNanosecond;
    found["mlp"] = static_cast<double>(mlp_ns_) * kNanosecond;
    return found;
  }

 private:
  struct Layer {
    const PassStep* step;
    PassExperts* experts;  // or null, and then
    const Mlp* mlp;        // or null too, if the layer ends with its mixer
  };

  void reserve(std::int64_t tokens) {
    if (tokens <= reserved_) return;
    const auto elements = static_cast<std::size_t>(tokens * hidden_);
    for (auto& rows : between_) rows.resize(elements * 4);
    shared_.resize(elements * 4);
    made_.resize(elements * 4);
    x_.resize(elements);
    summed_.resize(elements);
    std::int64_t chosen = 0;
    for (const Layer& layer : layers_) {
      const FeedStep& feed = layer.step->feed_of();
      if (feed.routes && feed.rule.chosen > chosen) chosen = feed.rule.chosen;
    }
    index_.resize(static_cast<std::size_t>(tokens * chosen));
    weights_.resize(static_cast<std::size_t>(tokens * chosen));
    reserved_ = tokens;
  }

  std::int64_t layer(const Layer& layer, const TokenPlaces& places, std::int64_t tokens, const void* hidden,
                     const void* cos, const void* sin, void* residual, std::int64_t* experts_ns,
                     std::int64_t* mlp_ns) {
    const FeedStep& feed = layer.step->feed_of();
    FeedRows rows{};
    if (layer.experts != nullptr) {
      rows = {nullptr, x_.data(), index_.data(), weights_.data(), shared_.data(), nullptr};
    } else {
      rows.normed = shared_.data();
    }
    layer.step->run(tokens, hidden, cos, sin, places, residual, rows);
    const std::int64_t start = experts_ns == nullptr ? 0 : now_ns();
    std::int64_t bytes = 0;
    if (layer.experts != nullptr) {
      bytes = layer.experts->run(x_.data(), index_.data(), weights_.data(), summed_.data(), tokens,
                                 feed.rule.chosen);
      if (experts_ns != nullptr) *experts_ns += now_ns() - start;
      add_experts(feed, tokens, summed_.data(), shared_.data(), residual);
    } else if (layer.mlp != nullptr) {
      const DecodeKernels& kernel = *kernels().decode;
      run_mlp(*layer.mlp, shared_.data(), tokens, made_.data());
      kernel.widen(type_, made_.data(), tokens * hidden_, summed_.data());
      kernel.add(type_, summed_.data(), tokens * hidden_, residual);
      if (mlp_ns != nullptr) *mlp_ns += now_ns() - start;
    }
    return bytes;
  }

  std::vector<Layer> layers_;
  std::vector<py::object> kept_;
  ElementType type_{};
  std::int64_t hidden_ = 0;
  std::int64_t reserved_ = 0;  // tokens that the buffers hold
  // [tokens, hidden] of the type; hidden states alternate between two.
  std::vector<unsigned char> between_[2], shared_, made_;
  std::vector<float> x_, summed_;  // [tokens, hidden]
  std::vector<std::int64_t> index_;
  std::vector<float> weights_;
  bool measured_ = false;
  std::int64_t experts_ns_ = 0, mlp_ns_ = 0;
};

}  // namespace

void bind_token_pass(py::module_& m) {
  py::class_<TokenPass>(m, "TokenPass")
      .def(py::init<const std::vector<std::pair<py::object, py::object>>&>(), py::arg("layers"))
      .def("run", &TokenPass::run, py::arg("hidden"), py::arg("angles"), py::arg("places"), py::arg("tokens"),
           py::arg("out"))
      .def("measure", &TokenPass::measure, py::arg("on"))
      .def("seconds", &TokenPass::seconds);
}

}  // namespace moechat
