// The part of a layer that the CPU computes where it lies, while a link brings the rest to a device ("hybrid
// execution", DESIGN sections 3 and 7).
//
// Missing blocks are drained from two ends. The link takes experts that are worth keeping first, or that have
// so many tokens that the CPU would take longer; the CPU takes the others, from their last block down, so
// that what is brought is a prefix. Both take a part of what is left each time the CPU has finished one, by
// the rates that they had lately while both were at work, so neither waits for the other at the end for
// longer than a piece takes. Nothing that the link was given is taken back.
//
// - Rows are those of Grouped. A row's blocks [0, link_end) are the link's, or are there; [far_begin, blocks)
//   are the CPU's; those between them are nobody's yet (open).
// - `out` gets chains of fused multiply-adds in the order in which blocks were taken: the last bits of a sum
//   depend on who was faster.
//
// Not thread-safe; the runner serialises.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "kernels/block_layout.h"
#include "kernels/forward.h"
#include "offload/expert_sum.h"

namespace moechat {

// What becomes of blocks that are missing on a device.
enum class Miss : std::uint8_t {
  kFetch,    // the link brings them
  kCompute,  // the CPU computes them, but for experts that targets keep, which the link brings
  kBoth      // shared
};

// Between which the CPU's part of a layer is computed.
struct FarPart {
  const float* x = nullptr;  // [tokens, hidden]
  float* out = nullptr;      // [tokens, hidden], set to that part of the sum where there is one
};

class FarShare {
 public:
  // Tokens of an expert up to which the CPU computes it.
  static constexpr std::int64_t kMostItems = 8;

  // records[layer]: [experts, blocks] records in memory of the host; none: the CPU computes nothing. They
  // outlive this.
  FarShare(const BlockLayout& layout, const ActivationSpec& activation, int activation_bits,
           std::vector<const unsigned char*> records);
  bool possible() const { return !records_.empty(); }

  // A layer begins. keys [experts of the layer]: of the policy. Sets the order in which rows are taken.
  void begin(std::int32_t layer, const Grouped* rows, const double* keys, std::int64_t tokens);
  // Rows in the order in which the CPU takes them; the link takes them the other way round.
  const std::vector<std::int32_t>& order() const { return order_; }
  // Whether the CPU may compute blocks of this row.
  bool eligible(std::int32_t row) const { return rows_->tokens_of[at(row)] <= kMostItems; }

  // Of `left` blocks that are open or on the link, how many are the link's. bandwidth: of the link, bytes a
  // second; 0: not known yet.
  std::int64_t of_link(std::int64_t left, double bandwidth) const;
  // How many of so many open blocks the CPU takes next.
  std::int64_t piece(std::int64_t open) const;

  // The next piece: blocks [begin, end) of a row, any number of rows.
  void take(std::int32_t row, std::int32_t begin, std::int32_t end);
  // Computes what was taken. x [tokens, hidden]; out [tokens, hidden] is set to 0 before the first piece of
  // a layer, then added to. Returns how many blocks.
  std::int64_t compute(const float* x, float* out);
  // Blocks of this layer that were computed.
  std::int64_t computed() const { return computed_; }

 private:
  using Clock = std::chrono::steady_clock;
  static std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }
  double& rate() { return rates_[tokens_ == 1 ? 0 : 1]; }
  double rate() const { return rates_[tokens_ == 1 ? 0 : 1]; }

  const BlockLayout layout_;
  const ActivationSpec activation_;
  const int activation_bits_;
  const std::vector<const unsigned char*> records_;
  // Bytes a second of decoding and of longer passes, moving estimates.
  double rates_[2];

  std::int32_t layer_ = 0;
  std::int64_t tokens_ = 0;
  const Grouped* rows_ = nullptr;
  std::int64_t computed_ = 0;
  std::vector<std::int32_t> order_;

  // Of the piece.
  std::vector<std::uint64_t> records_of_;
  std::vector<std::int32_t> blocks_of_;
  std::vector<std::int32_t> row_of_;
  std::vector<std::int32_t> taken_;  // rows
  std::vector<std::int32_t> start_;
  std::vector<std::int32_t> token_;
  std::vector<std::int32_t> out_row_;
  std::vector<float> weight_;
  std::vector<float> inputs_;  // rows of x that the piece reads, where they are few of many
};

}  // namespace moechat
