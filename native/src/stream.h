#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "llama-stream-hook.h"
#include "longhaul.h"
#include "read-pool.h"
#include "slot-kind.h"

struct ggml_backend_buffer;
struct ggml_backend_buffer_type;
struct ggml_context;
struct ggml_tensor;

namespace lh {

// One routed tensor of one layer, and the slot tensor that stands for it while a model is loaded.
struct expert_tensor {
    std::string   name;
    int32_t       file;
    int64_t       offset;
    int64_t       slice_bytes;
    ggml_tensor * slots = nullptr;
    slot_kind     kind  = slot_kind::host;
    device_traits traits;                       // of the slots' device
    uint8_t *     locked = nullptr;             // [n_locked] slices of the tier
    uint8_t *     tier   = nullptr;             // [n_tier - n_locked] slices of it

    ggml_backend_buffer_type * buft = nullptr;  // of the last load, with or without allocation
    std::string                device;          // where the slots were planned to be; empty: anywhere
    int64_t                    later_bytes = 0; // what that device is to hold beside slots once they are there
};

struct stream_layer;

// Where and when an expert is computed in the running ubatch.
struct placement {
    int32_t stage = -1;
    int32_t slot  = -1;
};

// One stage of one tensor.
struct stage_reads {
    bool       is_submitted = false;
    read_batch batch;
};

// A slot that the next miss may take, as long as it holds what it held.
struct nominee {
    int32_t slot;
    int32_t expert; // -1: none
};

// The stages of a layer in the running ubatch.
struct stage_plan {
    bool                   is_active    = false;
    bool                   has_loads    = false; // something is read for them
    bool                   is_completed = false; // all of it has been computed, and it is to be settled
    int32_t                n_stages     = 0;
    std::vector<placement> places;               // [n_expert], true for those that are needed
    std::vector<lh_place>  loads;                // by stage
    std::vector<size_t>    load_first;           // [n_stages + 1] of loads
    std::vector<int32_t>   last_user;           // [n_stages] the last stage before that uses one of its slots, -1: none
    int32_t                n_synced        = 0; // syncs of the layer so far
    int32_t                n_tensors_begun = 0;
    bool                   has_asked_ahead = false;

    std::vector<int32_t>                 n_synced_of; // [n_tensors] stages whose sync has run
    std::vector<std::deque<stage_reads>> reads;       // [n_tensors][n_stages], with loads only
};

// Writes what layers need to a file: see lh_trace_record.
class trace_writer {
  public:
    // Throws if something could not be written since the last call.
    void set_file(int file);
    bool is_open() const { return file >= 0 && code == 0; }
    void add(const stream_layer & layer, const ggml_tensor * ids, int32_t phase);
    void end_ubatch();

  private:
    void flush();

    int                  file     = -1;
    int                  code     = 0; // errno of the first write that failed
    uint32_t             n_ubatch = 0;
    std::vector<uint8_t> buffer;
};

// A routed tensor: which one of its layer.
struct tensor_place {
    stream_layer * layer;
    int32_t        tensor;
};

// What a sync op stands before: one stage of one tensor.
struct sync_point {
    stream_layer * layer;
    int32_t        tensor;
    int32_t        stage;
};

struct stream_layer {
    lh_stream *                 stream;
    int32_t                     index;    // in lh_stream::layers
    int32_t                     layer;    // in the model
    int32_t                     n_expert_used;
    std::vector<int32_t>        n_stages; // [n_expert + 1]
    std::vector<int32_t>        n_stages_device;
    lh_slot_table               table;    // in lh_stream_params::live
    int32_t                     n_expert;
    int32_t                     n_slots;
    int32_t                     n_tier;
    int32_t                     n_locked;
    std::vector<int32_t>        tier_of;      // [n_tier] expert whose bytes are there, -1: none that is known
    bool                        is_on_device; // some of its slots
    bool                        is_quiet;     // slots take bytes while others are computed from
    std::vector<expert_tensor>  tensors;
    std::vector<int32_t>        order;        // of the tensors that have slots: as in the graph, once that was seen
    stage_plan                  plan;
    std::unique_ptr<read_batch> ahead;        // reads that were started before the router spoke
    std::vector<lh_load>        ahead_loads;
    std::vector<nominee>        nominees;     // the first to be taken first
    bool                        is_untold = false; // the caller need not know what slots hold

    void enter_tier(const lh_load & load);
    void leave_tier(const lh_load & load);

    std::map<std::pair<int32_t, int32_t>, sync_point> points; // by tensor and stage

    // scratch of the sync op: ubatch that saw the expert last, its slot then, and the distinct ids in the order of their last rows
    std::vector<int64_t> seen;
    std::vector<int32_t> seen_slot;
    std::vector<int32_t> needed;
    std::vector<int32_t> missing;
    std::vector<int32_t> taken; // [missing] slots of nominees
};

} // namespace lh

struct lh_stream {
    explicit lh_stream(const lh_stream_params & params);

    // One model at a time: false when another one holds the stream.
    bool             acquire();
    void             release();
    // Between them no ubatch runs.
    void             pause();
    void             resume() { ubatch_mutex.unlock(); }
    // Returns the bytes of the pages that free slots have given back; while paused.
    int64_t          give_back();
    // Reads experts into free slots, while paused.
    void             fill(int32_t layer_index, const lh_load * loads, int32_t n_loads);
    // A routed tensor by its name; no layer: there is none.
    lh::tensor_place find(const std::string & name);

    // Allocates slot tensors so that experts can be read into them directly; null: no memory.
    ggml_backend_buffer * alloc(ggml_context * ctx, ggml_backend_buffer_type * buft);
    void                  bind(ggml_tensor * slots);

    void                begin(int32_t n_tokens, bool is_prefill, bool is_dry_run);
    bool                end();
    void                fail(lh_status status);
    llama_stream_totals totals() const;
    // Replaces the expert ids [n_expert_used, n_tokens] by slot ids, after what they stand for has been loaded: -1 for experts of
    // other stages. To be called by one thread of those that compute; it leads the crew of the others.
    void                sync(const lh::sync_point & point, ggml_tensor * dst, const ggml_tensor * ids);
    // What a sync op writes when nothing that follows is going to be used: ids that do no harm.
    void                fill_harmless(const lh::sync_point & point, ggml_tensor * dst) const;
    void                release_crew() { pool->release(crew); }
    void                follow(int ith) { pool->follow(crew, ith); }
    void                load(int32_t layer_index, const lh_load * loads, int32_t n_loads);
    void                load_ahead(int32_t layer_index, const lh_load * loads, int32_t n_loads);
    void                set_stages(int32_t layer_index, const lh_place * places, int32_t n_places);
    void                nominate(int32_t layer_index, const int32_t * slots, int32_t n_slots);

    uint32_t n_ubatch(uint32_t wanted) const { return std::min(wanted, n_ubatch_most); }
    // Stages of a product that selects n_selected experts, repeats included.
    int32_t  n_stages_for(const lh::stream_layer & layer, int64_t n_selected) const;
    uint32_t n_stage_nodes(uint32_t n_tokens) const;

    bool has_staging() const { return staging != nullptr; }

    lh::stream_layer & layer_at(int32_t layer_index);
    void               check_file(int32_t file) const { pool->check_file(file); }

    const std::string             path_model; // canonical
    const uint32_t                n_ubatch_most;
    std::vector<lh::stream_layer> layers;
    lh_live *                     live; // outlives the stream
    std::atomic<int32_t>          phase      = { LH_N_PHASES };
    std::atomic<bool>             has_failed = { false };
    std::string                   failure;        // why the last ubatch that failed did, for whoever asked for it
    bool                          is_dry = false; // the running ubatch loads nothing

    bool is_loaded = false;

    std::atomic<bool> is_ready = { false }; // a context of the loaded model has been made

    lh::trace_writer trace;

  private:
    void empty_tables();
    void reset_tables();
    void collect(lh::stream_layer & layer, const ggml_tensor * ids);
    void request_plan(lh::stream_layer & layer);
    bool take_nominees(lh::stream_layer & layer);
    void begin_loads(lh::stream_layer & layer);
    void report_begun(lh::stream_layer & layer, bool is_taken);
    void settle_completed();
    void begin_layer(lh::stream_layer & layer, const ggml_tensor * ids);
    void begin_plan(lh::stream_layer & layer);
    void begin_stage(lh::stream_layer & layer, int32_t tensor, int32_t stage);
    void await_stage(lh::stream_layer & layer, int32_t tensor, int32_t stage);
    void await(lh::read_batch & batch);
    void check_places(const lh::stream_layer & layer, const lh_place * places, int32_t n_places) const;
    void find_last_users(lh::stream_layer & layer, std::vector<lh_place> places) const;
    void submit_stage(lh::stream_layer & layer, int32_t tensor, int32_t stage);
    bool submit_ahead(lh::stream_layer & layer);
    void ask_ahead(const lh::stream_layer & layer, int64_t n_selected);
    void settle_ahead(lh::stream_layer & layer);
    void report_complete(const lh::stream_layer & layer);
    void drop(lh::stream_layer & layer);
    void complete(lh::stream_layer & layer);
    void check_free(const lh::stream_layer & layer, const lh_load * loads, int32_t n_loads) const;
    void check_tier(const lh::stream_layer & layer, const lh_load & load, std::vector<bool> & is_taken) const;
    void allocate_tier(const lh::stream_layer & layer, lh::expert_tensor & tensor);
    void use_staging(ggml_backend_device * device);
    void free_memory();
    void fill_ids(const lh::sync_point & point, ggml_tensor * dst, const ggml_tensor * ids) const;
    void settle(lh::stream_layer & layer);
    void stamp(lh::stream_layer & layer);
    void record();
    void add_load(lh::stream_layer & layer, const lh::expert_tensor & tensor, const lh_load & load,
                  lh::read_batch & batch, std::vector<lh::read_chunk> & chunks);

    lh_read_pool * pool;
    lh_plan_fn     on_plan;
    lh_begun_fn    on_begun;
    lh_ahead_fn    on_ahead;
    lh_complete_fn on_complete;
    lh_reset_fn    on_reset;
    lh_failure_fn  on_failure;
    void *         user_data;

    lh::crew             crew;
    std::mutex           ubatch_mutex; // contexts of one model compute one after the other: they share the slots
    std::atomic<int32_t> n_pausing       = { 0 }; // which go before the next ubatch
    int64_t              clock           = 0;
    int64_t              n_collected     = 0;     // stamp of seen
    int64_t              ubatch_start_us = 0;
    int64_t              busy_start_us   = 0;
    lh_counters          counters_before = {};            // of the running ubatch

    ggml_backend_buffer *              staging = nullptr; // page-locked memory of the pool's workers
    std::vector<ggml_backend_buffer *> locked;            // parts of tiers
    std::vector<void *>                tiers;             // the other parts
};

namespace lh {

std::string    canonical_path(const std::string & path);
inline lh_load load_of(const lh_place & place) {
    return { place.expert, place.slot, place.tier_slot, place.is_in_tier, place.swap_slot };
}

int64_t live_bytes(const lh_layer_shape * shapes, int32_t n_layers);

} // namespace lh
