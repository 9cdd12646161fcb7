// The integer kernels and their table, kIntegerKernels: those for plain weights or, with MOECHAT_KEPT
// defined, those for kept ones. Included inside the anonymous namespace of one instruction set, after its
// simd_*.h and dot_*.h.
//
// clang-format off: each header needs names of those before it
#include "kernels/isa/math.inc.h"
#include "kernels/experts/group_scales.inc.h"
#include "kernels/experts/output_rows.inc.h"
#include "kernels/experts/grid_codes.inc.h"
#include "kernels/experts/plain_codes.inc.h"
#include "kernels/experts/weight_classes.inc.h"
#include "kernels/experts/neuron_streams.inc.h"
#include "kernels/experts/quantise_inputs.inc.h"
#include "kernels/experts/integer_dots.inc.h"
#include "kernels/experts/kept_dots.inc.h"
#include "kernels/experts/integer_kernel.inc.h"
#include "kernels/experts/panel_dot.inc.h"
#include "kernels/experts/panel_unpack.inc.h"
#include "kernels/experts/panel_kernel.inc.h"
#include "kernels/experts/many_tokens.inc.h"
// clang-format on

constexpr IntegerKernels kIntegerKernels = {quantise_rows, integer_neurons, integer_outputs,
                                            integer_block, integer_linear,  &kManyTokens};
