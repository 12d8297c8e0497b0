// Drives the read pool by its C API and by read-pool.h, and checks every byte. tests/test_sanitize.py compiles it with sanitizers:
//
//   read-pool-test FOLDER           all checks; exit code 0, and the last line says what was done
//   read-pool-test FOLDER race      looks at bytes before they are waited for, which ThreadSanitizer must report
//   read-pool-test FOLDER overflow  reads into too little memory, which AddressSanitizer must report

#include "read-pool.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

// The library has it in stream.cpp, which needs ggml.
int64_t lh::now_us() {
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::microseconds>(time).count();
}

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);                             \
            std::abort();                                                                                              \
        }                                                                                                              \
    } while (false)

static constexpr int64_t file_bytes = 600001; // ends within a block
static constexpr int64_t guard      = 64;     // bytes around a destination that stay as they are
static constexpr uint8_t blank      = 0xaa;

static std::string          folder;
static std::string          path;
static std::atomic<int64_t> n_checked = { 0 }; // bytes
static lh_file_mode         uncached_mode;

static uint8_t byte_at(int64_t offset) {
    const uint64_t n = static_cast<uint64_t>(offset) * 0x9e3779b97f4a7c15u;
    return static_cast<uint8_t>(n >> 56);
}

static void write_file(const std::string & name, int64_t size) {
    std::vector<uint8_t> bytes(size);
    for (int64_t i = 0; i < size; i++) {
        bytes[i] = byte_at(i);
    }
    FILE * file = std::fopen(name.c_str(), "wb");
    CHECK(file);
    CHECK(std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size());
    CHECK(std::fclose(file) == 0);
}

static void check_bytes(const uint8_t * data, int64_t offset, int64_t size) {
    for (int64_t i = 0; i < size; i++) {
        CHECK(data[i] == byte_at(offset + i));
    }
    n_checked += size;
}

// --- the C API -------------------------------------------------------------------------------------------------------------

struct pool_deleter {
    void operator()(lh_read_pool * pool) const { lh_read_pool_free(pool); }
};

using pool_ptr = std::unique_ptr<lh_read_pool, pool_deleter>;

static pool_ptr make_pool(int32_t n_threads, int64_t chunk_bytes, bool uncached) {
    lh_read_pool * pool = nullptr;
    CHECK(lh_read_pool_init(n_threads, chunk_bytes, &pool) == LH_STATUS_OK);
    int32_t      file = -1;
    lh_file_mode mode = LH_FILE_MODE_CACHED;
    CHECK(lh_read_pool_open_file(pool, path.c_str(), uncached, &file, &mode) == LH_STATUS_OK);
    CHECK(file == 0);
    CHECK(uncached || mode == LH_FILE_MODE_CACHED);
    if (uncached) {
        uncached_mode = mode;
    }
    return pool_ptr(pool);
}

// Memory for one read, at a given distance from a block and with guards around it.
struct destination {
    destination(int64_t size, int64_t distance) : bytes(size + 2 * guard + 2 * lh::block_bytes, blank) {
        const uintptr_t start = reinterpret_cast<uintptr_t>(bytes.data()) + guard;
        const uintptr_t block = (start + lh::block_bytes - 1) / lh::block_bytes * lh::block_bytes;
        data                  = bytes.data() + guard + (block - start) + distance;
    }

    void check(int64_t offset, int64_t size) const {
        check_bytes(data, offset, size);
        for (int64_t i = 0; i < guard; i++) {
            CHECK(data[-1 - i] == blank);
            CHECK(data[size + i] == blank);
        }
    }

    std::vector<uint8_t> bytes;
    uint8_t *            data;
};

static lh_read random_range(std::mt19937 & random, int64_t most) {
    const int64_t offset = random() % file_bytes;
    return { 0, offset, static_cast<int64_t>(random() % std::min(most, file_bytes - offset + 1)), nullptr };
}

// Ranges at all kinds of alignment, in one call.
static void check_ranges(lh_read_pool * pool, std::mt19937 & random, int n_random, int64_t most) {
    std::vector<lh_read> reads = {
        { 0, 0, 1, nullptr },
        { 0, 5, 0, nullptr },
        { 0, file_bytes - 1, 1, nullptr },
        { 0, file_bytes, 0, nullptr },
        { 0, lh::block_bytes, lh::block_bytes, nullptr },
        { 0, lh::block_bytes - 1, 2 * lh::block_bytes, nullptr },
        { 0, 3 * lh::block_bytes + 32, 5 * lh::block_bytes + 1, nullptr },
        { 0, file_bytes - 70000, 70000, nullptr },
    };
    for (int i = 0; i < n_random; i++) {
        reads.push_back(random_range(random, most));
    }
    std::vector<destination> destinations;
    for (lh_read & read : reads) {
        const int64_t distances[] = { read.offset % lh::block_bytes, 0, 32, static_cast<int64_t>(random() % 4096) };
        destinations.emplace_back(read.size, distances[random() % 4]);
        read.dst = destinations.back().data;
    }
    CHECK(lh_read_pool_read(pool, reads.data(), reads.size()) == LH_STATUS_OK);
    for (size_t i = 0; i < reads.size(); i++) {
        destinations[i].check(reads[i].offset, reads[i].size);
    }
}

static void test_ranges_of_any_alignment() {
    std::mt19937 random(1);
    for (bool uncached : { false, true }) {
        for (int32_t n_threads : { 1, 3, 8 }) {
            for (int64_t chunk_bytes : { 4096, 16384, 1 << 20 }) {
                const pool_ptr pool = make_pool(n_threads, chunk_bytes, uncached);
                CHECK(lh_read_pool_buffer_bytes(pool.get()) == n_threads * (chunk_bytes + 2 * lh::block_bytes));
                check_ranges(pool.get(), random, 12, 60000);
                check_ranges(pool.get(), random, 3, 200000);
            }
        }
    }
}

static void test_what_is_refused() {
    lh_read_pool * none = nullptr;
    CHECK(lh_read_pool_init(0, 4096, &none) == LH_STATUS_INVALID_ARGUMENT);
    CHECK(lh_read_pool_init(1, 5000, &none) == LH_STATUS_INVALID_ARGUMENT);
    CHECK(!none);
    lh_read_pool_free(none);

    const pool_ptr    pool    = make_pool(2, 4096, true);
    const std::string missing = folder + "/missing";
    int32_t           file    = -1;
    lh_file_mode      mode    = LH_FILE_MODE_CACHED;
    for (bool uncached : { false, true }) {
        CHECK(lh_read_pool_open_file(pool.get(), missing.c_str(), uncached, &file, &mode) == LH_STATUS_IO);
        CHECK(lh_last_errno() == ENOENT);
        CHECK(std::strstr(lh_last_error(), "missing"));
    }
    CHECK(file == -1);
    uint8_t byte = blank;
    for (const lh_read & read : { lh_read{ 1, 0, 1, &byte }, lh_read{ -1, 0, 1, &byte }, lh_read{ 0, -1, 1, &byte },
                                  lh_read{ 0, 0, -1, &byte } }) {
        CHECK(lh_read_pool_read(pool.get(), &read, 1) == LH_STATUS_INVALID_ARGUMENT);
        CHECK(byte == blank);
    }
}

// Reads 11 bytes where there are 10, together with others that are there.
static void check_short_read(lh_read_pool * pool) {
    destination   all(file_bytes, 0), tail(11, 7);
    const lh_read reads[] = {
        { 0, 0, file_bytes, all.data },
        { 0, file_bytes - 10, 11, tail.data },
        { 0, file_bytes - 10, 10, tail.data },
    };
    CHECK(lh_read_pool_read(pool, reads, 2) == LH_STATUS_IO);
    CHECK(lh_last_errno() == 0);
    CHECK(std::strstr(lh_last_error(), ("offset " + std::to_string(file_bytes - 10)).c_str()));
    CHECK(lh_read_pool_read(pool, reads + 2, 1) == LH_STATUS_OK);
    check_bytes(tail.data, file_bytes - 10, 10);
}

static void test_failing_reads() {
    for (bool uncached : { false, true }) {
        const pool_ptr pool = make_pool(4, 4096, uncached);
        for (int i = 0; i < 5; i++) {
            check_short_read(pool.get());
        }
    }
    const std::string shrinking = folder + "/shrinking";
    write_file(shrinking, 100000);
    const pool_ptr pool = make_pool(4, 4096, true);
    int32_t        file = -1;
    lh_file_mode   mode = LH_FILE_MODE_CACHED;
    CHECK(lh_read_pool_open_file(pool.get(), shrinking.c_str(), true, &file, &mode) == LH_STATUS_OK);
    CHECK(file == 1);
    CHECK(truncate(shrinking.c_str(), 50000) == 0);
    destination   room(100000, 0);
    const lh_read read = { file, 0, 100000, room.data };
    CHECK(lh_read_pool_read(pool.get(), &read, 1) == LH_STATUS_IO);
    CHECK(std::strstr(lh_last_error(), "shrinking"));
}

static void test_many_callers() {
    for (bool uncached : { false, true }) {
        const pool_ptr           pool = make_pool(4, 8192, uncached);
        std::vector<std::thread> callers;
        for (int seed = 0; seed < 6; seed++) {
            callers.emplace_back([&pool, seed] {
                std::mt19937 random(seed);
                for (int i = 0; i < 6; i++) {
                    if (seed == 0) {
                        check_short_read(pool.get()); // fails for this caller alone
                    } else {
                        check_ranges(pool.get(), random, 6, 20000);
                    }
                    CHECK(pool->busy_us() >= 0);
                }
            });
        }
        for (std::thread & caller : callers) {
            caller.join();
        }
    }
}

static void test_pools_that_are_freed_at_once() {
    std::mt19937 random(3);
    for (int i = 0; i < 20; i++) {
        const pool_ptr pool = make_pool(1 + i % 5, 4096, i % 2);
        if (i % 3 == 0) {
            check_ranges(pool.get(), random, 2, 10000);
        }
    }
}

// --- batches ---------------------------------------------------------------------------------------------------------------

// Slices that are read as groups of chunks, each with a follow-up that checks its part of the slice.
struct slices {
    slices(int n, int64_t slice_bytes, int32_t n_parts, uint32_t seed) :
        memory(n * slice_bytes, blank),
        n_runs(n * n_parts) {
        std::mt19937 random(seed);
        for (int i = 0; i < n; i++) {
            const int64_t offset = random() % (file_bytes - slice_bytes);
            uint8_t *     dst    = memory.data() + i * slice_bytes;
            offsets.push_back(offset);
            lh::read_group * group = nullptr;
            if (n_parts > 0) {
                group            = &batch.groups.emplace_back();
                group->n_parts   = n_parts;
                group->follow_up = [=](int32_t part) {
                    const int64_t first = part * slice_bytes / n_parts;
                    const int64_t last  = (part + 1) * slice_bytes / n_parts;
                    check_bytes(dst + first, offset + first, last - first);
                    for (int64_t j = first; j < last; j++) {
                        dst[j] ^= 0xff; // as repacking does, in place
                    }
                    n_runs[i * n_parts + part]++;
                };
            }
            for (const lh::piece & piece : lh::split_file_range(offset, slice_bytes, 4096)) {
                lh::read_chunk chunk = { 0, offset + piece.offset, piece.size, dst + piece.offset, {}, group };
                if (i % 3 == 2) { // by way of the worker's buffer
                    chunk.dst  = nullptr;
                    chunk.sink = [to = dst + piece.offset, size = piece.size](const uint8_t * data) {
                        std::memcpy(to, data, size);
                    };
                }
                chunks.push_back(std::move(chunk));
            }
        }
        turned = n_parts > 0 ? 0xff : 0;
    }

    // After the wait: every part has run once, and the bytes are there.
    void check() const {
        for (const int32_t n : n_runs) {
            CHECK(n == 1);
        }
        const int64_t slice_bytes = memory.size() / offsets.size();
        for (size_t i = 0; i < offsets.size(); i++) {
            for (int64_t j = 0; j < slice_bytes; j++) {
                CHECK((memory[i * slice_bytes + j] ^ turned) == byte_at(offsets[i] + j));
            }
        }
        n_checked += memory.size();
    }

    std::vector<uint8_t>        memory;
    std::vector<int64_t>        offsets;
    std::vector<int32_t>        n_runs; // of each part
    std::vector<lh::read_chunk> chunks;
    lh::read_batch              batch;
    uint8_t                     turned;
};

static lh_status failure_of(lh_read_pool & pool, lh::read_batch & batch, lh::crew * crew = nullptr) {
    try {
        pool.wait(batch, crew);
    } catch (const lh::error & e) {
        return e.status;
    }
    return LH_STATUS_OK;
}

static void test_batches_with_follow_ups() {
    for (bool uncached : { false, true }) {
        const pool_ptr pool = make_pool(3, 4096, uncached);
        for (int32_t n_parts : { 0, 1, 5 }) {
            slices first(7, 9000, n_parts, 1), second(4, 30000, n_parts, 2);
            pool->submit(std::move(first.chunks), first.batch);
            pool->submit(std::move(second.chunks), second.batch);
            pool->wait(second.batch);
            second.check();
            pool->wait(first.batch);
            first.check();
        }
        lh::read_batch empty;
        pool->submit({}, empty);
        pool->wait(empty);
    }
}

static void test_batches_that_fail() {
    const pool_ptr pool = make_pool(3, 4096, true);
    for (uint32_t seed = 0; seed < 8; seed++) {
        slices bad(6, 9000, 3, seed), good(6, 9000, 3, seed + 100);
        if (seed % 3 == 0) {        // past the end of the file
            bad.chunks[seed].offset = file_bytes;
        } else if (seed % 3 == 1) { // in a worker
            bad.chunks[seed].dst  = nullptr;
            bad.chunks[seed].sink = [](const uint8_t *) {
                throw lh::error(LH_STATUS_IO, "no room");
            };
        } else { // in a follow-up
            bad.batch.groups[seed % 6].follow_up = [](int32_t) {
                throw lh::error(LH_STATUS_IO, "no memory");
            };
        }
        pool->submit(std::move(bad.chunks), bad.batch);
        pool->submit(std::move(good.chunks), good.batch);
        CHECK(failure_of(*pool, bad.batch) == LH_STATUS_IO);
        CHECK(failure_of(*pool, bad.batch) == LH_STATUS_IO); // it stays so
        pool->wait(good.batch);
        good.check();
        for (const int32_t n : bad.n_runs) {
            CHECK(n <= 1);
        }
    }
}

// Holds a worker until it is opened.
struct gate {
    void pass() {
        std::unique_lock<std::mutex> lock(mutex);
        n_waiting++;
        changed.notify_all();
        changed.wait(lock, [&] { return is_open; });
    }

    void await_waiting(int n) {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return n_waiting == n; });
    }

    void open() {
        const std::lock_guard<std::mutex> lock(mutex);
        is_open = true;
        changed.notify_all();
    }

    std::mutex              mutex;
    std::condition_variable changed;
    int                     n_waiting = 0;
    bool                    is_open   = false;
};

static void test_cancelled_before_it_was_begun() {
    const pool_ptr pool = make_pool(2, 4096, true);
    gate           gate;
    lh::read_batch held;
    const auto     hold = [&](const uint8_t * data) {
        check_bytes(data, 5, 9);
        gate.pass();
    };
    pool->submit({ { 0, 5, 9, nullptr, hold, nullptr }, { 0, 5, 9, nullptr, hold, nullptr } }, held);
    gate.await_waiting(2);
    slices plain(3, 9000, 0, 1), grouped(3, 9000, 4, 2);
    pool->submit(std::move(plain.chunks), plain.batch);
    pool->submit(std::move(grouped.chunks), grouped.batch);
    pool->cancel({ &plain.batch, &grouped.batch }); // with all workers busy: nothing of it can have been read
    for (slices * some : { &plain, &grouped }) {
        CHECK(failure_of(*pool, some->batch) == LH_STATUS_STATE);
        CHECK(std::count(some->memory.begin(), some->memory.end(), blank) == 27000);
        CHECK(std::count(some->n_runs.begin(), some->n_runs.end(), 0) == static_cast<int64_t>(some->n_runs.size()));
    }
    gate.open();
    pool->wait(held);
}

static void test_cancelled_at_any_time() {
    const pool_ptr pool = make_pool(2, 4096, true);
    for (uint32_t seed = 0; seed < 30; seed++) {
        std::vector<std::unique_ptr<slices>> all;
        std::vector<lh::read_batch *>        cancelled;
        for (int i = 0; i < 4; i++) {
            all.push_back(std::make_unique<slices>(5, 9000, seed % 2 ? 3 : 0, 10 * seed + i));
            pool->submit(std::move(all.back()->chunks), all.back()->batch);
            if (i % 2 == 0) {
                cancelled.push_back(&all.back()->batch);
            }
        }
        if (seed % 5 == 4) {
            usleep(300);
        }
        if (seed % 5 == 3) { // of what has been finished as well
            pool->wait(*cancelled[0]);
        }
        pool->cancel(cancelled);
        for (int i = 0; i < 4; i++) {
            if (i % 2 == 0) {
                CHECK(seed % 3 || failure_of(*pool, all[i]->batch) == LH_STATUS_STATE);
                for (const int32_t n : all[i]->n_runs) {
                    CHECK(n <= 1);
                }
                all[i].reset(); // nothing may touch it any longer
            }
        }
        for (int i : { 1, 3 }) {
            pool->wait(all[i]->batch);
            all[i]->check();
        }
        pool->cancel({});
    }
}

// --- a crew ----------------------------------------------------------------------------------------------------------------

// Threads meet here, as those of a graph do after each op.
struct barrier {
    explicit barrier(int n) : n_threads(n) {}

    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        const int64_t                round = n_rounds;
        if (++n_here == n_threads) {
            n_here = 0;
            n_rounds++;
            all_here.notify_all();
        }
        all_here.wait(lock, [&] { return n_rounds != round; });
    }

    const int               n_threads;
    int                     n_here   = 0;
    int64_t                 n_rounds = 0;
    std::mutex              mutex;
    std::condition_variable all_here;
};

// What the leader does in an op; all other threads of the crew then look at the bytes with no other means of order.
struct op {
    std::unique_ptr<slices> reads; // null: everything was there
    bool                    fails = false;
};

static void lead(lh_read_pool & pool, lh::crew & crew, op & op, uint32_t n) {
    op.reads.reset();
    op.fails = n % 7 == 6;
    if (n % 4 != 3) {
        op.reads = std::make_unique<slices>(3, 9000, n % 3 ? 4 : 0, n);
        if (op.fails) {
            op.reads->chunks[n % 5].offset = file_bytes;
        }
        crew.hold();
        pool.submit(std::move(op.reads->chunks), op.reads->batch);
        CHECK(failure_of(pool, op.reads->batch, &crew) == (op.fails ? LH_STATUS_IO : LH_STATUS_OK));
    } else if (n % 8 == 3) {
        usleep(500); // the others fall asleep, unless they spin for long
    }
    pool.release(crew);
}

static void test_a_crew(int n_threads, bool uncached) {
    const pool_ptr pool = make_pool(3, 4096, uncached);
    lh::crew       crew;
    for (int graph = 0; graph < 2; graph++) {
        crew.reset();
        barrier                  all(n_threads);
        op                       op;
        std::vector<std::thread> threads;
        for (int ith = 0; ith < n_threads; ith++) {
            threads.emplace_back([&, ith] {
                for (uint32_t n = 0; n < 60; n++) {
                    if (ith == 0) {
                        lead(*pool, crew, op, n);
                    } else {
                        pool->follow(crew, ith);
                    }
                    if (op.reads && !op.fails) {
                        op.reads->check();
                    }
                    all.wait();
                }
            });
        }
        for (std::thread & thread : threads) {
            thread.join();
        }
        CHECK(crew.n_done == 60);
        CHECK(crew.n_asleep == 0);
        CHECK(crew.worked_us >= 0);
    }
}

// A thread that finds another one on its processor goes elsewhere, if it may, and may go where it might before.
static void test_threads_that_share_a_processor_part() {
#if defined(__linux__)
    cpu_set_t before, after;
    CHECK(sched_getaffinity(0, sizeof(before), &before) == 0);
    lh::crew crew;
    int      n_parted = 0;
    for (int i = 0; i < 100; i++) {
        crew.reset();
        crew.cpu[0]     = sched_getcpu();
        const int taken = crew.cpu[0];
        crew.leave(1);
        CHECK(crew.cpu[0] == taken);
        CHECK(sched_getaffinity(0, sizeof(after), &after) == 0);
        CHECK(CPU_EQUAL(&before, &after));
        CHECK(CPU_ISSET(crew.cpu[1].load(), &before));
        n_parted += crew.cpu[1] != taken ? 1 : 0;
    }
    if (CPU_COUNT(&before) > 1) {
        CHECK(n_parted > 50); // the system may move a thread at any time
    }
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    CHECK(sched_setaffinity(0, sizeof(one), &one) == 0);
    crew.reset();
    crew.cpu[0] = sched_getcpu();
    crew.leave(1);
    CHECK(crew.cpu[1] == crew.cpu[0]);
    CHECK(sched_getaffinity(0, sizeof(after), &after) == 0);
    CHECK(CPU_EQUAL(&one, &after));
    CHECK(sched_setaffinity(0, sizeof(before), &before) == 0);
#endif
}

// --- what the sanitizers must see ------------------------------------------------------------------------------------------

static void race() {
    const pool_ptr       pool = make_pool(1, 4096, false);
    std::vector<uint8_t> memory(100, static_cast<uint8_t>(~byte_at(0)));
    lh::read_batch       batch;
    pool->submit({ { 0, 0, 100, memory.data(), {}, nullptr } }, batch);
    const volatile uint8_t & first = memory[0];
    while (first != byte_at(0)) {
    }
    pool->wait(batch);
}

static void overflow() {
    const pool_ptr                   pool = make_pool(1, 4096, true);
    const std::unique_ptr<uint8_t[]> memory(new uint8_t[99]);
    const lh_read                    read = { 0, 0, 100, memory.get() };
    lh_read_pool_read(pool.get(), &read, 1);
}

int main(int argc, char ** argv) {
    CHECK(argc >= 2);
    alarm(120); // nothing here may hang
    folder = argv[1];
    path   = folder + "/known";
    write_file(path, file_bytes);
    const std::string what = argc > 2 ? argv[2] : "";
    if (what == "race") {
        race();
        return 0;
    }
    if (what == "overflow") {
        overflow();
        return 0;
    }
    CHECK(what.empty());
    test_ranges_of_any_alignment();
    test_what_is_refused();
    test_failing_reads();
    test_many_callers();
    test_pools_that_are_freed_at_once();
    test_batches_with_follow_ups();
    test_batches_that_fail();
    test_cancelled_before_it_was_begun();
    test_cancelled_at_any_time();
    test_threads_that_share_a_processor_part();
    for (bool uncached : { false, true }) {
        for (int n_threads : { 1, 2, 4 }) {
            test_a_crew(n_threads, uncached);
        }
    }
    std::printf("%lld bytes checked, file mode %d\n", static_cast<long long>(n_checked), uncached_mode);
    return 0;
}
