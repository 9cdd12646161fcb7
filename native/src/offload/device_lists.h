// The lists that kernels on a device read: which items a pass has, and which blocks a launch computes for
// them.
//
// int32 lists one after the other in one piece of memory, so that they reach the device in one copy. Each
// begins at a multiple of 16 bytes, for which kernels are built. Rows are experts, ascending; items are
// (token, expert) pairs, grouped by row; entries are blocks, grouped by row, each row's blocks neighbours and
// ascending; a slot is one entry for one item.
//
//   of a pass     first item of each row [rows + 1] · token [items] · router weight, float32 [items] ·
//                 items of each token, experts ascending, -1 where it has fewer [tokens, picks]
//   of a launch   page [entries] · row [entries] · first slot [entries] · first entry of each row [rows + 1]
//   ·
//                 number of each row's first block [rows]
#pragma once

#include <cstdint>

#include "offload/executors.h"
#include "offload/expert_sum.h"

namespace moechat {

struct ItemLists {
  std::int64_t used;  // elements, a multiple of 4
  std::int32_t rows;
  std::int32_t items;
  std::int32_t picks;                 // most items of a token, at least 1
  std::int32_t most;                  // items of a row
  std::int64_t token, weight, table;  // where the lists behind the first one begin
};

// Elements that the lists of one launch take.
std::int64_t block_list_size(std::int64_t rows, std::int64_t entries);

// Both throw std::invalid_argument when `capacity` elements are too few.
ItemLists write_items(const Grouped& rows, std::int64_t tokens, std::int32_t* out, std::int64_t capacity);

struct BlockLists {
  std::int64_t used;
  std::int64_t slots;
  std::int64_t slot, row_entry, row_block;  // likewise
};
// Also throws when there are more slots than int32 counts.
BlockLists write_blocks(const DeviceLaunch& launch, const Grouped& rows, std::int32_t* out,
                        std::int64_t capacity);

}  // namespace moechat
