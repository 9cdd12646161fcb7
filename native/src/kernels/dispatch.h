// Choice of the instruction set at run time.
#pragma once

#include <vector>

#include "kernels/kernel_api.h"

namespace moechat {

// The best kernels that this processor runs, or those that MOECHAT_ISA names. The choice is made at the first
// call and kept. Throws std::runtime_error when MOECHAT_ISA names something unknown or impossible here.
const KernelTable& kernels();

// Names of the instruction sets that this processor runs, slowest first.
std::vector<const char*> available_isas();

}  // namespace moechat
