#include "slot-kind.h"

#include <cstring>
#include <string>

#include "ggml-backend.h"
#include "status.h"

namespace lh {

static bool is_default_of_device(ggml_backend_buffer_type_t buft) {
    ggml_backend_dev_t device = ggml_backend_buft_get_device(buft);
    return device && ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_CPU &&
           buft == ggml_backend_dev_buffer_type(device);
}

// ggml-metal's shared buffers are not called host buffers, so that the CPU backend does not compute in them, but are addresses of
// this process. Their type is "MTL" with a number, and the device's default type only where the device uses them; the others
// are "MTL0_Private", whose addresses are made up, and "MTL0_Mapped".
static bool is_shared_with_metal(ggml_backend_buffer_type_t buft) {
    const std::string name = ggml_backend_buft_name(buft);
    return name.size() > 3 && name.compare(0, 3, "MTL") == 0 &&
           name.find_first_not_of("0123456789", 3) == std::string::npos && is_default_of_device(buft);
}

slot_kind slot_kind_of(ggml_backend_buffer_type_t buft, const char * tensor_name) {
    if (ggml_backend_buft_is_host(buft)) {
        return slot_kind::host;
    }
    if (std::strcmp(ggml_backend_buft_name(buft), "CPU_REPACK") == 0) {
        return slot_kind::repacked;
    }
    if (is_shared_with_metal(buft)) {
        return slot_kind::mapped;
    }
    if (is_default_of_device(buft)) {
        return slot_kind::device;
    }
    throw error(LH_STATUS_INVALID_ARGUMENT, std::string(tensor_name) +
                                                ": experts cannot be loaded into a buffer of type " +
                                                ggml_backend_buft_name(buft) + " (try --no-repack)");
}

// Whether the worker that a device of ggml's RPC backend belongs to says that it passes over negative ids.
static bool worker_skips_rows(ggml_backend_dev_t device) {
    using skips_rows_fn = bool (*)(ggml_backend_dev_t device);
    void * skips_rows =
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_rpc_dev_skips_rows");
    return skips_rows && reinterpret_cast<skips_rows_fn>(skips_rows)(device);
}

device_traits traits_of(ggml_backend_dev_t device) {
    const char * name = ggml_backend_reg_name(ggml_backend_dev_backend_reg(device));
    const auto   is   = [&](const char * backend) {
        return std::strncmp(name, backend, std::strlen(backend)) == 0;
    };
    device_traits traits = {};
    // up to 8 tokens take a kernel that looks the expert up; with more, each expert looks for its rows
    if (is("Vulkan")) {
        traits.n_tokens_skipping = 9;
    }
    if (is("RPC") && worker_skips_rows(device)) {
        traits.n_tokens_skipping = 1;
    }
    // CUDA counts a slot's rows by tokens, and Metal adds the places where a token names it. Of a worker it is not known: it is
    // taken for a CPU, and whoever plans gives it a slot for each expert of a token.
    traits.allows_repeats   = is("Vulkan") || is("RPC");
    // RPC puts what it is told in a queue. Vulkan writes through a queue of its own, or to mapped memory; CUDA on a stream for
    // each thread; Metal by command buffers, or to mapped memory.
    traits.has_quiet_writes = is("RPC") || is("Vulkan") || is("CUDA") || is("MTL");
    return traits;
}

const char * kind_text(slot_kind kind) {
    switch (kind) {
        case slot_kind::host:
            return "as in the file";
        case slot_kind::repacked:
            return "repacked";
        case slot_kind::mapped:
            return "memory that the device shares with the CPU";
        case slot_kind::device:
            return "a device's own memory";
    }
    return "";
}

} // namespace lh
