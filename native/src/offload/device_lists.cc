#include "offload/device_lists.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace moechat {
namespace {

constexpr std::int64_t kStep = 4;  // elements of 16 bytes

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }
std::int64_t rounded(std::int64_t count) { return (count + kStep - 1) / kStep * kStep; }

void check_room(std::int64_t needed, std::int64_t capacity) {
  if (needed <= capacity) return;
  throw std::invalid_argument("lists of " + std::to_string(needed) + " elements do not fit into " +
                              std::to_string(capacity));
}

// Copies a list and returns where the next one begins.
template <class T>
std::int32_t* put(const T* from, std::int64_t count, std::int32_t* to) {
  static_assert(sizeof(T) == sizeof(std::int32_t));
  std::memcpy(to, from, at(count) * sizeof(T));
  return to + rounded(count);
}

}  // namespace

std::int64_t block_list_size(std::int64_t rows, std::int64_t entries) {
  return 3 * rounded(entries) + rounded(rows + 1) + rounded(rows);
}

ItemLists write_items(const Grouped& rows, std::int64_t tokens, std::int32_t* out, std::int64_t capacity) {
  static thread_local std::vector<std::int32_t> counts;
  counts.assign(at(tokens), 0);
  ItemLists lists{};
  lists.rows = rows.rows();
  lists.items = rows.items();
  lists.picks = 1;
  for (const std::int32_t token : rows.token) lists.picks = std::max(lists.picks, ++counts[at(token)]);
  for (const std::int32_t items : rows.tokens_of) lists.most = std::max(lists.most, items);
  const std::int64_t items = lists.items;
  const std::int64_t table = tokens * lists.picks;
  lists.token = rounded(lists.rows + 1);
  lists.weight = lists.token + rounded(items);
  lists.table = lists.weight + rounded(items);
  lists.used = lists.table + rounded(table);
  check_room(lists.used, capacity);
  out = put(rows.start.data(), lists.rows + 1, out);
  out = put(rows.token.data(), items, out);
  out = put(rows.weight.data(), items, out);
  std::fill_n(out, table, -1);
  counts.assign(at(tokens), 0);
  for (std::int32_t item = 0; item < lists.items; ++item) {
    const std::int32_t token = rows.token[at(item)];
    out[std::int64_t{token} * lists.picks + counts[at(token)]++] = item;
  }
  return lists;
}

BlockLists write_blocks(const DeviceLaunch& launch, const Grouped& rows, std::int32_t* out,
                        std::int64_t capacity) {
  const std::int64_t entries = launch.entries;
  BlockLists lists{};
  lists.used = block_list_size(launch.rows, entries);
  lists.slot = 2 * rounded(entries);
  lists.row_entry = lists.slot + rounded(entries);
  lists.row_block = lists.row_entry + rounded(launch.rows + 1);
  check_room(lists.used, capacity);
  static_assert(sizeof(PageId) == sizeof(std::int32_t));
  std::int32_t* const row = put(launch.page, entries, out);
  std::int32_t* const slot = out + lists.slot;
  for (std::int64_t r = 0; r < launch.rows; ++r) {
    for (std::int32_t entry = launch.row_entry[r]; entry < launch.row_entry[r + 1]; ++entry) {
      row[entry] = static_cast<std::int32_t>(r);
      slot[entry] = static_cast<std::int32_t>(lists.slots);
      lists.slots += rows.tokens_of[at(r)];
      if (lists.slots > std::numeric_limits<std::int32_t>::max()) {
        throw std::invalid_argument(std::to_string(lists.slots) +
                                    " pairs of a block and a token are too many for one launch");
      }
    }
  }
  put(launch.row_entry, launch.rows + 1, out + lists.row_entry);
  put(launch.row_block, launch.rows, out + lists.row_block);
  return lists;
}

}  // namespace moechat
