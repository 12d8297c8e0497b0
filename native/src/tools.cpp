// llama.cpp's own programs, as functions of this process.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <vector>

#include "../src/llama-ext.h"
#include "arg.h"
#include "common.h"
#include "ends.h"
#include "fit.h"
#include "llama-cpp.h"
#include "speculative.h"
#include "status.h"

int llama_server(int argc, char ** argv);
int llama_cli(int argc, char ** argv);
int llama_bench(int argc, char ** argv);
int llama_completion(int argc, char ** argv);
int llama_perplexity(int argc, char ** argv);
int llama_quantize(int argc, char ** argv);
int llama_rpc_server(int argc, char ** argv);

namespace {

// It serves until it is ended, and tells nobody when it cannot.
int rpc_server(int argc, char ** argv) {
    const int code = llama_rpc_server(argc, argv);
    return code ? code : 1;
}

struct tool {
    const char * name;
    int (*run)(int argc, char ** argv);
    llama_example example; // whose options it takes; LLAMA_EXAMPLE_COUNT: its own
};

const tool tools[] = {
    { "server", llama_server, LLAMA_EXAMPLE_SERVER },
    { "cli", llama_cli, LLAMA_EXAMPLE_CLI },
    { "bench", llama_bench, LLAMA_EXAMPLE_COUNT },
    { "completion", llama_completion, LLAMA_EXAMPLE_COMPLETION },
    { "perplexity", llama_perplexity, LLAMA_EXAMPLE_PERPLEXITY },
    { "quantize", llama_quantize, LLAMA_EXAMPLE_COUNT },
    { "rpc-server", rpc_server, LLAMA_EXAMPLE_COUNT },
};

const tool & find_tool(const char * name) {
    for (const tool & t : tools) {
        if (std::strcmp(t.name, name) == 0) {
            return t;
        }
    }
    throw lh::error(LH_STATUS_INVALID_ARGUMENT, std::string("no tool ") + name);
}

// What the tools make of their options before they load a model.
void settle(common_params & params, llama_example example) {
    if (example == LLAMA_EXAMPLE_SERVER) {
        if (params.n_parallel < 0) {
            params.n_parallel = 4;
            params.kv_unified = true;
        }
        const bool is_whole = static_cast<uint32_t>(params.fit_params_min_ctx) == UINT32_MAX;
        if (params.kv_unified_per_slot > 0 && params.n_ctx == 0 && !is_whole) {
            params.n_ctx = params.n_parallel * params.kv_unified_per_slot;
        }
    }
    if (example == LLAMA_EXAMPLE_PERPLEXITY && params.n_ctx > 0) {
        const bool is_choice = params.hellaswag || params.winogrande || params.multiple_choice;
        params.kv_unified |= is_choice;
        params.n_parallel = is_choice ? std::max(4, params.n_parallel) : std::max(1, params.n_batch / params.n_ctx);
        params.n_ctx *= params.n_parallel;
        params.n_batch = std::min(params.n_batch, params.n_ctx);
        params.n_ctx += std::max(params.ppl_stride / 2, 0);
    }
}

// Options as llama.cpp's library takes them, those of a draft model or MTP context as well: see common_init_result.
struct load_params {
    explicit load_params(common_params & params) : draft(common_base_params_to_speculative(params)) {
        const auto & types = params.speculative.types;
        has_draft_model    = params.speculative.has_dft();
        has_draft     = has_draft_model || std::count(types.begin(), types.end(), COMMON_SPECULATIVE_TYPE_DRAFT_MTP);
        model         = common_model_params_to_llama(params);
        context       = common_context_params_to_llama(params);
        draft_model   = common_model_params_to_llama(draft);
        draft_context = common_context_params_to_llama(draft);
        if (has_draft && !has_draft_model) {
            draft_context.ctx_type = LLAMA_CONTEXT_TYPE_MTP;
        }
        draft_context.n_rs_seq = 0;
    }

    common_params        draft;
    bool                 has_draft_model;
    bool                 has_draft;
    llama_model_params   model;
    llama_context_params context;
    llama_model_params   draft_model;
    llama_context_params draft_context;
};

size_t n_overrides(const common_params & params) {
    const auto & list = params.tensor_buft_overrides;
    return std::find_if(list.begin(), list.end(), [](const auto & item) { return !item.pattern; }) - list.begin();
}

// Shares of the devices, up to the last that has one.
std::vector<float> split_of(const common_params & params) {
    std::vector<float> split(params.tensor_split, params.tensor_split + llama_max_devices());
    while (!split.empty() && split.back() == 0.0f) {
        split.pop_back();
    }
    return split;
}

// Fits as the tool would, and returns the words that say what has come of it.
std::string fit(common_params & params, load_params & load) {
    const auto    split_before       = split_of(params);
    const size_t  n_overrides_before = n_overrides(params);
    const int32_t n_layers_before    = load.model.n_gpu_layers;
    const auto    n_ctx_before       = load.context.n_ctx;
    if (params.fit_params) {
        const common_fit_extra_model extra = { load.draft.model.path.c_str(), &load.draft_model, &load.draft_context,
                                               !load.has_draft_model };
        common_fit_params(params.model.path.c_str(), &load.model, &load.context, params.tensor_split,
                          params.tensor_buft_overrides.data(), params.fit_params_target.data(),
                          params.fit_params_min_ctx, load.has_draft ? &extra : nullptr, GGML_LOG_LEVEL_ERROR);
    }
    std::ostringstream words;
    words << "--fit\noff\n";
    if (load.context.n_ctx != n_ctx_before) {
        words << "--ctx-size\n" << load.context.n_ctx << "\n";
    }
    if (load.model.n_gpu_layers != n_layers_before) {
        words << "--n-gpu-layers\n" << load.model.n_gpu_layers << "\n";
    }
    const std::vector<float> split = split_of(params);
    if (split != split_before) {
        words << "--tensor-split\n";
        for (size_t i = 0; i < split.size(); i++) {
            words << (i ? "," : "") << split[i];
        }
        words << "\n";
    }
    if (n_overrides(params) != n_overrides_before) {
        words << "--override-tensor\n";
        for (size_t i = 0; i < n_overrides(params); i++) {
            const auto & item = params.tensor_buft_overrides[i];
            words << (i ? "," : "") << item.pattern << "=" << ggml_backend_buft_name(item.buft);
        }
        words << "\n";
    }
    return words.str();
}

// The devices of a model, the host last.
class device_list {
  public:
    device_list(lh_device_memory * devices, int32_t n_most) : devices(devices), n_most(n_most) {}

    lh_device_memory & at(ggml_backend_dev_t dev) {
        const auto it = std::find(known.begin(), known.end(), dev);
        if (it == known.end() && static_cast<int32_t>(known.size()) == n_most) {
            throw lh::error(LH_STATUS_INVALID_ARGUMENT, "more devices than there is room for");
        }
        lh_device_memory & memory = devices[it - known.begin()];
        if (it == known.end()) {
            known.push_back(dev);
            memory      = {};
            size_t free = 0, total = 0;
            ggml_backend_dev_memory(dev, &free, &total);
            memory.free_bytes  = free;
            memory.total_bytes = total;
            std::snprintf(memory.name, sizeof(memory.name), "%s", ggml_backend_dev_name(dev));
            std::snprintf(memory.description, sizeof(memory.description), "%s", ggml_backend_dev_description(dev));
            memory.is_host = is_host_memory(dev);
        }
        return memory;
    }

    lh_device_memory & of_type(ggml_backend_buffer_type_t buft) {
        ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
        return !dev || ggml_backend_buft_is_host(buft) ? host : at(dev);
    }

    int32_t finish() {
        const auto dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        for (size_t i = 0; i < known.size(); i++) {
            if (known[i] == dev) { // weights that the CPU has repacked
                host.model_bytes += devices[i].model_bytes;
                std::move(devices + i + 1, devices + known.size(), devices + i);
                known.erase(known.begin() + i);
            }
        }
        lh_device_memory & last = at(dev);
        const auto         own  = host;
        last.model_bytes        = own.model_bytes;
        last.context_bytes      = own.context_bytes;
        last.compute_bytes      = own.compute_bytes;
        last.other_bytes        = own.other_bytes;
        return static_cast<int32_t>(known.size());
    }

    lh_device_memory host = {};

  private:
    // Integrated GPUs share the host's memory, by ggml's word; Metal's is one with it, and llvmpipe is the CPU itself.
    static bool is_host_memory(ggml_backend_dev_t dev) {
        const auto        type = ggml_backend_dev_type(dev);
        const std::string reg  = ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev));
        return type == GGML_BACKEND_DEVICE_TYPE_CPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU || reg == "MTL" ||
               reg == "Metal" || std::strstr(ggml_backend_dev_description(dev), "llvmpipe");
    }

    lh_device_memory *              devices;
    int32_t                         n_most;
    std::vector<ggml_backend_dev_t> known;
};

// What a model and a context of it take; returns the cells of the context.
uint32_t measure(const std::string & path, llama_model_params model_params, const llama_context_params & context_params,
                 device_list & devices, bool is_other, bool shares_model) {
    model_params.no_alloc  = true;
    model_params.load_mode = LLAMA_LOAD_MODE_NONE;
    const llama_model_ptr model(llama_model_load_from_file(path.c_str(), model_params));
    if (!model) {
        throw lh::error(LH_STATUS_STATE, "the model cannot be loaded");
    }
    const llama_context_ptr context(llama_init_from_model(model.get(), context_params));
    if (!context) {
        throw lh::error(LH_STATUS_STATE, "no context can be made");
    }
    for (int32_t i = 0; i < llama_model_n_devices(model.get()); i++) {
        devices.at(llama_model_get_device(model.get(), i));
    }
    for (const auto & [buft, data] : llama_get_memory_breakdown(context.get())) {
        lh_device_memory & memory = devices.of_type(buft);
        if (is_other) {
            memory.other_bytes += data.total() - (shares_model ? data.model : 0);
        } else {
            memory.model_bytes += data.model;
            memory.context_bytes += data.context;
            memory.compute_bytes += data.compute;
        }
    }
    return llama_n_ctx(context.get());
}

// A projector, by the size of its file.
void add_projector(const common_params & params, device_list & devices) {
    std::ifstream file(params.mmproj.path, std::ios::binary | std::ios::ate);
    if (params.mmproj.path.empty() || !file) {
        return;
    }
    ggml_backend_dev_t dev = params.mmproj_use_gpu ? params.mmproj_device : nullptr;
    if (params.mmproj_use_gpu && !dev) {
        dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU);
    }
    (dev ? devices.at(dev) : devices.host).other_bytes += static_cast<int64_t>(file.tellg());
}

} // namespace

lh_status lh_tool_run(const char * name, int32_t argc, char ** argv, int32_t * exit_code) {
    lh::explain_ends();
    return lh::guarded([&] { *exit_code = find_tool(name).run(argc, argv); });
}

lh_status lh_tool_place(const char * name, int32_t argc, char ** argv, lh_device_memory * devices, int32_t n_most,
                        int32_t * n_devices, uint32_t * n_ctx, const char ** args) {
    static std::string words;
    return lh::guarded([&] {
        const llama_example example = find_tool(name).example;
        if (example == LLAMA_EXAMPLE_COUNT) {
            throw lh::error(LH_STATUS_INVALID_ARGUMENT, std::string(name) + " has options of its own");
        }
        common_params params;
        if (!common_params_parse(argc, argv, params, example)) {
            throw lh::error(LH_STATUS_INVALID_ARGUMENT, "a bad option");
        }
        settle(params, example);
        llama_backend_init();
        load_params load(params);
        words = fit(params, load);

        device_list found(devices, n_most);
        *n_ctx = measure(params.model.path, load.model, load.context, found, false, false);
        add_projector(params, found);
        if (load.has_draft) {
            load.draft_context.n_ctx = *n_ctx;
            if (!load.has_draft_model) { // the same weights, in the same places
                load.draft_model.n_gpu_layers          = load.model.n_gpu_layers;
                load.draft_model.tensor_split          = load.model.tensor_split;
                load.draft_model.tensor_buft_overrides = load.model.tensor_buft_overrides;
            }
            measure(load.draft.model.path, load.draft_model, load.draft_context, found, true, !load.has_draft_model);
        }
        *n_devices = found.finish();
        for (int32_t i = 0; i + 1 < *n_devices; i++) {
            devices[i].margin_bytes = params.fit_params_target.at(i);
        }
        *args = words.c_str();
    });
}
