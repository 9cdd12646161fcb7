// Prints the instruction sets that the kernels need to run at their best on this processor, for
// MOECHAT_ISAS=native.
#include <cstdio>

#include "kernels/threads/cpu_info.h"

int main() {
  const char* best = "";
  if (moechat::cpu_runs_avx2()) best = "avx2";
  if (moechat::cpu_runs_avx2_vnni()) best = "avx2-vnni";
  if (moechat::cpu_runs_avx512()) best = "avx512";
  if (moechat::cpu_runs_avx512_vnni()) best = "avx512-vnni";
  if (moechat::cpu_runs_amx()) best = "avx512-vnni;amx";
  std::fputs(best, stdout);
}
