// A link out of host memory with a programmed speed: for tests (seeded delays, reordering, faults) and for
// measuring decisions over a link that this machine does not have.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "link/link.h"

namespace moechat {

struct SimRegion {
  const unsigned char* data;  // kept alive by the caller
  std::int64_t bytes;
};

struct SimLinkOptions {
  double bandwidth = 0;  // bytes a second; 0: as fast as memory
  double latency = 0;    // seconds from start to the first byte, overlapping with other transfers
  double jitter = 0;     // up to that many more seconds for each transfer, drawn from the seed
  std::uint64_t seed = 0;
  int reorder = 1;                   // up to that many started transfers finish in a drawn order; 1: in order
  std::int64_t in_flight_bytes = 0;  // most bytes in flight; 0: default
  bool copy = true;              // false: time passes, bytes do not move (for measurements on random weights)
  double fault_rate = 0;         // share of transfers that end with EIO, drawn from the seed
  std::int64_t fail_after = -1;  // the whole link fails after that many transfers; -1: never
  std::int64_t stall_after =
      -1;  // after that many transfers nothing finishes any more, until stop(); -1: never
};

// Throws std::invalid_argument for an option out of range.
std::unique_ptr<Link> make_sim_link(const std::vector<SimRegion>& regions, const SimLinkOptions& options);

}  // namespace moechat
