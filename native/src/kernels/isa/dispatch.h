// Choice of the instruction set at run time.
#pragma once

#include <vector>

#include "kernels/isa/kernel_api.h"

namespace moechat {

// Returns the fastest kernels that are compiled into this build and run on this processor, or those that the
// environment variable MOECHAT_ISA names. The choice is made at the first call and kept. Thread-safe.
//
// Throws std::runtime_error if MOECHAT_ISA names an instruction set that is unknown, that the processor
// cannot run, or that is not compiled in.
const KernelTable& kernels();

// Returns what is fast on this processor, unless set_weight_streams() was called. On AMD's that is one
// stream: on Zen 5, with one token, experts of 2048 x 1024 in 4 bits and one thread it read 0.76 to 0.82 of
// streaming with AVX-512 and 0.78 to 0.79 with AVX2; two streams, 4096 bytes ahead, gave 0.74 and 0.74; one
// stream with 4096 bytes 0.75 and 0.73, with 12288 bytes 0.72 and 0.77. With two threads all were nearer to
// each other. Prefetching twice, into the second cache first, gained nothing. One stream was not tried on
// Intel's.
Reading weight_reading();

// Results do not depend on it. Throws std::invalid_argument for other numbers than 1 and 2.
void set_weight_streams(int streams);

// Returns the names of the instruction sets that are compiled in and run on this processor, slowest first.
std::vector<const char*> available_isas();

// Returns the names of all instruction sets that are compiled in, whether or not this processor runs them.
// Contains "amx-emulated", which available_isas() never lists.
std::vector<const char*> built_isas();

}  // namespace moechat
