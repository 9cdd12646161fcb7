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

// Returns the names of the instruction sets that are compiled in and run on this processor, slowest first.
std::vector<const char*> available_isas();

// Returns the names of all instruction sets that are compiled in, whether or not this processor runs them.
// Contains "amx-emulated", which available_isas() never lists.
std::vector<const char*> built_isas();

}  // namespace moechat
