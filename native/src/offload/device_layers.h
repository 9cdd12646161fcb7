// The expert layers of decoded tokens on a GPU, from the router's choice to the launches.
//
// A recorded pass leaves each layer's request in host memory. The rest of a layer is the same calls for every
// token: wait, decide, write the lists and copy them, launch the kernels over resident and over arrived
// blocks, and their sum. Done here, a layer costs the host some microseconds; the same calls from Python take
// several times as long, and the GPU waits for them.
//
// Kernels come with their arguments, once for a recording; only where the lists lie differs between tokens.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/driver.h"
#include "cuda/kernel.h"
#include "offload/executors.h"
#include "offload/runner.h"
#include "offload/speculation.h"

namespace moechat {

// An argument that is known when a layer is launched: an address of a list (device_lists.h), or whether
// outputs without blocks are cleared.
enum class Blank : std::uint8_t {
  kRowItem,
  kItemToken,
  kItemWeight,
  kTokenItem,
  kEntryPage,
  kEntrySlot,
  kRowEntry,
  kRowBlock,
  kClear
};
constexpr std::size_t kBlanks = 9;
// By its name in Python, such as "row_item". Throws std::invalid_argument.
Blank blank_of(const std::string& name);

using Filled = std::array<cuda::Kernel::Value, kBlanks>;

// A kernel with its arguments.
class PreparedLaunch {
 public:
  // values: one for each parameter; those of `blanks` (parameter and what goes there) are not used. Throws
  // std::invalid_argument if they do not fit the kernel.
  PreparedLaunch(cuda::Kernel kernel, cuda::Kernel::Grid grid, std::vector<cuda::Kernel::Value> values,
                 std::vector<std::pair<std::size_t, Blank>> blanks);
  bool has_blanks() const { return !blanks_.empty(); }
  // Throws cuda::Error.
  void launch(cuda::Stream stream, const Filled& filled) const;

 private:
  cuda::Kernel kernel_;
  cuda::Kernel::Grid grid_;
  std::vector<cuda::Kernel::Value> values_;
  std::vector<std::pair<std::size_t, Blank>> blanks_;
};

// One expert layer of a recording.
struct DeviceLayer {
  // The request in host memory: experts [picks], the bits of their weights, the bits of the scores of every
  // place, and if `inputs` those of the layer's inputs, float32 [hidden].
  const std::int32_t* packed;
  std::vector<Prediction> places;  // that the scores are for
  bool inputs;                     // the CPU may compute a part
  PreparedLaunch blocks;           // for a row for each pick
  PreparedLaunch sum;
  std::optional<PreparedLaunch> sum_with_far;  // with the CPU's part; there if `inputs`
};

// What all layers share.
struct DeviceMemory {
  int device;
  std::int64_t picks;
  std::int64_t work;    // most (token, block) pairs of a launch
  std::int32_t* lists;  // [capacity], pinned
  cuda::Pointer lists_there;
  std::int64_t capacity;
  std::int64_t launch_size;  // elements that the lists of a launch take at most
  float* far_out;            // [hidden], pinned: the CPU's part; null: it computes nothing
  cuda::Pointer far_there;
  std::int64_t hidden;
};

// How the experts of a token are loaded.
struct DeviceToken {
  cuda::Stream stream;
  Prefetching prefetching;
  Miss miss;
};

// Called around the launch of blocks whose records have so many bytes; null: nothing is.
struct LaunchHooks {
  std::function<void(std::int64_t)> begin;
  std::function<void()> end;
};

// Not safe for several threads.
class DeviceLayers {
 public:
  // Throws std::invalid_argument.
  DeviceLayers(DeviceMemory memory, std::vector<DeviceLayer> layers);

  void begin_token(const DeviceToken& token) { token_ = token; }
  // Computes a layer of the token: returns when all is launched. Returns the bytes of block records, or -1 if
  // the kernels do not serve it (the router chose an expert twice): then the layer has begun in the runner,
  // with its prefetches, and nothing has been launched. Throws as ExpertRunner and cuda::Error.
  std::int64_t run(ExpertRunner* runner, std::int32_t layer, const DeviceExecutor::Interrupted& interrupted,
                   const LaunchHooks& hooks = {});

 private:
  void begin(ExpertRunner* runner, std::int32_t layer);
  void copy_lists(std::int64_t end);

  // Invariant: lists [0, copied_) are on the device, in stream order.
  const DeviceMemory memory_;
  const std::vector<DeviceLayer> layers_;
  DeviceToken token_{};
  std::int64_t copied_ = 0;
  Miss miss_ = Miss::kFetch;  // of the layer at work
  std::vector<std::int64_t> picks_;
};

}  // namespace moechat
