// The integer kernels, compiled for AVX2 with AVX-VNNI; all others are those of avx2. No standard C++ headers
// beyond the C ones here: an inline function of the library emitted from this file could be picked by the
// linker for the whole module.
#include <immintrin.h>
#include <math.h>

#include <cstdint>

#include "kernels/half.h"
#include "kernels/kernel_api.h"

#define MOECHAT_INLINE inline __attribute__((always_inline))

namespace moechat {
namespace {

// clang-format off: each part needs the names of the one before
#include "kernels/simd_avx2.h"
#include "kernels/dot_avx2_vnni.h"
#include "kernels/math.inc.h"
#include "kernels/output_rows.inc.h"
#include "kernels/quantise_inputs.inc.h"
#include "kernels/integer_kernel.inc.h"
#include "kernels/panel_dot.inc.h"
#include "kernels/panel_unpack.inc.h"
#include "kernels/panel_kernel.inc.h"
#include "kernels/many_tokens.inc.h"
// clang-format on

}  // namespace

extern const IntegerKernels kAvx2VnniIntegers;
const IntegerKernels kAvx2VnniIntegers = {quantise_rows, integer_neurons, integer_outputs, integer_linear,
                                          &kManyTokens};

}  // namespace moechat
