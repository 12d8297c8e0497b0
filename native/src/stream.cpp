#include "stream.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

namespace lh {

// Rows that the CPU's repacked layouts interleave: 4, 8 or 16.
static constexpr int64_t repack_rows = 16;

// What a thread copies at once to repack it, and what it takes over at once: near enough to the first cache, and enough of them
// for all threads.
static constexpr int64_t repack_copy_bytes = 16 * 1024;
static constexpr int64_t repack_part_bytes = 128 * 1024;

int64_t now_us() {
    return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

std::string canonical_path(const std::string & path) {
    char * resolved = realpath(path.c_str(), nullptr);
    if (!resolved) {
        return path;
    }
    std::string result = resolved;
    std::free(resolved);
    return result;
}

// Takes the pages of fresh memory: what does not fit fails now and not in the middle of an answer, and no read has to wait for the
// kernel to clear them.
static void touch(uint8_t * memory, int64_t size) {
    const int64_t page        = sysconf(_SC_PAGESIZE);
    const int64_t n_threads   = std::max(1u, std::min(std::thread::hardware_concurrency(), 8u));
    const auto    touch_share = [=](int64_t i) {
        for (int64_t at = size * i / n_threads; at < size * (i + 1) / n_threads; at += page) {
            static_cast<volatile uint8_t *>(memory)[at] = 0;
        }
    };
    std::vector<std::thread> threads;
    for (int64_t i = 1; i < n_threads; i++) {
        try {
            threads.emplace_back(touch_share, i);
        } catch (const std::exception &) { // no more threads
            touch_share(i);
        }
    }
    touch_share(0);
    for (std::thread & thread : threads) {
        thread.join();
    }
}

static int64_t round_up(int64_t n, int64_t unit) {
    return (n + unit - 1) / unit * unit;
}

// Lets the system have the whole pages of a range of private memory, which then reads as anything; returns their bytes.
static int64_t give_back_pages(uint8_t * memory, int64_t size) {
    const int64_t   page  = sysconf(_SC_PAGESIZE);
    const uintptr_t start = reinterpret_cast<uintptr_t>(memory);
    const uintptr_t first = round_up(start, page);
    const uintptr_t last  = (start + size) / page * page;
    if (first >= last) {
        return 0;
    }
#if defined(__APPLE__)
    const int advice = MADV_FREE_REUSABLE;
#else
    const int advice = MADV_DONTNEED;
#endif
    return madvise(reinterpret_cast<void *>(first), last - first, advice) == 0 ? last - first : 0;
}

// The pieces of a slice that is read from offset to be repacked. If chunks are large enough they are cut between groups of rows that
// are interleaved, so that each piece can be repacked as soon as it is there.
static std::vector<piece> split_rows(int64_t offset, int64_t slice_bytes, int64_t row_bytes, int64_t chunk_bytes) {
    const int64_t unit_bytes = repack_rows * row_bytes;
    if (unit_bytes > chunk_bytes) {
        return split_file_range(offset, slice_bytes, chunk_bytes);
    }
    const int64_t      n_units  = (slice_bytes + unit_bytes - 1) / unit_bytes;
    const int64_t      n_most   = chunk_bytes / unit_bytes;
    const int64_t      n_pieces = (n_units + n_most - 1) / n_most;
    std::vector<piece> pieces;
    for (int64_t i = 0; i < n_pieces; i++) {
        const int64_t first = n_units * i / n_pieces * unit_bytes;
        const int64_t last  = std::min(n_units * (i + 1) / n_pieces * unit_bytes, slice_bytes);
        pieces.push_back({ first, last - first });
    }
    return pieces;
}

// Rows of one slot, which lie in it as in the file, into the CPU's repacked layout. Rows that are interleaved take up the same
// bytes before and after, so a copy of a few of them is enough.
static void repack_rows_of_slot(const ggml_tensor * slots, int64_t slot_offset, int64_t row_first, int64_t row_last) {
    thread_local std::vector<uint8_t> copy;

    const int64_t row_bytes = slots->nb[1];
    const int64_t n_at_once = std::max(repack_copy_bytes / row_bytes / repack_rows, int64_t(1)) * repack_rows;
    copy.resize(n_at_once * row_bytes);
    for (int64_t row = row_first; row < row_last; row += n_at_once) {
        ggml_tensor rows = *slots; // to the repacking buffer type a whole tensor
        rows.ne[1]       = std::min(n_at_once, row_last - row);
        rows.ne[2]       = 1;
        rows.nb[2]       = rows.nb[1] * rows.ne[1];
        rows.nb[3]       = rows.nb[2];
        rows.data        = static_cast<char *>(slots->data) + slot_offset + row * row_bytes;
        std::memcpy(copy.data(), rows.data, rows.nb[2]);
        ggml_backend_tensor_set(&rows, copy.data(), 0, rows.nb[2]);
    }
}

static int64_t table_bytes(const lh_layer_shape & shape) {
    return round_up(shape.n_expert * sizeof(int32_t), 8) + round_up(shape.n_slots * sizeof(int32_t), 8) +
           (2 * shape.n_slots + shape.n_expert) * sizeof(int64_t);
}

static lh_slot_table table_at(uint8_t * memory, const lh_layer_shape & shape) {
    uint8_t * expert_of = memory + round_up(shape.n_expert * sizeof(int32_t), 8);
    uint8_t * last_use  = expert_of + round_up(shape.n_slots * sizeof(int32_t), 8);
    uint8_t * n_uses    = last_use + shape.n_slots * sizeof(int64_t);
    return { reinterpret_cast<int32_t *>(memory), reinterpret_cast<int32_t *>(expert_of),
             reinterpret_cast<int64_t *>(last_use), reinterpret_cast<int64_t *>(n_uses),
             reinterpret_cast<int64_t *>(n_uses + shape.n_slots * sizeof(int64_t)) };
}

int64_t live_bytes(const lh_layer_shape * shapes, int32_t n_layers) {
    int64_t n_bytes = sizeof(lh_live);
    for (int32_t i = 0; i < n_layers; i++) {
        n_bytes += table_bytes(shapes[i]);
    }
    return n_bytes;
}

} // namespace lh

lh_stream::lh_stream(const lh_stream_params & params) :
    path_model(lh::canonical_path(params.path_model)),
    n_ubatch_most(params.n_ubatch),
    layers(params.n_layers),
    live(params.live),
    pool(params.pool),
    on_plan(params.on_plan),
    on_begun(params.on_begun),
    on_ahead(params.on_ahead),
    on_complete(params.on_complete),
    on_reset(params.on_reset),
    on_failure(params.on_failure),
    user_data(params.user_data) {
    uint8_t * tables = reinterpret_cast<uint8_t *>(live + 1);
    for (int32_t i = 0; i < params.n_layers; i++) {
        const lh_layer_shape & shape = params.shapes[i];
        if (shape.n_expert < 1 || shape.n_slots < 1 || shape.n_slots > shape.n_expert || shape.n_tier < 0 ||
            shape.n_tier > shape.n_expert || shape.n_locked < 0 || shape.n_locked > shape.n_tier) {
            throw lh::error(LH_STATUS_INVALID_ARGUMENT, "layer " + std::to_string(shape.layer) + ": " +
                                                            std::to_string(shape.n_slots) + " slots for " +
                                                            std::to_string(shape.n_expert) + " experts");
        }
        lh::stream_layer & layer = layers[i];
        layer.stream             = this;
        layer.index              = i;
        layer.layer              = shape.layer;
        layer.n_expert_used      = shape.n_expert_used;
        layer.n_stages.assign(shape.n_stages, shape.n_stages + shape.n_expert + 1);
        layer.n_stages_device.assign(shape.n_stages_device, shape.n_stages_device + shape.n_expert + 1);
        layer.n_expert = shape.n_expert;
        layer.n_slots  = shape.n_slots;
        layer.n_tier   = shape.n_tier;
        layer.n_locked = shape.n_locked;
        layer.table    = lh::table_at(tables, shape);
        tables += lh::table_bytes(shape);
        layer.seen.assign(shape.n_expert, 0);
        layer.seen_slot.assign(shape.n_expert, -1);
        layer.needed.reserve(shape.n_expert);
        layer.missing.reserve(shape.n_expert);
        layer.plan.places.resize(shape.n_expert);
    }
    empty_tables();
}

lh::stream_layer & lh_stream::layer_at(int32_t layer_index) {
    if (layer_index < 0 || layer_index >= static_cast<int32_t>(layers.size())) {
        throw lh::error(LH_STATUS_INVALID_ARGUMENT, "no layer " + std::to_string(layer_index));
    }
    return layers[layer_index];
}

void lh_stream::empty_tables() {
    for (lh::stream_layer & layer : layers) {
        std::fill_n(layer.table.slot_of, layer.n_expert, -1);
        std::fill_n(layer.table.expert_of, layer.n_slots, -1);
        std::fill_n(layer.table.last_use, layer.n_slots, 0);
        std::fill_n(layer.table.n_uses, layer.n_slots, 0);
    }
}

void lh_stream::reset_tables() {
    for (lh::stream_layer & layer : layers) {
        for (lh::expert_tensor & tensor : layer.tensors) {
            tensor.slots = nullptr;
        }
        layer.plan.is_active = false;
        layer.is_on_device   = false;
        layer.is_quiet       = true;
        layer.order.clear();
        layer.nominees.clear();
        layer.is_untold = false;
        layer.tier_of.assign(layer.n_tier, -1);
    }
    empty_tables();
    on_reset(user_data);
}

void lh_stream::pause() {
    n_pausing++;
    ubatch_mutex.lock();
    n_pausing--;
}

int64_t lh_stream::give_back() {
    int64_t n_bytes = 0;
    for (const lh::stream_layer & layer : layers) {
        const int32_t * expert_of = layer.table.expert_of;
        for (int32_t first = 0; first < layer.n_slots; first++) {
            int32_t last = first;
            while (last < layer.n_slots && expert_of[last] < 0) {
                last++;
            }
            for (const lh::expert_tensor & tensor : layer.tensors) {
                if (last > first && tensor.slots && !lh::is_on_device(tensor.kind)) {
                    uint8_t * data = static_cast<uint8_t *>(tensor.slots->data);
                    n_bytes +=
                        lh::give_back_pages(data + first * tensor.slice_bytes, (last - first) * tensor.slice_bytes);
                }
            }
            first = last;
        }
    }
    return n_bytes;
}

bool lh_stream::acquire() {
    const std::lock_guard<std::mutex> lock(ubatch_mutex);
    if (is_loaded) {
        return false;
    }
    is_loaded            = true;
    live->slot_bytes     = 0;
    live->repacked_bytes = 0;
    live->device_bytes   = 0;
    live->tier_bytes     = 0;
    live->locked_bytes   = 0;
    reset_tables();
    return true;
}

void lh_stream::fill(int32_t layer_index, const lh_load * loads, int32_t n_loads) {
    lh::stream_layer & layer = layer_at(layer_index);
    if (!is_ready || layer.order.empty()) {
        throw lh::error(LH_STATUS_STATE, "slots are filled once the model is there");
    }
    check_free(layer, loads, n_loads);
    lh::read_batch              batch;
    std::vector<lh::read_chunk> chunks;
    for (int32_t i = 0; i < n_loads; i++) {
        for (const lh::expert_tensor & tensor : layer.tensors) {
            if (tensor.slots) {
                add_load(layer, tensor, loads[i], batch, chunks);
            }
        }
    }
    pool->submit(std::move(chunks), batch);
    pool->wait(batch);
    for (int32_t i = 0; i < n_loads; i++) {
        layer.enter_tier(loads[i]);
    }
}

void lh_stream::free_memory() {
    pool->set_staging(nullptr);
    ggml_backend_buffer_free(staging);
    staging = nullptr;
    for (ggml_backend_buffer * buffer : locked) {
        ggml_backend_buffer_free(buffer);
    }
    locked.clear();
    for (void * tier : tiers) {
        std::free(tier);
    }
    tiers.clear();
    for (lh::stream_layer & layer : layers) {
        for (lh::expert_tensor & tensor : layer.tensors) {
            tensor.locked = nullptr;
            tensor.tier   = nullptr;
        }
    }
}

// Page-locked memory for what the pool's workers read, where the device offers such: it is copied from there without the CPU.
void lh_stream::use_staging(ggml_backend_dev_t device) {
    ggml_backend_buffer_type_t buft = ggml_backend_dev_host_buffer_type(device);
    if (staging || !buft) {
        return;
    }
    staging = ggml_backend_buft_alloc_buffer(buft, pool->staging_bytes() + lh::block_bytes);
    if (staging) {
        const uintptr_t base = reinterpret_cast<uintptr_t>(ggml_backend_buffer_get_base(staging));
        pool->set_staging(reinterpret_cast<uint8_t *>(lh::round_up(base, lh::block_bytes)));
    }
}

// Takes memory for the tier's part of a tensor, as far from a block as the file's bytes are if that lets direct reads land in it.
void lh_stream::allocate_tier(const lh::stream_layer & layer, lh::expert_tensor & tensor) {
    const int64_t misaligned = tensor.slice_bytes % lh::block_bytes == 0 ? tensor.offset % lh::block_bytes : 0;
    const auto    place      = [&](void * memory) {
        const uintptr_t base = lh::round_up(reinterpret_cast<uintptr_t>(memory), lh::block_bytes);
        return reinterpret_cast<uint8_t *>(base + misaligned);
    };
    int64_t            n_locked     = layer.n_locked;
    ggml_backend_dev_t device       = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(tensor.slots->buffer));
    ggml_backend_buffer_type_t buft = device ? ggml_backend_dev_host_buffer_type(device) : nullptr;
    if (n_locked > 0 && buft) {
        const int64_t         size   = n_locked * tensor.slice_bytes + 2 * lh::block_bytes;
        ggml_backend_buffer * buffer = ggml_backend_buft_alloc_buffer(buft, size);
        if (!buffer) {
            throw lh::error(LH_STATUS_NO_MEMORY,
                            tensor.name + ": no " + std::to_string(size) + " bytes of page-locked memory for experts");
        }
        locked.push_back(buffer);
        void * base   = ggml_backend_buffer_get_base(buffer);
        tensor.locked = place(base);
        if (ggml_backend_buffer_get_type(buffer) != buft) {
            lh::touch(static_cast<uint8_t *>(base), size);
        }
        // a device that refuses to lock more is given ordinary memory by its backend
        live->locked_bytes += ggml_backend_buffer_get_type(buffer) == buft ? n_locked * tensor.slice_bytes : 0;
    } else {
        n_locked = 0;
    }
    const int64_t size = (layer.n_tier - n_locked) * tensor.slice_bytes;
    if (size > 0) {
        void * memory = nullptr;
        if (posix_memalign(&memory, lh::block_bytes, size + 2 * lh::block_bytes) != 0) {
            throw lh::error(LH_STATUS_NO_MEMORY, tensor.name + ": no " + std::to_string(size) +
                                                     " bytes of memory for experts behind the slots");
        }
        tiers.push_back(memory);
        lh::touch(static_cast<uint8_t *>(memory), size + 2 * lh::block_bytes);
        tensor.tier = place(memory);
        if (n_locked == 0) { // one row of slices
            tensor.locked = tensor.tier;
            tensor.tier += layer.n_locked * tensor.slice_bytes;
        }
    }
    live->tier_bytes += layer.n_tier * tensor.slice_bytes;
}

void lh_stream::release() {
    const std::lock_guard<std::mutex> lock(ubatch_mutex);
    is_ready = false;
    reset_tables();
    free_memory();
    is_loaded = false;
}

ggml_backend_buffer * lh_stream::alloc(ggml_context * ctx, ggml_backend_buffer_type * buft) {
    const lh::slot_kind kind = lh::slot_kind_of(buft, ggml_get_first_tensor(ctx)->name);
    if (kind == lh::slot_kind::device) {
        return ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft);
    }
    // a direct read lands where it belongs if offset and address are equally far from a block
    const int64_t alignment = ggml_backend_buft_get_alignment(buft);
    int64_t       size      = 0;
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        size += lh::round_up(ggml_backend_buft_get_alloc_size(buft, t) + alignment, alignment) + lh::block_bytes;
    }
    if (static_cast<size_t>(size) > ggml_backend_buft_get_max_size(buft)) {
        return ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft); // which makes several
    }
    ggml_backend_buffer * buffer = ggml_backend_buft_alloc_buffer(buft, size);
    if (!buffer) {
        return nullptr;
    }
    lh::touch(static_cast<uint8_t *>(ggml_backend_buffer_get_base(buffer)), size);
    uintptr_t end = reinterpret_cast<uintptr_t>(ggml_backend_buffer_get_base(buffer));
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        const auto [layer, index] = find(t->name);
        const int64_t offset      = layer ? layer->tensors[index].offset : -1;
        uintptr_t     address     = lh::round_up(end, alignment);
        if (offset >= 0 && offset % alignment == 0 && t->nb[2] % lh::block_bytes == 0) {
            address = lh::round_up(end - offset % lh::block_bytes, lh::block_bytes) + offset % lh::block_bytes;
        }
        if (ggml_backend_tensor_alloc(buffer, t, reinterpret_cast<void *>(address)) != GGML_STATUS_SUCCESS) {
            ggml_backend_buffer_free(buffer);
            return nullptr;
        }
        end = address + ggml_backend_buft_get_alloc_size(buft, t);
    }
    return buffer;
}

lh::tensor_place lh_stream::find(const std::string & name) {
    for (lh::stream_layer & layer : layers) {
        for (size_t i = 0; i < layer.tensors.size(); i++) {
            if (layer.tensors[i].name == name) {
                return { &layer, static_cast<int32_t>(i) };
            }
        }
    }
    return { nullptr, -1 };
}

void lh_stream::bind(ggml_tensor * slots) {
    const std::lock_guard<std::mutex> lock(ubatch_mutex);
    pool->check_paths(); // llama.cpp has opened them as well by now
    const auto [layer, index] = find(slots->name);
    if (!layer) {
        throw lh::error(LH_STATUS_INVALID_ARGUMENT, std::string(slots->name) + ": unknown tensor");
    }
    lh::expert_tensor &        tensor = layer->tensors[index];
    ggml_backend_buffer_type_t buft   = ggml_backend_buffer_get_type(slots->buffer);
    if (slots->ne[2] != layer->n_slots || static_cast<int64_t>(slots->nb[2]) != tensor.slice_bytes || tensor.slots) {
        throw lh::error(LH_STATUS_INVALID_ARGUMENT, tensor.name + ": the slot tensor has another shape than planned");
    }
    tensor.kind  = lh::slot_kind_of(buft, slots->name);
    tensor.slots = slots;
    layer->order.push_back(index);
    live->slot_bytes += ggml_nbytes(slots);
    if (lh::is_on_device(tensor.kind)) {
        ggml_backend_dev_t device = ggml_backend_buft_get_device(buft);
        tensor.traits             = lh::traits_of(device);
        layer->is_on_device       = true;
        if (!tensor.traits.allows_repeats && layer->n_slots < std::min(layer->n_expert_used, layer->n_expert)) {
            throw lh::error(
                LH_STATUS_INVALID_ARGUMENT,
                tensor.name + ": " + std::to_string(layer->n_slots) + " slots on " + ggml_backend_dev_name(device) +
                    ", which needs as many as a token uses experts: " + std::to_string(layer->n_expert_used));
        }
        layer->is_quiet &= tensor.kind == lh::slot_kind::mapped || tensor.traits.has_quiet_writes;
        live->device_bytes += ggml_nbytes(slots);
        if (tensor.kind == lh::slot_kind::device) {
            use_staging(device);
        }
    }
    if (layer->n_tier > 0) {
        allocate_tier(*layer, tensor);
    }
    if (tensor.kind == lh::slot_kind::repacked) {
        live->repacked_bytes += ggml_nbytes(slots);
    }
}

void lh_stream::begin(int32_t n_tokens, bool is_prefill, bool is_dry_run) {
    while (n_pausing > 0) { // the mutex alone would let this thread go first again and again
        std::this_thread::yield();
    }
    ubatch_mutex.lock();
    crew.reset();
    has_failed = false;
    failure.clear();
    is_dry          = is_dry_run;
    phase           = is_prefill ? LH_PHASE_PREFILL : LH_PHASE_DECODE;
    ubatch_start_us = lh::now_us();
    busy_start_us   = pool->busy_us();
    counters_before = live->counters[phase];
    live->counters[phase].n_ubatches += is_dry ? 0 : 1;
    live->counters[phase].n_tokens += is_dry ? 0 : n_tokens;
    if (!is_dry) {
        const lh_status status = lh::guarded([&] { pool->check_unchanged(); });
        if (status != LH_STATUS_OK) {
            fail(status);
        }
    }
}

void lh_stream::fail(lh_status status) {
    has_failed = true;
    if (status == LH_STATUS_IO) {
        const int    code   = lh_last_errno();
        const char * reason = code == ESTALE ? "the model file has changed"
                              : code         ? std::strerror(code)
                                             : "the file ends too early";
        failure             = std::string("Experts could not be read: ") + reason + ".";
    } else {
        const char * reason = status == LH_STATUS_INTERNAL ? lh_last_error() : nullptr;
        failure             = status == LH_STATUS_NO_MEMORY ? "Out of memory for reading experts."
                              : reason                      ? std::string(reason) + "."
                                                            : "Experts could not be loaded.";
    }
    on_failure(user_data, status);
}

llama_stream_totals lh_stream::totals() const {
    llama_stream_totals totals = {};
    for (const lh_counters & counters : live->counters) {
        totals.n_hits += counters.n_hits;
        totals.n_misses += counters.n_misses;
        totals.n_tier_hits += counters.n_tier_hits;
        totals.n_evictions += counters.n_evictions;
        totals.n_errors += counters.n_errors;
        totals.read_bytes += counters.read_bytes;
        totals.wait_us += counters.wait_us;
        totals.compute_us += counters.compute_us;
        totals.disk_us += counters.disk_us;
    }
    totals.n_slots_least = layers.front().n_slots;
    for (const lh::stream_layer & layer : layers) {
        totals.n_slots_least = std::min(totals.n_slots_least, layer.n_slots);
        totals.n_slots_most  = std::max(totals.n_slots_most, layer.n_slots);
        const int64_t n_resident =
            layer.n_slots - std::count(layer.table.expert_of, layer.table.expert_of + layer.n_slots, -1);
        for (const lh::expert_tensor & tensor : layer.tensors) {
            totals.resident_bytes += tensor.slots ? n_resident * tensor.slice_bytes : 0;
        }
    }
    totals.slot_bytes = live->slot_bytes;
    return totals;
}

// Notes that the bytes of an expert have been read into the tier, or have changed places there.
void lh::stream_layer::enter_tier(const lh_load & load) {
    if (load.tier_slot >= 0) {
        tier_of[load.tier_slot] = load.expert;
    }
    if (load.swap_slot >= 0) {
        std::swap(tier_of[load.tier_slot], tier_of[load.swap_slot]);
    }
}

// Notes that nothing is known of what a load has changed in the tier.
void lh::stream_layer::leave_tier(const lh_load & load) {
    if (load.tier_slot >= 0 && !load.is_in_tier) {
        tier_of[load.tier_slot] = -1;
    }
    if (load.swap_slot >= 0) {
        tier_of[load.tier_slot] = -1;
        tier_of[load.swap_slot] = -1;
    }
}

// Gives up what a layer is reading: after a failure, or when the graph does not compute all of the layer.
void lh_stream::drop(lh::stream_layer & layer) {
    std::vector<lh::read_batch *> batches;
    for (auto & reads : layer.plan.reads) {
        for (lh::stage_reads & stage : reads) {
            batches.push_back(&stage.batch);
        }
    }
    if (layer.ahead) {
        batches.push_back(layer.ahead.get());
    }
    pool->cancel(batches);
    const bool has_loads  = layer.plan.is_active && layer.plan.has_loads;
    const bool is_changed = has_loads || layer.ahead || layer.is_untold;
    if (has_loads) {
        for (const lh_place & load : layer.plan.loads) {
            layer.leave_tier(lh::load_of(load));
        }
    }
    if (layer.ahead) {
        for (const lh_load & load : layer.ahead_loads) {
            layer.leave_tier(load);
        }
    }
    layer.plan.is_active    = false;
    layer.plan.is_completed = false;
    layer.ahead.reset();
    if (is_changed) {
        layer.is_untold = on_complete(user_data, layer.index, false) != LH_STATUS_OK;
    }
}

// Enters what a layer has read.
void lh_stream::settle(lh::stream_layer & layer) {
    layer.plan.is_completed = false;
    if (layer.plan.has_loads) {
        for (const lh_place & load : layer.plan.loads) {
            layer.enter_tier(lh::load_of(load));
        }
        layer.is_untold = true;
        report_complete(layer);
        layer.is_untold = false;
    }
    stamp(layer);
}

void lh_stream::settle_completed() {
    for (lh::stream_layer & layer : layers) {
        if (layer.plan.is_completed) {
            settle(layer);
        }
    }
}

bool lh_stream::end() {
    for (lh::stream_layer & layer : layers) {
        if (layer.plan.is_active || layer.ahead || layer.is_untold) {
            drop(layer);
        } else if (layer.plan.is_completed) {
            const lh_status status = lh::guarded([&] { settle(layer); });
            if (status != LH_STATUS_OK && !has_failed) {
                fail(status);
            }
        }
    }
    if (!is_dry && !has_failed) { // weights may be mapped, so that nobody else looks
        const lh_status status = lh::guarded([&] { pool->check_unchanged(); });
        if (status != LH_STATUS_OK) {
            fail(status);
        }
    }
    const bool ok = !has_failed;
    live->counters[phase].compute_us += is_dry ? 0 : lh::now_us() - ubatch_start_us;
    live->counters[phase].disk_us += is_dry ? 0 : pool->busy_us() - busy_start_us;
    live->counters[phase].n_errors += ok ? 0 : 1;
    if (!is_dry) {
        record();
        trace.end_ubatch();
    }
    phase = LH_N_PHASES;
    ubatch_mutex.unlock();
    return ok;
}

void lh_stream::record() {
    lh_record & record        = live->records[live->n_records % LH_N_RECORDS];
    record.end_us             = lh::now_us();
    record.phase              = phase;
    // all fields are int64_t
    constexpr size_t n_fields = sizeof(lh_counters) / sizeof(int64_t);
    const auto *     now      = reinterpret_cast<const int64_t *>(&live->counters[phase]);
    const auto *     before   = reinterpret_cast<const int64_t *>(&counters_before);
    auto *           change   = reinterpret_cast<int64_t *>(&record.counters);
    std::transform(now, now + n_fields, before, change, std::minus<>());
    std::atomic_thread_fence(std::memory_order_release); // whoever watches sees whole records
    live->n_records++;
}

int32_t lh_stream::n_stages_for(const lh::stream_layer & layer, int64_t n_selected) const {
    const std::vector<int32_t> & n_stages = layer.is_on_device ? layer.n_stages_device : layer.n_stages;
    return n_stages[std::min<int64_t>(n_selected, layer.n_expert)];
}

uint32_t lh_stream::n_stage_nodes(uint32_t n_tokens) const {
    uint32_t n_nodes = 0;
    for (const lh::stream_layer & layer : layers) {
        const int32_t n_stages = n_stages_for(layer, int64_t(n_tokens) * layer.n_expert_used);
        // sync and product; on devices also views, and the copy
        n_nodes += static_cast<uint32_t>(layer.tensors.size()) * (layer.is_on_device ? 8 : 2) * n_stages;
    }
    return n_nodes;
}

void lh_stream::add_load(lh::stream_layer & layer, const lh::expert_tensor & tensor, const lh_load & load,
                         lh::read_batch & batch, std::vector<lh::read_chunk> & chunks) {
    ggml_tensor *          slots       = tensor.slots;
    const int64_t          file_offset = tensor.offset + load.expert * tensor.slice_bytes;
    const int64_t          slot_offset = load.slot * tensor.slice_bytes;
    const int64_t          row_bytes   = slots->nb[1];
    lh::read_group *       group       = nullptr;
    std::vector<lh::piece> pieces;
    if (tensor.kind == lh::slot_kind::repacked) {
        pieces = lh::split_rows(file_offset, tensor.slice_bytes, row_bytes, pool->chunk_bytes);
    } else {
        pieces = lh::split_file_range(file_offset, tensor.slice_bytes, pool->chunk_bytes);
    }
    const auto repack = [&](int64_t offset, int64_t size) { // once all of it has been read
        const int64_t first   = offset / row_bytes;
        const int64_t n_rows  = size / row_bytes;
        const int64_t n_units = (n_rows + lh::repack_rows - 1) / lh::repack_rows;
        const int64_t n_parts = std::min(n_units, lh::round_up(size, lh::repack_part_bytes) / lh::repack_part_bytes);
        group                 = &batch.groups.emplace_back();
        group->n_parts        = static_cast<int32_t>(n_parts);
        group->follow_up      = [=](int32_t part) {
            const int64_t part_first = part * n_units / n_parts * lh::repack_rows;
            const int64_t part_last  = std::min((part + 1) * n_units / n_parts * lh::repack_rows, n_rows);
            lh::repack_rows_of_slot(slots, slot_offset, first + part_first, first + part_last);
        };
    };
    const bool is_cut_at_rows = std::all_of(pieces.begin(), pieces.end(), [&](const lh::piece & piece) {
        return piece.offset % (lh::repack_rows * row_bytes) == 0;
    });
    if (tensor.kind == lh::slot_kind::repacked && !is_cut_at_rows) {
        repack(0, tensor.slice_bytes);
    }
    const auto tier_slot = [&](int32_t slot) {
        return slot < layer.n_locked ? tensor.locked + slot * tensor.slice_bytes
                                     : tensor.tier + (slot - layer.n_locked) * tensor.slice_bytes;
    };
    uint8_t * kept = nullptr; // in the tier
    if (load.tier_slot >= 0) {
        kept = tier_slot(load.tier_slot);
        if (!load.is_in_tier) {
            layer.tier_of[load.tier_slot] = -1; // until it has been read
        }
    }
    uint8_t * other = load.swap_slot >= 0 ? tier_slot(load.swap_slot) : nullptr;
    for (const lh::piece & piece : pieces) {
        if (tensor.kind == lh::slot_kind::repacked && is_cut_at_rows) {
            repack(piece.offset, piece.size);
        }
        lh::read_chunk chunk = { tensor.file, file_offset + piece.offset, piece.size, nullptr, {}, group };
        if (tensor.kind == lh::slot_kind::device) {
            chunk.sink = [slots, offset = slot_offset + piece.offset, n = piece.size](const uint8_t * data) {
                ggml_backend_tensor_set(slots, data, offset, n);
            };
        } else if (kept) {
            uint8_t * dst = static_cast<uint8_t *>(slots->data) + slot_offset + piece.offset;
            chunk.sink    = [dst, n = piece.size](const uint8_t * data) {
                std::memcpy(dst, data, n);
            };
        } else {
            chunk.dst = static_cast<uint8_t *>(slots->data) + slot_offset + piece.offset;
        }
        if (kept && load.is_in_tier) {
            chunk.src = kept + piece.offset;
            if (other) {
                uint8_t * here  = kept + piece.offset;
                uint8_t * there = other + piece.offset;
                chunk.sink      = [copy = std::move(chunk.sink), here, there, n = piece.size](const uint8_t * data) {
                    copy(data);
                    std::swap_ranges(here, here + n, there);
                };
            }
        } else if (kept) {
            chunk.dst = kept + piece.offset;
        }
        chunks.push_back(std::move(chunk));
    }
    if (phase != LH_N_PHASES && !load.is_in_tier) {
        live->counters[phase].read_bytes += tensor.slice_bytes;
    }
}

// A tier slot is read into or from by one load at a time, and nothing is believed to be in it that was not read into it.
void lh_stream::check_tier(const lh::stream_layer & layer, const lh_load & load, std::vector<bool> & is_taken) const {
    const std::string what = "layer " + std::to_string(layer.layer) + ", expert " + std::to_string(load.expert) + ": ";
    if (load.tier_slot < -1 || load.tier_slot >= layer.n_tier || (load.is_in_tier && load.tier_slot < 0)) {
        throw lh::error(LH_STATUS_INVALID_ARGUMENT, what + "no such place in the tier");
    }
    if (load.tier_slot < 0 && load.swap_slot == -1) {
        return;
    }
    if (load.tier_slot < 0) {
        throw lh::error(LH_STATUS_INVALID_ARGUMENT, what + "nothing to change places with");
    }
    if (is_taken[load.tier_slot]) {
        throw lh::error(LH_STATUS_INVALID_ARGUMENT, what + "a place in the tier is used twice");
    }
    if (load.swap_slot != -1) {
        if (load.swap_slot < 0 || load.swap_slot >= layer.n_tier || !load.is_in_tier) {
            throw lh::error(LH_STATUS_INVALID_ARGUMENT, what + "nothing to change places with");
        }
        if (load.swap_slot == load.tier_slot || is_taken[load.swap_slot]) {
            throw lh::error(LH_STATUS_INVALID_ARGUMENT, what + "a place in the tier is used twice");
        }
        is_taken[load.swap_slot] = true;
    }
    is_taken[load.tier_slot] = true;
    if (load.is_in_tier && layer.tier_of[load.tier_slot] != load.expert) {
        throw lh::error(LH_STATUS_INVALID_ARGUMENT, what + "it is not in the tier");
    }
}

void lh_stream::check_free(const lh::stream_layer & layer, const lh_load * loads, int32_t n_loads) const {
    std::vector<bool> is_taken(layer.n_tier, false);
    for (int32_t i = 0; i < n_loads; i++) {
        check_tier(layer, loads[i], is_taken);
        if (loads[i].expert < 0 || loads[i].expert >= layer.n_expert || loads[i].slot < 0 ||
            loads[i].slot >= layer.n_slots) {
            throw lh::error(LH_STATUS_INVALID_ARGUMENT, "layer " + std::to_string(layer.layer) + ": no expert or slot");
        }
        if (layer.table.slot_of[loads[i].expert] >= 0 || layer.table.expert_of[loads[i].slot] >= 0) {
            throw lh::error(LH_STATUS_INVALID_ARGUMENT, "layer " + std::to_string(layer.layer) +
                                                            ": a slot that is taken, or an expert that is there");
        }
        for (int32_t j = 0; j < i; j++) {
            if (loads[i].expert == loads[j].expert || loads[i].slot == loads[j].slot) {
                throw lh::error(LH_STATUS_INVALID_ARGUMENT,
                                "layer " + std::to_string(layer.layer) + ": an expert or slot is named twice");
            }
        }
    }
}

void lh_stream::load_ahead(int32_t layer_index, const lh_load * loads, int32_t n_loads) {
    lh::stream_layer & layer = layer_at(layer_index);
    if (phase == LH_N_PHASES || layer.ahead || layer.plan.is_active) {
        throw lh::error(LH_STATUS_STATE, "experts are loaded ahead once, while the layer before is computed");
    }
    check_free(layer, loads, n_loads);
    auto                        ahead = std::make_unique<lh::read_batch>();
    std::vector<lh::read_chunk> chunks;
    for (int32_t i = 0; i < n_loads; i++) {
        for (const lh::expert_tensor & tensor : layer.tensors) {
            if (tensor.slots) { // a tensor that the architecture does not use has none
                add_load(layer, tensor, loads[i], *ahead, chunks);
            }
        }
    }
    layer.ahead = std::move(ahead);
    layer.ahead_loads.assign(loads, loads + n_loads);
    pool->submit(std::move(chunks), *layer.ahead);
}
