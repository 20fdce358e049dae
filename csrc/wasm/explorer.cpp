// What the explorer's page asks of the kernels: rows of scores in, numbers to draw out, all in double precision. The maps are
// those of anymax.h, and three ratio maps, p_i = u(x_i) / sum u, in plain loops. Every function returns 0 or a code of
// `explorer_error`.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "anymax.h"
#include "wasm/door.hpp"

namespace {

enum { SQUARE = 16, SIGMOID = 17, RELU = 18 };
enum { HINGE = 0, LOGISTIC = 1, MODIFIED_HUBER = 2, HARD_SIGMOID = 3 };
enum { LARGEST = 0, FIRST = 1, ENTROPY = 2 };  // colours of the plane
enum { NO_LOSS = 100, NO_MAP = 101, NO_MEMORY = 102, NO_CURVE = 103 };
constexpr double INF = __builtin_inf();

struct Map {
    int32_t kind, noise;
    double param;
    bool ratio() const { return kind >= SQUARE && kind <= RELU; }
    bool has_potential() const { return !ratio() && kind != ANYMAX_TAYLOR && kind != ANYMAX_SIGSOFTMAX; }
    bool has_log() const {
        return kind == ANYMAX_SOFTMAX || kind == ANYMAX_TOPK || kind == ANYMAX_TOPP || kind == ANYMAX_SIGSOFTMAX;
    }
};

template <class T>
struct Memory {
    T *data;
    explicit Memory(int64_t count) : data((T *)malloc((size_t)count * sizeof(T) + 64)) {}
    ~Memory() { free(data); }
    Memory(const Memory &) = delete;
    operator T *() const { return data; }
};

anymax_call call_of(const Map &map, int32_t op, int64_t rows, int64_t n) {
    anymax_call c;
    memset(&c, 0, sizeof c);
    c.op = op, c.map = map.kind, c.dtype = ANYMAX_F64, c.noise = map.noise;
    c.outer = rows, c.inner = 1, c.n = n, c.param = map.param, c.nodes = ANYMAX_NODES_F64, c.pool = -1;
    return c;
}

anymax_view rows_of(const void *data, int64_t step) { return anymax_view{(void *)data, step, 0, 1}; }

// u, or its derivative, up to a factor that a row has in common; a masked class has none.
double weight(int kind, double x, double size, bool slope) {
    if (x == -INF) return 0.0;
    if (kind == SQUARE) return slope ? 2.0 * (x / size) / size : (x / size) * (x / size);
    if (kind == RELU) return slope ? (x > 0.0 ? 1.0 : 0.0) : (x > 0.0 ? x : 0.0);
    const double e = exp(-fabs(x));
    return slope ? e / ((1.0 + e) * (1.0 + e)) : (x < 0.0 ? e : 1.0) / (1.0 + e);
}

double size_of(const double *x, int64_t n) {
    double size = 0.0;
    for (int64_t i = 0; i < n; i++)
        if (x[i] != -INF && fabs(x[i]) > size) size = fabs(x[i]);
    return size > 0.0 ? size : 1.0;
}

void ratio_row(int kind, const double *x, int64_t n, double *p) {
    const double size = size_of(x, n);
    double z = 0.0;
    for (int64_t i = 0; i < n; i++) z += p[i] = weight(kind, x[i], size, false);
    for (int64_t i = 0; i < n; i++) p[i] = z > 0.0 ? p[i] / z : 0.0;
}

// J^T g = (u' / Z) (g - <p, g>)
void ratio_vjp(int kind, const double *x, const double *p, const double *g, int64_t n, double *out) {
    const double size = size_of(x, n);
    double z = 0.0, dot = 0.0;
    for (int64_t i = 0; i < n; i++) z += weight(kind, x[i], size, false), dot += p[i] * g[i];
    for (int64_t i = 0; i < n; i++) out[i] = z > 0.0 ? weight(kind, x[i], size, true) / z * (g[i] - dot) : 0.0;
}

int apply(const Map &map, const double *x, int64_t rows, int64_t n, double *p) {
    if (map.ratio()) {
        for (int64_t r = 0; r < rows; r++) ratio_row(map.kind, x + r * n, n, p + r * n);
        return 0;
    }
    anymax_call c = call_of(map, ANYMAX_FORWARD, rows, n);
    c.x = rows_of(x, n), c.out = rows_of(p, n);
    return anymax_run(&c);
}

// J^T g for `rows` gradients at one row of scores.
int vjp(const Map &map, const double *x, const double *p, const double *g, int64_t rows, int64_t n, double *out) {
    if (map.ratio()) {
        for (int64_t r = 0; r < rows; r++) ratio_vjp(map.kind, x, p, g + r * n, n, out + r * n);
        return 0;
    }
    anymax_call c = call_of(map, ANYMAX_VJP, rows, n);
    c.x = rows_of(x, 0), c.p = rows_of(p, 0), c.g = rows_of(g, n), c.out = rows_of(out, n);
    return anymax_run(&c);
}

// The Fenchel-Young loss of the map for one class, or minus the logarithm of its probability where the map has no such loss.
int loss(const Map &map, const double *x, int64_t rows, int64_t n, int64_t target, double *value) {
    if (map.kind == ANYMAX_BUDGET && map.param != 1.0) return NO_LOSS;
    if (map.has_potential()) {
        Memory<int64_t> index(rows);
        if (!index) return NO_MEMORY;
        for (int64_t r = 0; r < rows; r++) index[r] = target;
        anymax_call c = call_of(map, ANYMAX_LOSS, rows, n);
        c.x = rows_of(x, n), c.index = index, c.value = value;
        return anymax_run(&c);
    }
    Memory<double> p(rows * n);
    if (!p) return NO_MEMORY;
    if (map.has_log()) {
        anymax_call c = call_of(map, ANYMAX_LOG, rows, n);
        c.x = rows_of(x, n), c.out = rows_of(p, n);
        if (int code = anymax_run(&c)) return code;
        for (int64_t r = 0; r < rows; r++) value[r] = -p[r * n + target];
        return 0;
    }
    if (int code = apply(map, x, rows, n, p)) return code;
    for (int64_t r = 0; r < rows; r++) value[r] = p[r * n + target] > 0.0 ? -log(p[r * n + target]) : INF;
    return 0;
}

// What the map sees: x / T - tilt log(1 + i), the logarithm of a prior that falls as 1 / (1 + i)^tilt; less the margin at the
// target.
void transform(double *x, int64_t n, double temperature, double tilt, int64_t target, double margin) {
    for (int64_t i = 0; i < n; i++)
        if (x[i] != -INF) x[i] = x[i] / temperature + -tilt * log((double)(i + 1));
    if (target >= 0 && target < n && x[target] != -INF) x[target] -= margin;
}

}  // namespace

EXPORT void explorer_scores(const double *x, int32_t n, double temperature, double tilt, int32_t target, double margin,
                            double *out) {
    memcpy(out, x, (size_t)n * sizeof *x);
    transform(out, n, temperature, tilt, target, margin);
}

EXPORT int explorer_apply(int32_t kind, int32_t noise, double param, const double *x, int32_t rows, int32_t n, double *p) {
    return apply(Map{kind, noise, param}, x, rows, n, p);
}

EXPORT int explorer_threshold(int32_t kind, int32_t noise, double param, const double *x, int32_t n, double *tau) {
    const Map map{kind, noise, param};
    if (map.ratio()) return NO_MAP;
    anymax_call c = call_of(map, ANYMAX_THRESHOLD, 1, n);
    c.x = rows_of(x, n), c.tau = tau;
    return anymax_run(&c);
}

// dp_i / dx_j for the m classes `which`, [m, m], by the backward kernel.
EXPORT int explorer_jacobian(int32_t kind, int32_t noise, double param, const double *x, const double *p, int32_t n,
                             const int32_t *which, int32_t m, double *out) {
    Memory<double> g((int64_t)m * n), rows((int64_t)m * n);
    if (!g || !rows) return NO_MEMORY;
    memset(g, 0, (size_t)m * n * sizeof(double));
    for (int64_t i = 0; i < m; i++) g[i * n + which[i]] = 1.0;
    if (int code = vjp(Map{kind, noise, param}, x, p, g, m, n, rows)) return code;
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < m; j++) out[i * m + j] = rows[i * n + which[j]];
    return 0;
}

EXPORT int explorer_loss(int32_t kind, int32_t noise, double param, const double *x, int32_t n, int32_t target, double *value) {
    return loss(Map{kind, noise, param}, x, 1, n, target, value);
}

// The gradient of that loss: p - y, or -(row of the Jacobian) / p of the target.
EXPORT int explorer_gradient(int32_t kind, int32_t noise, double param, const double *x, int32_t n, int32_t target,
                             double *out) {
    const Map map{kind, noise, param};
    if (kind == ANYMAX_BUDGET && param != 1.0) return NO_LOSS;
    if (map.has_potential()) {
        const int64_t index = target;
        const double one = 1.0;
        anymax_call c = call_of(map, ANYMAX_LOSS_GRAD, 1, n);
        c.x = rows_of(x, n), c.out = rows_of(out, n), c.index = &index, c.scale = &one;
        return anymax_run(&c);
    }
    Memory<double> p(n), g(n);
    if (!p || !g) return NO_MEMORY;
    if (int code = apply(map, x, 1, n, p)) return code;
    memset(g, 0, (size_t)n * sizeof(double));
    g[target] = -1.0 / p[target];
    return vjp(map, x, p, g, 1, n, out);
}

// Shannon, Renyi of order 2, and Tsallis of order alpha, as anymax.entropy has them.
EXPORT void explorer_entropies(const double *p, int32_t n, double alpha, double *out) {
    double shannon = 0.0, squares = 0.0, tsallis = 0.0;
    for (int32_t i = 0; i < n; i++) {
        if (!(p[i] > 0.0)) continue;
        const double log_p = log(p[i]);
        shannon -= p[i] * log_p;
        squares += p[i] * p[i];
        tsallis -= alpha == 1.0 ? p[i] * log_p : p[i] * expm1((alpha - 1.0) * log_p) / (alpha - 1.0) / alpha;
    }
    out[0] = shannon, out[1] = -log(squares), out[2] = tsallis;
}

// The k largest scores, the largest first: their classes.
EXPORT int explorer_largest(const double *x, int32_t n, int32_t k, int32_t *which) {
    Memory<double> values(k);
    Memory<int64_t> positions(k);
    if (!values || !positions) return NO_MEMORY;
    anymax_call c = call_of(Map{ANYMAX_TOPK, 0, (double)k}, ANYMAX_LARGEST, 1, n);
    c.x = rows_of(x, n), c.out = rows_of(values, k), c.positions = positions;
    if (int code = anymax_run(&c)) return code;
    for (int32_t i = 0; i < k; i++) which[i] = (int32_t)positions[i];
    return 0;
}

// Two classes with the scores (t, 0), t from `from` to `to` in m steps: the probability of the first, and its loss with the
// margin.
EXPORT int explorer_two(int32_t kind, int32_t noise, double param, double from, double to, int32_t m, double temperature,
                        double tilt, double margin, double *p, double *losses) {
    const Map map{kind, noise, param};
    Memory<double> x(2 * (int64_t)m), both(2 * (int64_t)m);
    if (!x || !both) return NO_MEMORY;
    for (int64_t i = 0; i < m; i++) {
        x[2 * i] = from + (to - from) * (double)i / (double)(m - 1), x[2 * i + 1] = 0.0;
        transform(x + 2 * i, 2, temperature, tilt, -1, 0.0);
    }
    if (int code = apply(map, x, m, 2, both)) return code;
    for (int64_t i = 0; i < m; i++) p[i] = both[2 * i], x[2 * i] -= margin;
    return loss(map, x, m, 2, 0, losses);
}

// The losses and the curve that the maps are held beside.
EXPORT int explorer_classic(int32_t which, double from, double to, int32_t m, double *out) {
    for (int32_t i = 0; i < m; i++) {
        const double t = from + (to - from) * (double)i / (double)(m - 1), gap = t < 1.0 ? 1.0 - t : 0.0;
        if (which == HINGE)
            out[i] = gap;
        else if (which == LOGISTIC)
            out[i] = log1p(exp(-fabs(t))) + (t < 0.0 ? -t : 0.0);
        else if (which == MODIFIED_HUBER)
            out[i] = t >= -1.0 ? gap * gap : -4.0 * t;
        else if (which == HARD_SIGMOID)
            out[i] = t <= -1.0 ? 0.0 : t >= 1.0 ? 1.0 : 0.5 * (t + 1.0);
        else
            return NO_CURVE;
    }
    return 0;
}

// Three classes over the plane of scores that sum to 0, `size` by `size` points within `extent` of the origin, the top row
// first: of the rows [first, last) what is to be coloured, and how many classes have a probability above 0.
EXPORT int explorer_simplex(int32_t kind, int32_t noise, double param, double extent, int32_t size, int32_t first, int32_t last,
                            double temperature, double tilt, int32_t heat, float *value, uint8_t *support) {
    const Map map{kind, noise, param};
    Memory<double> x(3 * (int64_t)size), p(3 * (int64_t)size);
    if (!x || !p) return NO_MEMORY;
    for (int64_t row = first; row < last; row++) {
        const double v = extent * (1.0 - 2.0 * row / (double)(size - 1));
        for (int64_t column = 0; column < size; column++) {
            const double u = extent * (2.0 * column / (double)(size - 1) - 1.0);
            double *at = x + 3 * column;
            at[0] = u / sqrt(2.0) - v / sqrt(6.0), at[1] = -u / sqrt(2.0) - v / sqrt(6.0), at[2] = 2.0 * v / sqrt(6.0);
            transform(at, 3, temperature, tilt, -1, 0.0);
        }
        if (int code = apply(map, x, size, 3, p)) return code;
        for (int64_t column = 0; column < size; column++) {
            const double *q = p + 3 * column, top = fmax(q[0], fmax(q[1], q[2]));
            double entropy[3];
            explorer_entropies(q, 3, 1.0, entropy);
            value[(row - first) * size + column] = (float)(heat == LARGEST ? top : heat == FIRST ? q[0] : entropy[0]);
            support[(row - first) * size + column] = (uint8_t)((q[0] > 0.0) + (q[1] > 0.0) + (q[2] > 0.0));
        }
    }
    return 0;
}

EXPORT const char *explorer_error(int code) {
    switch (code) {
        case NO_LOSS: return "a budget of k sums to k and a target class to 1, so only k = 1 has a loss";
        case NO_MAP: return "the map has no threshold";
        case NO_MEMORY: return "out of memory";
        case NO_CURVE: return "there is no such curve";
        default: return anymax_error(code);
    }
}
