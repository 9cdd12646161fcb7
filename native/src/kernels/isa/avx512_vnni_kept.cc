// The integer kernels for kept weights compiled for AVX-512 with VNNI.
#include "kernels/isa/unit.h"

#define MOECHAT_KEPT 1
#define MOECHAT_LOOKS_UP_BYTES 1

namespace moechat {
namespace {

// clang-format off: each header needs names of those before it
#include "kernels/isa/simd_avx512.h"
#include "kernels/isa/dot_avx512_vnni.h"
#include "kernels/isa/integer_kernels.inc.h"
// clang-format on

}  // namespace

extern const IntegerKernels kAvx512VnniKept;
const IntegerKernels kAvx512VnniKept = kIntegerKernels;

}  // namespace moechat
