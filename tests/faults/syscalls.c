/* Counts the system calls that a process makes on files below one folder, and breaks one of them.

   Loaded with LD_PRELOAD; does nothing until `syscalls_arm`. What happened is kept in memory that survives the process:
   whoever forked it reads the counter and the names of the calls afterwards. Python's and SQLite's calls go through
   libc and arrive here; reading is left alone, besides opening.  */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define FILES 4096
#define CALLS 16384
#define NAME 80

enum mode { COUNT, FAIL, SHORT, KILL, TORN, FULL, DEAD };
enum verdict { GO, BREAK, HALF };

struct report {
    int calls;               /* how many were seen */
    int broken;              /* how many were made to fail, to write half, or were the last */
    char names[CALLS][NAME]; /* "call file" of each */
};

static struct report *report;
static char root[4096];
static size_t root_length;
static int armed_at;
static enum mode armed_mode;
static __thread int mine; /* number of this thread's latest call: threads count at the same time */
static char tracked[FILES][NAME]; /* file name behind a descriptor; empty: not ours */

static const int CREATE_ERRORS[] = {ENOSPC, EMFILE, EROFS, EACCES, EIO, 0};
static const int WRITE_ERRORS[] = {ENOSPC, EIO, EDQUOT, 0};
static const int SYNC_ERRORS[] = {EIO, ENOSPC, 0};
static const int NAME_ERRORS[] = {EIO, EROFS, EACCES, ENOSPC, 0};
static const int LOCK_ERRORS[] = {ENOLCK, EIO, 0};
static const int MEMORY_ERRORS[] = {ENOMEM, EIO, 0};
static const int PLAIN_ERRORS[] = {EIO, EACCES, 0};

#define REAL(name)                                                                                                     \
    ({                                                                                                                 \
        static __typeof__(&name) found;                                                                                \
        if (!found) found = (__typeof__(&name))dlsym(RTLD_NEXT, #name);                                                \
        found;                                                                                                         \
    })

__attribute__((constructor)) static void prepare(void) {
    report = mmap(NULL, sizeof *report, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (report == MAP_FAILED) abort();
}

/* From now on calls below `folder` are counted, and number `at` (from 1) is broken; 0 breaks none. */
void syscalls_arm(const char *folder, int at, int mode) {
    report->calls = report->broken = 0;
    memset(tracked, 0, sizeof tracked);
    armed_at = at;
    armed_mode = (enum mode)mode;
    snprintf(root, sizeof root, "%s", folder);
    root_length = strlen(root);
}

int syscalls_seen(void) { return report->calls; }
int syscalls_broken(void) { return report->broken; }
const char *syscalls_name(int number) { return report->names[number < CALLS ? number : CALLS - 1]; }

static int is_ours(int folder, const char *path) {
    if (!root_length || !path) return 0;
    if (path[0] == '/') return strncmp(path, root, root_length) == 0;
    return folder >= 0 && folder < FILES && tracked[folder][0];
}

static int is_tracked(int file) { return root_length && file >= 0 && file < FILES && tracked[file][0]; }

static const char *last_part(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* What a call asks of the disk. */
enum need { NOTHING, ACCESS, ROOM, DATA }; /* a lock lives in the kernel; a new name takes room; data can go half */

/* Counts one call. GO: make it; HALF: write half of it; BREAK: errno is set, fail. */
static enum verdict judge(const char *call, const char *file, const int *errors, enum need need) {
    int number = __atomic_add_fetch(&report->calls, 1, __ATOMIC_SEQ_CST);
    mine = number;
    if (number <= CALLS) snprintf(report->names[number - 1], NAME, "%s %s", call, file);
    if (!armed_at || number < armed_at) return GO;
    int first = number == armed_at, count = 0;
    while (errors[count]) count++;
    int half = need == DATA && (armed_mode == SHORT || armed_mode == TORN || armed_mode == FULL);
    int fits = (armed_mode == FAIL && first) || (armed_mode == FULL && need >= ROOM) ||
               (armed_mode == DEAD && need >= ACCESS);
    if (!fits && !half) return GO; /* KILL is seen to after the call */
    int before = __atomic_fetch_add(&report->broken, 1, __ATOMIC_SEQ_CST);
    if (half && !before) return HALF; /* the first write from there on: threads move calls about a little */
    if (!fits) return GO;
    errno = armed_mode == FULL ? ENOSPC : armed_mode == DEAD ? EIO : errors[armed_at % count];
    return BREAK;
}

/* Called once a call was made: the process may have to end here. */
static void passed(void) {
    if (armed_mode == KILL && armed_at && mine == armed_at) {
        __atomic_add_fetch(&report->broken, 1, __ATOMIC_SEQ_CST);
        die();
    }
}

#define JUDGE(call, file, errors, need)                                                                              \
    enum verdict verdict = judge(call, file, errors, need);                                                          \
    if (verdict == BREAK) return -1
#define DONE(result)                                                                                                   \
    do {                                                                                                               \
        __typeof__(result) value = (result);                                                                           \
        int kept = errno;                                                                                              \
        passed();                                                                                                      \
        errno = kept;                                                                                                  \
        return value;                                                                                                  \
    } while (0)

static int opened(int file, const char *path) {
    if (file >= 0 && file < FILES) snprintf(tracked[file], NAME, "%s", last_part(path));
    return file;
}

#define OPEN(name, signature, folder, ...)                                                                             \
    int name signature {                                                                                               \
        mode_t mode = 0;                                                                                               \
        if (flags & (O_CREAT | __O_TMPFILE)) {                                                                         \
            va_list rest;                                                                                              \
            va_start(rest, flags);                                                                                     \
            mode = va_arg(rest, mode_t);                                                                               \
            va_end(rest);                                                                                              \
        }                                                                                                              \
        if (!is_ours(folder, path)) return REAL(name)(__VA_ARGS__, flags, mode);                                       \
        JUDGE(flags & O_CREAT ? #name "(create)" : #name, last_part(path), CREATE_ERRORS, flags & O_CREAT ? ROOM : ACCESS);    \
        DONE(opened(REAL(name)(__VA_ARGS__, flags, mode), path));                                                      \
    }
OPEN(open, (const char *path, int flags, ...), AT_FDCWD, path)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, path)
OPEN(openat, (int at, const char *path, int flags, ...), at, at, path)
OPEN(openat64, (int at, const char *path, int flags, ...), at, at, path)

int creat(const char *path, mode_t mode) { return open(path, O_WRONLY | O_CREAT | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return open64(path, O_WRONLY | O_CREAT | O_TRUNC, mode); }

int close(int file) {
    if (!is_tracked(file)) return REAL(close)(file);
    char name[NAME];
    memcpy(name, tracked[file], NAME);
    tracked[file][0] = 0; /* first: another thread may get this number at once */
    int result = REAL(close)(file);
    JUDGE("close", name, SYNC_ERRORS, ACCESS); /* the descriptor is gone all the same, as on Linux */
    DONE(result);
}

#define WRITE(name, signature, whole, half)                                                                            \
    ssize_t name signature {                                                                                           \
        if (!is_tracked(file)) return whole;                                                                           \
        JUDGE(#name, tracked[file], WRITE_ERRORS, DATA);                                                                  \
        if (verdict == GO) DONE(whole);                                                                                \
        ssize_t written = half;                                                                                        \
        if (armed_mode == TORN) die();                                                                                 \
        return written;                                                                                                \
    }
WRITE(write, (int file, const void *data, size_t size), REAL(write)(file, data, size),
      REAL(write)(file, data, (size + 1) / 2))
WRITE(pwrite, (int file, const void *data, size_t size, off_t at), REAL(pwrite)(file, data, size, at),
      REAL(pwrite)(file, data, (size + 1) / 2, at))
WRITE(pwrite64, (int file, const void *data, size_t size, off64_t at), REAL(pwrite64)(file, data, size, at),
      REAL(pwrite64)(file, data, (size + 1) / 2, at))
WRITE(writev, (int file, const struct iovec *parts, int count), REAL(writev)(file, parts, count),
      REAL(write)(file, parts[0].iov_base, (parts[0].iov_len + 1) / 2))
WRITE(pwritev, (int file, const struct iovec *parts, int count, off_t at), REAL(pwritev)(file, parts, count, at),
      REAL(pwrite)(file, parts[0].iov_base, (parts[0].iov_len + 1) / 2, at))
WRITE(pwritev64, (int file, const struct iovec *parts, int count, off64_t at), REAL(pwritev64)(file, parts, count, at),
      REAL(pwrite64)(file, parts[0].iov_base, (parts[0].iov_len + 1) / 2, at))

#define ON_FILE(name, signature, errors, need, call)                                                                 \
    int name signature {                                                                                               \
        if (!is_tracked(file)) return call;                                                                            \
        JUDGE(#name, tracked[file], errors, need);                                                                   \
        DONE(call);                                                                                                    \
    }
ON_FILE(fsync, (int file), SYNC_ERRORS, ACCESS, REAL(fsync)(file))
ON_FILE(fdatasync, (int file), SYNC_ERRORS, ACCESS, REAL(fdatasync)(file))
ON_FILE(ftruncate, (int file, off_t size), PLAIN_ERRORS, ACCESS, REAL(ftruncate)(file, size))
ON_FILE(ftruncate64, (int file, off64_t size), PLAIN_ERRORS, ACCESS, REAL(ftruncate64)(file, size))
ON_FILE(fallocate, (int file, int mode, off_t at, off_t size), WRITE_ERRORS, ROOM, REAL(fallocate)(file, mode, at, size))
ON_FILE(fallocate64, (int file, int mode, off64_t at, off64_t size), WRITE_ERRORS, ROOM,
        REAL(fallocate64)(file, mode, at, size))
ON_FILE(flock, (int file, int what), LOCK_ERRORS, NOTHING, REAL(flock)(file, what))
ON_FILE(fchmod, (int file, mode_t mode), NAME_ERRORS, ACCESS, REAL(fchmod)(file, mode))
ON_FILE(fchown, (int file, uid_t user, gid_t group), NAME_ERRORS, ACCESS, REAL(fchown)(file, user, group))
ON_FILE(futimens, (int file, const struct timespec times[2]), NAME_ERRORS, ACCESS, REAL(futimens)(file, times))
ON_FILE(fstatvfs, (int file, struct statvfs *into), PLAIN_ERRORS, ACCESS, REAL(fstatvfs)(file, into))
ON_FILE(fstatvfs64, (int file, struct statvfs64 *into), PLAIN_ERRORS, ACCESS, REAL(fstatvfs64)(file, into))

#define LOCKING(name)                                                                                                  \
    int name(int file, int what, ...) {                                                                                \
        va_list rest;                                                                                                  \
        va_start(rest, what);                                                                                          \
        void *argument = va_arg(rest, void *);                                                                         \
        va_end(rest);                                                                                                  \
        int locks = what == F_SETLK || what == F_SETLKW || what == F_OFD_SETLK || what == F_OFD_SETLKW;                \
        locks = locks && ((struct flock *)argument)->l_type != F_UNLCK; /* giving back does not fail */                 \
        if (!locks || !is_tracked(file)) return REAL(name)(file, what, argument);                                      \
        JUDGE(#name "(lock)", tracked[file], LOCK_ERRORS, NOTHING);                                                          \
        DONE(REAL(name)(file, what, argument));                                                                        \
    }
LOCKING(fcntl)
LOCKING(fcntl64)

#define ON_PATH(name, signature, folder, path, errors, need, call)                                                   \
    int name signature {                                                                                               \
        if (!is_ours(folder, path)) return call;                                                                       \
        JUDGE(#name, last_part(path), errors, need);                                                                 \
        DONE(call);                                                                                                    \
    }
ON_PATH(rename, (const char *from, const char *to), AT_FDCWD, to, NAME_ERRORS, ROOM, REAL(rename)(from, to))
ON_PATH(renameat, (int here, const char *from, int there, const char *to), there, to, NAME_ERRORS, ROOM,
        REAL(renameat)(here, from, there, to))
ON_PATH(renameat2, (int here, const char *from, int there, const char *to, unsigned flags), there, to, NAME_ERRORS, ROOM,
        REAL(renameat2)(here, from, there, to, flags))
ON_PATH(link, (const char *from, const char *to), AT_FDCWD, to, NAME_ERRORS, ROOM, REAL(link)(from, to))
ON_PATH(unlink, (const char *path), AT_FDCWD, path, NAME_ERRORS, ACCESS, REAL(unlink)(path))
ON_PATH(unlinkat, (int at, const char *path, int flags), at, path, NAME_ERRORS, ACCESS, REAL(unlinkat)(at, path, flags))
ON_PATH(rmdir, (const char *path), AT_FDCWD, path, NAME_ERRORS, ACCESS, REAL(rmdir)(path))
ON_PATH(mkdir, (const char *path, mode_t mode), AT_FDCWD, path, CREATE_ERRORS, ROOM, REAL(mkdir)(path, mode))
ON_PATH(mkdirat, (int at, const char *path, mode_t mode), at, path, CREATE_ERRORS, ROOM, REAL(mkdirat)(at, path, mode))
ON_PATH(chmod, (const char *path, mode_t mode), AT_FDCWD, path, NAME_ERRORS, ACCESS, REAL(chmod)(path, mode))
ON_PATH(truncate, (const char *path, off_t size), AT_FDCWD, path, PLAIN_ERRORS, ACCESS, REAL(truncate)(path, size))
ON_PATH(statvfs, (const char *path, struct statvfs *into), AT_FDCWD, path, PLAIN_ERRORS, ACCESS, REAL(statvfs)(path, into))
ON_PATH(statvfs64, (const char *path, struct statvfs64 *into), AT_FDCWD, path, PLAIN_ERRORS, ACCESS,
        REAL(statvfs64)(path, into))
ON_PATH(utimensat, (int at, const char *path, const struct timespec times[2], int flags), at, path, NAME_ERRORS, ACCESS,
        REAL(utimensat)(at, path, times, flags))

#define MAPPING(name, offset)                                                                                          \
    void *name(void *where, size_t size, int protection, int flags, int file, offset at) {                             \
        if (!is_tracked(file)) return REAL(name)(where, size, protection, flags, file, at);                            \
        if (judge(#name, tracked[file], MEMORY_ERRORS, ACCESS) == BREAK) return MAP_FAILED;                                 \
        DONE(REAL(name)(where, size, protection, flags, file, at));                                                    \
    }
MAPPING(mmap, off_t)
MAPPING(mmap64, off64_t)
