// What every file compiled for one instruction set begins with.
//
// Such a file includes only this header, kernel bodies, C headers and <cstdint>: the linker could keep an
// inline function of the C++ library that is compiled there, with instructions that other processors lack,
// for the whole module.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <math.h>

#include <cstdint>

#include "kernels/isa/kernel_api.h"
#include "kernels/layout/grids.h"
#include "kernels/layout/half.h"
#include "kernels/layout/scale_words.h"

#define MOECHAT_INLINE inline __attribute__((always_inline))
