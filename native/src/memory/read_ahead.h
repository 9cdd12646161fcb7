// Asking for parts of a mapped file before they are touched.
#pragma once

#include <cstddef>

namespace moechat {

// Begins to read the pages of [data, data + bytes) of a mapped file that are not in memory, and does not wait
// for them. Touched one after another, pages are read in small pieces, each waited for: 0.2 GB/s of a disk
// that gives 0.9 GB/s to this. Only a wish.
void read_ahead(const unsigned char* data, std::size_t bytes);

}  // namespace moechat
