// Makes reads of chosen files fail, fall short or take long, in a process that preloads this.
// Linux, 64 bits.
//
// FAULTY_READS_NAME     how the path of a file ends whose reads are concerned
// FAULTY_READS_CONTROL  a file of one struct control: what happens to them, changed as they run

#define _GNU_SOURCE

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum fault {
    FAULT_NONE,
    FAULT_ERROR,     // fail with control.code
    FAULT_INTERRUPT, // fail with EINTR; the thread's next read is let through
    FAULT_SHORT,     // read half, in whole blocks, and one at least
    FAULT_END,       // read nothing, as at the end of the file
    FAULT_DELAY,     // read after control.delay_ms
};

// tests/faults.py writes it
struct control {
    atomic_int fault;
    atomic_int n_before; // reads to let through before
    atomic_int n_faults; // reads to disturb after those
    atomic_int code;
    atomic_int delay_ms;
    atomic_int n_reads;     // seen
    atomic_int n_disturbed; // of them
};

#define BLOCK_BYTES 4096
#define MAX_PARTS   16

static struct control * control;
static const char *     name;

__attribute__((constructor)) static void init(void) {
    const char * path = getenv("FAULTY_READS_CONTROL");
    name              = getenv("FAULTY_READS_NAME");
    if (!path || !name) {
        return;
    }
    const int fd     = open(path, O_RDWR | O_CLOEXEC);
    const int access = PROT_READ | PROT_WRITE;
    void *    memory = mmap(NULL, sizeof(struct control), access, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
        perror("FAULTY_READS_CONTROL");
        abort();
    }
    close(fd);
    control = memory;
}

static bool is_concerned(int fd) {
    char link[32];
    char path[PATH_MAX];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    const ssize_t n_path = readlink(link, path, sizeof(path));
    const ssize_t n_name = (ssize_t) strlen(name);
    return n_path >= n_name && memcmp(path + n_path - n_name, name, n_name) == 0;
}

// Says what a read of fd is to suffer, and counts it.
static enum fault next_fault(int fd) {
    static _Thread_local bool was_interrupted;

    const int error = errno;
    if (!control || !is_concerned(fd)) {
        errno = error;
        return FAULT_NONE;
    }
    control->n_reads++;
    const enum fault fault = (enum fault) control->fault;
    if (fault == FAULT_NONE) {
        return FAULT_NONE;
    }
    if (fault == FAULT_INTERRUPT && was_interrupted) {
        was_interrupted = false;
        return FAULT_NONE;
    }
    if (atomic_fetch_sub(&control->n_before, 1) > 0) {
        return FAULT_NONE;
    }
    if (atomic_fetch_sub(&control->n_faults, 1) <= 0) {
        return FAULT_NONE;
    }
    was_interrupted = fault == FAULT_INTERRUPT;
    control->n_disturbed++;
    return fault;
}

static size_t half(size_t size) {
    const size_t n_blocks = size / BLOCK_BYTES / 2;
    return n_blocks > 0 ? n_blocks * BLOCK_BYTES : size < BLOCK_BYTES ? size : BLOCK_BYTES;
}

static size_t size_of(const struct iovec * parts, int n_parts) {
    size_t size = 0;
    for (int i = 0; i < n_parts; i++) {
        size += parts[i].iov_len;
    }
    return size;
}

// offset -1: where the file stands
static ssize_t read_parts(int fd, const struct iovec * parts, int n, off_t offset, int flags) {
    return syscall(SYS_preadv2, fd, parts, n, offset, 0, flags);
}

static ssize_t read_half(int fd, const struct iovec * parts, int n_parts, off_t offset, int flags) {
    struct iovec shorter[MAX_PARTS];
    size_t       left = half(size_of(parts, n_parts));
    int          n    = 0;
    for (; n < n_parts && n < MAX_PARTS && left > 0; n++) {
        shorter[n] = parts[n];
        if (shorter[n].iov_len > left) {
            shorter[n].iov_len = left;
        }
        left -= shorter[n].iov_len;
    }
    return read_parts(fd, shorter, n, offset, flags);
}

static ssize_t faulty_read(int fd, const struct iovec * parts, int n, off_t offset, int flags) {
    switch (next_fault(fd)) {
        case FAULT_ERROR:
            errno = control->code;
            return -1;
        case FAULT_INTERRUPT:
            errno = EINTR;
            return -1;
        case FAULT_SHORT:
            return read_half(fd, parts, n, offset, flags);
        case FAULT_END:
            return 0;
        case FAULT_DELAY: {
            const int             ms   = control->delay_ms;
            const struct timespec time = { ms / 1000, ms % 1000 * 1000000L };
            nanosleep(&time, NULL);
            break;
        }
        case FAULT_NONE:
            break;
    }
    return read_parts(fd, parts, n, offset, flags);
}

ssize_t read(int fd, void * buffer, size_t size) {
    if (!control) { // before init as well
        return syscall(SYS_read, fd, buffer, size);
    }
    return faulty_read(fd, &(struct iovec) { buffer, size }, 1, -1, 0);
}

ssize_t pread(int fd, void * buffer, size_t size, off_t offset) {
    return faulty_read(fd, &(struct iovec) { buffer, size }, 1, offset, 0);
}

ssize_t pread64(int fd, void * buffer, size_t size, off_t offset) {
    return pread(fd, buffer, size, offset);
}

ssize_t preadv2(int fd, const struct iovec * parts, int n_parts, off_t offset, int flags) {
    return faulty_read(fd, parts, n_parts, offset, flags);
}

ssize_t preadv64v2(int fd, const struct iovec * parts, int n_parts, off_t offset, int flags) {
    return preadv2(fd, parts, n_parts, offset, flags);
}

ssize_t preadv(int fd, const struct iovec * parts, int n_parts, off_t offset) {
    return preadv2(fd, parts, n_parts, offset, 0);
}

ssize_t preadv64(int fd, const struct iovec * parts, int n_parts, off_t offset) {
    return preadv2(fd, parts, n_parts, offset, 0);
}
