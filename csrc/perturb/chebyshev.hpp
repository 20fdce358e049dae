// Chebyshev's polynomials on [-1, 1]: moments of scores become weights of K points, and values at these points a polynomial.
#pragma once

#include "core/vec.hpp"

namespace ANYMAX_UNIT {
namespace perturb {

// K Chebyshev points; fit: the Chebyshev coefficients of a function from its values there; power[k][j]: the coefficient of t^j
// in Chebyshev's k-th polynomial.
template <int K>
struct Chebyshev {
    double point[K], fit[K][K], power[K][K];
};
template <int K>
constexpr Chebyshev<K> chebyshev() {
    constexpr double upper8[4] = {0.19509032201612827, 0.55557023301960222, 0.83146961230254524, 0.98078528040323045};
    constexpr double upper16[8] = {0.098017140329560602, 0.29028467725446237, 0.47139673682599765, 0.63439328416364550,
                                   0.77301045336273697,  0.88192126434835503, 0.95694033573220887, 0.99518472667219689};
    Chebyshev<K> c{};
    for (int m = 0; m < K / 2; m++) {
        const double x = K == 8 ? upper8[m] : upper16[m];
        c.point[K / 2 + m] = x;
        c.point[K / 2 - 1 - m] = -x;
    }
    for (int m = 0; m < K; m++) {
        double a = 1.0, b = c.point[m];
        for (int k = 0; k < K; k++) {
            c.fit[k][m] = a * (k ? 2.0 : 1.0) / K;
            const double next = 2.0 * c.point[m] * b - a;
            a = b;
            b = next;
        }
    }
    c.power[0][0] = 1.0;
    c.power[1][1] = 1.0;
    for (int k = 2; k < K; k++)
        for (int j = 0; j < K; j++) c.power[k][j] = (j ? 2.0 * c.power[k - 1][j - 1] : 0.0) - c.power[k - 2][j];
    return c;
}

template <int K>
constexpr Chebyshev<K> CHEBYSHEV = chebyshev<K>();
template <class E>
constexpr int points_a_cell = sizeof(E) == 8 ? 16 : 8;

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef double d4 __attribute__((vector_size(32)));

// to[k] += t^k, weighted[k] += g t^k: k < 8 in floats, k < 16 in doubles.
template <bool G>
ANYMAX_INLINE void add_powers(float *to, float *weighted, float t, float g) {
    constexpr i8 odd = {0, -1, 0, -1, 0, -1, 0, -1}, second = {0, 0, -1, -1, 0, 0, -1, -1},
                 upper = {0, 0, 0, 0, -1, -1, -1, -1};
    const f8 one = {1, 1, 1, 1, 1, 1, 1, 1};
    const float t2 = t * t, t4 = t2 * t2;
    f8 p = odd ? t - f8{} : one;
    p = p * (second ? t2 - f8{} : one);
    p = p * (upper ? t4 - f8{} : one);
    f8 a;
    __builtin_memcpy(&a, to, sizeof a);
    a += p;
    __builtin_memcpy(to, &a, sizeof a);
    if (G) {
        __builtin_memcpy(&a, weighted, sizeof a);
        a += p * g;
        __builtin_memcpy(weighted, &a, sizeof a);
    }
}
template <bool G>
ANYMAX_INLINE void add_powers(double *to, double *weighted, double t, double g) {
    const double t2 = t * t, t4 = t2 * t2, t8 = t4 * t4;
    d4 p[4];
    p[0] = d4{1.0, t, t2, t2 * t};
    p[1] = p[0] * t4;
    p[2] = p[0] * t8;
    p[3] = p[1] * t8;
    for (int i = 0; i < 4; i++) {
        d4 a;
        __builtin_memcpy(&a, to + 4 * i, sizeof a);
        a += p[i];
        __builtin_memcpy(to + 4 * i, &a, sizeof a);
        if (G) {
            __builtin_memcpy(&a, weighted + 4 * i, sizeof a);
            a += p[i] * g;
            __builtin_memcpy(weighted + 4 * i, &a, sizeof a);
        }
    }
}

// Adds the two copies of the floats' sums to the moments, and begins them again.
inline void flush_sums(float *from, double *to, int64_t copy) {
    for (int64_t k = 0; k < copy; k += width<float>) {
        const vf a = load(from + k);
        const vf b = load(from + k + copy);
        constexpr int64_t half = width<double>;
        store(to + k, load(to + k) + (low(a) + low(b)));
        store(to + k + half, load(to + k + half) + (high(a) + high(b)));
        store(from + k, vf{});
        store(from + k + copy, vf{});
    }
}

// The weights of a cell's points, from its moments.
template <class E>
__attribute__((noinline)) void weights(const double *moment, E *to) {
    constexpr int K = points_a_cell<E>;
    double c[K], out[K] = {};
    for (int k = 0; k < K; k++) {
        double a = 0.0;
        for (int j = 0; j <= k; j++) a += CHEBYSHEV<K>.power[k][j] * moment[j];
        c[k] = a;
    }
    for (int k = 0; k < K; k++)
        for (int m = 0; m < K; m++) out[m] += CHEBYSHEV<K>.fit[k][m] * c[k];
    for (int m = 0; m < K; m++) to[m] = (E)out[m];
}
// The powers of the polynomial that has these values at a cell's points.
template <class E>
__attribute__((noinline)) void interpolate_cell(const E *values, E *to) {
    constexpr int K = points_a_cell<E>;
    double out[K] = {};
    for (int k = 0; k < K; k++) {
        double a = 0.0;
        for (int m = 0; m < K; m++) a += CHEBYSHEV<K>.fit[k][m] * (double)values[m];
        for (int j = 0; j <= k; j++) out[j] += CHEBYSHEV<K>.power[k][j] * a;
    }
    for (int m = 0; m < K; m++) to[m] = (E)out[m];
}

template <class E>
ANYMAX_INLINE E horner(const E *c, E t) {
    constexpr int K = points_a_cell<E>;
    E y = c[K - 1];
    for (int k = K - 2; k >= 0; k--) y = y * t + c[k];
    return y;
}

}  // namespace perturb
}  // namespace ANYMAX_UNIT
