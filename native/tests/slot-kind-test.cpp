// Checks how buffers are classified, and which slots stand in for others, with made-up buffer types and devices: ggml-metal's are there on macOS only.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>

#include "ggml-backend-impl.h"
#include "slot-kind.h"
#include "spare-slots.h"
#include "status.h"

static int n_checks = 0;

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        n_checks++;                                                                                                    \
        if (!(condition)) {                                                                                            \
            std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);                             \
            std::abort();                                                                                              \
        }                                                                                                              \
    } while (false)

// A backend of this name with a device whose default buffer type has that name.
struct fake {
    std::string                reg_name, buft_name;
    bool                       is_host;
    enum ggml_backend_dev_type type;
    ggml_backend_reg           reg    = {};
    ggml_backend_device        device = {};
    ggml_backend_buffer_type   buft   = {};
    ggml_backend_buffer_type   other  = {}; // another buffer type of the device

    fake(const char * reg_name, const char * buft_name, bool is_host = false,
         enum ggml_backend_dev_type type = GGML_BACKEND_DEVICE_TYPE_GPU) :
        reg_name(reg_name),
        buft_name(buft_name),
        is_host(is_host),
        type(type) {
        reg.context        = this;
        reg.iface.get_name = [](ggml_backend_reg_t r) {
            return self(r->context).reg_name.c_str();
        };
        device.context        = this;
        device.reg            = &reg;
        device.iface.get_type = [](ggml_backend_dev_t d) {
            return self(d->context).type;
        };
        device.iface.get_buffer_type = [](ggml_backend_dev_t d) {
            return &self(d->context).buft;
        };
        buft.context        = this;
        buft.device         = &device;
        buft.iface.get_name = [](ggml_backend_buffer_type_t b) {
            return self(b->context).buft_name.c_str();
        };
        buft.iface.is_host = [](ggml_backend_buffer_type_t b) {
            return self(b->context).is_host;
        };
        other = buft;
    }

    static fake & self(void * context) { return *static_cast<fake *>(context); }
};

static bool is_refused(ggml_backend_buffer_type_t buft) {
    try {
        lh::slot_kind_of(buft, "blk.0.ffn_up_exps.weight");
        return false;
    } catch (const lh::error & e) {
        CHECK(e.status == LH_STATUS_INVALID_ARGUMENT);
        CHECK(e.message.find("blk.0.ffn_up_exps.weight") == 0);
        CHECK(e.message.find(ggml_backend_buft_name(buft)) != std::string::npos);
        return true;
    }
}

static lh::slot_kind kind(fake & f) {
    return lh::slot_kind_of(&f.buft, "blk.0.ffn_up_exps.weight");
}

// Slots of a token have to be distinct, whichever of them are in a stage.
static void check_spare_slots() {
    std::mt19937 random(7);
    for (int i = 0; i < 2000; i++) {
        const int32_t        n_used  = 1 + random() % 10;
        const int32_t        n_slots = n_used + random() % 8;
        std::vector<int32_t> spare(n_slots);
        std::iota(spare.begin(), spare.end(), 0);
        std::shuffle(spare.begin(), spare.end(), random);
        std::vector<int32_t> ids(spare.begin(), spare.begin() + n_used);
        std::shuffle(spare.begin(), spare.end(), random);
        std::vector<int32_t> filled = ids;
        for (int32_t & id : filled) {
            id = random() % 2 ? id : -1; // another stage's
        }
        ids = filled;
        lh::fill_spare(filled.data(), n_used, spare);
        for (int32_t j = 0; j < n_used; j++) {
            CHECK(ids[j] < 0 || filled[j] == ids[j]);
            CHECK(filled[j] >= 0 && filled[j] < n_slots);
            CHECK(std::count(filled.begin(), filled.end(), filled[j]) == 1);
        }
        // the first of the spare ones are taken, as far as the token does not use them
        const auto first = std::find_if(spare.begin(), spare.end(), [&](int32_t slot) {
            return std::find(ids.begin(), ids.end(), slot) == ids.end();
        });
        const auto other = std::find(ids.begin(), ids.end(), -1);
        CHECK(other == ids.end() || filled[other - ids.begin()] == *first);
    }
    int32_t few[] = { -1, 0, -1 };
    lh::fill_spare(few, 3, { 0 });
    CHECK(few[0] == 0 && few[1] == 0 && few[2] == 0);
}

int main() {
    fake cpu("CPU", "CPU", true, GGML_BACKEND_DEVICE_TYPE_CPU);
    fake locked("CUDA", "CUDA_Host", true);
    fake repack("CPU", "CPU_REPACK", false, GGML_BACKEND_DEVICE_TYPE_CPU);
    fake amx("CPU", "AMX", false, GGML_BACKEND_DEVICE_TYPE_CPU);
    fake cuda("CUDA", "CUDA0");
    fake vulkan("Vulkan", "Vulkan0");
    fake rpc("RPC[127.0.0.1:50052]", "RPC0[127.0.0.1:50052]");
    fake shared("MTL", "MTL0");
    fake shared_12("MTL", "MTL12");
    fake apart("MTL", "MTL0_Private"); // the default type where the device has memory of its own
    fake mapped("MTL", "MTL0_Mapped");

    CHECK(kind(cpu) == lh::slot_kind::host);
    CHECK(kind(locked) == lh::slot_kind::host);
    CHECK(kind(repack) == lh::slot_kind::repacked);
    CHECK(kind(cuda) == lh::slot_kind::device);
    CHECK(kind(vulkan) == lh::slot_kind::device);
    CHECK(kind(rpc) == lh::slot_kind::device);
    CHECK(kind(shared) == lh::slot_kind::mapped);
    CHECK(kind(shared_12) == lh::slot_kind::mapped);
    CHECK(kind(apart) == lh::slot_kind::device);
    CHECK(is_refused(&amx.buft));
    // types that are not their device's default: split buffers, mapped files, shared ones of a device that shares nothing
    CHECK(is_refused(&cuda.other));
    CHECK(is_refused(&mapped.other));
    CHECK(is_refused(&shared.other));

    CHECK(lh::is_on_device(lh::slot_kind::device));
    CHECK(lh::is_on_device(lh::slot_kind::mapped));
    CHECK(!lh::is_on_device(lh::slot_kind::host));
    CHECK(!lh::is_on_device(lh::slot_kind::repacked));

    fake unknown("SomethingNew", "New0");
    CHECK(lh::traits_of(&vulkan.device).allows_repeats);
    CHECK(!lh::traits_of(&cuda.device).allows_repeats);
    CHECK(!lh::traits_of(&shared.device).allows_repeats);
    CHECK(!lh::traits_of(&unknown.device).allows_repeats);
    CHECK(lh::traits_of(&vulkan.device).n_tokens_skipping == 9);
    CHECK(lh::traits_of(&cuda.device).n_tokens_skipping == INT64_MAX);
    CHECK(lh::traits_of(&rpc.device).n_tokens_skipping == INT64_MAX);
    rpc.reg.iface.get_proc_address = [](ggml_backend_reg_t, const char * name) -> void * {
        CHECK(std::strcmp(name, "ggml_backend_rpc_dev_skips_rows") == 0);
        return reinterpret_cast<void *>(+[](ggml_backend_dev_t) { return true; });
    };
    CHECK(lh::traits_of(&rpc.device).n_tokens_skipping == 1);
    rpc.reg.iface.get_proc_address = nullptr;
    for (fake * f : { &vulkan, &cuda, &rpc, &shared }) {
        CHECK(lh::traits_of(&f->device).has_quiet_writes);
    }
    CHECK(!lh::traits_of(&unknown.device).has_quiet_writes);

    check_spare_slots();
    std::printf("%d checks\n", n_checks);
    return 0;
}
