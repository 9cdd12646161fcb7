// Hints to the system about parts of a mapped file, before they are used.
#pragma once

#include <cstddef>

namespace moechat {

// Requests huge pages for the parts of [data, data + bytes) of a mapped file that are read from now on.
// Kernels that stream over them then miss the TLB less often (experts of 2.6 MB, chosen at random, on Linux
// 6.18: 0.80 instead of 0.68 of the streaming speed). Small pages already in memory stay small. A hint only.
void prefer_huge_pages(const unsigned char* data, std::size_t bytes);

// Reads the pages of [data, data + bytes) of a mapped file that are not in memory, and maps them. Page faults
// one after another read small pieces and wait for each: 0.2 GB/s on a disk that gives 1 GB/s with this call.
// Without support by the system (Linux before 5.14), it only starts reading. A hint only.
void read_ahead(const unsigned char* data, std::size_t bytes);

}  // namespace moechat
