// The integer kernels compiled for avx2.
//
// Includes only C headers and <cstdint>: the linker could keep an inline function of the C++ library that is
// compiled here, with instructions that other processors lack, for the whole module.
#include <immintrin.h>
#include <math.h>

#include <cstdint>

#include "kernels/isa/kernel_api.h"
#include "kernels/layout/half.h"

#define MOECHAT_INLINE inline __attribute__((always_inline))

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
