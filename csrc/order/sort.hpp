// Rows sorted in descending order, with the places of their numbers.
#pragma once

#include <stdint.h>
#include <string.h>

#include "core/pieces.hpp"
#include "limits.hpp"

namespace ANYMAX_UNIT {

// A number as a key that rises as the number falls, and its place.
struct Item32 {
    uint64_t both;                                                  // key, place
    static constexpr int DIGITS = 4, FIRST = 1, FIRST_OF_MANY = 0;  // of those that a sort begins with
    static constexpr int64_t MANY = SORTED_MANY;
    uint32_t digit(int d) const { return (uint32_t)(both >> (32 + 8 * d)) & 255; }
    uint32_t place() const { return (uint32_t)both; }
    bool before(const Item32 &other) const { return both < other.both; }
    static Item32 of(float x, uint32_t place) {
        uint32_t u;
        memcpy(&u, &x, sizeof u);
        u = u >> 31 ? u : u ^ 0x7fffffffu;
        return Item32{(uint64_t)u << 32 | place};
    }
    float number() const {
        uint32_t u = (uint32_t)(both >> 32);
        float x;
        u = u >> 31 ? u : u ^ 0x7fffffffu;
        memcpy(&x, &u, sizeof x);
        return x;
    }
};
struct Item64 {
    uint64_t key;
    uint64_t at;
    static constexpr int DIGITS = 8, FIRST = 4, FIRST_OF_MANY = 2;
    static constexpr int64_t MANY = 8 * SORTED_MANY;
    uint32_t digit(int d) const { return (uint32_t)(key >> (8 * d)) & 255; }
    uint32_t place() const { return (uint32_t)at; }
    bool before(const Item64 &other) const { return key < other.key || (key == other.key && at < other.at); }
    static Item64 of(double x, uint32_t place) {
        uint64_t u;
        memcpy(&u, &x, sizeof u);
        return Item64{u >> 63 ? u : u ^ 0x7fffffffffffffffull, place};
    }
    double number() const {
        const uint64_t u = key >> 63 ? key : key ^ 0x7fffffffffffffffull;
        double x;
        memcpy(&x, &u, sizeof x);
        return x;
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

// How often each value of a digit is there in a part of a row, then where its items go.
typedef uint32_t Counts[256];

// Parts of a row that is sorted, and the rooms for the counts of all digits that they need.
constexpr int64_t sorted_parts(int64_t n, anymax_parallel team) { return team ? pieces_of(n) : 1; }

// Sorts by the digits from LOWEST on, in parts that the threads of `team` share; the items are in the one that is returned.
template <int LOWEST, class Item>
Item *by_digits(Item *a, Item *b, int64_t n, Counts *counts, anymax_parallel team) {
    constexpr int DIGITS = Item::DIGITS;
    const int64_t parts = sorted_parts(n, team);
    const auto each = [=](auto f) { pieces(Team{team}, n, f, team ? PIECE : n); };
    // of digits d to `end`, in each part
    const auto count = [&](int d, int end) {
        each([=](int64_t k, int64_t from, int64_t to) {
            Counts *own = counts + k * DIGITS;
            memset(own + d, 0, sizeof(Counts) * (size_t)(end - d));
            for (int64_t i = from; i < to; i++)
                for (int e = d; e < end; e++) own[e][a[i].digit(e)]++;
        });
    };
    count(LOWEST, DIGITS);
    bool moved = false;
    for (int d = LOWEST; d < DIGITS; d++) {
        int64_t alike = 0;
        for (int64_t k = 0; k < parts; k++) alike += counts[k * DIGITS + d][a[0].digit(d)];
        if (alike == n) continue;  // all have this digit
        if (moved && parts > 1) count(d, d + 1);
        uint32_t from = 0;
        const auto begins = [&](uint32_t &place) {
            const uint32_t here = place;
            place = from, from += here;
        };
        if (parts == 1)
            for (int c = 0; c < 256; c++) begins(counts[d][c]);
        else
            for (int c = 0; c < 256; c++)
                for (int64_t k = 0; k < parts; k++) begins(counts[k * DIGITS + d][c]);
        each([=](int64_t k, int64_t from, int64_t to) {
            uint32_t *own = counts[k * DIGITS + d];
            for (int64_t i = from; i < to; i++) b[own[a[i].digit(d)]++] = a[i];
        });
        moved = true;
        Item *const other = a;
        a = b, b = other;
    }
    return a;
}

// Sorts `a`, with `b` as scratch memory of the same size; the sorted items are in the one that is returned. Equal numbers keep
// their order.
template <class Item>
Item *sorted(Item *a, Item *b, int64_t n, Counts *counts, anymax_parallel team) {
    if (n <= INSERTED_MOST) {
        inserted(a, n, INT64_MAX);
        return a;
    }
    // the lowest digits seldom matter: a few moves put right what they leave, or else they are taken, too
    const bool many = n >= Item::MANY;
    Item *const most =
        many ? by_digits<Item::FIRST_OF_MANY>(a, b, n, counts, team) : by_digits<Item::FIRST>(a, b, n, counts, team);
    if ((many && !Item::FIRST_OF_MANY) || inserted(most, n, n)) return most;
    Item *const all = by_digits<0>(most, most == a ? b : a, n, counts, team);
    inserted(all, n, INT64_MAX);  // equal numbers, which the moves may have left out of order
    return all;
}

}  // namespace ANYMAX_UNIT
