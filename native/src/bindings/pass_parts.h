// What a pass of tokens through a model (token_pass.cc) calls for a layer, of whichever class that is.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/decode/feed_step.h"
#include "kernels/decode/layer_step.h"
#include "kernels/decode/state_step.h"
#include "kernels/decode/step_times.h"

namespace moechat {

// Where a layer of each attention cache takes its token: one of the two, by the class of the step.
struct TokenPlaces {
  std::vector<CachePlace> keys;
  std::vector<MixerStates> states;
};

// The step of a layer up to its experts.
class PassStep {
 public:
  virtual ~PassStep() = default;
  virtual const FeedStep& feed_of() const = 0;
  // From what Python gives for each token. Throws pybind11::cast_error for another class of step.
  virtual TokenPlaces places_of(const pybind11::sequence& given) const = 0;
  // What run() adds its times to, or null. The caller keeps it alive during run().
  virtual std::shared_ptr<StepTimes> times() const = 0;
  // As the fields of LayerStepCall; without the GIL.
  virtual void run(std::int64_t tokens, const void* hidden, const void* cos, const void* sin,
                   const TokenPlaces& places, void* residual, const FeedRows& rows) const = 0;
};

// The routed experts of a layer.
class PassExperts {
 public:
  virtual ~PassExperts() = default;
  virtual std::int64_t hidden_size() const = 0;
  // out [tokens, hidden] from x, for index and weights [tokens, k]; without the GIL. Returns the bytes of the
  // blocks that were read.
  virtual std::int64_t run(const float* x, const std::int64_t* index, const float* weights, float* out,
                           std::int64_t tokens, std::int64_t k) = 0;
};

// A feed-forward part without experts.
class PassMlp {
 public:
  virtual ~PassMlp() = default;
  virtual const Mlp& mlp() const = 0;
};

}  // namespace moechat
