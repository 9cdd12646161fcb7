// The kernels compiled for avx512, except the integer ones.
#include "kernels/isa/unit.h"

namespace moechat {
namespace {

// clang-format off: each header needs names of those before it
#include "kernels/isa/simd_avx512.h"
#include "kernels/isa/float_kernels.inc.h"
// clang-format on

}  // namespace

extern const KernelTable kAvx512Kernels;
const KernelTable kAvx512Kernels = kFloatKernels;

}  // namespace moechat
