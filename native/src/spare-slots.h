#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace lh {

// Gives the rows of a token that belong to other stages, which have -1, slots whose result is thrown away: kernels may rely on a
// token's slots being distinct, as its experts are.
inline void fill_spare(int32_t * ids, int64_t n, const std::vector<int32_t> & spare) {
    size_t next = 0;
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] >= 0) {
            continue;
        }
        while (next < spare.size() && std::find(ids, ids + n, spare[next]) != ids + n) {
            next++;
        }
        ids[i] = next < spare.size() ? spare[next] : 0; // fewer slots than experts of a token: see allows_repeats
    }
}

} // namespace lh
