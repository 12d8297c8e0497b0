#include "read-pool.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace lh {

// File offset, length and address of a direct read are multiples of this: no block device in use has larger blocks.
static constexpr int64_t block_bytes = 4096;

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

std::vector<piece> split_range(int64_t size, int64_t chunk_bytes, int64_t unit, int64_t head) {
    const int64_t n_units  = (head + size + unit - 1) / unit;
    const int64_t n_max    = std::max<int64_t>(chunk_bytes / unit, 1);
    const int64_t n_pieces = (n_units + n_max - 1) / n_max;

    std::vector<piece> pieces;
    for (int64_t i = 0; i < n_pieces; i++) {
        const int64_t first = std::max<int64_t>(n_units * i / n_pieces * unit - head, 0);
        const int64_t last  = std::min(n_units * (i + 1) / n_pieces * unit - head, size);
        pieces.push_back({ first, last - first });
    }
    return pieces;
}

std::vector<piece> split_file_range(int64_t offset, int64_t size, int64_t chunk_bytes) {
    return split_range(size, chunk_bytes, block_bytes, offset % block_bytes);
}

static error read_error(const read_file & file, int64_t offset, int64_t size, int code) {
    return error(LH_STATUS_IO,
                 file.path + ": cannot read " + std::to_string(size) + " bytes at offset " + std::to_string(offset) +
                     ": " + (code ? std::strerror(code) : "the file ends before them"),
                 code);
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

// Switches caching off, proved by one real read.
static lh_file_mode probe_uncached(read_file & file) {
#if defined(F_NOCACHE)
    return fcntl(file.fd, F_NOCACHE, 1) == 0 ? LH_FILE_MODE_NOCACHE : LH_FILE_MODE_CACHED;
#elif defined(O_DIRECT)
    const int fd = open(file.path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (fd >= 0) {
        uint8_t *     buffer = allocate_buffer(block_bytes);
        const ssize_t n      = pread(fd, buffer, block_bytes, 0);
        std::free(buffer);
        if (n > 0) {
            close(file.fd);
            file.fd = fd;
            return LH_FILE_MODE_DIRECT;
        }
        close(fd);
    }
    return LH_FILE_MODE_DONTNEED;
#else
    return LH_FILE_MODE_CACHED;
#endif
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

void lh_read_pool::reserve(int64_t size) {
    if (size <= chunk_bytes) {
        return;
    }
    const int64_t                aligned = lh::align_up(size);
    std::unique_lock<std::mutex> lock(mutex);
    done.wait(lock, [&] { return jobs.empty() && n_busy == 0; });
    for (worker & w : workers) {
        uint8_t * buffer = lh::allocate_buffer(aligned + 2 * lh::block_bytes);
        std::free(w.buffer);
        w.buffer = buffer;
    }
    chunk_bytes = aligned;
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

void lh_read_pool::submit(std::vector<lh::read_chunk> chunks, lh::read_batch & batch) {
    std::list<job> added; // spliced in, so that either all or none of the batch is submitted
    for (lh::read_chunk & chunk : chunks) {
        added.push_back({ std::move(chunk), &batch });
    }
    {
        std::lock_guard<std::mutex> lock(mutex);
        batch.n_open += added.size();
        jobs.splice(jobs.end(), added);
    }
    wake.notify_all();
}

void lh_read_pool::wait(lh::read_batch & batch) {
    std::unique_lock<std::mutex> lock(mutex);
    done.wait(lock, [&] { return batch.n_open == 0; });
    if (batch.failure) {
        std::rethrow_exception(batch.failure);
    }
}

void lh_read_pool::cancel(const std::vector<lh::read_batch *> & batches) {
    std::unique_lock<std::mutex> lock(mutex);
    for (auto it = jobs.begin(); it != jobs.end();) {
        if (std::find(batches.begin(), batches.end(), it->batch) == batches.end()) {
            it++;
            continue;
        }
        finish(*it->batch);
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

void lh_read_pool::finish(lh::read_batch & batch) {
    batch.n_open--;
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
        n_busy++;
        if (!next.batch->failure) {
            lock.unlock();
            std::exception_ptr failure;
            try {
                next.chunk.sink(lh::read_into(files[next.chunk.file], next.chunk.offset, next.chunk.size, self.buffer));
            } catch (...) {
                failure = std::current_exception();
            }
            lock.lock();
            if (failure && !next.batch->failure) {
                next.batch->failure = failure;
            }
        }
        n_busy--;
        finish(*next.batch);
        if (jobs.empty() && n_busy == 0) {
            done.notify_all();
        }
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
                chunks.push_back({ read.file, read.offset + piece.offset, piece.size,
                                   [dst, n = piece.size](const uint8_t * data) { std::memcpy(dst, data, n); } });
            }
        }
        pool->run(std::move(chunks));
    });
}

int64_t lh_read_pool_buffer_bytes(const lh_read_pool * pool) {
    return pool->buffer_bytes();
}
