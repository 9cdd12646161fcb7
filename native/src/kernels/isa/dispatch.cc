#include "kernels/isa/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels/threads/cpu_info.h"

namespace moechat {

extern const KernelTable kPortableKernels;
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
extern const IntegerKernels kPortableIntegers;
extern const IntegerKernels kAvx2Integers;
extern const IntegerKernels kAvx2VnniIntegers;
extern const IntegerKernels kAvx512Integers;
extern const IntegerKernels kAvx512VnniIntegers;
extern const IntegerKernels kPortableKept;
extern const IntegerKernels kAvx2Kept;
extern const IntegerKernels kAvx2VnniKept;
extern const IntegerKernels kAvx512Kept;
extern const IntegerKernels kAvx512VnniKept;
extern const ManyTokens kAmxTokens;
extern const ManyTokens kAmxEmulatedTokens;
bool amx_multiplies();            // in amx.cc
bool amx_emulation_multiplies();  // in amx_emulated.cc

namespace {

// The kernels of one instruction set, combined from the units that the build compiled.
struct Parts {
  IntegerKernels integers;
  KernelTable table;

  // `many` replaces the many-token path for plain weights.
  Parts(const char* name, const KernelTable& floats, const IntegerKernels& integer,
        const IntegerKernels& kept, const ManyTokens* many = nullptr)
      : integers(integer), table(floats) {
    if (many != nullptr) integers.many = many;
    table.name = name;
    table.integer = &integers;
    table.kept = &kept;
  }
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;
};

struct InstructionSet {
  const char* name;
  const KernelTable* table;  // null: not in this build
  // Called only when needed: for AMX it requests the tile registers and tries the instructions.
  bool (*runs)();
  bool hidden = false;  // for tests: not listed, and chosen only by name
};

// Slowest first. MOECHAT_HAS_* is 1 for the sets of the CMake variable MOECHAT_ISAS.
std::vector<InstructionSet> make_sets() {
  std::vector<InstructionSet> sets = {
      {"portable", nullptr, [] { return true; }},     {"avx2", nullptr, cpu_runs_avx2},
      {"avx2-vnni", nullptr, cpu_runs_avx2_vnni},     {"avx512", nullptr, cpu_runs_avx512},
      {"avx512-vnni", nullptr, cpu_runs_avx512_vnni}, {"amx", nullptr, cpu_runs_amx},
      {"amx-emulated", nullptr, cpu_runs_avx2, true},
  };
  const auto add = [&sets](const Parts& parts) -> InstructionSet& {
    for (InstructionSet& set : sets) {
      if (std::string(set.name) != parts.table.name) continue;
      set.table = &parts.table;
      return set;
    }
    throw std::logic_error(std::string(parts.table.name) + " has no row");
  };
  static const Parts portable("portable", kPortableKernels, kPortableIntegers, kPortableKept);
  add(portable);
  if constexpr (MOECHAT_HAS_AVX2) {
    static const Parts parts("avx2", kAvx2Kernels, kAvx2Integers, kAvx2Kept);
    add(parts);
  }
  if constexpr (MOECHAT_HAS_AVX2_VNNI) {
    static const Parts parts("avx2-vnni", kAvx2Kernels, kAvx2VnniIntegers, kAvx2VnniKept);
    add(parts);
  }
  if constexpr (MOECHAT_HAS_AVX512) {
    static const Parts parts("avx512", kAvx512Kernels, kAvx512Integers, kAvx512Kept);
    add(parts);
  }
  if constexpr (MOECHAT_HAS_AVX512_VNNI) {
    static const Parts parts("avx512-vnni", kAvx512Kernels, kAvx512VnniIntegers, kAvx512VnniKept);
    add(parts);
  }
  if constexpr (MOECHAT_HAS_AMX) {
    static const Parts parts("amx", kAvx512Kernels, kAvx512VnniIntegers, kAvx512VnniKept, &kAmxTokens);
    add(parts).runs = [] { return cpu_runs_amx() && amx_multiplies(); };
  }
  if constexpr (MOECHAT_HAS_AMX_EMULATED) {
    static const Parts parts("amx-emulated", kAvx2Kernels, kAvx2Integers, kAvx2Kept, &kAmxEmulatedTokens);
    add(parts).runs = [] { return cpu_runs_avx2() && amx_emulation_multiplies(); };
  }
  return sets;
}

const std::vector<InstructionSet>& sets() {
  static const std::vector<InstructionSet> made = make_sets();
  return made;
}

std::string joined(const std::vector<const char*>& names) {
  std::string text;
  for (const char* name : names) text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

const KernelTable& choose() {
  const char* variable = std::getenv("MOECHAT_ISA");
  if (variable == nullptr || *variable == '\0') {
    const KernelTable* best = nullptr;
    for (const InstructionSet& set : sets()) {
      if (!set.hidden && set.table != nullptr && set.runs()) best = set.table;
    }
    return *best;
  }
  const std::string name = variable;
  for (const InstructionSet& set : sets()) {
    if (name != set.name) continue;
    if (!set.runs()) {
      throw std::runtime_error("MOECHAT_ISA=" + name + " cannot run on this processor; it runs " +
                               joined(available_isas()));
    }
    if (set.table == nullptr) {
      throw std::runtime_error("MOECHAT_ISA=" + name + " is not compiled into this build, which has " +
                               joined(built_isas()) +
                               "; in a clone, MOECHAT_ISAS=all scripts/setup compiles all instruction sets");
    }
    return *set.table;
  }
  throw std::runtime_error("MOECHAT_ISA=" + name +
                           " is not an instruction set; this build and processor run " +
                           joined(available_isas()));
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

namespace {

constexpr Reading kOneStream{6144, true};
constexpr Reading kTwoStreams{4096, false};
std::atomic<int> g_streams{0};  // 0: not chosen yet

}  // namespace

Reading weight_reading() {
  int streams = g_streams.load(std::memory_order_relaxed);
  if (streams == 0) {
    streams = cpu_is_amd() ? 1 : 2;
    g_streams.store(streams, std::memory_order_relaxed);
  }
  return streams == 1 ? kOneStream : kTwoStreams;
}

void set_weight_streams(int streams) {
  if (streams != 1 && streams != 2) throw std::invalid_argument("weights are read as 1 or 2 streams");
  g_streams.store(streams, std::memory_order_relaxed);
}

std::vector<const char*> available_isas() {
  std::vector<const char*> names;
  for (const InstructionSet& set : sets()) {
    if (!set.hidden && set.table != nullptr && set.runs()) names.push_back(set.name);
  }
  return names;
}

std::vector<const char*> built_isas() {
  std::vector<const char*> names;
  for (const InstructionSet& set : sets()) {
    if (set.table != nullptr) names.push_back(set.name);
  }
  return names;
}

bool looks_up_bytes() {
  static const bool found = cpu_runs_avx512_vbmi();
  return found;
}

}  // namespace moechat
