#include "kernels/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels/cpu_info.h"

namespace moechat {

extern const KernelTable kPortableKernels;
#if defined(MOECHAT_X86)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
extern const IntegerKernels kAvx2VnniIntegers;
extern const IntegerKernels kAvx512VnniIntegers;
extern const ManyTokens kAmxTokens;
extern const ManyTokens kAmxEmulatedTokens;
bool amx_multiplies();            // in isa_amx.cc
bool amx_emulation_multiplies();  // in isa_amx_emulated.cc
#endif

namespace {

struct Build {
  const KernelTable* table;
  // Asked only where the answer counts: to ask for AMX changes the process, and tries its instructions.
  bool (*runs)();
  bool hidden = false;  // for tests: neither listed nor chosen, only named
};

#if defined(MOECHAT_X86)
IntegerKernels with_many(IntegerKernels kernels, const ManyTokens& many) {
  kernels.many = &many;
  return kernels;
}

// The same kernels, but for the integer ones.
KernelTable with_integers(const char* name, KernelTable table, const IntegerKernels& integer) {
  table.name = name;
  table.integer = &integer;
  return table;
}
#endif

// Slowest first.
std::vector<Build> builds() {
#if defined(MOECHAT_X86)
  static const KernelTable avx2_vnni = with_integers("avx2-vnni", kAvx2Kernels, kAvx2VnniIntegers);
  static const KernelTable avx512_vnni = with_integers("avx512-vnni", kAvx512Kernels, kAvx512VnniIntegers);
  static const IntegerKernels amx_integers = with_many(kAvx512VnniIntegers, kAmxTokens);
  static const KernelTable amx = with_integers("amx", kAvx512Kernels, amx_integers);
  static const IntegerKernels emulated_integers = with_many(*kAvx2Kernels.integer, kAmxEmulatedTokens);
  static const KernelTable emulated = with_integers("amx-emulated", kAvx2Kernels, emulated_integers);
#endif
  return {{&kPortableKernels, [] { return true; }},
#if defined(MOECHAT_X86)
          {&kAvx2Kernels, cpu_runs_avx2},
          {&avx2_vnni, cpu_runs_avx2_vnni},
          {&kAvx512Kernels, cpu_runs_avx512},
          {&avx512_vnni, cpu_runs_avx512_vnni},
          {&amx, [] { return cpu_runs_amx() && amx_multiplies(); }},
          {&emulated, [] { return cpu_runs_avx2() && amx_emulation_multiplies(); }, true}
#endif
  };
}

std::string names(const std::vector<const char*>& list) {
  std::string joined;
  for (const char* name : list) joined += (joined.empty() ? "" : ", ") + std::string(name);
  return joined;
}

const KernelTable& choose() {
  const std::vector<Build> all = builds();
  const char* wanted = std::getenv("MOECHAT_ISA");
  if (wanted == nullptr || *wanted == '\0') {
    const KernelTable* best = &kPortableKernels;
    for (const Build& build : all) {
      if (!build.hidden && build.runs()) best = build.table;
    }
    return *best;
  }
  const std::string name = wanted;
  for (const Build& build : all) {
    if (name != build.table->name) continue;
    if (build.runs()) return *build.table;
    throw std::runtime_error("MOECHAT_ISA=" + name + " cannot run on this processor; it runs " +
                             names(available_isas()));
  }
  throw std::runtime_error("MOECHAT_ISA=" + name +
                           " is not an instruction set of this build; this processor runs " +
                           names(available_isas()));
}

}  // namespace

const KernelTable& kernels() {
  static std::atomic<const KernelTable*> chosen{nullptr};
  const KernelTable* table = chosen.load(std::memory_order_acquire);
  if (table == nullptr) {
    table = &choose();
    chosen.store(table, std::memory_order_release);
  }
  return *table;
}

std::vector<const char*> available_isas() {
  std::vector<const char*> result;
  for (const Build& build : builds()) {
    if (!build.hidden && build.runs()) result.push_back(build.table->name);
  }
  return result;
}

}  // namespace moechat
