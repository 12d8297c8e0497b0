#pragma once

// Where slot tensors lie: what was planned, what was found, and what to say when there is no room.

#include <string>

#include "stream.h"

namespace lh {

// The device whose memory a buffer type is of, "CPU" for the host's; a type that slots cannot be in has its own name.
const char * device_name(ggml_backend_buffer_type * buft);

// Throws if the slots are on another device than planned.
void check_placement(lh_stream & stream, const ggml_tensor * slots);

// Why the slot tensors of a context were not allocated, and how large they may be.
std::string no_memory_text(lh_stream & stream, ggml_context * ctx, ggml_backend_buffer_type * buft);

} // namespace lh
