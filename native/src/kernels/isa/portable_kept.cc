// The integer kernels for kept weights compiled for the baseline instructions.
#include "kernels/isa/unit.h"

#define MOECHAT_KEPT 1

namespace moechat {
namespace {

// clang-format off: each header needs names of those before it
#include "kernels/isa/simd_portable.h"
#include "kernels/isa/dot_portable.h"
#include "kernels/isa/integer_kernels.inc.h"
// clang-format on

}  // namespace

extern const IntegerKernels kPortableKept;
const IntegerKernels kPortableKept = kIntegerKernels;

}  // namespace moechat
