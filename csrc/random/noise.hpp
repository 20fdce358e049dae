// Random numbers of a framework's generator, and Gumbel noise from them.
#pragma once

#include "core/packing.hpp"

namespace ANYMAX_UNIT {

constexpr int64_t NOISE_TOGETHER = 1024;  // numbers that stay in the first cache
constexpr float LEAST_UNIFORM = 0x1p-48f, MOST_UNIFORM = 1.0f - 0x1p-24f;

// -log(-log1p(-u)) for u = pairs[2 i] + 2^-24 pairs[2 i + 1], which is kept between 0 and 1.
inline void gumbel(const float *pairs, float *out, int64_t count) {
    constexpr int64_t W = width<float>;
    alignas(64) float u[NOISE_TOGETHER];
    for (int64_t from = 0; from < count; from += NOISE_TOGETHER) {
        const int64_t n = count - from < NOISE_TOGETHER ? count - from : NOISE_TOGETHER;
        const float *const pair = pairs + 2 * from;
        for (int64_t i = 0; i < n; i++) u[i] = pair[2 * i] + pair[2 * i + 1] * 0x1p-24f;
        for (int64_t i = 0; i < n; i += W) {
            const vf v = smaller(larger(load_or(u, i, n, 0.5f), all<vf>(LEAST_UNIFORM)), all<vf>(MOST_UNIFORM));
            store_within(out + from, i, n, -log(-log1p(-v)));
        }
    }
}

// MT19937, with its numbers as torch keeps them.
class Twister {
    static constexpr int64_t N = ANYMAX_TWISTER_WORDS, M = 397;
    uint32_t word[N];

    static uint32_t twisted(uint32_t u, uint32_t v) {
        return ((u & 0x80000000u) | (v & 0x7fffffffu)) >> 1 ^ ((0u - (v & 1u)) & 0x9908b0dfu);
    }
    void renew() {
        for (int64_t i = 0; i < N - M; i++) word[i] = word[i + M] ^ twisted(word[i], word[i + 1]);
        for (int64_t i = N - M; i < N - 1; i++) word[i] = word[i + M - N] ^ twisted(word[i], word[i + 1]);
        word[N - 1] = word[M - 1] ^ twisted(word[N - 1], word[0]);
    }

  public:
    // `count` floats of 24 bits in [0, 1).
    void fill(int64_t *words, int64_t &next, int64_t &left, float *out, int64_t count) {
        for (int64_t i = 0; i < N; i++) word[i] = (uint32_t)words[i];
        for (int64_t done = 0; done < count;) {
            if (left == 1) renew(), next = 0, left = N + 1;
            const int64_t here = count - done < left - 1 ? count - done : left - 1;
            const uint32_t *const from = word + next;
            for (int64_t i = 0; i < here; i++) {
                uint32_t y = from[i];
                y ^= y >> 11;
                y ^= y << 7 & 0x9d2c5680u;
                y ^= y << 15 & 0xefc60000u;
                y ^= y >> 18;
                out[done + i] = (float)(int32_t)(y & 0xffffffu) * 0x1p-24f;
            }
            done += here, next += here, left -= here;
        }
        for (int64_t i = 0; i < N; i++) words[i] = word[i];
    }
};

}  // namespace ANYMAX_UNIT
