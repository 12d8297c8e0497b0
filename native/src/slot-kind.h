#pragma once

#include <cstdint>

struct ggml_backend_buffer_type;
struct ggml_backend_device;

namespace lh {

// How bytes get into a slot tensor.
enum class slot_kind {
    host,     // read to their place
    repacked, // read to their place, and from there set through the CPU's repacking buffer type, some rows at a time
    mapped,   // in a device's buffer that the CPU sees as well: read to their place
    device,   // set through the backend's buffer
};

// What the backend of a device is known to do; by its source, since nothing tells.
struct device_traits {
    // mul_mat_id passes over negative ids when it computes so many tokens or more
    int64_t n_tokens_skipping = INT64_MAX;
    // mul_mat_id may name a slot twice for a token
    bool    allows_repeats    = false;
    // its buffers take bytes from another thread while a graph is computed
    bool    has_quiet_writes  = false;
};

// Of slots in buffers of this type. Throws if experts cannot be loaded there.
slot_kind slot_kind_of(ggml_backend_buffer_type * buft, const char * tensor_name);

inline bool is_on_device(slot_kind kind) {
    return kind == slot_kind::mapped || kind == slot_kind::device;
}

device_traits traits_of(ggml_backend_device * device);

const char * kind_text(slot_kind kind);

} // namespace lh
