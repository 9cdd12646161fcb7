// Measures how fast memory can be read: the upper bound of every kernel that reads experts from memory.
#pragma once

#include <cstdint>
#include <functional>

namespace moechat {

// Reads [data, data + bytes) over and over with `threads` threads (the calling one included, and at most
// those of the pool), each a contiguous part of it, for at least `seconds` and at least twice. `between` is
// called after each pass; an exception that it throws passes through.
//
// Returns bytes per second of the fastest pass, because other programs can only slow a pass down. Memory
// that fits into caches gives the speed of the caches. Throws std::invalid_argument for less than 4096 bytes,
// a number of threads outside 1..kMaxThreads or seconds that are not finite and at least 0.
double stream_read_rate(const unsigned char* data, std::int64_t bytes, int threads, double seconds,
                        const std::function<void()>& between);

}  // namespace moechat
