// Copies block records from host memory into VRAM, on a stream of its own, in the order that the queues say.
//
// - Where host memory is pinned, a copy is one call and moves at the speed of PCIe while no thread waits.
//   Where it is not (the system refused, or the records lie in a mapped file that is larger than RAM),
//   threads copy through a ring of pinned buffers; these threads read from the disk where the page cache
//   misses.
// - Demands are begun at once, all of them: the GPU works through them in order, and the kernels that
//   read them follow on the GPU (StreamOrder). Of prefetches little is begun at a time, so that a demand
//   waits for a few blocks.
// - An error that ends the CUDA context ends the link; that of a single copy looks the same, since
//   copies fail when the stream reaches them, and ends the link as well. A file that cannot be read fails its
//   transfers alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "link/link.h"

namespace moechat {

// Copies of one batch at most: its transfers complete together, so that a longer one is reported too late.
constexpr std::size_t kCudaBatchCopies = 64;

struct CudaRegion {
  const unsigned char* data = nullptr;  // host memory, kept alive by the caller; or null: read the file
  std::int64_t bytes = 0;
  bool pinned = false;  // all of `data` is registered with the driver
  std::string path;     // with data null; also for messages
  std::int64_t offset = 0;
};

struct CudaLinkOptions {
  int device = 0;
  std::int64_t in_flight_bytes = 0;  // of prefetches; 0: default
  // Regions that are not pinned: size of a buffer, at least that of the largest transfer; how many; threads
  // that fill them. 0: default. No buffer is made where all regions are pinned.
  std::int64_t buffer_bytes = 0;
  int buffers = 0;
  int threads = 0;
};

// Targets of transfers are addresses in VRAM. Throws cuda::Unavailable, cuda::Error, FileError for a file
// that cannot be opened, std::invalid_argument for regions and options out of range.
std::unique_ptr<Link> make_cuda_link(const std::vector<CudaRegion>& regions, const CudaLinkOptions& options);

}  // namespace moechat
