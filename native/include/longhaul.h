#ifndef LONGHAUL_H
#define LONGHAUL_H

// The whole C API of longhaul's native library: a read pool that brings byte ranges of files into memory, and streams, which
// put it behind the slot tensors of one model. It decides nothing: what to load and where comes from the caller.
//
// Every function that can fail returns an lh_status; lh_last_error() then says why, on the thread of the call. No exception
// leaves a function. Objects are not thread-safe unless a function says so.
//
// Python reads the part between the two cffi lines, so it holds declarations only.

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define LH_API __attribute__((visibility("default")))
#else
#define LH_API
#endif

// cffi: begin

typedef enum lh_status {
    LH_STATUS_OK               = 0,
    LH_STATUS_INVALID_ARGUMENT = 1, // a value out of range; nothing was changed
    LH_STATUS_NO_MEMORY        = 2, // an allocation failed; nothing was changed
    LH_STATUS_IO               = 3, // open or read failed; lh_last_errno() has errno, 0 for a short read
    LH_STATUS_CALLBACK         = 4, // the caller's own function reported a failure
    LH_STATUS_STATE            = 5, // the call does not fit the object's state; nothing was changed
    LH_STATUS_INTERNAL         = 6, // an exception that no other status stands for
} lh_status;

// How a file is read.
typedef enum lh_file_mode {
    LH_FILE_MODE_CACHED   = 0, // through the page cache, as asked
    LH_FILE_MODE_DIRECT   = 1, // O_DIRECT: the page cache is passed by
    LH_FILE_MODE_NOCACHE  = 2, // F_NOCACHE
    LH_FILE_MODE_DONTNEED = 3, // fallback: through the page cache, which is told to drop each range after use
} lh_file_mode;

// Message and errno of the last failed call of this thread; "" and 0 when there was none. The text lives until the next failure.
LH_API const char * lh_last_error(void);
LH_API int32_t      lh_last_errno(void);

// What ties the library to the Python side: a digest of patches, this header and the version.
LH_API const char * lh_build_id(void);

// Makes the devices of a worker, HOST:PORT, known to ggml; once more is harmless. Fails if it cannot be reached.
LH_API lh_status lh_add_worker(const char * endpoint);

// --- read pool -------------------------------------------------------------------------------------------------------------

typedef struct lh_read_pool lh_read_pool;

typedef struct lh_read {
    int32_t file;   // from lh_read_pool_open_file
    int64_t offset; // bytes from the start of the file
    int64_t size;   // bytes
    void *  dst;    // room for size bytes, no alignment needed
} lh_read;

// Start n_threads workers, each with a buffer for chunks of chunk_bytes (a multiple of 4096).
LH_API lh_status lh_read_pool_init(int32_t n_threads, int64_t chunk_bytes, lh_read_pool ** pool);
// Stop the workers, close the files. NULL is allowed.
LH_API void      lh_read_pool_free(lh_read_pool * pool);

// Open a file; with uncached, one real read decides between the direct mode and the fallback.
LH_API lh_status lh_read_pool_open_file(lh_read_pool * pool, const char * path, bool uncached, int32_t * file,
                                        lh_file_mode * mode);

// Read all ranges concurrently and return when the last one is done. After a failure the destinations hold anything.
// May be called from several threads; the calls run one after the other.
LH_API lh_status lh_read_pool_read(lh_read_pool * pool, const lh_read * reads, int64_t n_reads);

// What tells a file from another, or from itself after a change.
typedef struct lh_file_stamp {
    int64_t device;
    int64_t inode;
    int64_t size;     // bytes
    int64_t mtime_ns; // of the last change of the content
} lh_file_stamp;

// What the file was when it was opened. A read fails with LH_STATUS_IO and ESTALE once size or mtime are others.
LH_API lh_status lh_read_pool_file_stamp(const lh_read_pool * pool, int32_t file, lh_file_stamp * stamp);

// Bytes of the workers' buffers.
LH_API int64_t lh_read_pool_buffer_bytes(const lh_read_pool * pool);

// --- streams ---------------------------------------------------------------------------------------------------------------

typedef struct lh_stream lh_stream;

typedef struct lh_layer_shape {
    int32_t         layer;           // block index in the model
    int32_t         n_expert;        // routed experts
    int32_t         n_expert_used;   // chosen for each token
    int32_t         n_slots;         // 1 .. n_expert
    int32_t         n_tier;          // experts that ordinary memory has room for behind the slots: 0 .. n_expert
    int32_t         n_locked;        // of these, the first ones: in page-locked memory where the device offers such
    const int32_t * n_stages;        // [n_expert + 1] stages of a ubatch that selects so many distinct experts at most
    const int32_t * n_stages_device; // [n_expert + 1] the same where slots are on a device
} lh_layer_shape;

// The slot table of one layer, in lh_live. Both sides read it. The sync op counts and stamps uses, and takes out what nominees held;
// who is in which slot is otherwise written by the caller of the API.
typedef struct lh_slot_table {
    int32_t * slot_of;   // [n_expert]  slot that holds the expert, -1: none
    int32_t * expert_of; // [n_slots]   expert in the slot, -1: free
    int64_t * last_use;  // [n_slots]   stamp of the last ubatch that used the slot, larger is later
    int64_t * n_uses;    // [n_slots]   ubatches that have used the slot
    int64_t * n_needed;  // [n_expert]  decoded ubatches that have needed the expert
} lh_slot_table;

typedef enum lh_phase {
    LH_PHASE_PREFILL = 0,
    LH_PHASE_DECODE  = 1,
    LH_N_PHASES      = 2,
} lh_phase;

typedef struct lh_counters {
    int64_t n_ubatches;
    int64_t n_tokens;
    int64_t n_hits;      // distinct (layer, expert) of a ubatch that were resident
    int64_t n_misses;    // distinct (layer, expert) of a ubatch that were not
    int64_t n_tier_hits; // of the misses, those whose bytes came from the tier
    int64_t n_evictions;
    int64_t read_bytes;
    int64_t compute_us; // from the start to the end of the ubatches, waiting included
    int64_t wait_us;    // of that, from a sync that misses something to the moment the layer can go on
    int64_t plan_us;    // of that, planning
    int64_t read_us;    // of that, waiting for reads
    int64_t repack_us;  // of that, repacking what has been read
    int64_t disk_us;    // of compute_us, in which something was being read
    int64_t n_errors;
} lh_counters;

// One ubatch that has ended.
typedef struct lh_record {
    int64_t     end_us; // by a clock that only goes forward
    int32_t     phase;
    int32_t     reserved;
    lh_counters counters; // of this ubatch alone
} lh_record;

// A reply of the server, and what was streamed from its prompt to its end, for others as well.
typedef struct lh_reply {
    int64_t end_us;
    int64_t n_cached; // tokens of the prompt that were not evaluated
    int64_t n_prompt; // tokens of the prompt that were
    int64_t n_generated;
    int64_t prompt_us;
    int64_t generation_us;
    int64_t n_hits;
    int64_t n_misses;
    int64_t read_bytes;
    int64_t wait_us;
} lh_reply;

enum { LH_N_RECORDS = 4096, LH_N_REPLIES = 64 };

// What can be watched while a stream works: lh_live_bytes of memory, all zero at first, that other processes may map as well.
// The slot tables follow: for each layer slot_of, expert_of, last_use, n_uses and n_needed, each of them at a multiple of 8
// bytes.
typedef struct lh_live {
    int64_t     slot_bytes;            // of the slot tensors of the model that was loaded last
    int64_t     repacked_bytes;        // of those, in the CPU's repacked layout
    int64_t     device_bytes;          // of those, on devices
    int64_t     tier_bytes;            // of the tier behind them
    int64_t     locked_bytes;          // of those, page-locked
    int64_t     n_records;             // ever written; the last one is records[(n_records - 1) % LH_N_RECORDS]
    lh_counters counters[LH_N_PHASES]; // since the stream was made; those of the running ubatch's phase grow
    lh_record   records[LH_N_RECORDS];
    int64_t     n_replies;             // ever noted, like n_records
    lh_reply    replies[LH_N_REPLIES];
} lh_live;

// What a layer needs in one ubatch: distinct experts, those whose last row (token, choice) comes later later.
typedef struct lh_request {
    int32_t         layer_index; // in lh_stream_params.shapes
    int32_t         n_stages;    // of the graph: 1 or more
    int32_t         n_needed;
    int32_t         n_missing;
    const int32_t * needed;  // [n_needed]
    const int32_t * missing; // [n_missing]  those of the needed that no slot holds
} lh_request;

// Plan a layer that misses something, and has more than two stages or not enough nominees. Called on the computing thread.
// LH_STATUS_OK promises that lh_stream_load or lh_stream_set_stages was called. Anything else fails the ubatch.
typedef lh_status (*lh_plan_fn)(void * user_data, const lh_request * request);
// A layer that misses something has no more than two stages, and what can be read now is being read: a time to plan what comes.
// Called on the computing thread. slots [n_missing]: where it is read to, if these were nominees; what they held has left the slot
// table. Else NULL. Anything but LH_STATUS_OK fails the ubatch.
typedef lh_status (*lh_begun_fn)(void * user_data, const lh_request * request, const int32_t * slots);
// A layer's ubatch is about to be computed, and all of its reads are under way: lh_stream_load_ahead may be called for this
// layer, which comes next. Asked only where it has free slots, and more rows are routed than there are experts. Anything but
// LH_STATUS_OK fails the ubatch.
typedef lh_status (*lh_ahead_fn)(void * user_data, int32_t layer_index, int64_t n_selected);
// What on_begun, lh_stream_load, lh_stream_set_stages or lh_stream_load_ahead named has been read into its slots; or, when the ubatch
// failed before that, will not be: is_read is false, and the slots hold anything. If nothing was named, what the layer's slots hold
// is not known: the caller forgets it. Told while a later layer is being read, or at the end of the ubatch; of what was loaded ahead,
// before the layer's plan is asked for. Anything but LH_STATUS_OK fails the ubatch if it goes on; is_read = false is then told again.
typedef lh_status (*lh_complete_fn)(void * user_data, int32_t layer_index, bool is_read);
// The running ubatch fails with this status, and lh_last_error() says why. Called on the computing thread, once a ubatch.
typedef void (*lh_failure_fn)(void * user_data, lh_status status);
// The slot table was emptied, because a model was loaded or freed.
typedef void (*lh_reset_fn)(void * user_data);

typedef struct lh_stream_params {
    const char *           path_model; // as the model is loaded with
    const lh_layer_shape * shapes;     // [n_layers]
    int32_t                n_layers;
    int32_t                n_ubatch;   // contexts get min(this, their n_ubatch)
    lh_read_pool *         pool;       // must outlive the stream
    lh_live *              live;       // must outlive the stream; lh_live_bytes of it
    lh_plan_fn             on_plan;
    lh_begun_fn            on_begun;
    lh_ahead_fn            on_ahead;
    lh_complete_fn         on_complete;
    lh_reset_fn            on_reset;
    lh_failure_fn          on_failure;
    void *                 user_data;
} lh_stream_params;

typedef struct lh_load {
    int32_t expert;
    int32_t slot;
    int32_t
         tier_slot;  // of the tier: where its bytes are, or where they are read to on their way; -1: it stays out of it
    bool is_in_tier; // nothing is read
    int32_t swap_slot; // of the tier: what is there changes places with it once it was copied; -1: nothing does
} lh_load;

// Bytes of lh_live and the tables behind it.
LH_API int64_t lh_live_bytes(const lh_layer_shape * shapes, int32_t n_layers);

LH_API lh_status lh_stream_init(const lh_stream_params * params, lh_stream ** stream);
// Only when no model uses it: LH_STATUS_STATE otherwise, and nothing is freed. NULL is allowed.
LH_API lh_status lh_stream_free(lh_stream * stream);

// Add a routed tensor: expert e lies at offset + e*slice_bytes of file.
LH_API lh_status lh_stream_add_tensor(lh_stream * stream, const char * name, int32_t layer_index, int32_t file,
                                      int64_t offset, int64_t slice_bytes);

// The device that a routed tensor's slots are planned on ("CPU" for the host), and what it is to hold beside slots once they are
// there: another device fails the load, and a device without memory names what would fit. Before a model is loaded.
LH_API lh_status lh_stream_plan_device(lh_stream * stream, const char * tensor, const char * device,
                                       int64_t later_bytes);
// The device that a routed tensor was put on by the last load, one without allocation as well: "CPU" for the host, "" for none, and
// the name of the buffer type where slots cannot be. Lives as long as the device.
LH_API lh_status lh_stream_device(lh_stream * stream, const char * tensor, const char ** device);

// From now on a model that is loaded from path_model streams; off: it is loaded whole. One model at a time.
LH_API lh_status lh_stream_set_active(lh_stream * stream, bool active);

// Pointers into lh_stream_params::live.
LH_API lh_status lh_stream_slot_table(lh_stream * stream, int32_t layer_index, lh_slot_table * table);

// Between these two no ubatch runs, and no model is loaded or freed: the caller may change the slot tables. Waits for the end of the
// running ubatch. Both from the same thread.
LH_API void lh_stream_pause(lh_stream * stream);
LH_API void lh_stream_resume(lh_stream * stream);

// Give the memory of free slots back to the system; it is taken again when something is read into them. Only while paused, from
// the thread that paused. *n_bytes: what was given back, whole pages; nothing on devices, or where the memory is locked.
LH_API lh_status lh_stream_give_back(lh_stream * stream, int64_t * n_bytes);

// Write a record of each layer of each ubatch to a file from now on, behind what it holds: lh_trace_record and what follows it.
// -1: no longer, and what is left is written. Fails with LH_STATUS_IO if something could not be written since the last call; nothing
// was recorded from there on. Not while a ubatch runs.
typedef struct lh_trace_record {
    uint32_t ubatch;      // from 0, in the order of evaluation
    uint16_t layer_index; // in lh_stream_params.shapes
    uint8_t  phase;       // lh_phase
    uint8_t  flags;       // bit 1: hits follow
    uint32_t
        n_tokens; // uint16_t ids[n_tokens * n_expert_used]; then a bit for each, the lowest first: it was in a slot
} lh_trace_record;
LH_API lh_status lh_stream_record(lh_stream * stream, int32_t file);

// A tool is about to load a model: with so much memory for its experts, or whole if cache is NULL. Anything but LH_STATUS_OK: it
// cannot be, and *error, which has to live until the next call, says why.
typedef lh_status (*lh_prepare_fn)(void * user_data, const char * path_model, const char * cache, uint32_t n_ctx,
                                   uint32_t n_ubatch, const char ** error);
// Who is told; NULL: nobody.
LH_API void lh_set_prepare(lh_prepare_fn on_prepare, void * user_data);

// Whether a context of the loaded model has been made, so that all slots are there.
LH_API bool      lh_stream_is_ready(const lh_stream * stream);
// Read experts into free slots of a layer, and return when they are there. Only while paused, from the thread that paused, and when
// the stream is ready. LH_STATUS_IO: the slots hold anything.
LH_API lh_status lh_stream_fill(lh_stream * stream, int32_t layer_index, const lh_load * loads, int32_t n_loads);

// Phase of the running ubatch; LH_N_PHASES outside of one.
LH_API lh_phase lh_stream_phase(const lh_stream * stream);

// Have all that is missing read into these slots, where all that is needed fits in the slots of the layer at once. What is
// there already is computed in the first stage, what is read in the last. To be called from on_plan.
LH_API lh_status lh_stream_load(lh_stream * stream, int32_t layer_index, const lh_load * loads, int32_t n_loads);

// Start to read experts into free slots of a layer; on_complete says when they are there, before the layer's plan is asked for.
// To be called from on_ahead.
LH_API lh_status lh_stream_load_ahead(lh_stream * stream, int32_t layer_index, const lh_load * loads, int32_t n_loads);

// Name the slots that what a layer misses next is read to without asking, in this order: free ones, or those whose expert may leave.
// Slots of what is needed at that time are passed over. The list is forgotten when the layer misses something, and from the first slot
// on that is used before, or that holds another expert by then. Not for layers with a tier. To be called from a callback, or while
// paused.
LH_API lh_status lh_stream_nominate(lh_stream * stream, int32_t layer_index, const int32_t * slots, int32_t n_slots);

typedef struct lh_place {
    int32_t stage; // 0 .. n_stages of the request
    int32_t expert;
    int32_t slot;
    bool    is_load;   // false: the slot holds the expert already
    int32_t tier_slot; // of a load: see lh_load
    bool    is_in_tier;
    int32_t swap_slot;
} lh_place;

// Say in which stage each needed expert is computed, and from which slot. A slot is used once in a stage, and first by what it
// holds. Loads are read in the order of the stages, as early as their slots allow: while the stage before is computed, if that
// one does not use the slot. To be called from on_plan.
LH_API lh_status lh_stream_set_stages(lh_stream * stream, int32_t layer_index, const lh_place * places,
                                      int32_t n_places);

// cffi: end

// --- tools (library longhaul-tools) ----------------------------------------------------------------------------------------

// cffi: begin

// Run a tool of llama.cpp in this process: cli, server, bench, completion, perplexity, quantize, rpc-server.
// argv[0] is the program's name.
// *exit_code is what the tool returned.
LH_API lh_status lh_tool_run(const char * name, int32_t argc, char ** argv, int32_t * exit_code);

// What a device is to hold beside routed experts that stream with the fewest slots.
typedef struct lh_device_memory {
    char    name[64];
    char    description[128];
    bool    is_host;       // its memory is the host's
    int64_t total_bytes;   // 0 and 0: it does not say
    int64_t free_bytes;
    int64_t model_bytes;   // slots included
    int64_t context_bytes; // KV cache and recurrent state
    int64_t compute_bytes;
    int64_t other_bytes;   // a draft model, a projector
    int64_t margin_bytes;  // what the tool's options want to stay free
} lh_device_memory;

// Find out what a tool would put where, with its options as they are: they are parsed, fitted to the devices if the tool would do
// that, and the model is loaded without allocation. At most n_most devices, the last one is the host. *args: the words, a line
// each, that make the tool do just that without fitting again; they live until the next call. A bad option may end the process, as
// it does in the tool: to be called from a process of its own.
LH_API lh_status lh_tool_place(const char * name, int32_t argc, char ** argv, lh_device_memory * devices,
                               int32_t n_most, int32_t * n_devices, uint32_t * n_ctx, const char ** args);

// cffi: end

#ifdef __cplusplus
}
#endif

#endif // LONGHAUL_H
