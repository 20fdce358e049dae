// Memory that a thread or a task keeps from one use to the next.
#pragma once

#include <stdint.h>
#include <stdlib.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "limits.hpp"

// In each unit its own, as all that units compile; in a door, which has no unit, that of this name.
namespace ANYMAX_UNIT {

// For the system to clear and map memory page by page can take longer than what is done with it: large pages are asked for.
// True for so many bytes that they come from the system.
inline bool newly_mapped(void *data, int64_t bytes) {
    if (bytes < NEWLY_MAPPED_FROM) return false;
#if defined(MADV_HUGEPAGE)
    const uintptr_t page = 1 << 16, first = (uintptr_t)data, last = first + (uintptr_t)bytes;  // a multiple of every page size
    const uintptr_t begin = (first + page - 1) & ~(page - 1), end = last & ~(page - 1);
    madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#else
    (void)data;
#endif
    return true;
}

// One piece, which only grows, aligned to a cache line. What is beyond the numbers asked for may be read and written by whole
// vectors.
struct Room {
    static constexpr int64_t LINE = 64, BEYOND = 2 * LINE;
    void *data = nullptr;
    int64_t bytes = 0;

    ~Room() { free(data); }
    template <class T>
    __attribute__((always_inline)) T *take(int64_t count) {
        const int64_t wanted = count * (int64_t)sizeof(T) + BEYOND;
        if (wanted > bytes) grow(wanted);
        return data ? (T *)(((uintptr_t)data + LINE - 1) & ~(uintptr_t)(LINE - 1)) : nullptr;
    }
    __attribute__((noinline)) void grow(int64_t wanted) {
        free(data);
        data = malloc((size_t)(wanted + LINE));
        bytes = data ? wanted : 0;
        newly_mapped(data, bytes);
    }
    // What is too much to be kept goes.
    void leave() {
        if (bytes <= ROOM_KEPT) return;
        free(data);
        data = nullptr, bytes = 0;
    }
};

// Arrays one after another, each from a cache line on; without a base it only counts their bytes.
struct Arena {
    char *base;
    int64_t used;

    template <class T>
    void take_one(int64_t count, T *&array) {
        array = base ? (T *)(base + used) : nullptr;
        used += (count * (int64_t)sizeof(T) + Room::LINE - 1) / Room::LINE * Room::LINE;
    }
    // Points these at arrays of `count` each.
    template <class... T>
    void take(int64_t count, T *&...arrays) {
        (take_one(count, arrays), ...);
    }
};

// clang-format off
enum Slot {
    STAGED, STAGED_P, STAGED_G, TRANSPOSED, RESULT, CELLS, VALUES, INDICES, WIDE, EXTRA,
    SORTED, PARTIAL, WORK, BATCH_IN, BATCH_OUT, LEFT_SCORES, LEFT_CLASSES, LEFT_SUMS, LEFT_KEYS, SLOTS
};
// clang-format on

// Rooms by their uses.
template <int COUNT>
struct Rooms {
    Room memory[COUNT];
    bool failed = false;  // one of them could not be had

    template <class T>
    T *take(int use, int64_t count) {
        T *const place = memory[use].template take<T>(count);
        if (!place) failed = true;
        return place;
    }
    void leave() {
        for (Room &room : memory) room.leave();
        failed = false;
    }
};
typedef Rooms<SLOTS> Scratch;  // of a task

}  // namespace ANYMAX_UNIT
