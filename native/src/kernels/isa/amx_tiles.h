// The eight tile registers of AMX, 16 rows of 64 bytes each: those of the processor, or an emulation in plain
// C++ with which the callers run on every processor. Included inside the anonymous namespace of isa/amx.cc
// and isa/amx_emulated.cc.

constexpr bool kWideDot = true;  // sums have 32 bits

#if defined(MOECHAT_AMX)

// Inline assembly declares to the compiler which memory is read and written: GCC 12 ignores that its own
// _tile_loadconfig reads the configuration, and drops the stores to it.
struct Tiles {
  static void enter() {
    struct alignas(64) {
      unsigned char palette, start_row, reserved[14];
      std::uint16_t row_bytes[16];
      unsigned char rows[16];
    } config = {};
    static_assert(sizeof config == 64, "the configuration of the tiles has 64 bytes");
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = 64;
      config.rows[i] = 16;
    }
    asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
  }
  static void leave() { asm volatile("tilerelease" : : : "memory"); }
  template <int kTile>
  MOECHAT_INLINE static void clear() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  template <int kTile>
  MOECHAT_INLINE static void load(const unsigned char* from, std::int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  MOECHAT_INLINE static void save(unsigned char* to, std::int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
  }
  // sums[i][j] += sum over d, k of the signed x[i][4d + k] times the unsigned codes[d][4j + k]
  template <int kSums, int kX, int kCodes>
  MOECHAT_INLINE static void multiply() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kX), "i"(kCodes));
  }
};

#else

struct TileFile {
  unsigned char bytes[8][16][64];
  bool configured;
};
thread_local TileFile tile_file;

struct Tiles {
  static void enter() {
    tile_file.configured = true;
    // The processor clears the tiles here. Other values expose code that relies on that.
    __builtin_memset(tile_file.bytes, 0x5a, sizeof tile_file.bytes);
  }
  static void leave() { tile_file.configured = false; }
  // As the processor, traps when tiles are not configured.
  static void need() {
    if (!tile_file.configured) __builtin_trap();
  }
  template <int kTile>
  static void clear() {
    need();
    __builtin_memset(tile_file.bytes[kTile], 0, 1024);
  }
  template <int kTile>
  static void load(const unsigned char* from, std::int64_t stride) {
    need();
    for (int i = 0; i < 16; ++i) __builtin_memcpy(tile_file.bytes[kTile][i], from + i * stride, 64);
  }
  template <int kTile>
  static void save(unsigned char* to, std::int64_t stride) {
    need();
    for (int i = 0; i < 16; ++i) __builtin_memcpy(to + i * stride, tile_file.bytes[kTile][i], 64);
  }
  template <int kSums, int kX, int kCodes>
  static void multiply() {
    need();
    for (int i = 0; i < 16; ++i) {
      std::int32_t sums[16];
      __builtin_memcpy(sums, tile_file.bytes[kSums][i], sizeof sums);
      for (int d = 0; d < 16; ++d) {
        for (int j = 0; j < 16; ++j) {
          for (int k = 0; k < 4; ++k) {
            sums[j] += static_cast<std::int8_t>(tile_file.bytes[kX][i][4 * d + k]) *
                       tile_file.bytes[kCodes][d][4 * j + k];
          }
        }
      }
      __builtin_memcpy(tile_file.bytes[kSums][i], sums, sizeof sums);
    }
  }
};

#endif
