"""Files of experts that the system refuses to open, map or read: an error with its file, never status 1."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

from preloaded_shim import built_shim

SHIM = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>
/* The call FAIL fails with the error NUMBER for files whose names hold PART, once the file ARMED is there. */
static int fails(const char *call, const char *path) {
  const char *armed = getenv("ARMED"), *fail = getenv("FAIL"), *part = getenv("PART");
  if (armed == NULL || strcmp(fail, call) != 0 || strstr(path, part) == NULL || access(armed, F_OK) != 0)
    return 0;
  errno = atoi(getenv("NUMBER"));
  return 1;
}
static int fails_of(const char *call, int fd) {
  char link[64], path[4096];
  int before = errno;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  errno = before;
  if (length < 0) return 0;
  path[length] = 0;
  return fails(call, path);
}
#define OPEN(name)                                                        \\
  int name(const char *path, int flags, ...) {                            \\
    int (*real)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name); \\
    va_list list;                                                         \\
    va_start(list, flags);                                                \\
    int mode = va_arg(list, int);                                         \\
    va_end(list);                                                         \\
    return fails("open", path) ? -1 : real(path, flags, mode);            \\
  }
OPEN(open)
OPEN(open64)
#define MAP(name)                                                         \\
  void *name(void *at, size_t bytes, int prot, int flags, int fd, off_t offset) { \\
    void *(*real)(void *, size_t, int, int, int, off_t) =                 \\
        (void *(*)(void *, size_t, int, int, int, off_t))dlsym(RTLD_NEXT, #name); \\
    return fd >= 0 && fails_of("mmap", fd) ? MAP_FAILED : real(at, bytes, prot, flags, fd, offset); \\
  }
MAP(mmap)
MAP(mmap64)
#define READ(name)                                                        \\
  ssize_t name(int fd, const struct iovec *v, int n, off_t at) {          \\
    ssize_t (*real)(int, const struct iovec *, int, off_t) =              \\
        (ssize_t (*)(int, const struct iovec *, int, off_t))dlsym(RTLD_NEXT, #name); \\
    return fails_of("read", fd) ? -1 : real(fd, v, n, at);                \\
  }
READ(preadv)
READ(preadv64)
"""
LOAD = """\
import gc, json, os, resource, sys
import moechat
from moechat.errors import MoechatError
from moechat.offload.settings import LinkSettings, OffloadOptions
model, what = sys.argv[1:3]
PAGED = OffloadOptions(pages=6, link=LinkSettings(io="threads"))

def answer(way):
    offload = PAGED if way == "paged" else OffloadOptions()
    with moechat.load(model, offload=offload) as engine:
        return [step.token_id for step in engine.generate([5, 6, 7, 8], max_new_tokens=3, temperature=0.0)]

def attempt(way, case):
    try:
        result = "right" if answer(way) == expected else "wrong tokens", 0, "", ""
    except MoechatError as error:
        result = type(error).__name__, error.exit_code, str(error), error.hint or ""
    gc.collect()
    found.append((way, case, *result))

expected, found = answer("mapped"), []
gc.collect()
if what == "shim":
    for way, call, number in json.loads(sys.argv[3]):
        os.environ["FAIL"], os.environ["NUMBER"] = call, str(number)
        open(os.environ["ARMED"], "w").close()
        attempt(way, [call, number])
        os.unlink(os.environ["ARMED"])
else:
    for way in ("paged", "mapped"):
        for name, kind in (("files", resource.RLIMIT_NOFILE), ("memory", resource.RLIMIT_AS)):
            soft, hard = resource.getrlimit(kind)
            if name == "files":
                base, steps = len(os.listdir("/proc/self/fd")) - 1, (0, 1, 2, 3, 4, 6, 24)
            else:
                base = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
                steps = (0, 1 << 18, 1 << 20, 1 << 28)
            for more in steps:
                resource.setrlimit(kind, (base + more, hard))
                attempt(way, [name, more])
                resource.setrlimit(kind, (soft, hard))
for way in ("paged", "mapped"):
    attempt(way, ["none", 0])
print(json.dumps(found))
"""
Outcome = tuple[str, tuple[str, int], str, int, str, str]


def outcomes(
    model: Path,
    home: Path,
    what: str,
    cases: list[tuple[str, str, int]] | None = None,
    extra: dict[str, str] | None = None,
) -> list[Outcome]:
    """Way, case, class, exit status, message and hint of each attempt; the last two are without any limit."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(model), what, json.dumps(cases or [])],
        capture_output=True,
        text=True,
        env={**os.environ, "MOECHAT_HOME": str(home), **(extra or {})},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [(way, (case[0], case[1]), *rest) for way, case, *rest in json.loads(done.stdout)]
    assert [one[2] for one in found[-2:]] == ["right", "right"], "nothing is left of the failures"
    return found[:-2]


# Status by way, call and error.
REFUSALS = {
    ("paged", "open", errno.EIO): 6,
    ("paged", "open", errno.EMFILE): 4,
    ("paged", "read", errno.EIO): 6,
    ("mapped", "open", errno.EIO): 6,
    ("mapped", "mmap", errno.ENOMEM): 4,
    ("mapped", "mmap", errno.EIO): 6,
}


def test_a_refused_file_of_experts_is_named_with_a_next_step(chat_model: Path, tmp_path: Path) -> None:
    shim = built_shim(SHIM, tmp_path)
    extra = {"LD_PRELOAD": str(shim), "PART": "experts-0", "ARMED": str(tmp_path / "armed")}
    extra |= {"FAIL": "", "NUMBER": "0"}
    found = outcomes(chat_model, tmp_path / "home", "shim", list(REFUSALS), extra)
    assert len(found) == len(REFUSALS)
    for way, (call, number), _, status, message, hint in found:
        assert status == REFUSALS[way, call, number], (way, call, number, message)
        assert "experts-0000" in message
        assert os.strerror(number) in message
        assert hint != ""


def test_limits_of_open_files_and_memory_never_end_in_an_unexpected_error(
    chat_model: Path, tmp_path: Path
) -> None:
    found = outcomes(chat_model, tmp_path / "home", "limits")
    for way in ("paged", "mapped"):
        for limit, highest in (("files", 24), ("memory", 1 << 28)):
            kinds = {case[1]: kind for other, case, kind, *_ in found if (other, case[0]) == (way, limit)}
            assert kinds[0] == "DoesNotFitError"
            assert kinds[highest] == "right"
    for way, case, kind, status, message, hint in found:
        if kind == "right":
            continue
        assert (kind, status) == ("DoesNotFitError", 4), (way, case, message)
        assert hint != ""
        if case[0] == "files":
            assert "Too many open files" in message
            assert "ulimit -n" in hint
