#include "offload/far_share.h"

#include <algorithm>
#include <cmath>

namespace moechat {
namespace {

// Bytes a second of a link that has not moved anything yet.
constexpr double kAssumedLink = 10e9;
// Weight of the newest piece in the estimate.
constexpr double kNewest = 0.25;
// Of the CPU's part of the rest, so that the last pieces are small.
constexpr std::int64_t kPieces = 4;
// Bytes of the least piece worth a call, for each thread: about ten microseconds of a core.
constexpr std::int64_t kLeastBytes = 192 << 10;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

}  // namespace

void FarShare::begin(const Grouped* rows, const double* keys, std::int64_t tokens, const std::uint8_t* held) {
  rows_ = rows;
  held_ = held;
  tokens_ = tokens;
  order_.resize(at(rows->rows()));
  for (std::int32_t row = 0; row < rows->rows(); ++row) order_[at(row)] = row;
  // Rows of few tokens first, since the CPU pays for tokens and the link does not; of equal ones those that
  // are least worth a page. Last those that the CPU does not have: so the link begins with them.
  std::sort(order_.begin(), order_.end(), [&](std::int32_t a, std::int32_t b) {
    if (holds(a) != holds(b)) return holds(a);
    const std::int32_t items_a = rows->tokens_of[at(a)];
    const std::int32_t items_b = rows->tokens_of[at(b)];
    if (items_a != items_b) return items_a < items_b;
    const double key_a = keys[rows->experts[at(a)]];
    const double key_b = keys[rows->experts[at(b)]];
    return key_a != key_b ? key_a < key_b : a > b;
  });
}

double FarShare::link_rate(const LinkStats& link) {
  return std::min(link.bandwidth > 0 ? link.bandwidth : kAssumedLink, link.bandwidth_bound);
}

std::int64_t FarShare::of_link(std::int64_t left, const LinkStats& link, std::int64_t ahead) const {
  return std::llround(share_of_link(left, link, ahead));
}

double FarShare::share_of_link(std::int64_t left, const LinkStats& link, std::int64_t ahead) const {
  const double bandwidth = link_rate(link);
  // n blocks of the link take (ahead + n * record) / bandwidth, the others (left - n) * record / rate.
  const double before = static_cast<double>(ahead) / static_cast<double>(record_bytes_);
  return std::max(0.0, (static_cast<double>(left) * bandwidth - before * rate()) / (bandwidth + rate()));
}

std::int64_t FarShare::piece(std::int64_t unassigned, std::int64_t threads) const {
  const std::int64_t least = std::max<std::int64_t>(1, kLeastBytes * threads / record_bytes_);
  return std::min(unassigned, std::max(least, (unassigned + kPieces - 1) / kPieces));
}

void FarShare::count(std::int64_t blocks, double seconds) {
  if (!(seconds > 0)) return;
  double& kept = rates_[tokens_ == 1 ? 0 : 1];
  kept += kNewest * (static_cast<double>(blocks * record_bytes_) / seconds - kept);
}

}  // namespace moechat
