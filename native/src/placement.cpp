#include "placement.h"

#include <algorithm>

#include "ggml-backend.h"
#include "ggml.h"

namespace lh {

static constexpr int64_t mib = 1024 * 1024;
static constexpr int n_tries = 12; // of finding what a device still has room for: to a thousandth of what was wanted

const char * device_name(ggml_backend_buffer_type * buft) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
    if (!dev || ggml_backend_buft_is_host(buft) || ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU) {
        return "CPU";
    }
    return buft == ggml_backend_dev_buffer_type(dev) ? ggml_backend_dev_name(dev) : ggml_backend_buft_name(buft);
}

void check_placement(lh_stream & stream, const ggml_tensor * slots) {
    const auto [layer, index] = stream.find(slots->name);
    if (!layer || layer->tensors[index].device.empty()) {
        return;
    }
    const std::string & planned = layer->tensors[index].device;
    const std::string   found   = device_name(ggml_backend_buffer_get_type(slots->buffer));
    if (found != planned) {
        throw error(LH_STATUS_STATE, std::string(slots->name) + ": planned on " + planned +
                                         ", but llama.cpp puts it on " + found +
                                         "; the options or the devices have changed since it was planned");
    }
}

// The largest buffer that can be had: free memory may be in pieces, or not what is reported.
static int64_t largest_buffer(ggml_backend_buffer_type * buft, int64_t wanted) {
    int64_t least = 0;
    int64_t most  = wanted;
    for (int i = 0; i < n_tries; i++) {
        const int64_t         size   = least + (most - least) / 2;
        ggml_backend_buffer * buffer = ggml_backend_buft_alloc_buffer(buft, size);
        ggml_backend_buffer_free(buffer);
        (buffer ? least : most) = size;
    }
    return least;
}

std::string no_memory_text(lh_stream & stream, ggml_context * ctx, ggml_backend_buffer_type * buft) {
    int64_t wanted = 0;
    int64_t later  = 0;
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        const auto [layer, index] = stream.find(t->name);
        wanted += ggml_backend_buft_get_alloc_size(buft, t);
        later = std::max(later, layer ? layer->tensors[index].later_bytes : 0);
    }
    const std::string name = device_name(buft);
    std::string       text = name + ": no memory for " + std::to_string(wanted / mib) + " MiB of slots";
    if (ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft)) {
        size_t free = 0, total = 0;
        ggml_backend_dev_memory(dev, &free, &total);
        text += ", " + std::to_string(free / mib) + " MiB are reported free";
    }
    const int64_t fits = (largest_buffer(buft, wanted) - later) / mib;
    return text + (fits > 0 ? "; give --longhaul-cache " + name + "=" + std::to_string(fits) + "MiB or less"
                            : "; nothing is left for slots beside the rest of the model");
}

} // namespace lh

lh_status lh_stream_plan_device(lh_stream * stream, const char * tensor, const char * device, int64_t later_bytes) {
    return lh::guarded([&] {
        const auto [layer, index] = stream->find(tensor);
        if (!layer) {
            throw lh::error(LH_STATUS_INVALID_ARGUMENT, std::string(tensor) + ": unknown tensor");
        }
        layer->tensors[index].device      = device;
        layer->tensors[index].later_bytes = later_bytes;
    });
}

lh_status lh_stream_device(lh_stream * stream, const char * tensor, const char ** device) {
    return lh::guarded([&] {
        const auto [layer, index] = stream->find(tensor);
        if (!layer) {
            throw lh::error(LH_STATUS_INVALID_ARGUMENT, std::string(tensor) + ": unknown tensor");
        }
        ggml_backend_buffer_type * buft = layer->tensors[index].buft;
        *device                         = buft ? lh::device_name(buft) : "";
    });
}
