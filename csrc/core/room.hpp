// Memory that a thread or a task keeps from one use to the next.
#pragma once

#include <stdint.h>
#include <stdlib.h>

// In each unit its own, as all that units compile; in a door, which has no unit, that of this name.
namespace ANYMAX_UNIT {

struct Room {
    void *data = nullptr;
    int64_t bytes = 0;
    ~Room() { free(data); }
    template <class C>
    C *take(int64_t count) {
        const int64_t wanted = count * (int64_t)sizeof(C) + 64;
        if (wanted > bytes) {
            free(data);
            data = malloc((size_t)wanted);
            bytes = data ? wanted : 0;
        }
        return data ? (C *)(((uintptr_t)data + 63) & ~(uintptr_t)63) : nullptr;
    }
    // What is too much to be kept goes.
    void leave() {
        if (bytes <= (4 << 20)) return;
        free(data);
        data = nullptr, bytes = 0;
    }
};

}  // namespace ANYMAX_UNIT
