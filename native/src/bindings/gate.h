// The Python class Gate.
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
inline GateSpec gate_spec(const std::string& activation, float alpha, float limit, float offset,
                          bool clamps_result, bool gated) {
  std::string names;
  for (const NamedActivation& known : kActivations) {
    names += (names.empty() ? "" : ", ") + std::string(known.name);
    if (activation != known.name) continue;
    if (!(limit > 0.0f)) refuse("limit is " + std::to_string(limit) + "; it must be positive");
    return {known.kind, alpha, limit, offset, clamps_result, gated};
  }
  refuse("activation \"" + activation + "\" is unknown; choose one of: " + names);
}

}  // namespace moechat
