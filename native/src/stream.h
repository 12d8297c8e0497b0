#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "longhaul.h"
#include "read-pool.h"

struct ggml_tensor;

namespace lh {

// How bytes get into a slot tensor.
enum class slot_kind {
    host,     // copied to their place
    repacked, // set through the CPU's repacking buffer type, some rows at a time
    device,   // set through the backend's buffer
};

// One routed tensor of one layer, and the slot tensor that stands for it while a model is loaded.
struct expert_tensor {
    std::string   name;
    int32_t       file;
    int64_t       offset;
    int64_t       slice_bytes;
    ggml_tensor * slots = nullptr;
    slot_kind     kind  = slot_kind::host;
};

struct stream_layer {
    lh_stream *                stream;
    int32_t                    index; // in lh_stream::layers
    int32_t                    layer; // in the model
    std::vector<int32_t>       slot_of;
    std::vector<int32_t>       expert_of;
    std::vector<int64_t>       last_use;
    std::vector<expert_tensor> tensors;

    // scratch of the sync op: ubatch that saw the expert last, and the distinct ids in order of appearance
    std::vector<int64_t> seen;
    std::vector<int32_t> needed;
    std::vector<int32_t> missing;
};

} // namespace lh

struct lh_stream {
    explicit lh_stream(const lh_stream_params & params);

    // One model at a time: false when another one holds the stream.
    bool acquire();
    void release();
    void bind(ggml_tensor * slots);

    void begin(int32_t n_tokens, bool is_prefill);
    bool end();
    // Replaces the expert ids [n_expert_used, n_tokens] by slot ids, loading what is missing.
    void sync(lh::stream_layer & layer, ggml_tensor * dst, const ggml_tensor * ids);
    void load(int32_t layer_index, const lh_load * loads, int32_t n_loads);

    lh::stream_layer & layer_at(int32_t layer_index);
    void               check_file(int32_t file) const { pool->check_file(file); }

    const std::string             path_model; // canonical
    const uint32_t                n_ubatch_max;
    std::vector<lh::stream_layer> layers;
    lh_counters                   counters[LH_N_PHASES] = {};
    int32_t                       phase                 = LH_N_PHASES;
    std::atomic<bool>             has_failed            = { false };

    int64_t slot_bytes     = 0;
    int64_t repacked_bytes = 0;
    bool    is_loaded      = false;

  private:
    void reset_tables();
    void collect(lh::stream_layer & layer, const ggml_tensor * ids);
    void add_chunks(const lh::expert_tensor & tensor, const lh_load & load, std::vector<lh::read_chunk> & chunks) const;

    lh_read_pool * pool;
    lh_miss_fn     on_miss;
    lh_reset_fn    on_reset;
    void *         user_data;

    std::mutex ubatch_mutex; // contexts of one model compute one after the other: they share the slots
    int64_t    clock           = 0;
    int64_t    n_ubatches      = 0;
    int64_t    ubatch_start_us = 0;
};

namespace lh {

std::string canonical_path(const std::string & path);

} // namespace lh
