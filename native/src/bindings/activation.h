// The shared arguments `activation`, `alpha` and `limit`.
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
    {"clamped_swiglu", Activation::kClampedSwiglu},
};

// Throws ValueError.
inline ActivationSpec activation_spec(const std::string& name, float alpha, float limit) {
  std::string names;
  for (const NamedActivation& known : kActivations) {
    names += (names.empty() ? "" : ", ") + std::string(known.name);
    if (name != known.name) continue;
    if (known.kind == Activation::kClampedSwiglu && !(limit > 0.0f)) {
      refuse("limit is " + std::to_string(limit) + "; clamped_swiglu needs a positive one");
    }
    return {known.kind, alpha, limit};
  }
  refuse("activation \"" + name + "\" is unknown; choose one of: " + names);
}

}  // namespace moechat
