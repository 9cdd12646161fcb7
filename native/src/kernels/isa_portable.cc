// The kernels, compiled for portable. No standard C++ headers beyond the C ones here: an inline function of
// the library emitted from this file could be picked by the linker for the whole module.
#include <math.h>

#include <cstdint>

#include "kernels/half.h"
#include "kernels/kernel_api.h"

#define MOECHAT_INLINE inline __attribute__((always_inline))

namespace moechat {
namespace {

// clang-format off: each part needs the names of the one before
#include "kernels/simd_portable.h"
#include "kernels/dot_portable.h"
#include "kernels/math.inc.h"
#include "kernels/encodings.inc.h"
#include "kernels/output_rows.inc.h"
#include "kernels/expert_kernel.inc.h"
#include "kernels/quantise_inputs.inc.h"
#include "kernels/integer_kernel.inc.h"
#include "kernels/panel_dot.inc.h"
#include "kernels/panel_unpack.inc.h"
#include "kernels/panel_kernel.inc.h"
#include "kernels/many_tokens.inc.h"
#include "kernels/hqq_solver.inc.h"
#include "kernels/rows16.inc.h"
#include "kernels/decode.inc.h"
// clang-format on

const IntegerKernels kIntegerKernels = {quantise_rows, integer_neurons, integer_outputs, integer_linear,
                                        &kManyTokens};

}  // namespace

extern const KernelTable kPortableKernels;
const KernelTable kPortableKernels = {"portable", prepare_tokens, neurons, outputs,          quantise_tile,
                                      activate,   linear,         rows16,  &kIntegerKernels, &kDecode};

}  // namespace moechat
