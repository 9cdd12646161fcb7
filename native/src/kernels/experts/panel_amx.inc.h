// Products of unpacked row tiles with many tokens in AMX tiles, 16 tokens x 16 rows x 64 columns at a time.
// Included inside the anonymous namespace of one instruction set, after panel_unpack.inc.h and amx_tiles.h;
// replaces panel_kernel.inc.h with bitwise the same results.
//
// Works on two row tiles at a time. Tile registers 0 and 1 hold the sums of their hi planes, 2 and 3 those of
// the lo planes, 4 and 5 the planes of the tokens, 6 and 7 the codes.

constexpr std::int64_t kPanelTokens = 16;
constexpr std::int64_t kRowsAfter =
    kPanelTokens - 1;  // a block always has 16 tokens; results beyond the last token are dropped
constexpr std::int64_t kThreshold = 6;

template <class W, int kPlanes>
constexpr Form form_of() {
  return kPlanes == 2 ? Form::kPlanes : Form::kQuads;
}
constexpr void (*kEnter)() = Tiles::enter;
constexpr void (*kLeave)() = Tiles::leave;

constexpr std::int64_t kTileBytes = 1024;

// Sums of one group: [plane, row tile, 16 tokens, 16 rows] int32.
template <Form kForm>
MOECHAT_INLINE void group_products(const unsigned char* const (&codes)[2], const unsigned char* x,
                                   std::int64_t stride, unsigned char* sums) {
  Tiles::load<6>(codes[0], kStepBytes);
  Tiles::load<7>(codes[1], kStepBytes);
  Tiles::load<4>(x, stride);
  Tiles::clear<0>();
  Tiles::clear<1>();
  Tiles::multiply<0, 4, 6>();
  Tiles::multiply<1, 4, 7>();
  if constexpr (kForm == Form::kPlanes) {
    Tiles::load<5>(x + 64, stride);
    Tiles::clear<2>();
    Tiles::clear<3>();
    Tiles::multiply<2, 5, 6>();
    Tiles::multiply<3, 5, 7>();
  }
  Tiles::save<0>(sums, 64);
  Tiles::save<1>(sums + kTileBytes, 64);
  if constexpr (kForm == Form::kPlanes) {
    Tiles::save<2>(sums + 2 * kTileBytes, 64);
    Tiles::save<3>(sums + 3 * kTileBytes, 64);
  }
}

// acc[t * 32 + 16 * m] += a group whose sums are computed; `tail` begins with the group for token 0.
template <Form kForm, class P, Sum kSum, Terms kTerms>
MOECHAT_INLINE void add_products(const unsigned char* const (&codes)[2], const unsigned char* sums,
                                 const std::uint32_t* tail, std::int64_t tail_stride, const float* weights,
                                 float* acc) {
  for (int m = 0; m < 2; ++m) {
    const unsigned char* of_tile = codes[m] + code_bytes(kForm);
    const Vec scale = load(of_tile);
    const Vec zeros = load(of_tile + kStepBytes);
    for (int t = 0; t < kPanelTokens; ++t) {
      const unsigned char* at = sums + m * kTileBytes + t * 64;
      VecI sum = loadi(at);
      if constexpr (kForm == Form::kPlanes) sum = addi(shl(sum, 8), loadi(at + 2 * kTileBytes));
      float* to = acc + t * 2 * kTileRows + m * kTileRows;
      store(to, next_sum<kSum, P, kTerms>(of_tile, scale, zeros, sum, tail + t * tail_stride, weights, t,
                                          load(to)));
    }
  }
}

// acc[t * 32 + 16 * m] += groups [first, first + groups) of all tokens and, up to a multiple of 16, of rows
// after them. Calls `between` with the number of blocks before every block of tokens.
template <Form kForm, class P, Sum kSum, Terms kTerms, class Between>
MOECHAT_INLINE void add_panel(const unsigned char* panel, std::int64_t tile_stride, std::int64_t first,
                              std::int64_t groups, const TokenRows& rows, std::int64_t tokens,
                              const float* weights, float* acc, const Between& between) {
  constexpr std::int64_t kTokenBytes = token_bytes(kForm);
  alignas(64) unsigned char sums[2][4 * kTileBytes];
  const std::int64_t tail_stride = rows.stride / 4;
  for (std::int64_t block = 0; block < tokens; block += kPanelTokens) {
    between((tokens + kPanelTokens - 1) / kPanelTokens);
    const unsigned char* row = rows.data + block * rows.stride;
    const unsigned char* x = row + first * kTokenBytes;
    const std::uint32_t* tail =
        reinterpret_cast<const std::uint32_t*>(row + rows.groups * kTokenBytes) + kTailDwords<P> * first;
    const float* of_block = kSum == Sum::kTerms ? nullptr : weights + block;
    const unsigned char* codes[2] = {panel, panel + tile_stride};
    group_products<kForm>(codes, x, rows.stride, sums[0]);
    for (std::int64_t g = 0; g < groups; ++g) {
      // The tiles multiply the next group while the vector units add this one.
      const unsigned char* next[2] = {codes[0] + panel_bytes<P>(kForm), codes[1] + panel_bytes<P>(kForm)};
      x += kTokenBytes;
      if (g + 1 < groups) group_products<kForm>(next, x, rows.stride, sums[(g + 1) % 2]);
      add_products<kForm, P, kSum, kTerms>(codes, sums[g % 2], tail, tail_stride, of_block,
                                           acc + block * 2 * kTileRows);
      codes[0] = next[0];
      codes[1] = next[1];
      tail += kTailDwords<P>;
    }
  }
}

// Returns whether the tiles multiply correctly: signed by unsigned, every dword and byte in its place. A
// virtual machine may show the processor's flags but lack the registers.
bool tiles_multiply() {
  alignas(64) unsigned char x[kTileBytes];
  alignas(64) unsigned char codes[kTileBytes];
  alignas(64) std::int32_t sums[16 * 16];
  for (int i = 0; i < kTileBytes; ++i) {
    x[i] = static_cast<unsigned char>(i * 73 + 11 + i / 64);
    codes[i] = static_cast<unsigned char>(i * 151 + 7 + i / 64);
  }
  Tiles::enter();
  Tiles::load<4>(x, 64);
  Tiles::load<6>(codes, 64);
  Tiles::clear<0>();
  Tiles::multiply<0, 4, 6>();
  Tiles::save<0>(reinterpret_cast<unsigned char*>(sums), 64);
  Tiles::leave();
  bool same = true;
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) {
      std::int32_t wanted = 0;
      for (int d = 0; d < 16; ++d) {
        for (int k = 0; k < 4; ++k)
          wanted += static_cast<std::int8_t>(x[i * 64 + 4 * d + k]) * codes[d * 64 + 4 * j + k];
      }
      same = same && sums[i * 16 + j] == wanted;
    }
  }
  return same;
}
