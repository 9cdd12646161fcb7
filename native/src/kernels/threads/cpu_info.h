// Detects instruction sets of the processor and cores available to the process.
#pragma once

#include <utility>
#include <vector>

namespace moechat {

// Names of features and whether they can be used, that is, the operating system also saves the registers.
std::vector<std::pair<const char*, bool>> cpu_features();
bool cpu_runs_avx2();         // AVX2, FMA and F16C
bool cpu_runs_avx2_vnni();    // the same, and AVX-VNNI
bool cpu_runs_avx512();       // AVX2, FMA and F16C, and AVX-512 F, BW, DQ and VL
bool cpu_runs_avx512_vnni();  // the same, and AVX-512 VNNI
bool cpu_runs_avx512_vbmi();  // the same, and AVX-512 VBMI
// As cpu_runs_avx512_vnni, and AMX with int8 tiles. The first call requests permission to use the tile
// registers, which the operating system grants for the life of the process.
bool cpu_runs_amx();

bool cpu_is_amd();

// Returns the physical cores that the affinity mask and the CPU quota of the cgroup allow; at least 1.
int available_cores();

// Returns how many cores waiting threads may spin on: 0 if a quota limits the CPU time, because spinning
// would use it up, else all cores of the affinity mask.
int cores_to_spin_on();

}  // namespace moechat
