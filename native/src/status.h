#pragma once

#include <exception>
#include <new>
#include <string>

#include "longhaul.h"

namespace lh {

// A failure with its status, thrown inside the library only.
struct error : std::exception {
    lh_status   status;
    int         code; // errno, 0: none
    std::string message;

    error(lh_status status, std::string message, int code = 0) :
        status(status),
        code(code),
        message(std::move(message)) {}

    const char * what() const noexcept override { return message.c_str(); }
};

// Keeps the failure for lh_last_error() and returns its status.
LH_API lh_status keep_error(lh_status status, const char * message, int code) noexcept;

// Runs a function body; an exception becomes a status.
template <typename F> lh_status guarded(F && body) noexcept {
    try {
        body();
        return LH_STATUS_OK;
    } catch (const error & e) {
        return keep_error(e.status, e.what(), e.code);
    } catch (const std::bad_alloc &) {
        return keep_error(LH_STATUS_NO_MEMORY, "out of memory", 0);
    } catch (const std::exception & e) {
        return keep_error(LH_STATUS_INTERNAL, e.what(), 0);
    } catch (...) {
        return keep_error(LH_STATUS_INTERNAL, "unknown exception", 0);
    }
}

} // namespace lh
