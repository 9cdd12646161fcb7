// Every wait goes through MOECHAT_WAIT(id, statement), so that scripts/mutate_waits can build the code with
// one of them left out (-DMOECHAT_MUTANT=<id>) and see a test fail. Normally it is the statement. Ids below
// 20 belong to the links, 20 to 39 to the runner; each is used once.
#pragma once

#ifndef MOECHAT_MUTANT
#define MOECHAT_MUTANT 0
#endif

#define MOECHAT_WAIT(id, ...)     \
  do {                            \
    if (MOECHAT_MUTANT != (id)) { \
      __VA_ARGS__;                \
    }                             \
  } while (false)
