// llama.cpp's own programs, as functions of this process.

#include <cstring>

#include "ends.h"
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
};

const tool tools[] = {
    { "server", llama_server },         { "cli", llama_cli },
    { "bench", llama_bench },           { "completion", llama_completion },
    { "perplexity", llama_perplexity }, { "quantize", llama_quantize },
    { "rpc-server", rpc_server },
};

} // namespace

lh_status lh_tool_run(const char * name, int32_t argc, char ** argv, int32_t * exit_code) {
    lh::explain_ends();
    return lh::guarded([&] {
        for (const tool & t : tools) {
            if (std::strcmp(t.name, name) == 0) {
                *exit_code = t.run(argc, argv);
                return;
            }
        }
        throw lh::error(LH_STATUS_INVALID_ARGUMENT, std::string("no tool ") + name);
    });
}
