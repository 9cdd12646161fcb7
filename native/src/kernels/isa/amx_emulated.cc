// The many-token kernels with AMX tiles emulated in plain C++, for tests on processors without them.
#include "kernels/isa/unit.h"

namespace moechat {
namespace {

// clang-format off: each header needs names of those before it
#include "kernels/isa/simd_avx2.h"
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

extern const ManyTokens kAmxEmulatedTokens;
const ManyTokens kAmxEmulatedTokens = kManyTokens;

bool amx_emulation_multiplies();
bool amx_emulation_multiplies() { return tiles_multiply(); }

}  // namespace moechat
