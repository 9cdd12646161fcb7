// The shared arguments `activation`, `alpha` and `limit`.
#pragma once

#include <string>

#include "bindings/arrays.h"
#include "kernels/isa/kernel_api.h"

namespace moechat {

// Throws ValueError.
inline ActivationSpec activation_spec(const std::string& name, float alpha, float limit) {
  if (name == "silu") return {Activation::kSilu, alpha, limit};
  if (name == "gelu") return {Activation::kGelu, alpha, limit};
  if (name == "gelu_tanh") return {Activation::kGeluTanh, alpha, limit};
  if (name != "clamped_swiglu") {
    refuse("activation \"" + name + "\" is unknown; choose silu, gelu, gelu_tanh or clamped_swiglu");
  }
  if (!(limit > 0.0f)) refuse("limit is " + std::to_string(limit) + "; clamped_swiglu needs a positive one");
  return {Activation::kClampedSwiglu, alpha, limit};
}

}  // namespace moechat
