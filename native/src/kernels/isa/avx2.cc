// The kernels compiled for avx2, except the integer ones.
#include "kernels/isa/unit.h"

namespace moechat {
namespace {

// clang-format off: each header needs names of those before it
#include "kernels/isa/simd_avx2.h"
#include "kernels/isa/float_kernels.inc.h"
// clang-format on

}  // namespace

extern const KernelTable kAvx2Kernels;
const KernelTable kAvx2Kernels = kFloatKernels;

}  // namespace moechat
