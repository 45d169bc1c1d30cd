/* Preloaded into a kvd process: the system calls of its store obey the files of a control folder.
 *
 * KVD_FAULTS names the folder, KVD_STORE the store's root; other files are left alone. Contents of the controls:
 *   hold-read, hold-write, hold-fsync   any: the call waits as long as the file is there, and first makes held-read, ... A write
 *                                       moves half of its bytes before it waits.
 *   fail-read, fail-write, fail-fsync   "errno every": every n-th such call fails with it
 *   short-read, short-write             "bytes every": every n-th such call moves at most so many
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static atomic_long num_calls;

static const char *control(char *path, const char *verb, const char *call) {
    const char *folder = getenv("KVD_FAULTS");
    if (folder == NULL) return NULL;
    snprintf(path, PATH_MAX, "%s/%s-%s", folder, verb, call);
    return path;
}

static int is_store(int fd) {
    const char *root = getenv("KVD_STORE");
    char link[64], target[PATH_MAX];
    if (root == NULL) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, target, sizeof target - 1);
    if (length < 0) return 0;
    target[length] = 0;
    return strncmp(target, root, strlen(root)) == 0;
}

static int is_held(const char *call) {
    char path[PATH_MAX];
    return control(path, "hold", call) != NULL && access(path, F_OK) == 0;
}

static void hold(const char *call) {
    char path[PATH_MAX];
    if (!is_held(call)) return;
    control(path, "held", call);
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0) close(fd);
    while (is_held(call)) {
        struct timespec pause = {0, 2000000};
        nanosleep(&pause, NULL);
    }
}

/* The value of a control whose turn it is, else 0. */
static long value_of(const char *verb, const char *call) {
    char path[PATH_MAX], text[64] = {0};
    long value = 0, every = 1;
    if (control(path, verb, call) == NULL) return 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0 || sscanf(text, "%ld %ld", &value, &every) < 1 || every < 1) return 0;
    return atomic_fetch_add(&num_calls, 1) % every == 0 ? value : 0;
}

static int fails(const char *call) {
    long code = value_of("fail", call);
    if (code == 0) return 0;
    errno = (int)code;
    return 1;
}

/* Cuts a list of buffers to so many bytes; returns how many buffers are left. */
static int cut(struct iovec *cut_to, const struct iovec *buffers, int count, size_t bytes) {
    int used = 0;
    for (; used < count && bytes > 0; used++) {
        cut_to[used] = buffers[used];
        if (cut_to[used].iov_len > bytes) cut_to[used].iov_len = bytes;
        bytes -= cut_to[used].iov_len;
    }
    return used;
}

static size_t total(const struct iovec *buffers, int count) {
    size_t bytes = 0;
    for (int index = 0; index < count; index++) bytes += buffers[index].iov_len;
    return bytes;
}

ssize_t preadv64v2(int fd, const struct iovec *buffers, int count, off64_t offset, int flags) {
    static ssize_t (*real)(int, const struct iovec *, int, off64_t, int);
    struct iovec few[IOV_MAX];
    if (real == NULL) real = dlsym(RTLD_NEXT, "preadv64v2");
    if (is_store(fd)) {
        hold("read");
        if (fails("read")) return -1;
        long most = value_of("short", "read");
        if (most > 0) {
            count = cut(few, buffers, count, (size_t)most);
            return real(fd, few, count, offset, flags);
        }
    }
    return real(fd, buffers, count, offset, flags);
}

ssize_t preadv2(int fd, const struct iovec *buffers, int count, off_t offset, int flags) {
    return preadv64v2(fd, buffers, count, offset, flags);
}

ssize_t preadv64(int fd, const struct iovec *buffers, int count, off64_t offset) {
    return preadv64v2(fd, buffers, count, offset, 0);
}

ssize_t preadv(int fd, const struct iovec *buffers, int count, off_t offset) {
    return preadv64v2(fd, buffers, count, offset, 0);
}

ssize_t writev(int fd, const struct iovec *buffers, int count) {
    static ssize_t (*real)(int, const struct iovec *, int);
    struct iovec few[IOV_MAX];
    if (real == NULL) real = dlsym(RTLD_NEXT, "writev");
    if (is_store(fd)) {
        if (is_held("write")) {
            ssize_t moved = real(fd, few, cut(few, buffers, count, total(buffers, count) / 2));
            hold("write");
            return moved;
        }
        if (fails("write")) return -1;
        long most = value_of("short", "write");
        if (most > 0) {
            count = cut(few, buffers, count, (size_t)most);
            return real(fd, few, count);
        }
    }
    return real(fd, buffers, count);
}

int fsync(int fd) {
    static int (*real)(int);
    if (real == NULL) real = dlsym(RTLD_NEXT, "fsync");
    if (is_store(fd)) {
        hold("fsync");
        if (fails("fsync")) return -1;
    }
    return real(fd);
}
