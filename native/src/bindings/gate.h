// Names of activations, and the Python class Gate.
#pragma once

#include <string>

#include "bindings/arrays.h"
#include "kernels/isa/kernel_api.h"

namespace moechat {

struct NamedActivation {
  const char* name;
  Activation kind;
};
constexpr NamedActivation kActivations[] = {
    {"silu", Activation::kSilu},
    {"gelu", Activation::kGelu},
    {"gelu_tanh", Activation::kGeluTanh},
    {"relu2", Activation::kRelu2},
};

// Throws ValueError.
inline Activation activation_of(const std::string& name) {
  std::string names;
  for (const NamedActivation& known : kActivations) {
    if (name == known.name) return known.kind;
    names += (names.empty() ? "" : ", ") + std::string(known.name);
  }
  refuse("activation \"" + name + "\" is unknown; choose one of: " + names);
}

// Throws ValueError.
inline GateSpec gate_spec(const std::string& activation, float alpha, float limit, float offset,
                          bool clamps_result, bool gated) {
  const Activation kind = activation_of(activation);
  if (!(limit > 0.0f)) refuse("limit is " + std::to_string(limit) + "; it must be positive");
  return {kind, alpha, limit, offset, clamps_result, gated};
}

}  // namespace moechat
