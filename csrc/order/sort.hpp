// Rows sorted in descending order, with the places of their numbers.
#pragma once

#include <stdint.h>
#include <string.h>

#include "core/tasks.hpp"
#include "limits.hpp"

namespace ANYMAX_UNIT {

// A number as a key that rises as the number falls, and its place.
struct Item32 {
    uint64_t both;  // key, place
    static constexpr int DIGITS = 4;
    uint32_t digit(int d) const { return (uint32_t)(both >> (32 + 8 * d)) & 255; }
    uint32_t place() const { return (uint32_t)both; }
    bool before(const Item32 &other) const { return both < other.both; }
    static Item32 of(float x, uint32_t place) {
        uint32_t u;
        memcpy(&u, &x, sizeof u);
        u = u >> 31 ? u : u ^ 0x7fffffffu;
        return Item32{(uint64_t)u << 32 | place};
    }
};
struct Item64 {
    uint64_t key;
    uint64_t at;
    static constexpr int DIGITS = 8;
    uint32_t digit(int d) const { return (uint32_t)(key >> (8 * d)) & 255; }
    uint32_t place() const { return (uint32_t)at; }
    bool before(const Item64 &other) const { return key < other.key || (key == other.key && at < other.at); }
    static Item64 of(double x, uint32_t place) {
        uint64_t u;
        memcpy(&u, &x, sizeof u);
        return Item64{u >> 63 ? u : u ^ 0x7fffffffffffffffull, place};
    }
};
template <class T>
struct ItemOf;
template <>
struct ItemOf<float> {
    using type = Item32;
};
template <>
struct ItemOf<double> {
    using type = Item64;
};

// Insertion: true if it took no more than `most` moves, else the items are left in some order.
template <class Item>
bool inserted(Item *a, int64_t n, int64_t most) {
    for (int64_t i = 1; i < n; i++) {
        if (!a[i].before(a[i - 1])) continue;
        const Item item = a[i];
        int64_t j = i;
        do a[j] = a[j - 1], j--;
        while (j > 0 && item.before(a[j - 1]));
        a[j] = item;
        if ((most -= i - j) < 0) return false;
    }
    return true;
}

// Sorts by the digits from LOWEST on; the items are in the one that is returned.
template <int LOWEST, class Item>
Item *by_digits(Item *a, Item *b, int64_t n) {
    uint32_t counts[Item::DIGITS][256] = {};
    for (int64_t i = 0; i < n; i++)
        for (int d = LOWEST; d < Item::DIGITS; d++) counts[d][a[i].digit(d)]++;
    for (int d = LOWEST; d < Item::DIGITS; d++) {
        uint32_t *count = counts[d], from = 0;
        if (count[a[0].digit(d)] == n) continue;  // all have this digit
        for (int c = 0; c < 256; c++) {
            const uint32_t here = count[c];
            count[c] = from, from += here;
        }
        for (int64_t i = 0; i < n; i++) b[count[a[i].digit(d)]++] = a[i];
        Item *const other = a;
        a = b, b = other;
    }
    return a;
}

// Sorts `a`, with `b` as scratch memory of the same size; the sorted items are in the one that is returned. Equal numbers keep
// their order.
template <class Item>
Item *sorted(Item *a, Item *b, int64_t n) {
    if (n <= INSERTED_MOST) {
        inserted(a, n, INT64_MAX);
        return a;
    }
    // the lowest digits seldom matter: a few moves put right what they leave, or else they are taken, too
    Item *const most = by_digits<Item::DIGITS == 4 ? 1 : 4>(a, b, n);
    if (inserted(most, n, n)) return most;
    Item *const all = by_digits<0>(most, most == a ? b : a, n);
    inserted(all, n, INT64_MAX);  // equal numbers, which the moves may have left out of order
    return all;
}

}  // namespace ANYMAX_UNIT
