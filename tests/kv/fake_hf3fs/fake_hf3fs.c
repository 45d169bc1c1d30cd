/* A stand-in for 3FS's libhf3fs_api_shared.so, for tests: the documented semantics of the calls that the engine makes, executed
 * by one daemon thread on ordinary files, and faults on command. Own code; only the declarations follow hf3fs_usrbio.h.
 *
 * What it is strict about: one thread prepares and submits, one waits; IOs stay inside their iov and its blocks; an fd must be
 * registered, and deregistered before its number is used again; a ring is for reads or for writes. Breaches are counted in
 * fake_count("violations") beside the error that the real library gives, where it gives one.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_FDS 4096
#define MAX_ENTRIES 4096
#define FORBID_READ_HOLES 2
#define HOLE_STATUS 8001

struct hf3fs_iov {
  uint8_t *base;
  void *iovh;
  char id[16];
  char mount_point[256];
  size_t size;
  size_t block_size;
  int numa;
};

struct hf3fs_ior {
  struct hf3fs_iov iov;
  void *iorh;
  char mount_point[256];
  bool for_read;
  int io_depth;
  int priority;
  int timeout;
  uint64_t flags;
};

struct hf3fs_cqe {
  int32_t index;
  int32_t reserved;
  int64_t result;
  const void *userdata;
};

struct io {
  uint8_t *address;
  int fd;
  size_t offset, length;
  const void *userdata;
  int index;
  int64_t bad; /* result fixed at preparation, 0 = execute */
};

struct ring {
  struct ring *next;
  int entries, io_depth;
  bool for_read;
  uint64_t flags;
  int used; /* slots taken: prepared, lost or not yet reaped */
  struct io pending[MAX_ENTRIES];
  int num_pending;
  struct hf3fs_cqe done[MAX_ENTRIES];
  int num_done;
  pthread_t preparer, waiter;
  bool has_preparer, has_waiter;
  bool dead;
};

struct registered {
  int dup_fd, status;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER, finished = PTHREAD_COND_INITIALIZER;
static pthread_t daemon_thread;
static bool daemon_runs, daemon_paused, not_hf3fs, reorders;
static struct ring *rings;
static struct registered files[MAX_FDS];
static char mount_point[256];
static struct io lost[MAX_ENTRIES];
static struct ring *lost_rings[MAX_ENTRIES];
static int num_lost;

/* One fault at a time: the `fault_at`-th IO that is executed from now on. */
static char fault_kind[16];
static int fault_at, fault_times;
static int64_t fault_value;

static struct {
  const char *name;
  long value;
} counts[] = {{"violations", 0}, {"rings", 0}, {"iovs", 0}, {"registered", 0}, {"deregistered", 0}, {"prepared", 0},
              {"submits", 0}, {"executed", 0}, {"max_batch", 0}, {"rejected_fds", 0}};

static long *count_of(const char *name) {
  for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); ++i)
    if (!strcmp(counts[i].name, name)) return &counts[i].value;
  abort();
}

long fake_count(const char *name) {
  pthread_mutex_lock(&lock);
  long value = *count_of(name);
  pthread_mutex_unlock(&lock);
  return value;
}

void fake_reset(const char *mount) {
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); ++i) counts[i].value = 0;
  snprintf(mount_point, sizeof(mount_point), "%s", mount);
  fault_times = 0;
  num_lost = 0;
  daemon_paused = not_hf3fs = reorders = false;
  for (int i = 0; i < MAX_FDS; ++i) files[i].dup_fd = 0;
  pthread_mutex_unlock(&lock);
}

/* kind: error (value = positive status), short (value = bytes), lose, hole, prep (value = errno of the preparation) */
void fake_fault(const char *kind, int at, int times, int64_t value) {
  pthread_mutex_lock(&lock);
  snprintf(fault_kind, sizeof(fault_kind), "%s", kind);
  fault_at = at;
  fault_times = times;
  fault_value = value;
  pthread_mutex_unlock(&lock);
}

void fake_pause(bool paused) {
  pthread_mutex_lock(&lock);
  daemon_paused = paused;
  pthread_cond_broadcast(&work);
  pthread_mutex_unlock(&lock);
}

/* The FUSE process is another one from now on: it knows nothing of the rings that there are. */
void fake_restart(void) {
  pthread_mutex_lock(&lock);
  for (struct ring *ring = rings; ring; ring = ring->next) ring->dead = true;
  pthread_mutex_unlock(&lock);
}

void fake_reorder(bool on) { reorders = on; }
void fake_not_hf3fs(bool on) { not_hf3fs = on; }

static bool meets_fault(const char *kind) {
  if (!fault_times || strcmp(fault_kind, kind) || --fault_at > 0) return false;
  --fault_times;
  fault_at = 1;
  return true;
}

static bool has_hole(int fd, size_t offset, size_t length) {
  off_t end = lseek(fd, 0, SEEK_END);
  if ((off_t)offset >= end) return false;
  off_t hole = lseek(fd, (off_t)offset, SEEK_HOLE);
  size_t stop = offset + length < (size_t)end ? offset + length : (size_t)end;
  return hole >= 0 && (size_t)hole < stop;
}

static int64_t execute(struct ring *ring, struct io *io) {
  if (io->bad) return io->bad;
  if (ring->for_read && (ring->flags & FORBID_READ_HOLES) && has_hole(io->fd, io->offset, io->length)) return -HOLE_STATUS;
  size_t done = 0;
  while (done < io->length) {
    ssize_t n = ring->for_read ? pread(io->fd, io->address + done, io->length - done, (off_t)(io->offset + done))
                               : pwrite(io->fd, io->address + done, io->length - done, (off_t)(io->offset + done));
    if (n < 0) return -errno;
    if (n == 0) break;
    done += (size_t)n;
  }
  return (int64_t)done;
}

static void complete(struct ring *ring, struct io *io, int64_t result) {
  struct hf3fs_cqe cqe = {io->index, 0, result, io->userdata};
  close(io->fd);
  ring->done[ring->num_done++] = cqe;
  pthread_cond_broadcast(&finished);
}

static void run_one(struct ring *ring, struct io io) {
  ++*count_of("executed");
  if (meets_fault("lose")) {
    lost_rings[num_lost] = ring;
    lost[num_lost++] = io;
  } else if (meets_fault("error")) {
    complete(ring, &io, -fault_value);
  } else if (meets_fault("hole")) {
    if (!(ring->flags & FORBID_READ_HOLES)) memset(io.address, 0, io.length);
    complete(ring, &io, ring->flags & FORBID_READ_HOLES ? -HOLE_STATUS : (int64_t)io.length);
  } else if (meets_fault("short")) {
    io.length = io.length < (size_t)fault_value ? io.length : (size_t)fault_value;
    complete(ring, &io, execute(ring, &io));
  } else {
    complete(ring, &io, execute(ring, &io));
  }
}

static void run_batch(struct ring *ring) {
  int n = ring->num_pending;
  /* A batch of fewer than |io_depth| waits: for ever with a positive depth, and by IoRing.cc's defect with a negative one. */
  int least = ring->io_depth < 0 ? -ring->io_depth : ring->io_depth;
  if (ring->dead || !n || n < least) return;
  struct io *batch = malloc(sizeof(struct io) * (size_t)n);
  memcpy(batch, ring->pending, sizeof(struct io) * (size_t)n);
  ring->num_pending = 0;
  if (n > *count_of("max_batch")) *count_of("max_batch") = n;
  for (int i = 0; i < n; ++i) run_one(ring, batch[reorders ? n - 1 - i : i]);
  free(batch);
}

static void *daemon_main(void *unused) {
  (void)unused;
  pthread_mutex_lock(&lock);
  for (;;) {
    /* Prepared IOs are also found without a submit, by looking now and then. */
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 5000000;
    if (until.tv_nsec >= 1000000000) until.tv_sec += 1, until.tv_nsec -= 1000000000;
    pthread_cond_timedwait(&work, &lock, &until);
    for (struct ring *ring = rings; ring && !daemon_paused; ring = ring->next) run_batch(ring);
  }
  return NULL;
}

/* Lets the daemon finish what it had lost: late data lands, late completions appear. */
void fake_finish_lost(void) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < num_lost; ++i) complete(lost_rings[i], &lost[i], execute(lost_rings[i], &lost[i]));
  num_lost = 0;
  pthread_mutex_unlock(&lock);
}

bool hf3fs_is_hf3fs(int fd) {
  (void)fd;
  return !not_hf3fs;
}

int hf3fs_extract_mount_point(char *out, int size, const char *path) {
  size_t length = strlen(mount_point);
  if (!length || strncmp(path, mount_point, length)) return -1;
  if ((int)length < size) strcpy(out, mount_point);
  return (int)length + 1;
}

static void fill_iov(struct hf3fs_iov *iov, uint8_t *base, const char *mount, size_t size, size_t block_size) {
  memset(iov, 0, sizeof(*iov));
  iov->base = base;
  snprintf(iov->mount_point, sizeof(iov->mount_point), "%s", mount);
  iov->size = size;
  iov->block_size = block_size;
}

int hf3fs_iovcreate(struct hf3fs_iov *iov, const char *mount, size_t size, size_t block_size, int numa) {
  (void)numa;
  if (!size || strcmp(mount, mount_point)) return -ENOENT;
  fill_iov(iov, aligned_alloc(4096, size), mount, size, block_size);
  iov->iovh = iov->base;
  pthread_mutex_lock(&lock);
  ++*count_of("iovs");
  pthread_mutex_unlock(&lock);
  return 0;
}

int hf3fs_iovwrap(struct hf3fs_iov *iov, void *base, const uint8_t id[16], const char *mount, size_t size, size_t block_size,
                  int numa) {
  (void)numa;
  fill_iov(iov, base, mount, size, block_size);
  memcpy(iov->id, id, 16);
  return 0;
}

void hf3fs_iovdestroy(struct hf3fs_iov *iov) {
  free(iov->iovh);
  iov->iovh = NULL;
  pthread_mutex_lock(&lock);
  --*count_of("iovs");
  pthread_mutex_unlock(&lock);
}

int hf3fs_iorcreate4(struct hf3fs_ior *ior, const char *mount, int entries, bool for_read, int io_depth, int timeout, int numa,
                     uint64_t flags) {
  (void)numa;
  if (!mount || !*mount || timeout < 0 || entries < 1 || entries > MAX_ENTRIES) return -EINVAL;
  struct ring *ring = calloc(1, sizeof(*ring));
  ring->entries = entries, ring->io_depth = io_depth, ring->for_read = for_read, ring->flags = flags;
  memset(ior, 0, sizeof(*ior));
  ior->iorh = ring, ior->for_read = for_read, ior->io_depth = io_depth, ior->timeout = timeout, ior->flags = flags;
  pthread_mutex_lock(&lock);
  ring->next = rings;
  rings = ring;
  ++*count_of("rings");
  if (!daemon_runs) pthread_create(&daemon_thread, NULL, daemon_main, NULL), daemon_runs = true;
  pthread_mutex_unlock(&lock);
  return 0;
}

void hf3fs_iordestroy(struct hf3fs_ior *ior) {
  pthread_mutex_lock(&lock);
  struct ring **at = &rings;
  while (*at && *at != ior->iorh) at = &(*at)->next;
  if (*at) {
    struct ring *ring = *at;
    if (ring->used) ++*count_of("violations");
    *at = ring->next;
    free(ring);
    /* The real library leaks a ring that has flags, until the process ends. */
    if (!ior->flags) --*count_of("rings");
  }
  ior->iorh = NULL;
  pthread_mutex_unlock(&lock);
}

int hf3fs_reg_fd(int fd, uint64_t flags) {
  (void)flags;
  pthread_mutex_lock(&lock);
  int result = 0, copy = -1;
  if (fd < 0 || fd >= MAX_FDS || not_hf3fs) {
    result = EBADF;
  } else if (files[fd].dup_fd) {
    result = EINVAL;
  } else if ((copy = fcntl(fd, F_DUPFD, 1024)) < 0 || copy >= MAX_FDS) {
    /* Above the small numbers, so that the table of copies never collides with fds that tests open. */
    result = EMFILE;
  } else {
    files[fd].dup_fd = copy;
    files[fd].status = fcntl(fd, F_GETFL);
    files[copy] = files[fd];
    ++*count_of("registered");
  }
  if (result) ++*count_of("rejected_fds");
  pthread_mutex_unlock(&lock);
  return result ? result : -copy;
}

void hf3fs_dereg_fd(int fd) {
  pthread_mutex_lock(&lock);
  /* As the real one, which asks the fd for its file system first: after the close it does nothing. */
  if (fd >= 0 && fd < MAX_FDS && fcntl(fd, F_GETFL) >= 0 && files[fd].dup_fd) {
    int copy = files[fd].dup_fd;
    files[copy].dup_fd = files[fd].dup_fd = 0;
    close(copy);
    ++*count_of("deregistered");
  }
  pthread_mutex_unlock(&lock);
}

static int check_io(const struct hf3fs_ior *ior, const struct hf3fs_iov *iov, bool read, uint8_t *address, int fd, size_t length) {
  if (!ior || !ior->iorh || read != ior->for_read || !iov || !length || address < iov->base ||
      address + length > iov->base + iov->size || fd >= MAX_FDS)
    return -EINVAL;
  if (!files[fd].dup_fd) return -EBADF;
  int mode = files[fd].status & O_ACCMODE;
  return (read && mode == O_WRONLY) || (!read && mode == O_RDONLY) ? -EACCES : 0;
}

int hf3fs_prep_io(const struct hf3fs_ior *ior, const struct hf3fs_iov *iov, bool read, void *ptr, int fd, size_t off,
                  uint64_t len, const void *userdata) {
  pthread_mutex_lock(&lock);
  fd = abs(fd);
  int result = check_io(ior, iov, read, ptr, fd, len);
  struct ring *ring = ior->iorh;
  if (!result) {
    if (ring->has_preparer && !pthread_equal(ring->preparer, pthread_self())) ++*count_of("violations");
    ring->preparer = pthread_self(), ring->has_preparer = true;
    if (meets_fault("prep")) result = -(int)fault_value;
    if (ring->used >= ring->entries) result = -EAGAIN;
  } else {
    ++*count_of("violations");
  }
  if (!result) {
    size_t start = (size_t)((uint8_t *)ptr - iov->base);
    bool crosses = iov->block_size && start / iov->block_size != (start + len - 1) / iov->block_size;
    /* The inode is fixed here: a file that is closed, or a number that is used again, changes nothing. */
    struct io io = {ptr, dup(files[fd].dup_fd), off, len, userdata, ring->used, crosses ? -EINVAL : 0};
    if (crosses) ++*count_of("violations");
    ring->pending[ring->num_pending++] = io;
    result = ring->used++;
    ++*count_of("prepared");
  }
  pthread_mutex_unlock(&lock);
  return result;
}

int hf3fs_submit_ios(const struct hf3fs_ior *ior) {
  if (!ior || !ior->iorh) return -EINVAL;
  pthread_mutex_lock(&lock);
  ++*count_of("submits");
  pthread_cond_broadcast(&work);
  pthread_mutex_unlock(&lock);
  return 0;
}

int hf3fs_wait_for_ios(const struct hf3fs_ior *ior, struct hf3fs_cqe *cqes, int cqec, int min_results,
                       const struct timespec *abs_timeout) {
  if (cqec <= 0 || !ior || !ior->iorh) return -EINVAL;
  pthread_mutex_lock(&lock);
  struct ring *ring = ior->iorh;
  if (ring->has_waiter && !pthread_equal(ring->waiter, pthread_self())) ++*count_of("violations");
  ring->waiter = pthread_self(), ring->has_waiter = true;
  if (min_results > cqec) min_results = cqec;
  while (ring->num_done < min_results) {
    int error = abs_timeout ? pthread_cond_timedwait(&finished, &lock, abs_timeout) : pthread_cond_wait(&finished, &lock);
    if (error == ETIMEDOUT) break;
  }
  int n = ring->num_done < cqec ? ring->num_done : cqec;
  memcpy(cqes, ring->done, sizeof(*cqes) * (size_t)n);
  memmove(ring->done, ring->done + n, sizeof(*cqes) * (size_t)(ring->num_done - n));
  ring->num_done -= n;
  ring->used -= n;
  pthread_mutex_unlock(&lock);
  return n;
}
