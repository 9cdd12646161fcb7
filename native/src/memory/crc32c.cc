#include "memory/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#define MOECHAT_CRC_SSE42 1
#else
#define MOECHAT_CRC_SSE42 0
#endif

namespace moechat {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78u;  // 0x1edc6f41 with its bits reversed

// ---- tables: slice[n][b] is the effect of byte b that n zero bytes follow

using Slices = std::array<std::array<std::uint32_t, 256>, 8>;

Slices make_slices() {
  Slices slices{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? kPolynomial : 0u);
    slices[0][byte] = crc;
  }
  for (std::size_t n = 1; n < slices.size(); ++n) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t crc = slices[n - 1][byte];
      slices[n][byte] = (crc >> 8) ^ slices[0][crc & 0xff];
    }
  }
  return slices;
}

const Slices& slices() {
  static const Slices made = make_slices();
  return made;
}

std::uint32_t portable(const unsigned char* data, std::size_t bytes, std::uint32_t crc) {
  const Slices& table = slices();
  for (; bytes >= 8; data += 8, bytes -= 8) {
    const std::uint32_t low = crc ^ (std::uint32_t{data[0]} | std::uint32_t{data[1]} << 8 |
                                     std::uint32_t{data[2]} << 16 | std::uint32_t{data[3]} << 24);
    crc = table[7][low & 0xff] ^ table[6][(low >> 8) & 0xff] ^ table[5][(low >> 16) & 0xff] ^
          table[4][low >> 24] ^ table[3][data[4]] ^ table[2][data[5]] ^ table[1][data[6]] ^ table[0][data[7]];
  }
  for (; bytes > 0; ++data, --bytes) crc = (crc >> 8) ^ table[0][(crc ^ *data) & 0xff];
  return crc;
}

#if MOECHAT_CRC_SSE42

// ---- three streams

// What a number of zero bytes does to a checksum: linear over its bits, so four tables of a byte each.
class ZeroBytes {
 public:
  explicit ZeroBytes(std::size_t bytes) {
    // Columns of the matrix of one zero byte; then by squaring, from the highest bit of the count.
    Matrix step{}, all{};
    for (std::uint32_t bit = 0; bit < 32; ++bit) {
      const std::uint32_t crc = 1u << bit;
      step[bit] = (crc >> 8) ^ slices()[0][crc & 0xff];
      all[bit] = crc;
    }
    for (; bytes > 0; bytes >>= 1) {
      if ((bytes & 1) != 0) all = product(step, all);
      step = product(step, step);
    }
    for (std::size_t n = 0; n < 4; ++n) {
      for (std::uint32_t byte = 0; byte < 256; ++byte) table_[n][byte] = apply(all, byte << (8 * n));
    }
  }

  std::uint32_t operator()(std::uint32_t crc) const {
    return table_[0][crc & 0xff] ^ table_[1][(crc >> 8) & 0xff] ^ table_[2][(crc >> 16) & 0xff] ^
           table_[3][crc >> 24];
  }

 private:
  using Matrix = std::array<std::uint32_t, 32>;

  static std::uint32_t apply(const Matrix& matrix, std::uint32_t crc) {
    std::uint32_t result = 0;
    for (std::size_t bit = 0; crc != 0; ++bit, crc >>= 1) {
      if ((crc & 1u) != 0) result ^= matrix[bit];
    }
    return result;
  }
  static Matrix product(const Matrix& outer, const Matrix& inner) {
    Matrix result{};
    for (std::size_t bit = 0; bit < 32; ++bit) result[bit] = apply(outer, inner[bit]);
    return result;
  }

  std::array<std::array<std::uint32_t, 256>, 4> table_{};
};

// Bytes of a stream: long ones join seldom, short ones leave little for the end.
constexpr std::size_t kLong = 4096;
constexpr std::size_t kShort = 256;

std::uint64_t word(const unsigned char* data) {
  std::uint64_t value = 0;
  std::memcpy(&value, data, sizeof value);
  return value;
}

__attribute__((target("sse4.2"))) std::uint32_t streams(const unsigned char** data, std::size_t* bytes,
                                                        std::size_t length, const ZeroBytes& shift,
                                                        std::uint32_t crc) {
  for (; *bytes >= 3 * length; *data += 3 * length, *bytes -= 3 * length) {
    std::uint64_t first = crc, second = 0, third = 0;
    const unsigned char* const end = *data + length;
    for (const unsigned char* at = *data; at < end; at += 8) {
      first = _mm_crc32_u64(first, word(at));
      second = _mm_crc32_u64(second, word(at + length));
      third = _mm_crc32_u64(third, word(at + 2 * length));
    }
    crc = shift(shift(static_cast<std::uint32_t>(first)) ^ static_cast<std::uint32_t>(second)) ^
          static_cast<std::uint32_t>(third);
  }
  return crc;
}

__attribute__((target("sse4.2"))) std::uint32_t sse42(const unsigned char* data, std::size_t bytes,
                                                      std::uint32_t crc) {
  static const ZeroBytes over_long(kLong);
  static const ZeroBytes over_short(kShort);
  crc = streams(&data, &bytes, kLong, over_long, crc);
  crc = streams(&data, &bytes, kShort, over_short, crc);
  std::uint64_t wide = crc;
  for (; bytes >= 8; data += 8, bytes -= 8) wide = _mm_crc32_u64(wide, word(data));
  crc = static_cast<std::uint32_t>(wide);
  for (; bytes > 0; ++data, --bytes) crc = _mm_crc32_u8(crc, *data);
  return crc;
}

// ---- carry-less products
//
// Folding (Gopal and others, Fast CRC computation using PCLMULQDQ, 2009): 16 bytes of the remainder so far
// move over 256 bytes of the message by two products with powers of x modulo the polynomial. What is left
// after the last 256 bytes has the checksum of the message.

constexpr std::size_t kFold = 256;

// x^power modulo the polynomial, as a factor of products of reversed bits.
std::int64_t factor(std::size_t power) {
  std::uint32_t value = 0x80000000u;
  for (; power > 0; --power) value = (value >> 1) ^ ((value & 1u) != 0 ? kPolynomial : 0u);
  return static_cast<std::int64_t>(std::uint64_t{value} << 1);
}

__attribute__((target("avx512f,vpclmulqdq"))) inline __m512i fold(__m512i value, __m512i factors,
                                                                  const unsigned char* data) {
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(value, factors, 0x00),
                                   _mm512_clmulepi64_epi128(value, factors, 0x11), _mm512_loadu_si512(data),
                                   0x96);  // exclusive or of all three
}

__attribute__((target("avx512f,vpclmulqdq"))) std::uint32_t avx512(const unsigned char* data,
                                                                   std::size_t bytes, std::uint32_t crc) {
  if (bytes < 2 * kFold) return sse42(data, bytes, crc);
  static const std::int64_t low = factor(8 * kFold + 32), high = factor(8 * kFold - 32);
  const __m512i factors = _mm512_set_epi64(high, low, high, low, high, low, high, low);
  __m512i first =
      _mm512_xor_si512(_mm512_loadu_si512(data), _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, std::int64_t{crc}));
  __m512i second = _mm512_loadu_si512(data + 64);
  __m512i third = _mm512_loadu_si512(data + 128);
  __m512i fourth = _mm512_loadu_si512(data + 192);
  for (data += kFold, bytes -= kFold; bytes >= kFold; data += kFold, bytes -= kFold) {
    first = fold(first, factors, data);
    second = fold(second, factors, data + 64);
    third = fold(third, factors, data + 128);
    fourth = fold(fourth, factors, data + 192);
  }
  alignas(64) unsigned char left[kFold];
  _mm512_store_si512(left, first);
  _mm512_store_si512(left + 64, second);
  _mm512_store_si512(left + 128, third);
  _mm512_store_si512(left + 192, fourth);
  return sse42(data, bytes, sse42(left, kFold, 0));
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("vpclmulqdq") != 0;
}

bool has_sse42() { return __builtin_cpu_supports("sse4.2") != 0; }

#endif  // MOECHAT_CRC_SSE42

}  // namespace

const char* crc_way_name(CrcWay way) {
  if (way == CrcWay::kAvx512) return "avx512";
  return way == CrcWay::kSse42 ? "sse4.2" : "portable";
}

const std::vector<CrcWay>& crc_ways() {
  static const std::vector<CrcWay> ways = [] {
    std::vector<CrcWay> found{CrcWay::kPortable};
#if MOECHAT_CRC_SSE42
    if (has_sse42()) found.push_back(CrcWay::kSse42);
    if (has_sse42() && has_avx512()) found.push_back(CrcWay::kAvx512);
#endif
    return found;
  }();
  return ways;
}

std::uint32_t crc32c_by(CrcWay way, const unsigned char* data, std::size_t bytes, std::uint32_t before) {
#if MOECHAT_CRC_SSE42
  if (way == CrcWay::kAvx512) return ~avx512(data, bytes, ~before);
  if (way == CrcWay::kSse42) return ~sse42(data, bytes, ~before);
#endif
  static_cast<void>(way);
  return ~portable(data, bytes, ~before);
}

std::uint32_t crc32c(const unsigned char* data, std::size_t bytes, std::uint32_t before) {
  static const CrcWay best = crc_ways().back();
  return crc32c_by(best, data, bytes, before);
}

}  // namespace moechat
