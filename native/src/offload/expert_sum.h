// The weighted sum over experts, in bounded memory and in an order that does not depend on which thread or
// device computes.
//
// The sum (DESIGN, invariant 6). The result for token t is
//   out[t] = (...((0 + acc_1) + acc_2) + acc_3)...,  acc_e = chain of fused multiply-adds over the blocks of
//   e, from 0
// over its experts e in ascending order and their blocks in ascending order. The chains of two experts are
// independent, so experts may be computed in the order in which their blocks arrive. The result is bitwise
// the same for every budget, split, policy, prefetch, delay and number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/experts/forward.h"
#include "kernels/layout/block_layout.h"

namespace moechat {

// Tokens grouped by expert, experts and tokens ascending. A row is one expert; an item is one (token,
// expert).
struct Grouped {
  std::vector<std::int32_t> experts;    // [rows]
  std::vector<std::int32_t> start;      // [rows + 1]
  std::vector<std::int32_t> token;      // [items]
  std::vector<float> weight;            // [items]
  std::vector<std::int32_t> tokens_of;  // [rows] items of the row

  std::int32_t rows() const { return static_cast<std::int32_t>(experts.size()); }
  std::int32_t items() const { return static_cast<std::int32_t>(token.size()); }

  std::vector<std::int32_t> counts;  // [experts of the layer], scratch
};

// index [tokens, k], weight [tokens, k]; indices outside [0, experts) select no expert. A token that names an
// expert twice has two items. Throws std::invalid_argument for more than 2^31 - 1 picks.
void group_by_expert(const std::int64_t* index, const float* weight, std::int64_t tokens, std::int64_t k,
                     std::int32_t experts, Grouped* out);

// One pass over one layer. Consecutive rows form groups whose accumulators fit into a fixed number of bytes
// (a single row with more is a group). Within a group rows may be computed in any order, each from its first
// block to its last.
class ExpertSum {
 public:
  static constexpr std::int64_t kBytes = std::int64_t{8} << 20;

  // Starts a pass and sets out [tokens, hidden] to 0. REQUIRES: no argument changes until the last group is
  // done.
  void start(const BlockLayout& layout, const GateSpec& gate, const Grouped& rows, const float* x,
             std::int64_t tokens, float* out, std::int64_t accumulator_bytes = kBytes,
             int activation_bits = kDefaultActivationBits);

  // Opens the next group with accumulators 0; returns false if there is none.
  bool next_group();
  std::int32_t first_row() const { return first_; }
  std::int32_t end_row() const { return end_; }

  // Adds the next block of a row to the batch. REQUIRES: rows of one batch ascend, and blocks of a row
  // ascend.
  void add(std::int32_t row, std::int32_t block, const unsigned char* record);
  bool empty() const { return records_.empty(); }
  // (token, block) pairs added since the last `compute`, a measure of the work.
  std::int64_t pending() const { return pending_; }
  // Computes the added blocks in one kernel call; returns their number.
  std::int64_t compute();
  // Discards the added blocks.
  void drop();

  // Adds the accumulators of the group to out, rows ascending. REQUIRES: every row of the group is computed.
  void finish_group();

 private:
  // An uninitialised array of floats.
  struct Floats {
    std::unique_ptr<float[]> data;
    std::size_t size = 0;
    float* need(std::int64_t count);
    void shrink();
  };
  std::int64_t items_of(std::int32_t row) const;
  const float* gathered(std::int32_t row_end);

  const BlockLayout* layout_ = nullptr;
  GateSpec gate_{};
  const Grouped* rows_ = nullptr;
  const float* x_ = nullptr;
  std::int64_t tokens_ = 0;
  float* out_ = nullptr;
  std::int64_t accumulator_bytes_ = kBytes;
  int activation_bits_ = kDefaultActivationBits;
  std::int32_t first_ = 0;
  std::int32_t end_ = 0;

  Floats accumulators_;                 // [items of the group, hidden]
  Floats inputs_;                       // [items of the group, hidden], rows of x, see compute()
  std::vector<unsigned char> copied_;   // [rows of the group]: whether its part of inputs_ is filled in
  std::vector<std::uint64_t> records_;  // addresses of the added blocks
  std::vector<std::int32_t> blocks_;
  std::vector<std::int32_t> entry_rows_;  // index into batch_
  std::vector<std::int32_t> batch_;       // rows with added blocks, ascending
  std::int64_t pending_ = 0;
  std::vector<std::int32_t> batch_start_;  // CSR of the kernel call
  std::vector<std::int32_t> batch_token_;
  std::vector<std::int32_t> batch_out_;
  std::vector<float> batch_weight_;
};

// Computes the same sum when all records [experts, blocks] of the layer are contiguous at `records`. out
// [tokens, hidden] is overwritten; it must not overlap x. Returns the bytes of block records that were read.
std::int64_t resident_forward(const BlockLayout& layout, const GateSpec& gate, const unsigned char* records,
                              std::int32_t experts, const float* x, const std::int64_t* index,
                              const float* weight, std::int64_t tokens, std::int64_t k, float* out,
                              int activation_bits = kDefaultActivationBits);

}  // namespace moechat
