/* Preloaded into servers, agents and jobs: while a flag in a shared file is set, changes below a
   folder fail as on a file system that the kernel has made read-only, and are counted. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static struct { atomic_long set, refused; } *state;
static char folder[PATH_MAX];
static size_t length;

__attribute__((constructor)) static void open_state(void) {
    const char *path = getenv("CHAOS_READ_ONLY"), *disk = getenv("CHAOS_DISK");
    if (!path || !disk) return;
    int file = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED) return;
    length = snprintf(folder, sizeof folder, "%s/", disk);
    state = mapped;
}

static int refuse(void) {
    atomic_fetch_add(&state->refused, 1);
    errno = EROFS;
    return -1;
}

static int is_below(const char *path) { return strncmp(path, folder, length) == 0; }

static int file_is_below(int file) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return is_below(path);
}

static int path_is_read_only(int from, const char *path) {
    char base[PATH_MAX];
    int kept = errno, result = 0;
    if (!state || !state->set || !path) return 0;
    if (path[0] == '/') return is_below(path);
    if (from != AT_FDCWD) result = file_is_below(from);
    else if (getcwd(base, sizeof base - 1)) result = is_below(strcat(base, "/"));
    errno = kept;
    return result;
}

static int file_is_read_only(int file) {
    int kept = errno, result = state && state->set && file_is_below(file);
    errno = kept;
    return result;
}

#define MODE(flags) ({ mode_t mode = 0; if ((flags) & (O_CREAT | __O_TMPFILE)) { \
    va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); } mode; })
#define WRITES(flags) (((flags) & O_ACCMODE) != O_RDONLY || ((flags) & (O_CREAT | O_TRUNC)))

static int open_at(int from, const char *path, int flags, mode_t mode) {
    if (WRITES(flags) && path_is_read_only(from, path)) return refuse();
    return syscall(SYS_openat, from, path, flags, mode);
}

int open(const char *path, int flags, ...) { return open_at(AT_FDCWD, path, flags, MODE(flags)); }
int open64(const char *path, int flags, ...) { return open_at(AT_FDCWD, path, flags, MODE(flags)); }
int openat(int from, const char *path, int flags, ...) {
    return open_at(from, path, flags, MODE(flags));
}
int openat64(int from, const char *path, int flags, ...) {
    return open_at(from, path, flags, MODE(flags));
}

/* System calls, not the functions of libc: nothing here may take a lock after a fork. */
#define ON_FILE(type, name, call, parameters, ...) type name parameters { \
    return file_is_read_only(file) ? refuse() : syscall(call, __VA_ARGS__); }
ON_FILE(ssize_t, write, SYS_write, (int file, const void *data, size_t size), file, data, size)
ON_FILE(ssize_t, writev, SYS_writev, (int file, const struct iovec *data, int count),
        file, data, count)
ON_FILE(ssize_t, pwrite, SYS_pwrite64, (int file, const void *data, size_t size, off_t at),
        file, data, size, at)
ON_FILE(ssize_t, pwrite64, SYS_pwrite64, (int file, const void *data, size_t size, off64_t at),
        file, data, size, at)
ON_FILE(int, ftruncate, SYS_ftruncate, (int file, off_t size), file, size)
ON_FILE(int, ftruncate64, SYS_ftruncate, (int file, off64_t size), file, size)
ON_FILE(int, fallocate, SYS_fallocate, (int file, int mode, off_t at, off_t size),
        file, mode, at, size)

#define ON_PATH(name, call, parameters, from, path, ...) int name parameters { \
    return path_is_read_only(from, path) ? refuse() : (int)syscall(call, __VA_ARGS__); }
ON_PATH(mkdir, SYS_mkdirat, (const char *path, mode_t mode), AT_FDCWD, path, AT_FDCWD, path, mode)
ON_PATH(mkdirat, SYS_mkdirat, (int from, const char *path, mode_t mode), from, path,
        from, path, mode)
ON_PATH(rmdir, SYS_unlinkat, (const char *path), AT_FDCWD, path, AT_FDCWD, path, AT_REMOVEDIR)
ON_PATH(unlink, SYS_unlinkat, (const char *path), AT_FDCWD, path, AT_FDCWD, path, 0)
ON_PATH(unlinkat, SYS_unlinkat, (int from, const char *path, int flags), from, path,
        from, path, flags)
ON_PATH(rename, SYS_renameat2, (const char *path, const char *target), AT_FDCWD, target,
        AT_FDCWD, path, AT_FDCWD, target, 0)
ON_PATH(renameat, SYS_renameat2, (int from, const char *path, int to, const char *target), to,
        target, from, path, to, target, 0)
ON_PATH(link, SYS_linkat, (const char *path, const char *target), AT_FDCWD, target,
        AT_FDCWD, path, AT_FDCWD, target, 0)
ON_PATH(symlink, SYS_symlinkat, (const char *path, const char *target), AT_FDCWD, target,
        path, AT_FDCWD, target)
ON_PATH(chmod, SYS_fchmodat, (const char *path, mode_t mode), AT_FDCWD, path,
        AT_FDCWD, path, mode)
