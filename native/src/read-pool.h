#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "status.h"

namespace lh {

// A file that chunks are read from.
struct read_file {
    std::string  path;
    int          fd   = -1;
    lh_file_mode mode = LH_FILE_MODE_CACHED;
};

// One contiguous read, small enough for a worker's buffer.
struct read_chunk {
    int32_t                                   file;
    int64_t                                   offset;
    int64_t                                   size;
    // Takes the bytes, on a worker thread.
    std::function<void(const uint8_t * data)> sink;
};

// Chunks that are waited for together.
struct read_batch {
    size_t             n_open = 0; // not finished
    std::exception_ptr failure;    // the first; the chunks after it are not read
};

// A part of a range, counted from the range's start.
struct piece {
    int64_t offset;
    int64_t size;
};

// The pieces of a range of size bytes that starts head bytes after a multiple of unit: evenly sized, cut at multiples of unit,
// at most chunk_bytes each if that is a unit or more.
std::vector<piece> split_range(int64_t size, int64_t chunk_bytes, int64_t unit, int64_t head);

// The same, cut where a direct read can start.
std::vector<piece> split_file_range(int64_t offset, int64_t size, int64_t chunk_bytes);

} // namespace lh

// Reads chunks, first come first served, with a fixed number of threads and buffers.
struct lh_read_pool {
    lh_read_pool(int32_t n_threads, int64_t chunk_bytes);
    ~lh_read_pool();

    lh_read_pool(const lh_read_pool &)             = delete;
    lh_read_pool & operator=(const lh_read_pool &) = delete;

    // The batch must live until wait() has returned, or cancel().
    void submit(std::vector<lh::read_chunk> chunks, lh::read_batch & batch);
    // Returns when every chunk of the batch has been read and taken, or throws its failure once none is being read.
    void wait(lh::read_batch & batch);
    // Forgets what has not been started of these batches, and returns when nothing of them is being read.
    void cancel(const std::vector<lh::read_batch *> & batches);
    void run(std::vector<lh::read_chunk> chunks);

    int32_t open_file(const char * path, bool uncached);
    void    check_file(int32_t file) const;

    // Makes the buffers large enough for chunks of this size.
    void reserve(int64_t chunk_bytes);

    std::vector<lh::read_file> files;
    int64_t                    chunk_bytes;

    int64_t buffer_bytes() const;

  private:
    struct worker {
        std::thread thread;
        uint8_t *   buffer = nullptr;
    };

    struct job {
        lh::read_chunk   chunk;
        lh::read_batch * batch;
    };

    void shut_down() noexcept;
    void work(worker & self);
    void finish(lh::read_batch & batch);

    std::vector<worker> workers;

    std::mutex              mutex; // guards what follows, and the batches
    std::condition_variable wake, done;
    std::list<job>          jobs;
    size_t                  n_busy = 0; // workers with a job
    bool                    stop   = false;
};
