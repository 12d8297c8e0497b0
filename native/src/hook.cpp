// Streams as llama.cpp sees them: the hook of include/llama-stream-hook.h, and the C API of streams.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <unordered_map>

#include "ends.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "llama-stream-hook.h"
#include "llama.h"
#include "placement.h"
#include "stream.h"

namespace lh {

// Changed only while models are loaded or freed, and by the API.
static std::mutex                                            registry_mutex;
static std::vector<lh_stream *>                              active_streams;
static std::unordered_map<const ggml_tensor *, tensor_place> slot_tensors;

static std::atomic<bool> is_cancelled = { false };

static const char * refusal(const llama_model_params & params) {
    if (params.load_mode == LLAMA_LOAD_MODE_MMAP_MLOCK) {
        return "load mode mmap+mlock would lock every expert in memory; use mlock or mmap";
    }
    if (params.split_mode == LLAMA_SPLIT_MODE_TENSOR) {
        return "split mode tensor spreads each expert over all devices, which cannot be streamed; use layer";
    }
    if (params.check_tensors) {
        return "streamed experts cannot be validated at load; leave --check-tensors out";
    }
    return nullptr;
}

// Into llama.cpp's log.
static void log_line(ggml_log_level level, const std::string & text) {
    ggml_log_callback log  = nullptr;
    void *            data = nullptr;
    llama_log_get(&log, &data);
    log(level, ("longhaul: " + text + "\n").c_str(), data);
}

// One load of a model. Loads without allocation only ask for shapes, so they do not hold the stream.
struct model_handle {
    lh_stream * stream;
    bool        holds;
};

static void * hook_open(void *, const char * path_model, const llama_model_params * params, const char ** error) {
    std::lock_guard<std::mutex> lock(registry_mutex);
    const std::string           path = canonical_path(path_model);
    const auto                  it = std::find_if(active_streams.begin(), active_streams.end(),
                                                  [&](const lh_stream * stream) { return stream->path_model == path; });
    if (it == active_streams.end()) {
        return nullptr;
    }
    *error = refusal(*params);
    if (*error == nullptr && !params->no_alloc && !(*it)->acquire()) {
        *error = "the model is loaded already, and its slots serve one load at a time";
    }
    is_cancelled = false;
    return *error ? nullptr : new model_handle{ *it, !params->no_alloc };
}

static void hook_close(void * handle) {
    std::lock_guard<std::mutex> lock(registry_mutex);
    auto *                      model = static_cast<model_handle *>(handle);
    if (model->holds) {
        for (const stream_layer & layer : model->stream->layers) {
            for (const expert_tensor & tensor : layer.tensors) {
                slot_tensors.erase(tensor.slots);
            }
        }
        model->stream->release();
    }
    delete model;
}

static int64_t hook_n_slots(void * handle, const char * name, ggml_backend_buffer_type * buft) {
    const auto [layer, index] = static_cast<model_handle *>(handle)->stream->find(name);
    if (!layer) {
        return 0;
    }
    layer->tensors[index].buft = buft;
    return layer->n_slots;
}

static ggml_backend_buffer * hook_alloc(void * handle, ggml_context * ctx, ggml_backend_buffer_type * buft) {
    ggml_backend_buffer * buffer = nullptr;
    lh_stream *           stream = static_cast<model_handle *>(handle)->stream;
    const lh_status       status = guarded([&] {
        buffer = stream->alloc(ctx, buft);
        if (!buffer) {
            throw error(LH_STATUS_NO_MEMORY, no_memory_text(*stream, ctx, buft));
        }
    });
    if (status != LH_STATUS_OK) {
        stream->fail(status);
    }
    return buffer;
}

static bool hook_bind(void * handle, ggml_tensor * slots) {
    std::lock_guard<std::mutex> lock(registry_mutex);
    lh_stream *                 stream = static_cast<model_handle *>(handle)->stream;
    const lh_status             status = guarded([&] {
        check_placement(*stream, slots);
        stream->bind(slots);
        slot_tensors[slots] = stream->find(slots->name);
    });
    if (status != LH_STATUS_OK) {
        log_line(GGML_LOG_LEVEL_ERROR, lh_last_error());
    }
    return status == LH_STATUS_OK;
}

// Whether a layer's stages compute rows that are not theirs, in slots that may be in use.
static bool computes_all_rows(const stream_layer & layer) {
    return layer.n_slots < layer.n_expert && std::any_of(
                                                 layer.tensors.begin(), layer.tensors.end(),
                                                 [](const expert_tensor & tensor) {
                                                     return tensor.slots && is_on_device(tensor.kind) &&
                                                            tensor.traits.n_tokens_skipping == INT64_MAX;
                                                 });
}

// Says where the slots are, and how experts get there.
static void log_slots(const lh_stream & stream) {
    std::map<std::string, int64_t> n_bytes;
    for (const stream_layer & layer : stream.layers) {
        for (const expert_tensor & tensor : layer.tensors) {
            if (tensor.slots) {
                std::string where = ggml_backend_buft_name(ggml_backend_buffer_get_type(tensor.slots->buffer));
                where += std::string(" (") + kind_text(tensor.kind);
                if (tensor.kind == slot_kind::device) {
                    where += stream.has_staging() ? ", through page-locked memory" : ", through ordinary memory";
                    where += layer.is_quiet ? "" : ", while nothing is computed";
                }
                n_bytes[where + ")"] += ggml_nbytes(tensor.slots);
            }
        }
    }
    if (std::any_of(stream.layers.begin(), stream.layers.end(), computes_all_rows)) {
        log_line(GGML_LOG_LEVEL_WARN,
                 "a device computes all rows in each stage of a prompt that needs more experts than there are slots: "
                 "where its kernels go by the number of rows, the last bits need not be the resident run's");
    }
    bool wants_locked = false;
    for (const stream_layer & layer : stream.layers) {
        wants_locked |= layer.n_locked > 0;
    }
    if (wants_locked && stream.live->locked_bytes == 0) {
        log_line(GGML_LOG_LEVEL_WARN, "no device here offers page-locked memory: --longhaul-pin locks nothing");
    }
    for (const auto & [where, n] : n_bytes) {
        log_line(GGML_LOG_LEVEL_INFO, std::to_string(n >> 20) + " MiB of slots in " + where);
    }
}

// Says what a new context is like.
static void log_context(const lh_stream & stream, uint32_t n_ubatch, uint32_t wanted) {
    int32_t least = INT32_MAX, most = 0, n_stages = 1;
    for (const stream_layer & layer : stream.layers) {
        least    = std::min(least, layer.n_slots);
        most     = std::max(most, layer.n_slots);
        n_stages = std::max(n_stages, stream.n_stages_for(layer, int64_t(n_ubatch) * layer.n_expert_used));
    }
    const std::string text =
        "n_ubatch = " + std::to_string(n_ubatch) + " of " + std::to_string(wanted) + " asked for, " +
        std::to_string(least) + " to " + std::to_string(most) + " slots per layer, up to " + std::to_string(n_stages) +
        " stages per layer, " +
        std::to_string(100 * stream.live->repacked_bytes / std::max<int64_t>(stream.live->slot_bytes, 1)) +
        " % of the slots' bytes repacked";
    log_line(n_ubatch < wanted ? GGML_LOG_LEVEL_WARN : GGML_LOG_LEVEL_INFO, text);
}

static uint32_t hook_n_ubatch(void * handle, uint32_t wanted) {
    const model_handle & model    = *static_cast<model_handle *>(handle);
    lh_stream &          stream   = *model.stream;
    const uint32_t       n_ubatch = stream.n_ubatch(wanted);
    if (model.holds) { // a context of a model without slots only asks for shapes
        stream.is_ready = true;
    }
    guarded([&] {
        log_context(stream, n_ubatch, wanted);
        if (model.holds) {
            log_slots(stream);
        }
    });
    return n_ubatch;
}

static uint32_t hook_n_nodes(void * handle, uint32_t n_tokens) {
    return static_cast<model_handle *>(handle)->stream->n_stage_nodes(n_tokens);
}

static int32_t hook_n_stages(const ggml_tensor * weight, int64_t n_selected) {
    std::lock_guard<std::mutex> lock(registry_mutex);
    const auto                  it = slot_tensors.find(weight);
    if (it == slot_tensors.end()) {
        return 0;
    }
    const stream_layer & layer = *it->second.layer;
    return layer.stream->n_stages_for(layer, n_selected);
}

static const void * hook_device_layer(const ggml_tensor * weight) {
    std::lock_guard<std::mutex> lock(registry_mutex);
    const auto                  it = slot_tensors.find(weight);
    if (it == slot_tensors.end() || !is_on_device(it->second.layer->tensors[it->second.tensor].kind)) {
        return nullptr;
    }
    return it->second.layer;
}

static void * hook_stage(const ggml_tensor * weight, int32_t stage) {
    std::lock_guard<std::mutex> lock(registry_mutex);
    const auto                  it = slot_tensors.find(weight);
    if (it == slot_tensors.end()) {
        return nullptr;
    }
    stream_layer & layer  = *it->second.layer;
    const int32_t  tensor = it->second.tensor;
    sync_point &   point  = layer.points[{ tensor, stage }];
    point                 = { &layer, tensor, stage };
    return &point;
}

static void hook_begin(void * handle, int32_t n_tokens, bool is_prefill, bool is_dry) {
    static_cast<model_handle *>(handle)->stream->begin(n_tokens, is_prefill, is_dry);
}

static bool hook_failed(void * handle) {
    return is_cancelled || static_cast<model_handle *>(handle)->stream->has_failed;
}

static bool hook_end(void * handle) {
    const bool is_whole = !is_cancelled; // before, so that nothing is believed whose graph was cut short
    return static_cast<model_handle *>(handle)->stream->end() && is_whole;
}

static void hook_fail(void * handle, const char * reason) {
    lh_stream * stream = static_cast<model_handle *>(handle)->stream;
    if (stream->phase == LH_N_PHASES || !stream->has_failed) { // or it is told already, as what a read met
        stream->fail(keep_error(LH_STATUS_INTERNAL, reason, 0));
    }
    explain_aborts();
}

static void hook_sync(ggml_tensor * dst, int ith, int, void * userdata) {
    const sync_point & point  = *static_cast<sync_point *>(userdata);
    lh_stream *        stream = point.layer->stream;
    if (stream->phase == LH_N_PHASES) {
        GGML_ABORT("longhaul: a graph with streamed experts was computed outside of llama_decode");
    }
    if (ith != 0) {
        stream->follow(ith);
        return;
    }
    lh_status status = LH_STATUS_STATE;
    if (!stream->has_failed && !is_cancelled && !stream->is_dry) {
        status = guarded([&] { stream->sync(point, dst, dst->src[0]); });
        if (status != LH_STATUS_OK) {
            stream->fail(status);
        }
    }
    if (status != LH_STATUS_OK) {
        stream->fill_harmless(point, dst);
    }
    stream->release_crew();
}

static void hook_totals(void * handle, llama_stream_totals * totals) {
    *totals = static_cast<model_handle *>(handle)->stream->totals();
}

static const char * hook_error(void * handle) {
    return is_cancelled ? "The process is about to end." : static_cast<model_handle *>(handle)->stream->failure.c_str();
}

static void hook_note(void * handle, const llama_stream_reply * reply) {
    lh_live * live                                = static_cast<model_handle *>(handle)->stream->live;
    live->replies[live->n_replies % LH_N_REPLIES] = {
        now_us(),      reply->n_cached, reply->n_prompt,   reply->n_generated, reply->prompt_us, reply->generation_us,
        reply->n_hits, reply->n_misses, reply->read_bytes, reply->wait_us,
    };
    std::atomic_thread_fence(std::memory_order_release);
    live->n_replies++;
}

static lh_prepare_fn on_prepare        = nullptr;
static void *        prepare_user_data = nullptr;

static bool hook_prepare(void *, const char * path_model, const char * cache, uint32_t n_ctx, uint32_t n_ubatch,
                         const char ** error) {
    *error = "nothing is there to stream it";
    if (!on_prepare) {
        return cache == nullptr;
    }
    return on_prepare(prepare_user_data, path_model, cache, n_ctx, n_ubatch, error) == LH_STATUS_OK;
}

// By the kernel's figure, which it can be told to forget.
static int64_t hook_peak_rss(void *, bool reset) {
    int64_t n_bytes = 0;
    if (reset) {
        std::ofstream("/proc/self/clear_refs") << "5";
    }
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
        if (line.rfind("VmHWM:", 0) == 0) {
            n_bytes = std::strtoll(line.c_str() + 6, nullptr, 10) * 1024;
        }
    }
    return n_bytes;
}

static void hook_cancel(void *) {
    is_cancelled = true;
}

static const llama_stream_hook hook = {
    /* user_data */ nullptr,
    /* open      */ hook_open,
    /* close     */ hook_close,
    /* n_slots   */ hook_n_slots,
    /* alloc     */ hook_alloc,
    /* bind      */ hook_bind,
    /* n_ubatch  */ hook_n_ubatch,
    /* n_nodes   */ hook_n_nodes,
    /* n_stages  */ hook_n_stages,
    /* device    */ hook_device_layer,
    /* stage     */ hook_stage,
    /* sync      */ hook_sync,
    /* begin     */ hook_begin,
    /* failed    */ hook_failed,
    /* end       */ hook_end,
    /* fail      */ hook_fail,
    /* totals    */ hook_totals,
    /* error     */ hook_error,
    /* note      */ hook_note,
    /* cancel    */ hook_cancel,
    /* prepare   */ hook_prepare,
    /* peak_rss  */ hook_peak_rss,
};

} // namespace lh

int64_t lh_live_bytes(const lh_layer_shape * shapes, int32_t n_layers) {
    return lh::live_bytes(shapes, n_layers);
}

lh_status lh_stream_init(const lh_stream_params * params, lh_stream ** stream) {
    return lh::guarded([&] {
        if (!params->path_model || params->n_layers < 1 || params->n_ubatch < 0 || !params->pool || !params->live ||
            !params->on_plan || !params->on_begun || !params->on_ahead || !params->on_complete || !params->on_reset ||
            !params->on_failure) {
            throw lh::error(LH_STATUS_INVALID_ARGUMENT, "a stream needs a model, layers, a pool, memory and callbacks");
        }
        *stream = new lh_stream(*params);
    });
}

lh_status lh_stream_free(lh_stream * stream) {
    return lh::guarded([&] {
        if (!stream) {
            return;
        }
        std::lock_guard<std::mutex> lock(lh::registry_mutex);
        if (stream->is_loaded) {
            throw lh::error(LH_STATUS_STATE, "a loaded model still uses the stream");
        }
        lh::active_streams.erase(std::remove(lh::active_streams.begin(), lh::active_streams.end(), stream),
                                 lh::active_streams.end());
        delete stream;
    });
}

lh_status lh_stream_add_tensor(lh_stream * stream, const char * name, int32_t layer_index, int32_t file, int64_t offset,
                               int64_t slice_bytes) {
    return lh::guarded([&] {
        if (stream->is_loaded) {
            throw lh::error(LH_STATUS_STATE, "tensors are added before the model is loaded");
        }
        if (offset < 0 || slice_bytes < 1) {
            throw lh::error(LH_STATUS_INVALID_ARGUMENT, std::string(name) + ": bad offset or size");
        }
        stream->check_file(file);
        lh::expert_tensor tensor;
        tensor.name        = name;
        tensor.file        = file;
        tensor.offset      = offset;
        tensor.slice_bytes = slice_bytes;
        stream->layer_at(layer_index).tensors.push_back(std::move(tensor));
    });
}

lh_status lh_stream_set_active(lh_stream * stream, bool active) {
    return lh::guarded([&] {
        std::lock_guard<std::mutex> lock(lh::registry_mutex);
        auto &                      streams = lh::active_streams;
        for (const lh_stream * other : streams) {
            if (active && other != stream && other->path_model == stream->path_model) {
                throw lh::error(LH_STATUS_STATE, stream->path_model + ": another stream serves this model");
            }
        }
        streams.erase(std::remove(streams.begin(), streams.end(), stream), streams.end());
        if (active) {
            streams.push_back(stream);
            llama_stream_set_hook(&lh::hook);
            lh::explain_ends();
        }
    });
}

lh_status lh_stream_slot_table(lh_stream * stream, int32_t layer_index, lh_slot_table * table) {
    return lh::guarded([&] { *table = stream->layer_at(layer_index).table; });
}

lh_status lh_stream_record(lh_stream * stream, int32_t file) {
    return lh::guarded([&] { stream->trace.set_file(file); });
}

void lh_set_prepare(lh_prepare_fn on_prepare, void * user_data) {
    lh::on_prepare        = on_prepare;
    lh::prepare_user_data = user_data;
    llama_stream_set_hook(&lh::hook);
}

void lh_stream_pause(lh_stream * stream) {
    stream->pause();
}

void lh_stream_resume(lh_stream * stream) {
    stream->resume();
}

bool lh_stream_is_ready(const lh_stream * stream) {
    return stream->is_ready;
}

lh_status lh_stream_fill(lh_stream * stream, int32_t layer_index, const lh_load * loads, int32_t n_loads) {
    return lh::guarded([&] { stream->fill(layer_index, loads, n_loads); });
}

lh_status lh_stream_give_back(lh_stream * stream, int64_t * n_bytes) {
    return lh::guarded([&] { *n_bytes = stream->give_back(); });
}

lh_phase lh_stream_phase(const lh_stream * stream) {
    return static_cast<lh_phase>(stream->phase.load());
}

lh_status lh_stream_load(lh_stream * stream, int32_t layer_index, const lh_load * loads, int32_t n_loads) {
    return lh::guarded([&] { stream->load(layer_index, loads, n_loads); });
}

lh_status lh_stream_set_stages(lh_stream * stream, int32_t layer_index, const lh_place * places, int32_t n_places) {
    return lh::guarded([&] { stream->set_stages(layer_index, places, n_places); });
}

lh_status lh_stream_nominate(lh_stream * stream, int32_t layer_index, const int32_t * slots, int32_t n_slots) {
    return lh::guarded([&] { stream->nominate(layer_index, slots, n_slots); });
}

lh_status lh_stream_load_ahead(lh_stream * stream, int32_t layer_index, const lh_load * loads, int32_t n_loads) {
    return lh::guarded([&] { stream->load_ahead(layer_index, loads, n_loads); });
}
