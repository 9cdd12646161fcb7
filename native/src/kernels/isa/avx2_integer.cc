// The integer kernels compiled for avx2.
#include "kernels/isa/unit.h"

namespace moechat {
namespace {

// clang-format off: each header needs names of those before it
#include "kernels/isa/simd_avx2.h"
#include "kernels/isa/dot_avx2.h"
#include "kernels/isa/integer_kernels.inc.h"
// clang-format on

}  // namespace

extern const IntegerKernels kAvx2Integers;
const IntegerKernels kAvx2Integers = kIntegerKernels;

}  // namespace moechat
