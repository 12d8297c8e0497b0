// Records which experts layers need.

#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "ggml.h"
#include "stream.h"

namespace lh {

static constexpr size_t  flush_bytes    = 1024 * 1024;
static constexpr uint8_t flag_has_hits  = 2;
static constexpr size_t  bits_of_a_byte = 8;

template <typename T> static void append(std::vector<uint8_t> & buffer, const T & value) {
    const auto * bytes = reinterpret_cast<const uint8_t *>(&value);
    buffer.insert(buffer.end(), bytes, bytes + sizeof(T));
}

void trace_writer::set_file(int next_file) {
    flush();
    const int failed = code;
    file             = next_file;
    code             = 0;
    buffer.clear();
    if (file >= 0) {
        buffer.reserve(2 * flush_bytes);
    }
    if (failed) {
        throw error(LH_STATUS_IO, std::string("the trace cannot be written: ") + std::strerror(failed), failed);
    }
}

void trace_writer::add(const stream_layer & layer, const ggml_tensor * ids, int32_t phase) {
    const auto id_at = [ids](int64_t i0, int64_t i1) {
        return *reinterpret_cast<const int32_t *>(static_cast<const char *>(ids->data) + i1 * ids->nb[1] +
                                                  i0 * ids->nb[0]);
    };
    append(buffer, lh_trace_record{ n_ubatch, static_cast<uint16_t>(layer.index), static_cast<uint8_t>(phase),
                                    flag_has_hits, static_cast<uint32_t>(ids->ne[1]) });
    const size_t first_bit = buffer.size() + ids->ne[0] * ids->ne[1] * sizeof(uint16_t);
    for (int64_t i1 = 0; i1 < ids->ne[1]; i1++) {
        for (int64_t i0 = 0; i0 < ids->ne[0]; i0++) {
            append(buffer, static_cast<uint16_t>(id_at(i0, i1)));
        }
    }
    buffer.resize(first_bit + (ids->ne[0] * ids->ne[1] + bits_of_a_byte - 1) / bits_of_a_byte, 0);
    size_t bit = 0;
    for (int64_t i1 = 0; i1 < ids->ne[1]; i1++) {
        for (int64_t i0 = 0; i0 < ids->ne[0]; i0++, bit++) {
            if (layer.seen_slot[id_at(i0, i1)] >= 0) {
                buffer[first_bit + bit / bits_of_a_byte] |= 1u << (bit % bits_of_a_byte);
            }
        }
    }
}

void trace_writer::end_ubatch() {
    if (!is_open()) {
        return;
    }
    n_ubatch++;
    if (buffer.size() >= flush_bytes) {
        flush();
    }
}

void trace_writer::flush() {
    for (size_t n_done = 0; is_open() && n_done < buffer.size();) {
        const ssize_t n = write(file, buffer.data() + n_done, buffer.size() - n_done);
        if (n < 0 && errno != EINTR) {
            code = errno;
        }
        n_done += n > 0 ? n : 0;
    }
    buffer.clear();
}

} // namespace lh
