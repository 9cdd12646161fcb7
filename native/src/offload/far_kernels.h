// The CPU's part of a layer: blocks computed where they lie in the far tier.
//
// The sum is made of chains of fused multiply-adds in the order in which pieces come, so its last bits depend
// on how link and CPU shared the layer. Not thread-safe.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/experts/forward.h"
#include "offload/expert_sum.h"
#include "offload/layer_executor.h"
#include "offload/layer_forms.h"

namespace moechat {

// Input and output of the CPU's part of a layer.
struct FarPart {
  const float* x = nullptr;  // [tokens, hidden]
  float* out = nullptr;      // [tokens, hidden], set to that part of the sum if the CPU computes any block
};

class FarKernels {
 public:
  // records[layer * experts + expert]: [blocks] records in memory of the host, which outlive this.
  FarKernels(LayerForms forms, int activation_bits, std::int32_t experts,
             std::vector<const unsigned char*> records)
      : forms_(std::move(forms)),
        activation_bits_(activation_bits),
        experts_(experts),
        records_(std::move(records)) {}

  // A layer begins; `rows` stay as they are until it is done.
  void begin(std::int32_t layer, const Grouped* rows, std::int64_t tokens, const FarPart& part);
  const FarPart& part() const { return part_; }
  std::int64_t record_bytes() const { return forms_.layout.record_bytes; }
  // The first call of a layer sets `out` to 0, and every call adds its blocks to it. REQUIRES: records of
  // these experts.
  void compute(const std::vector<FarPiece>& pieces);

 private:
  void add_records(const std::vector<FarPiece>& pieces);
  void add_items(const std::vector<FarPiece>& pieces, bool gather);

  const LayerForms forms_;
  const int activation_bits_;
  const std::int32_t experts_;
  const std::vector<const unsigned char*> records_;

  std::int32_t layer_ = 0;
  const Grouped* rows_ = nullptr;
  std::int64_t tokens_ = 0;
  FarPart part_;
  bool first_ = true;  // no piece of the layer has been computed

  // Of the kernel call.
  std::vector<std::uint64_t> block_ptr_;
  std::vector<std::int32_t> block_index_;
  std::vector<std::int32_t> block_row_;
  std::vector<std::int32_t> start_;
  std::vector<std::int32_t> token_;
  std::vector<std::int32_t> out_row_;
  std::vector<float> weight_;
  std::vector<float> inputs_;  // rows of x that the pieces read, where these are few of many
};

}  // namespace moechat
