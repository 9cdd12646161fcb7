// The integer kernels compiled for the baseline instructions.
#include "kernels/isa/unit.h"

namespace moechat {
namespace {

// clang-format off: each header needs names of those before it
#include "kernels/isa/simd_portable.h"
#include "kernels/isa/dot_portable.h"
#include "kernels/isa/integer_kernels.inc.h"
// clang-format on

}  // namespace

extern const IntegerKernels kPortableIntegers;
const IntegerKernels kPortableIntegers = kIntegerKernels;

}  // namespace moechat
