#include "kernels/threads/cpu_info.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <set>
#include <string>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(MOECHAT_X86)
#include <cpuid.h>
#endif

namespace moechat {
namespace {

#if defined(MOECHAT_X86)
struct X86 {
  bool avx, avx2, fma, f16c, avx512f, avx512bw, avx512dq, avx512vl, avx512_vbmi, avx512_vnni, avx512_bf16,
      avx_vnni;
  bool amx_tile, amx_int8, amx_bf16;
  bool amd;
};

std::uint64_t enabled_state() {
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
}

X86 detect() {
  X86 cpu{};
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (__get_cpuid(0, &a, &b, &c, &d)) {
    cpu.amd = b == signature_AMD_ebx && c == signature_AMD_ecx && d == signature_AMD_edx;
  }
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return cpu;
  const std::uint64_t state = enabled_state();
  const bool ymm = (state & 0x6) == 0x6;
  const bool zmm = (state & 0xe6) == 0xe6;
  const bool tiles = (state & 0x60000) == 0x60000;
  cpu.avx = ymm && (c & bit_AVX);
  cpu.fma = cpu.avx && (c & bit_FMA);
  cpu.f16c = cpu.avx && (c & bit_F16C);
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return cpu;
  cpu.avx2 = cpu.avx && (b & (1u << 5));
  cpu.avx512f = zmm && (b & (1u << 16));
  cpu.avx512dq = cpu.avx512f && (b & (1u << 17));
  cpu.avx512bw = cpu.avx512f && (b & (1u << 30));
  cpu.avx512vl = cpu.avx512f && (b & (1u << 31));
  cpu.avx512_vbmi = cpu.avx512f && (c & (1u << 1));
  cpu.avx512_vnni = cpu.avx512f && (c & (1u << 11));
  cpu.amx_bf16 = tiles && (d & (1u << 22));
  cpu.amx_tile = tiles && (d & (1u << 24));
  cpu.amx_int8 = tiles && (d & (1u << 25));
  if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
    cpu.avx_vnni = cpu.avx2 && (a & (1u << 4));
    cpu.avx512_bf16 = cpu.avx512f && (a & (1u << 5));
  }
  return cpu;
}

bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

const X86& x86() {
  static const X86 cpu = detect();
  return cpu;
}
#endif

#if defined(__linux__)
constexpr int kNoQuota = 1 << 20;

// Cores that a quota of microseconds in a period is worth, rounded up; kNoQuota for what is none.
int cores_of(const std::string& quota, long long period) {
  if (quota.empty() || quota == "max" || quota[0] == '-' || period <= 0) return kNoQuota;
  try {
    const long long cores = (std::stoll(quota) + period - 1) / period;
    return static_cast<int>(std::clamp<long long>(cores, 1, kNoQuota));
  } catch (const std::exception&) {
    return kNoQuota;
  }
}

// Smallest quota of a control group and of all above it. In a container its own group is the root.
int quota_of_groups(const std::string& root, std::string group, bool unified) {
  int cores = kNoQuota;
  for (;;) {
    const std::string directory = root + (group == "/" ? "" : group);
    std::string quota;
    long long period = 0;
    if (unified) {
      std::ifstream(directory + "/cpu.max") >> quota >> period;
    } else {
      std::ifstream(directory + "/cpu.cfs_quota_us") >> quota;
      std::ifstream(directory + "/cpu.cfs_period_us") >> period;
    }
    cores = std::min(cores, cores_of(quota, period));
    if (group.empty() || group == "/") return cores;
    group.resize(group.rfind('/'));
  }
}

// Cores allowed by the control group, rounded up; kNoQuota where there is no limit.
int quota_cores() {
  int cores = kNoQuota;
  std::ifstream groups("/proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {  // "0::/path" or "4:cpu,cpuacct:/path"
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (path.empty() || path[0] != '/') continue;
    if (controllers == ",,") {
      cores = std::min(cores, quota_of_groups("/sys/fs/cgroup", path, true));
    } else if (controllers.find(",cpu,") != std::string::npos) {
      cores = std::min(cores, quota_of_groups("/sys/fs/cgroup/cpu", path, false));
    }
  }
  return cores;
}

int affinity_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 0;
  std::set<std::string> cores;  // one name of siblings for each physical core
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                       "/topology/thread_siblings_list");
    std::string siblings;
    cores.insert(file >> siblings ? siblings : "cpu" + std::to_string(cpu));
  }
  return static_cast<int>(cores.size());
}

// Of the affinity mask, hyper-threads counted one by one.
int logical_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  return sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
}
#endif

}  // namespace

std::vector<std::pair<const char*, bool>> cpu_features() {
#if defined(MOECHAT_X86)
  const X86& cpu = x86();
  return {{"avx", cpu.avx},
          {"avx2", cpu.avx2},
          {"fma", cpu.fma},
          {"f16c", cpu.f16c},
          {"avx_vnni", cpu.avx_vnni},
          {"avx512f", cpu.avx512f},
          {"avx512bw", cpu.avx512bw},
          {"avx512dq", cpu.avx512dq},
          {"avx512vl", cpu.avx512vl},
          {"avx512vbmi", cpu.avx512_vbmi},
          {"avx512_vnni", cpu.avx512_vnni},
          {"avx512_bf16", cpu.avx512_bf16},
          {"amx_tile", cpu.amx_tile},
          {"amx_int8", cpu.amx_int8},
          {"amx_bf16", cpu.amx_bf16}};
#else
  return {};
#endif
}

bool cpu_is_amd() {
#if defined(MOECHAT_X86)
  return x86().amd;
#else
  return false;
#endif
}

bool cpu_runs_avx2() {
#if defined(MOECHAT_X86)
  return x86().avx2 && x86().fma && x86().f16c;
#else
  return false;
#endif
}

bool cpu_runs_avx512() {
#if defined(MOECHAT_X86)
  return cpu_runs_avx2() && x86().avx512f && x86().avx512bw && x86().avx512dq && x86().avx512vl;
#else
  return false;
#endif
}

bool cpu_runs_avx2_vnni() {
#if defined(MOECHAT_X86)
  return cpu_runs_avx2() && x86().avx_vnni;
#else
  return false;
#endif
}

bool cpu_runs_avx512_vnni() {
#if defined(MOECHAT_X86)
  return cpu_runs_avx512() && x86().avx512_vnni;
#else
  return false;
#endif
}

bool cpu_runs_avx512_vbmi() {
#if defined(MOECHAT_X86)
  return cpu_runs_avx512_vnni() && x86().avx512_vbmi;
#else
  return false;
#endif
}

bool cpu_runs_amx() {
#if defined(MOECHAT_X86)
  static const bool runs = cpu_runs_avx512_vnni() && x86().amx_tile && x86().amx_int8 && may_use_tiles();
  return runs;
#else
  return false;
#endif
}

int available_cores() {
  int cores = 0;
#if defined(__linux__)
  cores = affinity_cores();
  if (cores > 0) cores = std::min(cores, quota_cores());
#endif
  if (cores <= 0) cores = static_cast<int>(std::thread::hardware_concurrency());
  return std::max(1, cores);
}

int cores_to_spin_on() {
#if defined(__linux__)
  const int cores = affinity_cores();
  if (cores > 0) return quota_cores() < logical_cores() ? 0 : cores;
#endif
  return available_cores();
}

}  // namespace moechat
