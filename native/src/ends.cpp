// Last words, where a process cannot go on.

#include "ends.h"

#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <exception>
#include <string>

#include "ggml.h"

namespace lh {

[[noreturn]] static void end(const char * text, size_t n) {
    if (write(STDERR_FILENO, text, n) < 0) {
        _exit(1);
    }
    _exit(1);
}

[[noreturn]] static void end_because(const char * reason) {
    const std::string line = std::string("longhaul: error: ") + reason + "\n";
    end(line.data(), line.size());
}

// Nobody can go on from there, but it can be said.
static void on_sigbus(int) {
    static const char text[] =
        "longhaul: error: a mapped file was cut short, or its disk failed; --load-mode none copies what is mapped\n";
    end(text, sizeof(text) - 1);
}

[[noreturn]] static void on_terminate() {
    try {
        if (const auto current = std::current_exception()) {
            std::rethrow_exception(current);
        }
    } catch (const std::exception & e) {
        end_because(e.what());
    } catch (...) {
    }
    end_because("something failed where nobody could go on");
}

static void on_abort(const char * message) {
    end_because(message);
}

void explain_ends() {
    struct sigaction now = {};
    if (sigaction(SIGBUS, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) {
        now.sa_handler = on_sigbus;
        sigaction(SIGBUS, &now, nullptr);
    }
    std::set_terminate(on_terminate);
}

void explain_aborts() {
    ggml_set_abort_callback(on_abort);
}

} // namespace lh
