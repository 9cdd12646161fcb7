// The many-token kernels with AMX tiles emulated in plain C++, for tests on processors without them. No
// standard C++ headers beyond the C ones here: an inline function of the library emitted from this file could
// be picked by the linker for the whole module.
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
#include "kernels/math.inc.h"
#include "kernels/output_rows.inc.h"
#include "kernels/panel_unpack.inc.h"
#include "kernels/amx_tiles.h"
#include "kernels/panel_amx.inc.h"
#include "kernels/many_tokens.inc.h"
// clang-format on

}  // namespace

extern const ManyTokens kAmxEmulatedTokens;
const ManyTokens kAmxEmulatedTokens = kManyTokens;

bool amx_emulation_multiplies();
bool amx_emulation_multiplies() { return tiles_multiply(); }

}  // namespace moechat
