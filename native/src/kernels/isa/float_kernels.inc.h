// The kernels for float inputs, for 16-bit weights and for the parts of a decoding step, and their table,
// kFloatKernels. Included inside the anonymous namespace of one instruction set, after its simd_*.h.

constexpr bool kWideDot = true;  // has no sums of integers

// clang-format off: each header needs names of those before it
#include "kernels/isa/math.inc.h"
#include "kernels/experts/encodings.inc.h"
#include "kernels/experts/group_scales.inc.h"
#include "kernels/experts/output_rows.inc.h"
#include "kernels/experts/grid_codes.inc.h"
#include "kernels/experts/weight_classes.inc.h"
#include "kernels/experts/kept_float.inc.h"
#include "kernels/experts/expert_kernel.inc.h"
#include "kernels/experts/hqq_solver.inc.h"
#include "kernels/experts/least_squares.inc.h"
#include "kernels/experts/quantise_tiles.inc.h"
#include "kernels/experts/kept_tiles.inc.h"
#include "kernels/dense/rows16.inc.h"
#include "kernels/decode/elements.inc.h"
#include "kernels/decode/plain_rows.inc.h"
#include "kernels/decode/packed_rows.inc.h"
#include "kernels/decode/attend.inc.h"
#include "kernels/decode/attend_prompt.inc.h"
#include "kernels/decode/convolve.inc.h"
#include "kernels/decode/delta.inc.h"
#include "kernels/decode/mamba.inc.h"
#include "kernels/decode/latent.inc.h"
#include "kernels/decode/decode.inc.h"
// clang-format on

// dispatch.cc adds the name and the integer kernels.
constexpr KernelTable kFloatKernels = {
    nullptr,        prepare_tokens, neurons,  outputs, block,  add_partials, quantise_tile, quantise_rows,
    pack_kept_rows, row_products,   activate, linear,  rows16, nullptr,      nullptr,       &kDecode};
