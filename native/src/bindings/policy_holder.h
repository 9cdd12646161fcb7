// The Python object that owns an eviction policy until a cache or a runner takes it.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "cache/policy.h"
#include "cache/split_cache.h"

namespace moechat {

class PolicyHolder {
 public:
  explicit PolicyHolder(std::unique_ptr<EvictionPolicy> policy) : policy_(std::move(policy)) {}

  // Throws std::invalid_argument once the policy has been taken.
  EvictionPolicy& get() const {
    if (!policy_)
      throw std::invalid_argument("the policy already belongs to a cache or a runner; make another one");
    return *policy_;
  }
  std::unique_ptr<EvictionPolicy> take() {
    get();
    return std::move(policy_);
  }

 private:
  std::unique_ptr<EvictionPolicy> policy_;
};

// The argument `targets`, int32 [layers, 2]: experts and blocks of each layer. Throws ValueError.
inline std::vector<LayerTarget> targets_of(const py::array& targets, std::int64_t layers) {
  const std::int32_t* values = checked<std::int32_t>("targets", targets, {layers, 2});
  std::vector<LayerTarget> list;
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    list.push_back({values[2 * layer], values[2 * layer + 1]});
  }
  return list;
}

}  // namespace moechat
