#include "offload/device_layers.h"

#include <algorithm>
#include <stdexcept>

#include "offload/device_lists.h"

namespace moechat {
namespace {

constexpr std::array<const char*, kBlanks> kNames{"row_item",   "item_token", "item_weight",
                                                  "token_item", "entry_page", "entry_slot",
                                                  "row_entry",  "row_block",  "clear"};

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }
std::size_t place(Blank blank) { return static_cast<std::size_t>(blank); }

}  // namespace

Blank blank_of(const std::string& name) {
  const auto* const found = std::find(kNames.begin(), kNames.end(), name);
  if (found == kNames.end()) throw std::invalid_argument("no argument of a layer is called '" + name + "'");
  return static_cast<Blank>(found - kNames.begin());
}

PreparedLaunch::PreparedLaunch(cuda::Kernel kernel, cuda::Kernel::Grid grid,
                               std::vector<cuda::Kernel::Value> values,
                               std::vector<std::pair<std::size_t, Blank>> blanks)
    : kernel_(std::move(kernel)), grid_(grid), values_(std::move(values)), blanks_(std::move(blanks)) {
  const std::string& kinds = kernel_.kinds();
  if (values_.size() != kinds.size()) {
    throw std::invalid_argument("a kernel with " + std::to_string(kinds.size()) + " parameters was given " +
                                std::to_string(values_.size()) + " values");
  }
  for (const auto& [parameter, blank] : blanks_) {
    const char kind = blank == Blank::kClear ? 'i' : 'p';
    if (parameter >= kinds.size() || kinds[parameter] != kind) {
      throw std::invalid_argument("parameter " + std::to_string(parameter) + " of the kernel cannot be " +
                                  kNames[place(blank)]);
    }
  }
}

void PreparedLaunch::launch(cuda::Stream stream, const Filled& filled) const {
  std::array<cuda::Kernel::Value, cuda::Kernel::kMostParameters> values;
  std::copy(values_.begin(), values_.end(), values.begin());
  for (const auto& [parameter, blank] : blanks_) values[parameter] = filled[place(blank)];
  kernel_.launch(stream, grid_, values.data());
}

DeviceLayers::DeviceLayers(DeviceMemory memory, std::vector<DeviceLayer> layers)
    : memory_(memory), layers_(std::move(layers)) {
  if (memory_.picks < 1 || memory_.lists == nullptr || memory_.launch_size < 1) {
    throw std::invalid_argument("layers need experts to choose, and memory for lists");
  }
  for (const DeviceLayer& layer : layers_) {
    if (layer.packed == nullptr) throw std::invalid_argument("a layer's request has no memory");
    if (layer.inputs && (!layer.sum_with_far || memory_.far_out == nullptr)) {
      throw std::invalid_argument("the CPU may compute a part of a layer, and there is no memory for it");
    }
  }
}

void DeviceLayers::begin(ExpertRunner* runner, std::int32_t ordinal) {
  const DeviceLayer& layer = layers_[at(ordinal)];
  const std::int32_t* const packed = layer.packed;
  const auto* const weights = reinterpret_cast<const float*>(packed + memory_.picks);
  picks_.assign(packed, packed + memory_.picks);
  miss_ = layer.inputs ? token_.miss : Miss::kFetch;
  runner->begin(ordinal, picks_.data(), weights, 1, memory_.picks, miss_);

  runner->prefetch_places(ordinal, token_.prefetching, layer.places.data(),
                          static_cast<std::int64_t>(layer.places.size()), weights + memory_.picks);
}

void DeviceLayers::copy_lists(std::int64_t end) {
  if (end <= copied_) return;
  const std::size_t offset = at(copied_) * sizeof(std::int32_t);
  cuda::check(cuda::driver().copy_to_device(memory_.lists_there + offset, memory_.lists + copied_,
                                            at(end - copied_) * sizeof(std::int32_t), token_.stream),
              "cuMemcpyHtoDAsync");
  copied_ = end;
}

std::int64_t DeviceLayers::run(ExpertRunner* runner, std::int32_t ordinal,
                               const DeviceExecutor::Interrupted& interrupted, const LaunchHooks& hooks) {
  if (ordinal < 0 || at(ordinal) >= layers_.size()) {
    throw std::invalid_argument("layer " + std::to_string(ordinal) + " of " + std::to_string(layers_.size()));
  }
  const DeviceLayer& layer = layers_[at(ordinal)];
  const cuda::Current current(cuda::primary_context(memory_.device));
  cuda::check(cuda::driver().stream_synchronize(token_.stream), "cuStreamSynchronize");
  begin(runner, ordinal);

  // What lies in the lists has been copied: the stream is done.
  copied_ = 0;
  ItemLists items{};
  runner->with_rows([&](const Grouped& rows, std::int64_t tokens) {
    items = write_items(rows, tokens, memory_.lists, memory_.capacity);
  });
  if (items.most != 1 || items.items != memory_.picks) return -1;
  Filled filled{};
  const auto put = [&](Blank blank, std::int64_t begin) {
    filled[place(blank)].pointer = memory_.lists_there + at(begin) * sizeof(std::int32_t);
  };
  const std::int64_t rows = items.rows;
  put(Blank::kRowItem, 0);
  put(Blank::kItemToken, items.token);
  put(Blank::kItemWeight, items.weight);
  put(Blank::kTokenItem, items.table);

  const std::int64_t first = items.used;
  std::int64_t next = first;
  // The CPU may compute all blocks of an expert: the first launch clears the outputs without blocks.
  bool clear = miss_ != Miss::kFetch;
  const DeviceExecutor::Launch launch = [&](const DeviceLaunch& blocks) {
    if (next + memory_.launch_size > memory_.capacity) {
      cuda::check(cuda::driver().stream_synchronize(token_.stream), "cuStreamSynchronize");
      copied_ = next = first;
    }
    const BlockLists lists =
        write_blocks(blocks, *blocks.items, memory_.lists + next, memory_.capacity - next);
    copy_lists(next + lists.used);
    put(Blank::kEntryPage, next);
    put(Blank::kEntrySlot, next + lists.slot);
    put(Blank::kRowEntry, next + lists.row_entry);
    put(Blank::kRowBlock, next + lists.row_block);
    filled[place(Blank::kClear)].integer = clear ? 1 : 0;
    if (hooks.begin) hooks.begin(blocks.entries * runner->options().layout.record_bytes);
    layer.blocks.launch(token_.stream, filled);
    if (hooks.end) hooks.end();
    clear = false;
    next += lists.used;
  };
  FarPart far;
  if (miss_ != Miss::kFetch) {
    const std::int64_t behind = 2 * memory_.picks + static_cast<std::int64_t>(layer.places.size()) *
                                                        std::int64_t{runner->options().experts};
    far = {reinterpret_cast<const float*>(layer.packed + behind), memory_.far_out};
  }
  const std::int64_t bytes =
      runner->finish_on_device(token_.stream, 1, memory_.work, launch, interrupted, far);
  if (clear) {
    // Nothing was launched: no blocks, but cleared outputs.
    const std::vector<std::int32_t> none(at(rows + 1), 0);
    const Grouped nothing;
    const PageId no_page{};
    launch(DeviceLaunch{&no_page, none.data(), none.data(), 0, rows, &nothing});
  }
  copy_lists(first);
  if (runner->far_blocks() > 0) {
    cuda::check(cuda::driver().copy_to_device(memory_.far_there, memory_.far_out,
                                              at(memory_.hidden) * sizeof(float), token_.stream),
                "cuMemcpyHtoDAsync");
    layer.sum_with_far->launch(token_.stream, filled);
  } else {
    layer.sum.launch(token_.stream, filled);
  }
  return bytes;
}

}  // namespace moechat
