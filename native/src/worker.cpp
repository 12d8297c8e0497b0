// Other machines: the workers of ggml's RPC backend.

#include <string>

#include "ends.h"
#include "ggml-backend.h"
#include "status.h"

namespace lh {

// Through the registry, so that it works where backends are modules as well.
static void add_worker(const char * endpoint) {
    using add_server_fn          = ggml_backend_reg_t (*)(const char * endpoint);
    const ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
    void * add_fn = rpc ? ggml_backend_reg_get_proc_address(rpc, "ggml_backend_rpc_add_server") : nullptr;
    if (!add_fn) {
        throw error(LH_STATUS_STATE, "these libraries are built without RPC (-DGGML_RPC=ON)");
    }
    explain_ends();
    const ggml_backend_reg_t worker = reinterpret_cast<add_server_fn>(add_fn)(endpoint);
    if (!worker) {
        throw error(LH_STATUS_STATE, std::string("worker ") + endpoint + " has no devices");
    }
    ggml_backend_register(worker); // once
}

} // namespace lh

lh_status lh_add_worker(const char * endpoint) {
    return lh::guarded([&] { lh::add_worker(endpoint); });
}
