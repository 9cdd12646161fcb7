// How link and CPU share the missing blocks of a layer ("hybrid execution"): the
// link brings some of them to a device while the CPU computes the others where they lie.
//
// Missing blocks are drained from two ends. The link takes experts that are worth keeping first, or that have
// so many tokens that the CPU would take longer; the CPU takes the others, from their last block down, so
// that the link brings a prefix. Each time the CPU has finished a piece, both take a part of the rest, by the
// rates that they had lately while both were at work, so neither waits for the other at the end for longer
// than a piece takes.
//
// Admission. An upload takes link time, memory bandwidth that the CPU computes with, and the page of another
// expert. With kCompute only experts are uploaded that the target keeps. Where a target keeps few of a
// layer's experts, or the policy's keys only rank the experts of one layer, they come at once. Where it keeps
// half of them or more, most of what is missing is of the target, and an upload has to pay: all of them are
// no more than the link brings while the CPU computes the rest of the layer (by the rates of both together,
// so the layer waits for nothing), and the expert's key is above that of the expert that loses the page.
// Fractions of a block add up over layers, so that the last block of an expert comes too where the link is
// slower than the CPU. To compare builds: scripts/bench/slab.
//
// With kSeldom an upload also has to pay for what it costs the host: the copies, and the lists and launches
// for what arrives. An expert comes whole, into free pages, or in place of one whose key is lower by kMuch.
// So the experts of a layer stay until the routing has clearly changed. At most one is replaced for a layer
// and token. Keys that are not comparable have no such scale: then only free pages are filled.
//
// Decides only; executors compute. Not thread-safe; the schedule serialises.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "link/link.h"
#include "offload/expert_sum.h"

namespace moechat {

// How blocks that are missing on a device get computed.
enum class Miss : std::uint8_t {
  kFetch,    // the link brings them
  kCompute,  // the CPU computes them; the link brings what is worth keeping
  kBoth,     // shared, whatever the experts are worth
  kCpu,      // the CPU computes them, and the link brings none of them: for a near tier too small for a cache
  kSeldom,   // the CPU computes them; the link brings an expert where it is clearly worth more than another
  kStay      // the same, where it is worth very much more: what is there was chosen for the long run
};

class FarShare {
 public:
  // Tokens of an expert up to which the CPU computes it.
  static constexpr std::int64_t kMostItems = 8;
  // Gains of a forecast that are worth an upload for kSeldom and kStay. A forecast (of the policy `forecast`)
  // is 1 where an expert is needed at the next token, and the less the longer it will not be. The difference
  // of two forecasts is about what the upload saves, and so decides better than the ratio of their odds,
  // which is large for two experts that are both hardly used.
  static constexpr double kMuch = 0.4;
  static constexpr double kVeryMuch = 0.8;
  // Whether an expert is worth the upload in place of another one. Comparable keys (log-odds) of both.
  static bool worth_upload(Miss miss, double key, double replaced) {
    const auto forecast = [](double log_odds) { return 1 / (1 + std::exp(-log_odds)); };
    return forecast(key) - forecast(replaced) > (miss == Miss::kStay ? kVeryMuch : kMuch);
  }

  explicit FarShare(std::int64_t record_bytes) : record_bytes_(record_bytes) {}

  // A layer begins. keys [experts of the layer]: of the policy. held [experts of the layer]: whether the CPU
  // has the records of an expert; null: of all. Both outlive the layer. Sets the order in which rows are
  // taken.
  void begin(const Grouped* rows, const double* keys, std::int64_t tokens, const std::uint8_t* held);
  // Rows in the order in which the CPU takes them; the link takes them in the opposite order.
  const std::vector<std::int32_t>& order() const { return order_; }
  // Whether the CPU may compute blocks of this row.
  bool eligible(std::int32_t row) const {
    return rows_->tokens_of[static_cast<std::size_t>(row)] <= kMostItems && holds(row);
  }

  // Bytes a second that the link moves, as far as is known.
  static double link_rate(const LinkStats& link);
  // Of `left` blocks that are unassigned or on the link, how many the link brings by the time at which the
  // CPU has computed the others. ahead: bytes that the link moves before them.
  std::int64_t of_link(std::int64_t left, const LinkStats& link, std::int64_t ahead) const;
  // The same, not rounded.
  double share_of_link(std::int64_t left, const LinkStats& link, std::int64_t ahead) const;
  // How many of so many unassigned blocks the CPU takes next.
  std::int64_t piece(std::int64_t unassigned, std::int64_t threads) const;
  // The CPU has computed so many blocks in so many seconds.
  void count(std::int64_t blocks, double seconds);

 private:
  bool holds(std::int32_t row) const {
    return held_ == nullptr || held_[rows_->experts[static_cast<std::size_t>(row)]] != 0;
  }
  const double& rate() const { return rates_[tokens_ == 1 ? 0 : 1]; }

  const std::int64_t record_bytes_;
  // Bytes a second of decoding and of longer passes, moving estimates. Until pieces have been timed: two
  // channels of DDR4.
  double rates_[2] = {20e9, 10e9};
  std::int64_t tokens_ = 0;
  const Grouped* rows_ = nullptr;
  const std::uint8_t* held_ = nullptr;
  std::vector<std::int32_t> order_;
};

}  // namespace moechat
