// What this processor and this process offer.
#pragma once

#include <utility>
#include <vector>

namespace moechat {

// Name and presence, as usable: the operating system saves the registers too.
std::vector<std::pair<const char*, bool>> cpu_features();
bool cpu_runs_avx2();         // AVX2, FMA and F16C
bool cpu_runs_avx2_vnni();    // the same, and AVX-VNNI
bool cpu_runs_avx512();       // AVX2, FMA and F16C, and AVX-512 F, BW, DQ and VL
bool cpu_runs_avx512_vnni();  // the same, and AVX-512 VNNI
// The same, and AMX with int8 tiles. Asks the operating system for the tile registers, which it grants a
// process once and for all.
bool cpu_runs_amx();

// Physical cores that the affinity mask and the cgroup's CPU quota leave to this process; at least 1.
int available_cores();

// Of these, those on which a thread that waits may spin: none where a quota limits the CPU time, since
// spinning would use it up.
int cores_to_spin_on();

}  // namespace moechat
