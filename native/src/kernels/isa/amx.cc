// The many-token kernels, compiled for AMX with int8 tiles; all other kernels are those of avx512-vnni.
#include "kernels/isa/unit.h"

#define MOECHAT_AMX 1

namespace moechat {
namespace {

// clang-format off: each header needs names of those before it
#include "kernels/isa/simd_avx512.h"
#include "kernels/isa/amx_tiles.h"
#include "kernels/isa/math.inc.h"
#include "kernels/experts/group_scales.inc.h"
#include "kernels/experts/output_rows.inc.h"
#include "kernels/experts/grid_codes.inc.h"
#include "kernels/experts/plain_codes.inc.h"
#include "kernels/experts/weight_classes.inc.h"
#include "kernels/experts/neuron_streams.inc.h"
#include "kernels/experts/panel_unpack.inc.h"
#include "kernels/experts/panel_amx.inc.h"
#include "kernels/experts/many_tokens.inc.h"
// clang-format on

}  // namespace

extern const ManyTokens kAmxTokens;
const ManyTokens kAmxTokens = kManyTokens;

bool amx_multiplies();
bool amx_multiplies() { return tiles_multiply(); }

}  // namespace moechat
