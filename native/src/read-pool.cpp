#include "read-pool.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace lh {

// Times that a thread looks whether the leader is done before it sleeps: some ten microseconds.
static constexpr int n_spins = 1000;

static void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

static int64_t align_down(int64_t n) {
    return n / block_bytes * block_bytes;
}

static int64_t align_up(int64_t n) {
    return align_down(n + block_bytes - 1);
}

static uint8_t * allocate_buffer(int64_t size) {
    void * buffer = nullptr;
    if (posix_memalign(&buffer, block_bytes, size) != 0) {
        throw std::bad_alloc();
    }
    return static_cast<uint8_t *>(buffer);
}

std::vector<piece> split_file_range(int64_t offset, int64_t size, int64_t chunk_bytes) {
    const int64_t head     = offset % block_bytes;
    const int64_t n_blocks = (head + size + block_bytes - 1) / block_bytes;
    const int64_t n_max    = std::max<int64_t>(chunk_bytes / block_bytes, 1);
    const int64_t n_pieces = (n_blocks + n_max - 1) / n_max;

    std::vector<piece> pieces;
    for (int64_t i = 0; i < n_pieces; i++) {
        const int64_t first = std::max<int64_t>(n_blocks * i / n_pieces * block_bytes - head, 0);
        const int64_t last  = std::min(n_blocks * (i + 1) / n_pieces * block_bytes - head, size);
        pieces.push_back({ first, last - first });
    }
    return pieces;
}

static error read_error(const read_file & file, int64_t offset, int64_t size, int code) {
    return error(LH_STATUS_IO,
                 file.path + ": cannot read " + std::to_string(size) + " bytes at offset " + std::to_string(offset) +
                     ": " + (code ? std::strerror(code) : "the file ends before them"),
                 code);
}

static lh_file_stamp stamp_of(const struct stat & status) {
#if defined(__APPLE__)
    const struct timespec & mtime = status.st_mtimespec;
#else
    const struct timespec & mtime = status.st_mtim;
#endif
    return { static_cast<int64_t>(status.st_dev), static_cast<int64_t>(status.st_ino),
             static_cast<int64_t>(status.st_size), int64_t(mtime.tv_sec) * 1000000000 + mtime.tv_nsec };
}

static bool is_same(const lh_file_stamp & a, const lh_file_stamp & b) {
    return a.device == b.device && a.inode == b.inode && a.size == b.size && a.mtime_ns == b.mtime_ns;
}

static void check_stamp(const read_file & file, int status_code, const struct stat & status) {
    if (status_code != 0) {
        throw error(LH_STATUS_IO, file.path + " cannot be looked at: " + std::strerror(status_code), status_code);
    }
    if (!is_same(stamp_of(status), file.stamp)) {
        throw error(LH_STATUS_IO, file.path + " has changed since it was opened; start again with a file that stays",
                    ESTALE);
    }
}

// Looks at the open file. After a read this says that what was read is what was there when the file was opened.
static void check_unchanged(const read_file & file) {
    struct stat status = {};
    const int   code   = fstat(file.fd, &status) == 0 ? 0 : errno;
    check_stamp(file, code, status);
}

// Reads at least [offset, offset + size) of what starts at the aligned offset before it; returns where offset lies in buffer.
static const uint8_t * read_into(const read_file & file, int64_t offset, int64_t size, uint8_t * buffer) {
    const bool    direct = file.mode == LH_FILE_MODE_DIRECT;
    const int64_t start  = direct ? align_down(offset) : offset;
    const int64_t end    = direct ? align_up(offset + size) : offset + size;
    const int64_t needed = offset + size - start;

    for (int64_t n_done = 0; n_done < needed;) {
        const ssize_t n = pread(file.fd, buffer + n_done, end - start - n_done, start + n_done);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            throw read_error(file, offset, size, errno);
        }
        n_done += n;
        if (n == 0 || (direct && n_done < needed && n % block_bytes != 0)) {
            throw read_error(file, offset, size, 0);
        }
    }
#if defined(POSIX_FADV_DONTNEED)
    if (file.mode == LH_FILE_MODE_DONTNEED) {
        posix_fadvise(file.fd, align_down(start), align_up(end) - align_down(start), POSIX_FADV_DONTNEED);
    }
#endif
    return buffer + (offset - start);
}

#if defined(O_DIRECT)
// Reads to an address that is as far from a block as the offset is: whole blocks to where they belong, the ends by way of the
// buffer. False: something was short, interrupted or not possible this way, and nothing is known.
static bool read_in_place(const read_file & file, const read_chunk & chunk, uint8_t * buffer) {
    const int64_t first = align_up(chunk.offset);
    const int64_t last  = align_down(chunk.offset + chunk.size);
    const int64_t start = align_down(chunk.offset);
    const int64_t end   = align_up(chunk.offset + chunk.size);
    uint8_t *     tail  = buffer + block_bytes;

    struct iovec parts[3];
    int          n_parts = 0;
    if (start < first) {
        parts[n_parts++] = { buffer, block_bytes };
    }
    parts[n_parts++] = { chunk.dst + (first - chunk.offset), static_cast<size_t>(last - first) };
    if (last < end) {
        parts[n_parts++] = { tail, block_bytes };
    }
    const ssize_t n = preadv(file.fd, parts, n_parts, start);
    if (n < 0 && errno != EINTR && errno != EINVAL && errno != EFAULT) { // a driver's memory may take no direct reads
        throw read_error(file, chunk.offset, chunk.size, errno);
    }
    if (n < chunk.offset + chunk.size - start) {
        return false;
    }
    std::memcpy(chunk.dst, buffer + (chunk.offset - start), first - chunk.offset);
    std::memcpy(chunk.dst + (last - chunk.offset), tail, chunk.offset + chunk.size - last);
    return true;
}
#endif

static void read_to_dst(const read_file & file, const read_chunk & chunk, uint8_t * buffer) {
    if (file.mode != LH_FILE_MODE_DIRECT) {
        read_into(file, chunk.offset, chunk.size, chunk.dst);
        return;
    }
#if defined(O_DIRECT)
    const bool is_congruent = (reinterpret_cast<uintptr_t>(chunk.dst) - chunk.offset) % block_bytes == 0;
    if (is_congruent && chunk.size >= 2 * block_bytes && read_in_place(file, chunk, buffer)) {
        return;
    }
#endif
    std::memcpy(chunk.dst, read_into(file, chunk.offset, chunk.size, buffer), chunk.size);
}

static void read(const read_file & file, const read_chunk & chunk, uint8_t * buffer) {
    if (!chunk.dst) {
        chunk.sink(read_into(file, chunk.offset, chunk.size, buffer));
        return;
    }
    read_to_dst(file, chunk, buffer);
    if (chunk.sink) {
        chunk.sink(chunk.dst);
    }
}

// Switches caching off, proved by one real read.
static lh_file_mode probe_uncached(read_file & file) {
#if defined(F_NOCACHE)
    return fcntl(file.fd, F_NOCACHE, 1) == 0 ? LH_FILE_MODE_NOCACHE : LH_FILE_MODE_CACHED;
#elif defined(O_DIRECT)
    uint8_t * buffer = allocate_buffer(block_bytes);
    const int fd     = open(file.path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (fd < 0) {
        std::free(buffer);
    } else {
        ssize_t n = -1;
        do {
            n = pread(fd, buffer, block_bytes, 0);
        } while (n < 0 && errno == EINTR);
        const int code = n < 0 ? errno : 0;
        std::free(buffer);
        if (n > 0) {
            close(file.fd);
            file.fd = fd;
            return LH_FILE_MODE_DIRECT;
        }
        close(fd);
        if (code == EIO || code == ENOMEM) { // not a refusal
            throw read_error(file, 0, block_bytes, code);
        }
    }
    return LH_FILE_MODE_DONTNEED;
#else
    return LH_FILE_MODE_CACHED;
#endif
}

// Threads that sleep and are woken together may end up on one processor, where they compute in turn until the system notices, some
// milliseconds later: whoever finds another one there goes elsewhere, once, and may go where it might before.
void crew::leave([[maybe_unused]] int ith) {
#if defined(__linux__)
    const int here = sched_getcpu();
    cpu[ith].store(here, std::memory_order_relaxed);
    if (std::none_of(cpu.begin(), cpu.begin() + ith, [&](const std::atomic<int32_t> & c) { return c == here; })) {
        return;
    }
    cpu_set_t allowed, others;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
        return;
    }
    others = allowed;
    for (int i = 0; i < ith; i++) {
        const int32_t taken = cpu[i];
        if (taken >= 0 && taken < CPU_SETSIZE) {
            CPU_CLR(taken, &others);
        }
    }
    if (CPU_COUNT(&others) > 0 && sched_setaffinity(0, sizeof(others), &others) == 0) {
        sched_setaffinity(0, sizeof(allowed), &allowed);
        cpu[ith].store(sched_getcpu(), std::memory_order_relaxed);
    }
#endif
}

void crew::reset() {
    std::fill(cpu.begin(), cpu.end(), -1);
    n_entered.fill(0);
    n_done    = 0;
    is_held   = false;
    worked_us = 0;
}

} // namespace lh

lh_read_pool::lh_read_pool(int32_t n_threads, int64_t chunk_bytes) : chunk_bytes(chunk_bytes), workers(n_threads) {
    try {
        for (worker & w : workers) {
            w.buffer = lh::allocate_buffer(chunk_bytes + 2 * lh::block_bytes);
        }
        for (worker & w : workers) {
            w.thread = std::thread([this, &w] { work(w); });
        }
    } catch (...) {
        shut_down();
        throw;
    }
}

lh_read_pool::~lh_read_pool() {
    shut_down();
}

void lh_read_pool::shut_down() noexcept {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stop = true;
    }
    wake.notify_all();
    for (worker & w : workers) {
        if (w.thread.joinable()) {
            w.thread.join();
        }
        std::free(w.buffer);
        w.buffer = nullptr;
    }
    for (lh::read_file & file : files) {
        close(file.fd);
    }
    files.clear();
}

int64_t lh_read_pool::buffer_bytes() const {
    return static_cast<int64_t>(workers.size()) * (chunk_bytes + 2 * lh::block_bytes);
}

int64_t lh_read_pool::staging_bytes() const {
    return buffer_bytes();
}

void lh_read_pool::set_staging(uint8_t * memory) {
    std::lock_guard<std::mutex> lock(mutex);
    const int64_t               each = chunk_bytes + 2 * lh::block_bytes;
    for (size_t i = 0; i < workers.size(); i++) {
        workers[i].staging = memory ? memory + i * each : nullptr;
    }
}

int64_t lh_read_pool::busy_us() {
    std::lock_guard<std::mutex> lock(mutex);
    return n_busy_us + (n_reading > 0 ? lh::now_us() - reading_since_us : 0);
}

int32_t lh_read_pool::open_file(const char * path, bool uncached) {
    lh::read_file file;
    file.path = path;
    file.fd   = open(path, O_RDONLY | O_CLOEXEC);
    if (file.fd < 0) {
        throw lh::error(LH_STATUS_IO, file.path + ": " + std::strerror(errno), errno);
    }
    try {
        if (uncached) {
            file.mode = lh::probe_uncached(file);
        }
        struct stat status = {};
        if (fstat(file.fd, &status) != 0) {
            throw lh::error(LH_STATUS_IO, file.path + ": " + std::strerror(errno), errno);
        }
        file.stamp = lh::stamp_of(status);
        files.push_back(file);
    } catch (...) {
        close(file.fd);
        throw;
    }
    return static_cast<int32_t>(files.size()) - 1;
}

void lh_read_pool::check_file(int32_t file) const {
    if (file < 0 || file >= static_cast<int32_t>(files.size())) {
        throw lh::error(LH_STATUS_INVALID_ARGUMENT, "no file " + std::to_string(file));
    }
}

void lh_read_pool::check_unchanged() const {
    for (const lh::read_file & file : files) {
        lh::check_unchanged(file);
    }
}

void lh_read_pool::check_paths() const {
    for (const lh::read_file & file : files) {
        struct stat status = {};
        const int   code   = stat(file.path.c_str(), &status) == 0 ? 0 : errno;
        lh::check_stamp(file, code, status);
    }
}

void lh_read_pool::submit(std::vector<lh::read_chunk> chunks, lh::read_batch & batch) {
    std::list<job> added; // spliced in, so that either all or none of the batch is submitted
    for (lh::read_chunk & chunk : chunks) {
        added.push_back({ std::move(chunk), &batch });
    }
    {
        std::lock_guard<std::mutex> lock(mutex);
        batch.n_open += added.size();
        for (const job & job : added) {
            if (job.chunk.group) {
                job.chunk.group->n_open++;
            }
        }
        for (const lh::read_group & group : batch.groups) {
            batch.n_open += group.n_parts;
        }
        jobs.splice(jobs.end(), added);
    }
    wake.notify_all();
}

void lh_read_pool::wait(lh::read_batch & batch, lh::crew * crew) {
    std::unique_lock<std::mutex> lock(mutex);
    if (crew) {
        crew->batch = &batch;
        done.notify_all();
    }
    while (batch.n_open > 0) {
        const int64_t start_us = lh::now_us();
        if (!run_part(batch, lock)) {
            done.wait(lock);
        } else if (crew) {
            crew->worked_us += lh::now_us() - start_us;
        }
    }
    if (crew) {
        crew->batch = nullptr;
    }
    if (batch.failure) {
        std::rethrow_exception(batch.failure);
    }
}

void lh_read_pool::release(lh::crew & crew) {
    crew.is_held.store(false, std::memory_order_relaxed);
    crew.leave(0);
    crew.n_done.fetch_add(1);
    if (crew.n_asleep.load() >
        0) { // a thread falls asleep only after it has been counted here and has looked at n_done again
        std::lock_guard<std::mutex> lock(mutex);
        done.notify_all();
    }
}

void lh_read_pool::follow(lh::crew & crew, int ith) {
    const int64_t op = ++crew.n_entered[ith];
    for (int i = 0; i < lh::n_spins && !crew.is_held.load(std::memory_order_relaxed); i++) {
        if (crew.n_done.load(std::memory_order_acquire) >= op) {
            crew.leave(ith);
            return;
        }
        lh::relax();
    }
    std::unique_lock<std::mutex> lock(mutex);
    crew.n_asleep++;
    while (crew.n_done.load() < op) {
        if (!crew.batch || !run_part(*crew.batch, lock)) {
            done.wait(lock);
        }
    }
    crew.n_asleep--;
    lock.unlock();
    crew.leave(ith);
}

// Runs a part of a follow-up with the lock released; false: none is ready.
bool lh_read_pool::run_part(lh::read_batch & batch, std::unique_lock<std::mutex> & lock) {
    if (batch.ready.empty()) {
        return false;
    }
    const auto [group, part] = batch.ready.front();
    batch.ready.pop_front();
    lock.unlock();
    std::exception_ptr failure;
    try {
        group->follow_up(part);
    } catch (...) {
        failure = std::current_exception();
    }
    lock.lock();
    if (failure) {
        fail(batch, failure);
    }
    finish(batch, 1);
    return true;
}

void lh_read_pool::cancel(const std::vector<lh::read_batch *> & batches) {
    const auto                   failure = std::make_exception_ptr(lh::error(LH_STATUS_STATE, "a read was given up"));
    std::unique_lock<std::mutex> lock(mutex);
    for (lh::read_batch * batch : batches) {
        fail(*batch, failure);
    }
    for (auto it = jobs.begin(); it != jobs.end();) {
        if (std::find(batches.begin(), batches.end(), it->batch) == batches.end()) {
            it++;
            continue;
        }
        finish_chunk(*it->batch, it->chunk.group);
        it = jobs.erase(it);
    }
    for (const lh::read_batch * batch : batches) {
        done.wait(lock, [&] { return batch->n_open == 0; });
    }
}

void lh_read_pool::run(std::vector<lh::read_chunk> chunks) {
    lh::read_batch batch;
    submit(std::move(chunks), batch);
    wait(batch);
}

// Keeps the first failure and forgets the parts that have not been started.
void lh_read_pool::fail(lh::read_batch & batch, std::exception_ptr failure) {
    if (!batch.failure) {
        batch.failure = failure;
    }
    const size_t n_forgotten = batch.ready.size();
    batch.ready.clear();
    finish(batch, n_forgotten);
}

// A chunk has been read or given up; what follows from the last one of its group can run, unless the batch has failed.
void lh_read_pool::finish_chunk(lh::read_batch & batch, lh::read_group * group) {
    if (group && --group->n_open == 0) {
        if (batch.failure) {
            finish(batch, group->n_parts);
        } else {
            for (int32_t part = 0; part < group->n_parts; part++) {
                batch.ready.emplace_back(group, part);
            }
            done.notify_all();
        }
    }
    finish(batch, 1);
}

void lh_read_pool::finish(lh::read_batch & batch, size_t n) {
    batch.n_open -= n;
    if (batch.n_open == 0) {
        done.notify_all();
    }
}

void lh_read_pool::work(worker & self) {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        wake.wait(lock, [&] { return stop || !jobs.empty(); });
        if (stop) {
            return;
        }
        job next = std::move(jobs.front());
        jobs.pop_front();
        if (!next.batch->failure) {
            const bool is_read = !next.chunk.src;
            if (is_read && n_reading++ == 0) {
                reading_since_us = lh::now_us();
            }
            uint8_t * buffer = !next.chunk.dst && self.staging ? self.staging : self.buffer;
            lock.unlock();
            std::exception_ptr failure;
            try {
                if (is_read) {
                    try {
                        lh::read(files[next.chunk.file], next.chunk, buffer);
                    } catch (const lh::error & e) {
                        if (e.code != EFAULT || buffer == self.buffer) {
                            throw;
                        }
                        self.staging = nullptr; // a driver's memory that takes no direct reads
                        lh::read(files[next.chunk.file], next.chunk, self.buffer);
                    }
                    lh::check_unchanged(files[next.chunk.file]);
                } else {
                    next.chunk.sink(next.chunk.src);
                }
            } catch (...) {
                failure = std::current_exception();
            }
            lock.lock();
            if (is_read && --n_reading == 0) {
                n_busy_us += lh::now_us() - reading_since_us;
            }
            if (failure) {
                fail(*next.batch, failure);
            }
        }
        finish_chunk(*next.batch, next.chunk.group);
    }
}

lh_status lh_read_pool_init(int32_t n_threads, int64_t chunk_bytes, lh_read_pool ** pool) {
    return lh::guarded([&] {
        if (n_threads < 1 || chunk_bytes < lh::block_bytes || chunk_bytes % lh::block_bytes != 0) {
            throw lh::error(LH_STATUS_INVALID_ARGUMENT,
                            "a read pool needs a thread, and chunks of a multiple of 4096 bytes");
        }
        *pool = new lh_read_pool(n_threads, chunk_bytes);
    });
}

void lh_read_pool_free(lh_read_pool * pool) {
    delete pool;
}

lh_status lh_read_pool_open_file(lh_read_pool * pool, const char * path, bool uncached, int32_t * file,
                                 lh_file_mode * mode) {
    return lh::guarded([&] {
        *file = pool->open_file(path, uncached);
        *mode = pool->files[*file].mode;
    });
}

lh_status lh_read_pool_read(lh_read_pool * pool, const lh_read * reads, int64_t n_reads) {
    return lh::guarded([&] {
        std::vector<lh::read_chunk> chunks;
        for (int64_t i = 0; i < n_reads; i++) {
            const lh_read & read = reads[i];
            pool->check_file(read.file);
            if (read.offset < 0 || read.size < 0) {
                throw lh::error(LH_STATUS_INVALID_ARGUMENT, "a read has a negative offset or size");
            }
            for (const lh::piece & piece : lh::split_file_range(read.offset, read.size, pool->chunk_bytes)) {
                uint8_t * dst = static_cast<uint8_t *>(read.dst) + piece.offset;
                chunks.push_back({ read.file, read.offset + piece.offset, piece.size, dst, {}, nullptr });
            }
        }
        pool->run(std::move(chunks));
    });
}

lh_status lh_read_pool_file_stamp(const lh_read_pool * pool, int32_t file, lh_file_stamp * stamp) {
    return lh::guarded([&] {
        pool->check_file(file);
        *stamp = pool->files[file].stamp;
    });
}

int64_t lh_read_pool_buffer_bytes(const lh_read_pool * pool) {
    return pool->buffer_bytes();
}
