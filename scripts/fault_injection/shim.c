/* Preloaded into a program under test: makes chosen calls of the C library fail.
 *
 * The campaign (shim.py) maps the page of `struct control` from the file that FAULTS_CONTROL names and sets it before
 * each start; the shim counts calls there and applies the one fault that is set. Only calls on files below `under` are
 * counted. Reads through io_uring pass no function of the C library for reading; they are altered in the submission
 * ring, before io_uring_enter hands them to the kernel.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/io_uring.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

/* In the order of shim.py. A change is any call that changes a file or directory, counted over all groups. */
enum group { OPEN, CREATE, READ, WRITE, SYNC, RENAME, MMAP, TRUNCATE, LINK, URING, CHANGE, GROUPS };
enum mode { ONCE, FOREVER, SHORT, WRONG, KILL, TORN };

struct control {
  uint32_t armed; /* 0: off; 1: count; 2: count and fail */
  uint32_t group;
  uint32_t index;
  uint32_t mode;
  int32_t error;
  uint32_t no_uring; /* io_uring_setup answers ENOSYS */
  uint32_t fired;
  uint32_t counts[GROUPS];
  char under[4][512]; /* empty: unused */
  char where[1024];   /* the file of the first fault */
};

static struct control *control;
static unsigned char watched[1 << 16]; /* by descriptor */

#define REAL(result, name, ...)                                     \
  static result (*real_##name)(__VA_ARGS__);                        \
  static void find_##name(void) {                                   \
    if (!real_##name) *(void **)&real_##name = dlsym(RTLD_NEXT, #name); \
  }

REAL(int, openat64, int, const char *, int, ...)
REAL(int, close, int)
REAL(ssize_t, read, int, void *, size_t)
REAL(ssize_t, pread64, int, void *, size_t, off64_t)
REAL(ssize_t, readv, int, const struct iovec *, int)
REAL(ssize_t, preadv64, int, const struct iovec *, int, off64_t)
REAL(ssize_t, write, int, const void *, size_t)
REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t)
REAL(ssize_t, writev, int, const struct iovec *, int)
REAL(ssize_t, sendfile64, int, int, off64_t *, size_t)
REAL(ssize_t, copy_file_range, int, off64_t *, int, off64_t *, size_t, unsigned)
REAL(int, fsync, int)
REAL(int, fdatasync, int)
REAL(int, rename, const char *, const char *)
REAL(int, renameat, int, const char *, int, const char *)
REAL(int, renameat2, int, const char *, int, const char *, unsigned)
REAL(void *, mmap64, void *, size_t, int, int, int, off64_t)
REAL(int, ftruncate64, int, off64_t)
REAL(int, posix_fallocate64, int, off64_t, off64_t)
REAL(int, link, const char *, const char *)
REAL(int, linkat, int, const char *, int, const char *, int)
REAL(int, symlink, const char *, const char *)
REAL(int, unlink, const char *)
REAL(int, unlinkat, int, const char *, int)
REAL(int, mkdir, const char *, mode_t)
REAL(int, rmdir, const char *)
REAL(long, syscall, long, ...)

static int on(void) { return control != NULL && control->armed != 0; }

static int below(const char *path) {
  for (int i = 0; i < 4; ++i) {
    const char *folder = control->under[i];
    const size_t length = strlen(folder);
    if (length > 0 && strncmp(path, folder, length) == 0 && (path[length] == '/' || path[length] == 0)) return 1;
  }
  return 0;
}

/* The absolute path of `path` under the directory `at`, as far as that is plain; links are not followed. */
static int absolute(int at, const char *path, char *full, size_t size) {
  if (path == NULL) return 0;
  if (path[0] == '/') return snprintf(full, size, "%s", path) < (int)size;
  char folder[PATH_MAX];
  if (at == AT_FDCWD) {
    if (getcwd(folder, sizeof folder) == NULL) return 0;
  } else {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", at);
    const ssize_t length = readlink(name, folder, sizeof folder - 1);
    if (length < 0) return 0;
    folder[length] = 0;
  }
  return snprintf(full, size, "%s/%s", folder, path) < (int)size;
}

static void note(const char *path) {
  if (__atomic_fetch_add(&control->fired, 1, __ATOMIC_SEQ_CST) == 0) {
    snprintf(control->where, sizeof control->where, "%s", path);
  }
}

static void note_descriptor(int fd) {
  char name[64], path[1024];
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(name, path, sizeof path - 1);
  path[length < 0 ? 0 : length] = 0;
  note(path);
}

static int counted(enum group group) {
  const uint32_t index = __atomic_fetch_add(&control->counts[group], 1, __ATOMIC_SEQ_CST);
  if (control->armed != 2 || control->group != (uint32_t)group) return 0;
  return index == control->index || (control->mode == FOREVER && index > control->index);
}

/* Counts a call; the mode of the fault that it shall have, or -1. */
static int fate(enum group group) {
  const int own = counted(group);
  const int changes = group == CREATE || group == WRITE || group == SYNC || group == RENAME || group == TRUNCATE ||
                      group == LINK;
  const int change = changes ? counted(CHANGE) : 0;
  return own || change ? (int)control->mode : -1;
}

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

/* The fate of a call on a path: 0, or -1 with errno. */
static int path_fails(enum group group, int at, const char *path) {
  char full[PATH_MAX];
  if (!on() || !absolute(at, path, full, sizeof full) || !below(full)) return 0;
  const int mode = fate(group);
  if (mode < 0) return 0;
  note(full);
  if (mode == KILL || mode == TORN) die();
  if (mode != ONCE && mode != FOREVER) return 0;
  errno = control->error;
  return -1;
}

static int is_watched(int fd) { return on() && fd >= 0 && fd < (int)sizeof watched && watched[fd]; }

static void watch(int fd, int at, const char *path) {
  char full[PATH_MAX];
  if (fd < 0 || fd >= (int)sizeof watched) return;
  watched[fd] = on() && absolute(at, path, full, sizeof full) && below(full);
}

/* The fate of a call on a descriptor that moves no bytes: 0, or -1 with errno. */
static int descriptor_fails(enum group group, int fd) {
  if (!is_watched(fd)) return 0;
  const int mode = fate(group);
  if (mode < 0) return 0;
  note_descriptor(fd);
  if (mode == KILL || mode == TORN) die();
  if (mode != ONCE && mode != FOREVER) return 0;
  errno = control->error;
  return -1;
}

/* The part of `size` that a short transfer moves: direct reads need whole pages. */
static size_t part_of(int fd, size_t size) {
  if (size < 2) return size;
  if (fcntl(fd, F_GETFL) & O_DIRECT) return size / 2 >= 4096 ? size / 2 / 4096 * 4096 : size;
  return size / 2;
}

/* ---- opening */

static int opens(int at, const char *path, int flags, mode_t mode) {
  find_openat64();
  const int writes = (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC));
  if (path_fails(writes ? CREATE : OPEN, at, path) != 0) return -1;
  const int fd = real_openat64(at, path, flags, mode);
  watch(fd, at, path);
  return fd;
}

#define MODE_OF(flags, mode)                     \
  mode_t mode = 0;                               \
  if ((flags) & (O_CREAT | O_TMPFILE)) {         \
    va_list rest;                                \
    va_start(rest, flags);                       \
    mode = (mode_t)va_arg(rest, int);            \
    va_end(rest);                                \
  }

EXPORT int open64(const char *path, int flags, ...) {
  MODE_OF(flags, mode)
  return opens(AT_FDCWD, path, flags, mode);
}
EXPORT int open(const char *path, int flags, ...) {
  MODE_OF(flags, mode)
  return opens(AT_FDCWD, path, flags, mode);
}
EXPORT int openat64(int at, const char *path, int flags, ...) {
  MODE_OF(flags, mode)
  return opens(at, path, flags, mode);
}
EXPORT int openat(int at, const char *path, int flags, ...) {
  MODE_OF(flags, mode)
  return opens(at, path, flags, mode);
}
EXPORT int close(int fd) {
  find_close();
  if (fd >= 0 && fd < (int)sizeof watched) watched[fd] = 0;
  return real_close(fd);
}

/* ---- reading */

static ssize_t spoiled(int mode, unsigned char *data, ssize_t count) {
  if (mode == WRONG && count > 0) data[count / 2] ^= 0x10;
  return count;
}

#define READS(fd, data, size, call)                                        \
  if (!is_watched(fd)) return call(size);                                  \
  const int mode = fate(READ);                                             \
  if (mode < 0) return call(size);                                         \
  note_descriptor(fd);                                                     \
  if (mode == ONCE || mode == FOREVER) {                                   \
    errno = control->error;                                                \
    return -1;                                                             \
  }                                                                        \
  const ssize_t count = call(mode == SHORT ? part_of(fd, size) : (size));  \
  return spoiled(mode, data, count);

EXPORT ssize_t read(int fd, void *data, size_t size) {
  find_read();
#define CALL(n) real_read(fd, data, n)
  READS(fd, data, size, CALL)
#undef CALL
}
EXPORT ssize_t pread64(int fd, void *data, size_t size, off64_t offset) {
  find_pread64();
#define CALL(n) real_pread64(fd, data, n, offset)
  READS(fd, data, size, CALL)
#undef CALL
}
EXPORT ssize_t pread(int fd, void *data, size_t size, off_t offset) { return pread64(fd, data, size, offset); }

static ssize_t reads_vectors(int fd, const struct iovec *vectors, int count, off64_t offset, int positioned) {
  find_readv();
  find_preadv64();
  struct iovec first = vectors[0];
  int mode = -1;
  if (is_watched(fd) && (mode = fate(READ)) >= 0) {
    note_descriptor(fd);
    if (mode == ONCE || mode == FOREVER) {
      errno = control->error;
      return -1;
    }
    if (mode == SHORT) {
      first.iov_len = part_of(fd, first.iov_len);
      vectors = &first;
      count = 1;
    }
  }
  const ssize_t done = positioned ? real_preadv64(fd, vectors, count, offset) : real_readv(fd, vectors, count);
  if (mode == WRONG && done > 0 && first.iov_len > 0) ((unsigned char *)first.iov_base)[first.iov_len / 2] ^= 0x10;
  return done;
}
EXPORT ssize_t readv(int fd, const struct iovec *vectors, int count) {
  return reads_vectors(fd, vectors, count, 0, 0);
}
EXPORT ssize_t preadv64(int fd, const struct iovec *vectors, int count, off64_t offset) {
  return reads_vectors(fd, vectors, count, offset, 1);
}
EXPORT ssize_t preadv(int fd, const struct iovec *vectors, int count, off_t offset) {
  return reads_vectors(fd, vectors, count, offset, 1);
}

/* ---- writing */

#define WRITES(fd, size, call)                                    \
  if (!is_watched(fd)) return call(size);                         \
  const int mode = fate(WRITE);                                   \
  if (mode < 0) return call(size);                                \
  note_descriptor(fd);                                            \
  if (mode == TORN) {                                             \
    const ssize_t ignored = call((size) / 2);                     \
    (void)ignored;                                                \
  }                                                               \
  if (mode == KILL || mode == TORN) die();                        \
  if (mode == ONCE || mode == FOREVER) {                          \
    errno = control->error;                                       \
    return -1;                                                    \
  }                                                               \
  return call(mode == SHORT ? part_of(fd, size) : (size));

EXPORT ssize_t write(int fd, const void *data, size_t size) {
  find_write();
#define CALL(n) real_write(fd, data, n)
  WRITES(fd, size, CALL)
#undef CALL
}
EXPORT ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
  find_pwrite64();
#define CALL(n) real_pwrite64(fd, data, n, offset)
  WRITES(fd, size, CALL)
#undef CALL
}
EXPORT ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
  return pwrite64(fd, data, size, offset);
}
EXPORT ssize_t writev(int fd, const struct iovec *vectors, int count) {
  find_writev();
  find_write();
#define CALL(n) ((n) == all ? real_writev(fd, vectors, count) : real_write(fd, vectors[0].iov_base, vectors[0].iov_len / 2))
  size_t all = 0;
  for (int i = 0; i < count; ++i) all += vectors[i].iov_len;
  WRITES(fd, all, CALL)
#undef CALL
}
EXPORT ssize_t sendfile64(int to, int from, off64_t *offset, size_t size) {
  find_sendfile64();
#define CALL(n) real_sendfile64(to, from, offset, n)
  WRITES(to, size, CALL)
#undef CALL
}
EXPORT ssize_t sendfile(int to, int from, off_t *offset, size_t size) {
  return sendfile64(to, from, offset, size);
}
EXPORT ssize_t copy_file_range(int from, off64_t *from_offset, int to, off64_t *to_offset, size_t size,
                               unsigned flags) {
  find_copy_file_range();
#define CALL(n) real_copy_file_range(from, from_offset, to, to_offset, n, flags)
  WRITES(to, size, CALL)
#undef CALL
}

/* ---- all else that files and directories suffer */

EXPORT int fsync(int fd) {
  find_fsync();
  return descriptor_fails(SYNC, fd) != 0 ? -1 : real_fsync(fd);
}
EXPORT int fdatasync(int fd) {
  find_fdatasync();
  return descriptor_fails(SYNC, fd) != 0 ? -1 : real_fdatasync(fd);
}
EXPORT int rename(const char *old, const char *new) {
  find_rename();
  return path_fails(RENAME, AT_FDCWD, new) != 0 ? -1 : real_rename(old, new);
}
EXPORT int renameat(int from, const char *old, int to, const char *new) {
  find_renameat();
  return path_fails(RENAME, to, new) != 0 ? -1 : real_renameat(from, old, to, new);
}
EXPORT int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
  find_renameat2();
  return path_fails(RENAME, to, new) != 0 ? -1 : real_renameat2(from, old, to, new, flags);
}
EXPORT int ftruncate64(int fd, off64_t size) {
  find_ftruncate64();
  return descriptor_fails(TRUNCATE, fd) != 0 ? -1 : real_ftruncate64(fd, size);
}
EXPORT int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }
EXPORT int posix_fallocate64(int fd, off64_t offset, off64_t size) {
  find_posix_fallocate64();
  return descriptor_fails(TRUNCATE, fd) != 0 ? errno : real_posix_fallocate64(fd, offset, size);
}
EXPORT int posix_fallocate(int fd, off_t offset, off_t size) { return posix_fallocate64(fd, offset, size); }
EXPORT int link(const char *old, const char *new) {
  find_link();
  return path_fails(LINK, AT_FDCWD, new) != 0 ? -1 : real_link(old, new);
}
EXPORT int linkat(int from, const char *old, int to, const char *new, int flags) {
  find_linkat();
  return path_fails(LINK, to, new) != 0 ? -1 : real_linkat(from, old, to, new, flags);
}
EXPORT int symlink(const char *old, const char *new) {
  find_symlink();
  return path_fails(LINK, AT_FDCWD, new) != 0 ? -1 : real_symlink(old, new);
}
EXPORT int unlink(const char *path) {
  find_unlink();
  return path_fails(LINK, AT_FDCWD, path) != 0 ? -1 : real_unlink(path);
}
EXPORT int unlinkat(int at, const char *path, int flags) {
  find_unlinkat();
  return path_fails(LINK, at, path) != 0 ? -1 : real_unlinkat(at, path, flags);
}
EXPORT int mkdir(const char *path, mode_t mode) {
  find_mkdir();
  return path_fails(LINK, AT_FDCWD, path) != 0 ? -1 : real_mkdir(path, mode);
}
EXPORT int rmdir(const char *path) {
  find_rmdir();
  return path_fails(LINK, AT_FDCWD, path) != 0 ? -1 : real_rmdir(path);
}

/* ---- io_uring: its submission entries are altered before the kernel sees them */

enum { RINGS = 8, VECTORS = 64, COPIES = 256 };
struct ring {
  int fd;
  struct io_uring_params params;
  struct io_uring_sqe *entries;
  unsigned char *rings;
};
static struct ring rings[RINGS];
static struct iovec copies[COPIES][VECTORS];
static unsigned next_copy;

static struct ring *ring_of(int fd) {
  for (int i = 0; i < RINGS; ++i) {
    if (rings[i].fd == fd && fd > 0) return &rings[i];
  }
  return NULL;
}

static void alter(struct io_uring_sqe *entry, int mode) {
  note_descriptor(entry->fd);
  if (mode == ONCE || mode == FOREVER) {
    const uint64_t tag = entry->user_data;
    memset(entry, 0, sizeof *entry);
    entry->opcode = IORING_OP_NOP;
    entry->user_data = tag;
#ifdef IORING_NOP_INJECT_RESULT
    entry->rw_flags = IORING_NOP_INJECT_RESULT;
#else
    entry->rw_flags = 1;
#endif
    entry->len = (uint32_t)-control->error;
  } else if (mode == SHORT) {
    const struct iovec *vectors = (const struct iovec *)(uintptr_t)entry->addr;
    struct iovec *copy = copies[__atomic_fetch_add(&next_copy, 1, __ATOMIC_SEQ_CST) % COPIES];
    copy[0] = vectors[0];
    copy[0].iov_len = part_of(entry->fd, copy[0].iov_len);
    entry->addr = (uintptr_t)copy;
    entry->len = 1;
  } else if (mode == WRONG) {
    entry->off += entry->off >= 4096 ? -(uint64_t)4096 : 4096;
  }
}

static void submits(int fd, unsigned count) {
  struct ring *ring = ring_of(fd);
  if (ring == NULL || ring->entries == NULL || ring->rings == NULL) return;
  const unsigned mask = *(unsigned *)(ring->rings + ring->params.sq_off.ring_mask);
  const unsigned tail = *(unsigned *)(ring->rings + ring->params.sq_off.tail);
  const unsigned *array = (unsigned *)(ring->rings + ring->params.sq_off.array);
  for (unsigned i = 0; i < count; ++i) {
    struct io_uring_sqe *entry = &ring->entries[array[(tail - count + i) & mask] & mask];
    if (entry->opcode != IORING_OP_READV || !is_watched(entry->fd)) continue;
    const int mode = fate(URING);
    if (mode >= 0) alter(entry, mode);
  }
}

EXPORT long syscall(long number, ...) {
  find_syscall();
  va_list rest;
  long a[6];
  va_start(rest, number);
  for (int i = 0; i < 6; ++i) a[i] = va_arg(rest, long);
  va_end(rest);
  if (on() && number == SYS_io_uring_setup && control->no_uring) {
    errno = ENOSYS;
    return -1;
  }
  if (on() && number == SYS_io_uring_enter && a[1] > 0) submits((int)a[0], (unsigned)a[1]);
  const long result = real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  if (number == SYS_io_uring_setup && result > 0) {
    for (int i = 0; i < RINGS; ++i) {
      if (rings[i].fd > 0 && rings[i].fd != (int)result) continue;
      memset(&rings[i], 0, sizeof rings[i]);
      rings[i].fd = (int)result;
      rings[i].params = *(struct io_uring_params *)a[1];
      break;
    }
  }
  return result;
}

EXPORT void *mmap64(void *place, size_t size, int protection, int flags, int fd, off64_t offset) {
  find_mmap64();
  if (!(flags & MAP_ANONYMOUS) && descriptor_fails(MMAP, fd) != 0) return MAP_FAILED;
  void *data = real_mmap64(place, size, protection, flags, fd, offset);
  struct ring *ring = data == MAP_FAILED ? NULL : ring_of(fd);
  if (ring != NULL && offset == IORING_OFF_SQES) ring->entries = data;
  if (ring != NULL && offset == IORING_OFF_SQ_RING) ring->rings = data;
  return data;
}
EXPORT void *mmap(void *place, size_t size, int protection, int flags, int fd, off_t offset) {
  return mmap64(place, size, protection, flags, fd, offset);
}

__attribute__((constructor)) static void start(void) {
  const char *path = getenv("FAULTS_CONTROL");
  if (path == NULL) return;
  find_openat64();
  find_mmap64();
  find_close();
  const int fd = real_openat64(AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0);
  if (fd < 0) return;
  void *data = real_mmap64(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  real_close(fd);
  if (data != MAP_FAILED) control = data;
}
