#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "status.h"

namespace lh {

int64_t now_us();

// A file that chunks are read from.
struct read_file {
    std::string   path;
    int           fd    = -1;
    lh_file_mode  mode  = LH_FILE_MODE_CACHED;
    lh_file_stamp stamp = {};
};

// Chunks that make sense only together. When all of them have been read, the parts of the follow-up can run, each once and in
// any order, on the threads that wait for the batch.
struct read_group {
    size_t                            n_open = 0; // chunks not read
    int32_t                           n_parts;
    std::function<void(int32_t part)> follow_up;
};

// One contiguous read, small enough for a worker's buffer.
struct read_chunk {
    int32_t   file;
    int64_t   offset;
    int64_t   size;
    uint8_t * dst;                 // where the bytes go; null: to the sink
    std::function<void(const uint8_t * data)>
                    sink;          // takes the bytes, on a worker thread, after they went to dst if any
    read_group *    group;         // null: none
    const uint8_t * src = nullptr; // where the bytes are already; nothing is read
};

// Chunks that are waited for together.
struct read_batch {
    size_t                                       n_open = 0; // chunks and parts that are not finished
    std::exception_ptr                           failure;    // the first; what comes after it is given up
    std::deque<read_group>                       groups;
    std::deque<std::pair<read_group *, int32_t>> ready;      // parts that can run
};

// The threads that compute a graph together, at an op that the first of them leads: the others run follow-ups, and sleep while
// there are none, so that they do not take a core from the threads that read.
struct crew {
    static constexpr int max_threads = 512;

    // No thread is at an op.
    void reset();

    // Thread ith leaves an op.
    void leave(int ith);

    // The leader is going to wait: the others need not spin any longer.
    void hold() { is_held.store(true, std::memory_order_relaxed); }

    std::array<int64_t, max_threads>              n_entered = {}; // ops, by thread
    std::array<std::atomic<int32_t>, max_threads> cpu; // that a thread was on when it left an op, -1: not known
    std::atomic<int64_t>                          n_done    = { 0 };   // ops that the leader has finished
    std::atomic<int32_t>                          n_asleep  = { 0 };   // threads that need waking
    std::atomic<bool>                             is_held   = { false };
    read_batch *                                  batch     = nullptr; // that the leader waits for; guarded by the pool
    int64_t                                       worked_us = 0;       // spent by the leader on follow-ups
};

// A part of a range, counted from the range's start.
struct piece {
    int64_t offset;
    int64_t size;
};

// File offset, length and address of a direct read are multiples of this: no block device in use has larger blocks.
constexpr int64_t block_bytes = 4096;

// The pieces of a range: evenly sized, cut where a direct read can start, at most chunk_bytes each if that is a block or more.
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
    // Returns when every chunk of the batch has been read and every follow-up has run, or throws the batch's failure once nothing
    // of it is running. Takes part in the follow-ups, as the leader of a crew if there is one.
    void wait(lh::read_batch & batch, lh::crew * crew = nullptr);
    // The end of an op for its leader, and the whole op for thread ith of the others.
    void release(lh::crew & crew);
    void follow(lh::crew & crew, int ith);
    // Forgets what has not been started of these batches, and returns when nothing of them is being read.
    void cancel(const std::vector<lh::read_batch *> & batches);
    void run(std::vector<lh::read_chunk> chunks);

    int32_t open_file(const char * path, bool uncached);
    void    check_file(int32_t file) const;
    // Throws if the content of a file may be another than when it was opened.
    void    check_unchanged() const;
    // Throws if a path does not lead to the file that was opened by it any longer.
    void    check_paths() const;

    std::vector<lh::read_file> files;
    const int64_t              chunk_bytes;

    int64_t buffer_bytes() const;

    // What the workers need for bytes that go to a sink: memory for each, block_bytes aligned, to be used instead of their own.
    // Null: no longer. Not while anything is read.
    int64_t staging_bytes() const;
    void    set_staging(uint8_t * memory);

    // Time in which at least one chunk was being read.
    int64_t busy_us();

  private:
    struct worker {
        std::thread thread;
        uint8_t *   buffer  = nullptr;
        uint8_t *   staging = nullptr; // for bytes that go to a sink; null: the buffer
    };

    struct job {
        lh::read_chunk   chunk;
        lh::read_batch * batch;
    };

    void shut_down() noexcept;
    void work(worker & self);
    bool run_part(lh::read_batch & batch, std::unique_lock<std::mutex> & lock);
    void finish_chunk(lh::read_batch & batch, lh::read_group * group);
    void fail(lh::read_batch & batch, std::exception_ptr failure);
    void finish(lh::read_batch & batch, size_t n);

    std::vector<worker> workers;

    std::mutex              mutex; // guards what follows, and the batches
    std::condition_variable wake, done;
    std::list<job>          jobs;
    bool                    stop             = false;
    int64_t                 n_reading        = 0; // chunks
    int64_t                 reading_since_us = 0; // where there are any
    int64_t                 n_busy_us        = 0; // before that
};
