// The kernels compiled for avx512, except the integer ones.
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
#include "kernels/isa/simd_avx512.h"
#include "kernels/isa/float_kernels.inc.h"
// clang-format on

}  // namespace

extern const KernelTable kAvx512Kernels;
const KernelTable kAvx512Kernels = {"avx512", prepare_tokens, neurons, outputs, quantise_tile,
                                    activate, linear,         rows16,  nullptr, &kDecode};

}  // namespace moechat
