#include "bindings/runner_object.h"

#include <cstddef>
#include <limits>
#include <utility>

#include "bindings/arrays.h"
#include "bindings/schedule.h"

namespace moechat {
namespace {

// [layers, experts] records of each expert, null where there are none, from those of each layer: of the
// experts that `listed` names, or of all if it is empty. whole: each layer has the records of all experts,
// not only of those that are listed. `name`: far or mapped.
std::vector<const unsigned char*> expert_records(const std::string& name,
                                                 const std::vector<py::array>& records,
                                                 const std::vector<py::array>& listed, std::int32_t layers,
                                                 std::int32_t experts, std::int64_t expert_bytes,
                                                 bool whole) {
  std::vector<const unsigned char*> found;
  if (records.empty()) return found;
  const auto of_layers = [&](const std::string& what, std::size_t count) {
    if (count == static_cast<std::size_t>(layers)) return;
    refuse(what + " has " + std::to_string(count) + " layers of " + std::to_string(layers));
  };
  const std::string records_name = name + "_records", list_name = name + "_experts";
  of_layers(records_name, records.size());
  if (!listed.empty()) of_layers(list_name, listed.size());
  found.resize(static_cast<std::size_t>(layers) * static_cast<std::size_t>(experts));
  for (std::size_t layer = 0; layer < records.size(); ++layer) {
    std::int64_t count = experts;
    const std::int32_t* list = nullptr;
    if (!listed.empty()) {
      count = listed[layer].size();
      list = checked<std::int32_t>(list_name.c_str(), listed[layer], {count});
    }
    const auto* const bytes = checked<std::uint8_t>(records_name.c_str(), records[layer],
                                                    {(whole ? experts : count) * expert_bytes});
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t expert = list == nullptr ? i : list[i];
      if (expert < 0 || expert >= experts) {
        refuse(list_name + " has expert " + std::to_string(expert) + " of " + std::to_string(experts));
      }
      found[layer * static_cast<std::size_t>(experts) + static_cast<std::size_t>(expert)] =
          bytes + (whole ? expert : i) * expert_bytes;
    }
  }
  return found;
}

}  // namespace

Prefetching prefetching(const RunnerOptions& options, std::int32_t predicted, std::int32_t experts,
                        std::optional<std::int64_t> max_bytes, const std::string& ahead,
                        std::int32_t lookahead, std::int64_t stream_tokens) {
  const std::int64_t page_bytes = options.layout.record_bytes;
  return {predicted,
          experts,
          max_bytes ? *max_bytes / page_bytes : std::numeric_limits<std::int64_t>::max(),
          {ahead_of(ahead), lookahead, stream_tokens}};
}

RunnerObject::RunnerObject(const BlockLayout& layout, const GateSpec& gate, std::int32_t layers,
                           std::int32_t experts, std::int64_t pages, const py::array& targets,
                           std::int64_t reserve, PolicyHolder& policy, LinkHolder& link, double stall_seconds,
                           bool whole_experts, bool populate, std::int32_t top_k, int activation_bits,
                           std::uintptr_t near_memory, const std::vector<py::array>& far_records,
                           const std::vector<py::array>& far_experts, std::vector<BlockLayout> layer_layouts,
                           std::vector<GateSpec> layer_gates, const std::string& admit,
                           const std::string& victims, double adaptive, std::int32_t adaptive_most,
                           const std::vector<py::array>& mapped_records,
                           const std::vector<py::array>& mapped_experts) {
  RunnerOptions options;
  options.layout = layout;
  options.gate = gate;
  options.layouts = std::move(layer_layouts);
  options.gates = std::move(layer_gates);
  options.activation_bits = activation_bits;
  options.layers = layers;
  options.experts = experts;
  options.top_k = top_k;
  options.pages = pages;
  options.targets = targets_of(targets, layers);
  options.reserve = reserve;
  options.rules = rules_of(admit, victims);
  options.adaptive = adaptive;
  options.adaptive_most = adaptive_most;
  options.stall_seconds = stall_seconds;
  options.whole_experts = whole_experts;
  options.populate = populate;
  options.near_memory = reinterpret_cast<unsigned char*>(near_memory);
  const std::int64_t expert_bytes = layout.blocks * layout.record_bytes;
  options.far_records = expert_records("far", far_records, far_experts, layers, experts, expert_bytes, false);
  options.mapped_records =
      expert_records("mapped", mapped_records, mapped_experts, layers, experts, expert_bytes, true);
  policy.get();  // both throw if already taken, before either is taken
  link.get();
  parts_ = std::make_shared<RunnerParts>(std::move(options), policy, link);
  parts_->alive.insert(parts_->alive.end(), far_records.begin(), far_records.end());
  parts_->alive.insert(parts_->alive.end(), mapped_records.begin(), mapped_records.end());
}

void RunnerObject::close() {
  const std::shared_ptr<RunnerParts> parts = std::move(parts_);
  parts_.reset();
  if (!parts) return;
  const ReleaseGil released;
  try {
    parts->runner->rest();
  } catch (const std::exception&) {
    // Called within another call of this thread, or in a forked child: waiting is impossible.
  }
}

}  // namespace moechat
