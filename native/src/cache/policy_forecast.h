// The eviction policy "forecast"; see policy_forecast.cc.
#pragma once

#include <memory>

#include "cache/policy.h"

namespace moechat {

std::unique_ptr<EvictionPolicy> make_forecast(const PolicySpec& spec);

}  // namespace moechat
