#include "status.h"

#ifndef LONGHAUL_BUILD_ID
#define LONGHAUL_BUILD_ID "unknown"
#endif

namespace lh {

static thread_local std::string last_message;
static thread_local int         last_code = 0;

lh_status keep_error(lh_status status, const char * message, int code) noexcept {
    last_code = code;
    try {
        last_message = message;
    } catch (...) {
        last_message.clear();
    }
    return status;
}

} // namespace lh

const char * lh_last_error(void) {
    return lh::last_message.c_str();
}

int32_t lh_last_errno(void) {
    return lh::last_code;
}

const char * lh_build_id(void) {
    return LONGHAUL_BUILD_ID;
}
