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

// Returns what is fastest on this processor. AMD's reads weights from memory faster if they come in two
// steps: on Zen 5, with one token and experts of 2048 x 1024 in 4 bits, two threads read 0.72 to 0.80 of
// streaming with AVX-512 and with AVX2, and 0.67 to 0.75 with one step of 4096 bytes; in 2880 columns AVX2
// was a fifth faster. From the third cache two steps are up to a fifth slower, but models that fit there are
// tiny. On Intel's processors one step reaches 0.9; two were not tried.
PrefetchAhead prefetch_ahead();

// Returns the names of the instruction sets that are compiled in and run on this processor, slowest first.
std::vector<const char*> available_isas();

// Returns the names of all instruction sets that are compiled in, whether or not this processor runs them.
// Contains "amx-emulated", which available_isas() never lists.
std::vector<const char*> built_isas();

}  // namespace moechat
