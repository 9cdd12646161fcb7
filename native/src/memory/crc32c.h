// CRC-32C (Castagnoli), the checksum of block records. It finds every error of up to 32 neighbouring bits and
// all but one of 4 billion others; against intent there is SHA-256 when a store is verified.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moechat {

// Ways to compute it; all give the same values.
enum class CrcWay {
  kPortable,  // tables, 8 bytes a step
  kSse42,     // the crc32 instruction, in three streams, since each one waits for the one before
  kAvx512,    // carry-less products of 64 bytes (VPCLMULQDQ), as fast as memory
};

const char* crc_way_name(CrcWay way);
// Those that this processor has, the best one last.
const std::vector<CrcWay>& crc_ways();

// Checksum of `bytes` bytes that follow others whose checksum is `before`, by the best way.
std::uint32_t crc32c(const unsigned char* data, std::size_t bytes, std::uint32_t before = 0);
// The same by another way. REQUIRES: it is in crc_ways().
std::uint32_t crc32c_by(CrcWay way, const unsigned char* data, std::size_t bytes, std::uint32_t before = 0);

}  // namespace moechat
