// The many-token kernels, compiled for AMX with int8 tiles; all others are those of avx512-vnni. No standard
// C++ headers beyond the C ones here: an inline function of the library emitted from this file could be
// picked by the linker for the whole module.
#include <immintrin.h>
#include <math.h>

#include <cstdint>

#include "kernels/half.h"
#include "kernels/kernel_api.h"

#define MOECHAT_INLINE inline __attribute__((always_inline))
#define MOECHAT_AMX 1

namespace moechat {
namespace {

// clang-format off: each part needs the names of the one before
#include "kernels/simd_avx512.h"
#include "kernels/math.inc.h"
#include "kernels/output_rows.inc.h"
#include "kernels/panel_unpack.inc.h"
#include "kernels/amx_tiles.h"
#include "kernels/panel_amx.inc.h"
#include "kernels/many_tokens.inc.h"
// clang-format on

}  // namespace

extern const ManyTokens kAmxTokens;
const ManyTokens kAmxTokens = kManyTokens;

bool amx_multiplies();
bool amx_multiplies() { return tiles_multiply(); }

}  // namespace moechat
