#pragma once

#include "longhaul.h"

namespace lh {

// Has the process end with a line, exit code 1 and no core dump where nobody can go on: a mapped file that was cut short, and
// what nobody catches, as when a device fails where nothing can be reported.
LH_API void explain_ends();

// The same for assertions of ggml: once something has failed for good, they are a consequence.
void explain_aborts();

} // namespace lh
