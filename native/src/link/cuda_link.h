// Copies block records from host memory into VRAM, on a stream of its own, in the order that the queues say.
//
// - Where host memory is pinned, a copy is one call and moves at the speed of PCIe while no thread waits.
//   Where it is not (the system refused, or the records lie in a file, since RAM does not hold all of them),
//   threads copy through a ring of pinned buffers; these threads read from the disk where the page cache
//   misses. A region may be pinned in parts.
// - Demands are issued at once, all of them: the GPU works through them in order, and the kernels that
//   read them follow on the GPU (StreamOrder). Of prefetches little is begun at a time, so that a demand
//   waits for a few blocks.
// - Copies are issued in batches, an event behind each. A batch is small (TransferQueue::batch_bytes), and
//   while there is work several are on the stream, so the copy engine never waits for the host: it moves the
//   next batch while the end of the last one is noticed and another one is issued.
// - No call waits for the driver with the link's mutex held. Whoever finds work issues it, one thread at a
//   time. A caller issues two batches and goes on, while a thread of the link issues the others.
// - An error that ends the CUDA context ends the link; that of a single copy looks the same, since
//   copies fail when the stream reaches them, and ends the link as well. A file that cannot be read fails its
//   transfers alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "link/far_sources.h"
#include "link/link.h"

namespace moechat {

// Copies of one batch at most, so that a call of the driver with many small ones stays short.
constexpr std::size_t kCudaBatchCopies = 64;

struct CudaLinkOptions {
  int device = 0;
  std::int64_t in_flight_bytes = 0;  // of which prefetches take a third; 0: default
  // Regions that are not pinned: size of a buffer, at least that of the largest transfer; how many (fewer if
  // the system does not pin so many); threads that fill them. 0: default. No buffer is made where all regions
  // are pinned.
  std::int64_t buffer_bytes = 0;
  int buffers = 0;
  int threads = 0;
  // Times that every block is copied, one after the other: a link that is so many times slower, for
  // measurements.
  int copies = 1;
};

// Targets of transfers are addresses in VRAM. Throws cuda::Unavailable, cuda::Error, FileError for a file
// that cannot be opened, std::invalid_argument for regions and options out of range.
std::unique_ptr<Link> make_cuda_link(std::vector<CudaRegion> regions, const CudaLinkOptions& options);

}  // namespace moechat
