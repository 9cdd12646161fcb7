// How the experts of every layer are stored and computed.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/isa/kernel_api.h"
#include "kernels/layout/block_layout.h"

namespace moechat {

// All layers have the sizes and record bytes of `layout`; their encodings and gates may differ.
struct LayerForms {
  BlockLayout layout{};
  GateSpec gate{};
  std::vector<BlockLayout> layouts;  // one for each layer; empty: all are `layout`
  std::vector<GateSpec> gates;       // one for each layer; empty: all are `gate`

  const BlockLayout& layout_of(std::int32_t layer) const {
    return layouts.empty() ? layout : layouts[static_cast<std::size_t>(layer)];
  }
  const GateSpec& gate_of(std::int32_t layer) const {
    return gates.empty() ? gate : gates[static_cast<std::size_t>(layer)];
  }
};

}  // namespace moechat
