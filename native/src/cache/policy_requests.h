// Eviction policies that follow a request: "request" (MoE-Infinity) and "map" (FineMoE); see
// policy_requests.cc.
#pragma once

#include <memory>

#include "cache/policy.h"

namespace moechat {

std::unique_ptr<EvictionPolicy> make_request(const PolicySpec& spec);
std::unique_ptr<EvictionPolicy> make_map(const PolicySpec& spec);

}  // namespace moechat
