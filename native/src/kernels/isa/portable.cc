// The kernels compiled for the baseline instructions, except the integer ones.
#include "kernels/isa/unit.h"

namespace moechat {
namespace {

// clang-format off: each header needs names of those before it
#include "kernels/isa/simd_portable.h"
#include "kernels/isa/float_kernels.inc.h"
// clang-format on

}  // namespace

extern const KernelTable kPortableKernels;
const KernelTable kPortableKernels = kFloatKernels;

}  // namespace moechat
