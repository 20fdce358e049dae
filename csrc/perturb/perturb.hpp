// Perturb max: p_i = P[argmax(x + scale * eps) = i] = INT G(u) h(u - z_i) du with z = (x - max x) / scale, h = f / F and
// G(u) = prod_j F(u - z_j). The rule (its ends, nodes and weights) is that of mappings/perturb_max.py.
//
// For one node, log F(u - z) and h(u - z) are smooth functions of z. So a long row is summed up first: the scores of a cell of the z axis
// act through their moments, that is as K weighted scores at the cell's Chebyshev points, and p is a polynomial of degree K - 1 on each cell.
// The cost is O(n) + O(cells K nodes) in place of O(n nodes). Short rows, and scores that are wider apart than that pays for, are taken one
// by one; so are, for noise with kinks, the scores above the first node.
#pragma once

#include "core/families.hpp"

namespace ANYMAX_UNIT {
namespace perturb {

constexpr int64_t BLOCK = 128;    // scores or points at once
constexpr int64_t CHUNK = 256;    // scores located at once
constexpr int64_t KINKS = 24;     // of PerturbMax: the highest scores whose kinks are edges of panels
constexpr int64_t PANEL = 8;      // Gauss nodes a panel
constexpr int64_t CELLS = 640;    // at most
constexpr int64_t ORDER = 16;     // at most, points a cell
constexpr int64_t CACHE = 32768;  // doubles of h kept between the two sweeps
constexpr int64_t SMALL = 48;     // rows shorter than this are never summed up
constexpr double FAR = 1e4;       // nothing is left of a class so far below the top

// -- the noises ------------------------------------------------------------------------------------------------------------------

// 2 atanh(s) for |s| <= 1/3.
ANYMAX_INLINE vf atanh2(vf s) {
    vf z = s * s, y = z * z;
    vf q = (z * 0.2818163834f + 0.2795977146f) * y + (z * 0.4002498004f + 0.6666631252f);
    return s * (q * z + 2.0f);
}
ANYMAX_INLINE vd atanh2(vd s) {
    vd z = s * s;
    vd q = z * 0.16488285931389568 + 0.06980390498332432;
    q = q * z + 0.10976616637947494;
    q = q * z + 0.11715274668110426;
    q = q * z + 0.13336876815743837;
    q = q * z + 0.1538444706045997;
    q = q * z + 0.18181823422495252;
    q = q * z + 0.22222222119103674;
    q = q * z + 0.28571428572622926;
    q = q * z + 0.3999999999999287;
    q = q * z + 0.6666666666666669;
    return s * (q * z + 2.0);
}

// exp(y + lo), y <= 0 and lo small.
ANYMAX_INLINE vf exp_sum(vf y, vf lo) {
    vf clipped = larger(y, all<vf>(-86.0f));
    vf shifted = clipped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the low bits
    vf k = shifted - 12582912.0f;
    vf r = clipped - k * 0.693145752f;
    r = r - k * 1.42860677e-6f + lo;
    vf r2 = r * r;
    vf q = r * 1.3814221908e-3f + 8.3688986656e-3f;
    q = (q * r + 4.1668405721e-2f) * r2 + (r * 1.6666519130e-1f + 4.9999993346e-1f);
    vf e = q * r2 + (r + 1.0f);
    e = (vf)((vi)e + (((vi)shifted) << 23));
    return y < -86.0f ? vf{} : e;
}
ANYMAX_INLINE vd exp_sum(vd y, vd) { return exp(y); }

// exp(-v^2 / 2), v = a + b, where a * a is exact.
ANYMAX_INLINE vf exp_square(vf a, vf b, vf v) {
    vf y = -(a * a);
    vf clipped = larger(y, all<vf>(-172.0f));
    vf shifted = clipped * 0.72134752f + 12582912.0f;
    vf k = shifted - 12582912.0f;
    vf r = clipped - k * 1.386291504f;
    r = r - b * (a + v);
    r = r - k * 2.85721354e-6f;
    vf r2 = r * r;
    vf q = r * 2.1584721733e-5f + 2.6152808330e-4f;
    q = (q * r + 2.6042753576e-3f) * r2 + (r * 2.0833148913e-2f + 1.2499998337e-1f);
    vf e = q * r2 + (r * 0.5f + 1.0f);
    e = (vf)((vi)e + (((vi)shifted) << 23));
    return y < -172.0f ? vf{} : e;
}
ANYMAX_INLINE vd exp_square(vd a, vd, vd) { return exp(a * a * -0.5); }

// 1 - F(x) = exp(-x^2 / 2) num / den of the normal law, x >= 0. In fp32 a rational minimax fit (2e-9 up to x = 9, still good beyond), in fp64
// the series of _noises.py.
ANYMAX_INLINE void mills(vf x, vf &num, vf &den) {
    num = x * 0.3989568028f + 4.1245367238f;
    num = num * x + 19.247281345f;
    num = num * x + 47.359328683f;
    num = num * x + 56.066324972f;
    den = x + 10.340226902f;
    den = den * x + 49.216306876f;
    den = den * x + 129.38846309f;
    den = den * x + 184.18758372f;
    den = den * x + 112.13264973f;
}
ANYMAX_INLINE void mills(vd x, vd &num, vd &den) {
    constexpr double series[24] = {
        1.2375126308378275,      -0.14024059858554697,   0.0035854154854790257, 0.0822767384901452,      -0.10880393014244462,
        0.09230432116037748,     -0.05869339857664935,   0.028362277418956364,  -0.009746579683265203,   0.001755625852895578,
        0.0002937143780446766,   -0.0002901540805420362, 5.1646529742613335e-05, 2.2384239158309724e-05, -1.143804803494536e-05,
        -9.735599024300036e-07,  1.7419821605685549e-06, -5.721822408015812e-08, -2.4857126394415325e-07, 2.3263504032644517e-08,
        3.197926733604639e-08,   -3.744208176587683e-09, -2.623107459747668e-09, 3.11143001991097e-10,
    };
    vd w = x * 0.70710678118654752;
    vd r = (w - 3.75) / (w + 3.75);
    num = all<vd>(series[23]);
    for (int k = 22; k >= 0; k--) num = num * r + series[k];
    num = num * 0.5;
    den = w * 2.0 + 1.0;
}

// y 2^k and k for the k with 2^(k - 1/2) <= h < 2^(k + 1/2), h in [1, 2^60].
ANYMAX_INLINE vf scaled(vf y, vf h, vf &k) {
    const vi b = ((vi)h - (vi)all<vf>(0.70710678f)) >> 23;
    k = __builtin_convertvector(b, vf);
    return (vf)((vi)y + (b << 23));
}
ANYMAX_INLINE vd scaled(vd y, vd h, vd &k) {
    typedef uint64_t vu __attribute__((vector_size(ANYMAX_VECTOR)));
    constexpr double MAGIC = 6755399441055744.0;  // 1.5 * 2^52
    const vu b = ((vu)h - (vu)all<vd>(0.70710678118654752)) >> 52;
    k = (vd)(b + (vu)all<vd>(MAGIC)) - MAGIC;
    return (vd)((vu)y + (b << 52));
}

// What `law` leaves out of h.
template <int N>
constexpr double unit = N == ANYMAX_NORMAL ? 0.3989422804014327 : 1.0;

// log F(v) and h(v) / unit at v = a + b: in fp32, a is a multiple of 2^-8 and b what is left, so that v^2 and v keep their digits; in fp64 b is 0.
// UPPER: v >= 0 is known, up to a rounding.
template <int N, bool UPPER, class V>
ANYMAX_INLINE void law(V a, V b, V &l, V &h) {
    typedef scalar<V> S;
    constexpr bool wide = sizeof(S) == 8;
    const V v = wide ? a : a + b;
    if constexpr (N == ANYMAX_NORMAL) {
        const V e = exp_square(a, b, v);
        V num, den;
        mills(UPPER ? v : absolute(v), num, den);
        const V q = e * num, r = den - q;
        if constexpr (UPPER) {
            l = -atanh2(q / (den + r));
            h = e * den / r;
        } else {
            const auto below = v < S(0);
            h = (below ? den : e * den) / (below ? num : r);
            V k;
            const V up = scaled(num, h, k);  // log(num / den) = log(up / den) - k log 2
            const V square = a * a + (wide ? V{} : b * (a + v));
            l = atanh2((below ? up - den : -q) / ((below ? up : r) + den));
            l = below ? l - (k * S(0.6931471805599453) + S(0.5) * square) : l;
        }
    } else if constexpr (N == ANYMAX_LOGISTIC) {
        const auto below = v < S(0);
        const V e = UPPER ? exp_sum(-a, -b) : exp_sum(below ? a : -a, below ? b : -b);
        l = -atanh2(e / (S(2) + e));
        if constexpr (UPPER) {
            h = e / (S(1) + e);
        } else {
            l = below ? l + v : l;
            h = (below ? all<V>(S(1)) : e) / (S(1) + e);
        }
    } else {
        const auto below = v < S(0);
        const V q = S(0.5) * (UPPER ? exp_sum(-a, -b) : exp_sum(below ? a : -a, below ? b : -b));
        l = -atanh2(q / (S(2) - q));
        h = q / (S(1) - q);
        if constexpr (!UPPER) {
            l = below ? v - S(0.6931471805599453) : l;
            h = below ? all<V>(S(1)) : h;
        }
    }
}

// The v with log F(v) = -depth < 0.
inline double level(int noise, double depth) {
    switch (noise) {
        case ANYMAX_LOGISTIC: return -depth - ::log(-::expm1(-depth));
        case ANYMAX_LAPLACE: return depth > 0.6931471805599453 ? 0.6931471805599453 - depth : -::log(-2.0 * ::expm1(-depth));
        case ANYMAX_UNIFORM: return ::expm1(-depth);
        case ANYMAX_GUMBEL: return -::log(depth);
    }
    const bool upper = depth < 0.6931471805599453;
    if (upper) depth = -::log(-::expm1(-depth));
    const double r = ::sqrt(2.0 * depth);
    double v = (2.515517 + r * (0.802853 + r * 0.010328)) / (1.0 + r * (1.432788 + r * (0.189269 + r * 0.001308))) - r;
    for (int i = 0; i < 2; i++) {
        vd l, h;
        law<ANYMAX_NORMAL, false>(all<vd>(v), vd{}, l, h);
        const double hazard = h[0] * unit<ANYMAX_NORMAL>, step = (l[0] + depth) / hazard;
        v = v - step / (1.0 + 0.5 * step * (v + hazard));
    }
    return upper ? -v : v;
}

inline double mean(int noise) { return noise == ANYMAX_UNIFORM ? 0.5 : noise == ANYMAX_GUMBEL ? 0.5772156649015329 : 0.0; }

// -- the two ends ------------------------------------------------------------------------------------------------------------------

// Where k = n^(j/32) equal scores would put the ends: 33 for the lower one, then 33 for the upper one. They depend on n, not on the row, so
// each thread keeps those of its last call.
struct Ends {
    double deep, tail;  // depths: log G <= -deep below the lower end, >= -tail above the upper one
    double at[66];
};

inline const Ends &ends_for(int noise, int64_t n, double mass) {
    static thread_local Ends kept;
    static thread_local int64_t kept_n = -1;
    static thread_local int kept_noise;
    static thread_local double kept_mass;
    if (kept_n != n || kept_noise != noise || kept_mass != mass) {
        kept_n = -1;
        kept.deep = -::log(mass);
        kept.tail = -::log1p(-mass);
        for (int j = 0; j < 33; j++) {
            const double k = ::pow((double)n, j / 32.0);
            kept.at[j] = level(noise, kept.deep / k);
            kept.at[33 + j] = level(noise, kept.tail / k);
        }
        kept_n = n;
        kept_noise = noise;
        kept_mass = mass;
    }
    return kept;
}

// log_g(u, v, lu, lv) gives log G at two places; log_g_low becomes that of the lower end, or 0 where it was not asked for.
template <class F>
ANYMAX_INLINE void find_ends(const Ends &table, double &low, double &high, double &log_g_low, F log_g) {
    int a = 0, b = 65;
    log_g_low = 0.0;
    for (int step = 16; step; step /= 2) {
        double la, lb;
        log_g(table.at[a + step], table.at[b - step], la, lb);
        if (la + table.deep <= 0.0) {
            a += step;
            log_g_low = la;
        }
        if (lb + table.tail >= 0.0) b -= step;
    }
    low = table.at[a];
    high = table.at[b];
}

// -- the rule ----------------------------------------------------------------------------------------------------------------------

constexpr double GAUSS[PANEL] = {-0.9602898564975362,  -0.7966664774136267, -0.525532409916329, -0.18343464249564978,
                                 0.18343464249564978, 0.525532409916329,   0.7966664774136267, 0.9602898564975362};
constexpr double GAUSS_WEIGHT[PANEL] = {0.10122853629037706, 0.22238103445337443, 0.3137066458778869,  0.36268378337836166,
                                        0.36268378337836166, 0.3137066458778869,  0.22238103445337443, 0.10122853629037706};
// The integrals from -1 to t of the nodes' Lagrange polynomials over the nodes' weights: by power of t.
constexpr double GAUSS_PART[PANEL + 1][PANEL] = {
    {1.0024143862437296, 0.9950230144390204, 1.012282805557396, 0.9359682237671803, 0.06403177623282374, -0.012282805557396248,
     0.0049769855609799185, -0.002414386243731914},
    {-0.17656317564076235, 0.31106839282925597, -0.5588505827456023, 1.7205419467537033, 1.7205419467536838, -0.5588505827455995,
     0.31106839282924, -0.17656317564075907},
    {0.09193222986064332, -0.19523125526701735, 0.5316994463144137, -4.689795567907782, 4.689795567907766, -0.5316994463144226,
     0.1952312552670194, -0.09193222986064675},
    {2.0549355515872265, -3.569447239770723, 6.031717102591245, -3.602119944322314, -3.6021199443222724, 6.031717102591219,
     -3.5694472397706978, 2.054935551587221},
    {-1.604933815828927, 3.360359078392702, -8.608009214243602, 14.72780670808013, -14.727806708080124, 8.608009214243607,
     -3.3603590783926993, 1.604933815828933},
    {-5.654860606833839, 8.943888396205493, -9.026805279781929, 3.902162105794946, 3.902162105794936, -9.026805279781929,
     8.943888396205491, -5.654860606833845},
    {4.90725150030811, -9.355534017658355, 14.31374657625634, -17.727304453444386, 17.727304453444386, -14.313746576256342,
     9.355534017658348, -4.907251500308114},
    {4.276488230887375, -5.185509549264025, 4.053938759936289, -1.5205841082263374, -1.5205841082263483, 4.0539387599363,
     -5.185509549264033, 4.276488230887381},
    {-3.8966643005835566, 5.695383180093652, -6.749719613884545, 7.2533250895048536, -7.2533250895048536, 6.749719613884545,
     -5.695383180093648, 3.896664300583557},
};

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
// Nodes of any rule asked for with up to 2 * nodes of them, and edges of its panels.
ANYMAX_INLINE int64_t most_nodes(int64_t nodes) { return round_up((2 * nodes + KINKS) * PANEL, 16) + 16; }
ANYMAX_INLINE int64_t most_edges(int64_t nodes) { return round_up(2 * nodes + 2 * KINKS + 2, 16); }

// The nodes and what belongs to each; arrays are readable up to a multiple of the vector.
struct Nodes {
    int64_t count, first;  // the sums of the nodes before `first` are not wanted
    double *u, *w;
    double *lt, *ht;    // log F and h of the top score
    double *l;          // sums over all but the top score: of log F,
    double *s, *t;      // h and, for a gradient g, h g
    double *c0, *c1;    // factors of h in the result
};

ANYMAX_INLINE void end_nodes(Nodes &at) {
    at.first = 0;
    for (int64_t q = at.count; q < at.count + 16; q++) {
        at.u[q] = 0.0;
        at.w[q] = at.l[q] = at.s[q] = at.t[q] = at.c0[q] = at.c1[q] = at.lt[q] = at.ht[q] = 0.0;
    }
}

inline void trapezoid(Nodes &at, double low, double high, int64_t count) {
    at.count = count;
    for (int64_t k = 0; k < count; k++) {
        const double s = (double)k / (double)(count - 1);
        at.u[k] = low * (1.0 - s) + high * s;
        at.w[k] = (high - low) * ((k == 0 || k == count - 1 ? 0.5 : 1.0) / (double)(count - 1));
    }
    end_nodes(at);
}

// Panels of equal width from low to high, cut once more at each kink (the highest scores, descending). Panels of no width are left out.
// `edges` receives the left and right ends of the panels.
inline void panels(Nodes &at, double low, double high, int64_t cuts, const double *kinks, int64_t count, double *edges) {
    int64_t k = 0, j = count, panel = 0;
    double left = low, right;
    at.count = 0;
    for (;;) {  // two sorted lists: the grid k = 0..cuts and the kinks from the last one back
        const double s = (double)k / (double)cuts;
        const double grid = k <= cuts ? low * (1.0 - s) + high * s : inf64;
        double kink = inf64;
        if (j > 0) {
            kink = kinks[j - 1] > low ? kinks[j - 1] : low;
            kink = kink < high ? kink : high;
        }
        if (k > cuts && j == 0) break;
        if (grid <= kink) {
            right = grid;
            k++;
        } else {
            right = kink;
            j--;
        }
        if (right > left) {
            const double half = 0.5 * (right - left);
            for (int i = 0; i < PANEL; i++) {
                at.u[at.count] = left + half * (1.0 + GAUSS[i]);
                at.w[at.count++] = half * GAUSS_WEIGHT[i];
            }
            edges[panel++] = left;
            edges[panel] = right;
            left = right;
        }
    }
    end_nodes(at);
}

// -- the row -------------------------------------------------------------------------------------------------------------------------

template <class C>
struct Row {
    const C *x, *g;  // g may be NULL
    int64_t n, top;  // the first of the highest scores
    double high, low, inv, scale, mid;  // the lowest of the finite scores; 1 / scale; subtracted from g
};

template <class C>
ANYMAX_INLINE vec<C> load_or_masked(const C *x, int64_t i, int64_t n) {
    return i + width<C> <= n ? load(x + i) : load_part(x + i, n - i, -infinity<C>);
}

template <class C>
inline Row<C> read_row(const C *x, int64_t n, double scale) {
    constexpr int64_t W = width<C>;
    typedef vec<C> V;
    V high = splat(-infinity<C>), low = splat(infinity<C>);
    for (int64_t i = 0; i < n; i += W) {
        V v = load_or_masked(x, i, n);
        high = larger(high, v);
        low = smaller(low, v > -infinity<C> ? v : splat(infinity<C>));
    }
    Row<C> row;
    row.x = x;
    row.g = nullptr;
    row.n = n;
    const C most = top(high);
    row.high = most;
    row.low = -top(-low);
    row.scale = scale;
    row.inv = 1.0 / (scale > 1e-300 ? scale : 1e-300);
    row.mid = 0.0;
    row.top = 0;
    const V goal = splat(most);
    for (int64_t i = 0; i < n; i += W) {
        uint32_t hit = bits((ints<C>)(load_or_masked(x, i, n) == goal));
        if (hit) {
            row.top = i + __builtin_ctz(hit);
            break;
        }
    }
    return row;
}

// z of the scores from i on, as many as a vd holds; -FAR past the end, for masked ones and for any below that.
template <class C>
ANYMAX_INLINE vd load_z(const Row<C> &row, int64_t i) {
    constexpr int64_t W = width<double>;
    vd v;
    if (i + W <= row.n) {
        v = load_wide(row.x + i);
    } else {
        v = all<vd>(-inf64);
        for (int64_t k = 0; i + k < row.n; k++) v[k] = (double)row.x[i + k];
    }
    return larger((v - row.high) * row.inv, all<vd>(-FAR));
}

// g less its middle; 0 past the end and at masked scores.
template <class C>
ANYMAX_INLINE vd load_g(const Row<C> &row, int64_t i) {
    constexpr int64_t W = width<double>;
    vd v = {}, x = all<vd>(-inf64);
    if (i + W <= row.n) {
        v = load_wide(row.g + i);
        x = load_wide(row.x + i);
    } else {
        for (int64_t k = 0; i + k < row.n; k++) {
            v[k] = (double)row.g[i + k];
            x[k] = (double)row.x[i + k];
        }
    }
    return x > -inf64 ? v - row.mid : vd{};
}

// The highest scores as z, descending; returns how many.
template <class C>
inline int64_t highest(const Row<C> &row, double *to) {
    constexpr int64_t W = width<double>;
    const int64_t most = row.n < KINKS ? row.n : KINKS;
    int64_t count = 0;
    for (int64_t i = 0; i < row.n; i += W) {
        const vd z = load_z(row, i);
        if (count == most && !bits((vl)(z > to[most - 1]))) continue;
        for (int64_t k = 0; k < W && i + k < row.n; k++) {
            if (count == most && !(z[k] > to[most - 1])) continue;
            int64_t j = count < most ? count++ : most - 1;
            for (; j > 0 && to[j - 1] < z[k]; j--) to[j] = to[j - 1];
            to[j] = z[k];
        }
    }
    return count;
}

// -- views: scores or points, a block at a time ------------------------------------------------------------------------------------------

// z = zh + zl; a weight, 0 for the top score, which is dealt with apart, and past the end; the weight times g.
template <class E>
struct View {
    const E *zh, *zl, *w, *g;
    int64_t m;    // a multiple of the vector
    double high;  // the highest z
    E *cache;     // h, [nodes, m], or NULL
};

constexpr double GRID = 26388279066624.0;  // 1.5 * 2^44: adding and subtracting it rounds to multiples of 2^-8

ANYMAX_INLINE void put_z(double *zh, double *, vd z) { store(zh, z); }
ANYMAX_INLINE void put_z(float *zh, float *zl, vd z) {
    const vd a = (z + GRID) - GRID;
    store_narrow(zh, a);
    store_narrow(zl, z - a);
}
ANYMAX_INLINE void split(double u, vd &a, vd &b) {
    a = all<vd>(u);
    b = vd{};
}
ANYMAX_INLINE void split(double u, vf &a, vf &b) {
    const double grid = (u + GRID) - GRID;
    a = all<vf>((float)grid);
    b = all<vf>((float)(u - grid));
}

ANYMAX_INLINE double wide_sum(vd v) { return sum(v); }
ANYMAX_INLINE double wide_sum(vf v) {
#if ANYMAX_VECTOR == 64
    return sum(__builtin_convertvector(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7), vd) +
               __builtin_convertvector(__builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15), vd));
#elif ANYMAX_VECTOR == 32
    return sum(__builtin_convertvector(__builtin_shufflevector(v, v, 0, 1, 2, 3), vd) +
               __builtin_convertvector(__builtin_shufflevector(v, v, 4, 5, 6, 7), vd));
#else
    return sum(__builtin_convertvector(__builtin_shufflevector(v, v, 0, 1), vd) +
               __builtin_convertvector(__builtin_shufflevector(v, v, 2, 3), vd));
#endif
}

// Adds the sums of one view: MODE 0 of log F, 1 of h too, 2 of h g too.
template <int N, bool UPPER, int MODE, class E>
ANYMAX_INLINE void collect_node(const View<E> &view, double u, double &l, double &s, double &t, E *cache) {
    typedef vec<E> V;
    V uh, ul, ls{}, hs{}, gs{};
    split(u, uh, ul);
    for (int64_t j = 0; j < view.m; j += width<E>) {
        V lv, hv;
        law<N, UPPER>(uh - load(view.zh + j), sizeof(E) == 8 ? V{} : ul - load(view.zl + j), lv, hv);
        const V w = load(view.w + j);
        ls += w * lv;
        if (MODE > 0) hs += w * hv;
        if (MODE > 1) gs += load(view.g + j) * hv;
        if (MODE > 0 && cache) store(cache + j, hv);
    }
    l += wide_sum(ls);
    if (MODE > 0) s += wide_sum(hs) * unit<N>;
    if (MODE > 1) t += wide_sum(gs) * unit<N>;
}

// Beyond this v both log F and h are 0 to the type.
template <int N, class E>
constexpr double reach = sizeof(E) == 8 ? (N == ANYMAX_NORMAL ? 37.0 : 700.0) : (N == ANYMAX_NORMAL ? 13.2 : 86.5);

template <int N, int MODE, class E>
inline void collect(const View<E> &view, Nodes &at) {
    for (int64_t q = at.first; q < at.count; q++) {
        const double u = at.u[q];
        E *cache = view.cache ? view.cache + q * view.m : nullptr;
        if (u - view.high > reach<N, E>) {
            if (cache) memset(cache, 0, (size_t)view.m * sizeof(E));
        } else if (u >= view.high) {
            collect_node<N, true, MODE>(view, u, at.l[q], at.s[q], at.t[q], cache);
        } else {
            collect_node<N, false, MODE>(view, u, at.l[q], at.s[q], at.t[q], cache);
        }
    }
}

template <int N, class E>
inline double collect_log(const View<E> &view, double u) {
    double l = 0.0, none = 0.0;
    if (u - view.high > reach<N, E>) return 0.0;
    if (u >= view.high)
        collect_node<N, true, 0>(view, u, l, none, none, (E *)nullptr);
    else
        collect_node<N, false, 0>(view, u, l, none, none, (E *)nullptr);
    return l;
}

template <int N, bool UPPER, int R, class E>
ANYMAX_INLINE void apply_node(const View<E> &view, double u, E c0, E c1, E *a0, E *a1) {
    typedef vec<E> V;
    V uh, ul;
    split(u, uh, ul);
    for (int64_t j = 0; j < view.m; j += width<E>) {
        V lv, hv;
        law<N, UPPER>(uh - load(view.zh + j), sizeof(E) == 8 ? V{} : ul - load(view.zl + j), lv, hv);
        store(a0 + j, load(a0 + j) + hv * c0);
        if (R > 1) store(a1 + j, load(a1 + j) + hv * c1);
    }
}

// a0 = sum over the nodes of c0 h, a1 that of c1 h.
template <int N, int R, class E>
inline void apply(const View<E> &view, const Nodes &at, E *a0, E *a1) {
    typedef vec<E> V;
    constexpr int64_t W = width<E>;
    if (view.cache) {
        int64_t j = 0;
        for (; j + 4 * W <= view.m; j += 4 * W) {
            V sa[4] = {}, sb[4] = {};
            for (int64_t q = 0; q < at.count;) {  // a few nodes at a time: smaller roundings
                V a[4] = {}, b[4] = {};
                for (const int64_t end = q + 8 < at.count ? q + 8 : at.count; q < end; q++) {
                    const E *h = view.cache + q * view.m + j;
                    const V c0 = splat((E)(at.c0[q] * unit<N>)), c1 = splat((E)(at.c1[q] * unit<N>));
                    for (int i = 0; i < 4; i++) {
                        a[i] += load(h + i * W) * c0;
                        if (R > 1) b[i] += load(h + i * W) * c1;
                    }
                }
                for (int i = 0; i < 4; i++) {
                    sa[i] += a[i];
                    if (R > 1) sb[i] += b[i];
                }
            }
            for (int i = 0; i < 4; i++) {
                store(a0 + j + i * W, sa[i]);
                if (R > 1) store(a1 + j + i * W, sb[i]);
            }
        }
        for (; j < view.m; j += W) {
            V sa{}, sb{};
            for (int64_t q = 0; q < at.count;) {
                V a{}, b{};
                for (const int64_t end = q + 8 < at.count ? q + 8 : at.count; q < end; q++) {
                    const V h = load(view.cache + q * view.m + j);
                    a += h * (E)(at.c0[q] * unit<N>);
                    if (R > 1) b += h * (E)(at.c1[q] * unit<N>);
                }
                sa += a;
                sb += b;
            }
            store(a0 + j, sa);
            if (R > 1) store(a1 + j, sb);
        }
        return;
    }
    memset(a0, 0, (size_t)view.m * sizeof(E));
    if (R > 1) memset(a1, 0, (size_t)view.m * sizeof(E));
    for (int64_t q = 0; q < at.count; q++) {
        const double u = at.u[q];
        if (u - view.high > reach<N, E>) continue;
        const E c0 = (E)(at.c0[q] * unit<N>), c1 = (E)(at.c1[q] * unit<N>);
        if (u >= view.high)
            apply_node<N, true, R>(view, u, c0, c1, a0, a1);
        else
            apply_node<N, false, R>(view, u, c0, c1, a0, a1);
    }
}

// -- cells -----------------------------------------------------------------------------------------------------------------------------

// K Chebyshev points; the Chebyshev coefficients of a function from its values there; the powers in Chebyshev's polynomials.
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

typedef float f4 __attribute__((vector_size(16)));
typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef double d4 __attribute__((vector_size(32)));

// row[k] += factor t^k, k < 8.
template <bool FACTOR>
ANYMAX_INLINE void add_powers(float *row, float *weighted, float t, float g) {
    constexpr i8 odd = {0, -1, 0, -1, 0, -1, 0, -1}, second = {0, 0, -1, -1, 0, 0, -1, -1}, upper = {0, 0, 0, 0, -1, -1, -1, -1};
    const f8 one = {1, 1, 1, 1, 1, 1, 1, 1};
    const float t2 = t * t, t4 = t2 * t2;
    f8 p = odd ? t - f8{} : one;
    p = p * (second ? t2 - f8{} : one);
    p = p * (upper ? t4 - f8{} : one);
    f8 a;
    __builtin_memcpy(&a, row, sizeof a);
    a += p;
    __builtin_memcpy(row, &a, sizeof a);
    if (FACTOR) {
        __builtin_memcpy(&a, weighted, sizeof a);
        a += p * g;
        __builtin_memcpy(weighted, &a, sizeof a);
    }
}
template <bool FACTOR>
ANYMAX_INLINE void add_powers(double *row, double *weighted, double t, double g) {
    const double t2 = t * t, t4 = t2 * t2, t8 = t4 * t4;
    d4 p[4];
    p[0] = d4{1.0, t, t2, t2 * t};
    p[1] = p[0] * t4;
    p[2] = p[0] * t8;
    p[3] = p[1] * t8;
    for (int i = 0; i < 4; i++) {
        d4 a;
        __builtin_memcpy(&a, row + 4 * i, sizeof a);
        a += p[i];
        __builtin_memcpy(row + 4 * i, &a, sizeof a);
        if (FACTOR) {
            __builtin_memcpy(&a, weighted + 4 * i, sizeof a);
            a += p[i] * g;
            __builtin_memcpy(weighted + 4 * i, &a, sizeof a);
        }
    }
}

// In INT F - G du: nodes below the lower end, where G / F is nothing.
inline void skip_gone(Nodes &at, double low, double log_ratio, bool wide) {
    if (log_ratio > (wide ? -31.0 : -18.0)) return;
    for (; at.first < at.count && at.u[at.first] < low; at.first++) at.l[at.first] = -50.0;
}

// -- memory ------------------------------------------------------------------------------------------------------------------------------

struct Arena {
    double *base;
    int64_t used;
    double *take(int64_t count) {
        double *p = base ? base + used : nullptr;
        used += round_up(count, 8);
        return p;
    }
};

inline Nodes take_nodes(Arena &arena, int64_t nodes) {
    const int64_t most = most_nodes(nodes);
    Nodes at;
    at.count = 0;
    at.u = arena.take(most);
    at.w = arena.take(most);
    at.lt = arena.take(most);
    at.ht = arena.take(most);
    at.l = arena.take(most);
    at.s = arena.take(most);
    at.t = arena.take(most);
    at.c0 = arena.take(most);
    at.c1 = arena.take(most);
    return at;
}

// -- smooth noises and Laplace's -----------------------------------------------------------------------------------------------------------

template <int N, class E>
struct Solver {
    enum { K = sizeof(E) == 8 ? 16 : 8 };
    static constexpr Chebyshev<K> T = chebyshev<K>();

    Row<E> row;
    int64_t count;  // nodes asked for
    Nodes at;
    double *edges, *kinks;
    int64_t kink_count;
    double low, high, log_g_low;  // ends
    // scores taken one by one: those above `cut`
    bool single, summed;
    double cut;
    E *zh, *zl, *w, *g, *a0, *a1;
    int64_t *index, loaded_pos, loaded_next, loaded_count;
    double loaded_high;
    // cells: of equal width in s = y (y + 2 bend), y = origin - z
    double origin, bend, width_, per;
    int64_t cells, points;
    int64_t *cell_of;         // of each chunk's scores; `cells` for those that are in none
    E *t_of;                  // and their place in it, in [-1, 1]
    E *value, *value1;
    double *moments, *moments1;
    float *sums, *sums1;      // of the current chunks, two copies
    int64_t *filled, filled_count;
    int64_t top_cell;         // of the top score, whose place in it is top_t
    E top_t;
    E *ph, *pl, *pw, *pg, *p0, *p1;
    E *poly, *poly1;
    E *cache;

    int64_t place(double *base, int64_t n, int64_t nodes) {
        Arena arena{base, 0};
        at = take_nodes(arena, nodes);
        edges = arena.take(most_edges(nodes));
        kinks = arena.take(KINKS);
        zh = (E *)arena.take(BLOCK);
        zl = (E *)arena.take(BLOCK);
        w = (E *)arena.take(BLOCK);
        g = (E *)arena.take(BLOCK);
        a0 = (E *)arena.take(BLOCK);
        a1 = (E *)arena.take(BLOCK);
        index = (int64_t *)arena.take(BLOCK);
        cache = (E *)arena.take(CACHE);
        if (n >= SMALL) {
            constexpr int64_t rows = CELLS + 1, most = CELLS * ORDER + BLOCK;
            cell_of = (int64_t *)arena.take(CHUNK);
            t_of = (E *)arena.take(CHUNK);
            value = (E *)arena.take(CHUNK);
            value1 = (E *)arena.take(CHUNK);
            moments = arena.take(rows * ORDER);
            moments1 = arena.take(rows * ORDER);
            sums = (float *)arena.take(rows * 8);
            sums1 = (float *)arena.take(rows * 8);
            filled = (int64_t *)arena.take(rows);
            ph = (E *)arena.take(most);
            pl = (E *)arena.take(most);
            pw = (E *)arena.take(most);
            pg = (E *)arena.take(most);
            p0 = (E *)arena.take(most);
            p1 = (E *)arena.take(most);
            poly = (E *)arena.take(rows * ORDER);
            poly1 = (E *)arena.take(rows * ORDER);
        }
        return arena.used;
    }

    Solver(const Row<E> &r, int64_t nodes, double *work) : row(r), count(nodes), top_cell(0) {
        place(work, r.n, nodes);
        const double mass = sizeof(E) == 8 && count >= 64 ? 1e-13 : 1e-9;
        const Ends &table = ends_for(N, row.n, mass);
        single = true;
        summed = false;
        cut = -inf64;
        loaded_pos = -1;
        points = cells = 0;
        if (N != ANYMAX_LAPLACE && row.n >= SMALL) summarise(0.0);
        const double last = table.at[0] - reach<N, E>;  // below this, nothing is left of a class at any node
        if (!summed && (row.low - row.high) * row.inv < last) cut = last;
        find_ends(table, low, high, log_g_low, [&](double a, double b, double &la, double &lb) {
            top_logs(a, b, la, lb);
            each(0, [&](const View<E> &view) {
                la += collect_log<N>(view, a);
                lb += collect_log<N>(view, b);
            });
        });
        if (N == ANYMAX_LAPLACE) {
            kink_count = highest(row, kinks);
            if (row.n >= SMALL) summarise(low);
        }
    }

    void top_logs(double a, double b, double &la, double &lb) {
        vd u = all<vd>(a), l, h;
        u[1] = b;
        law<N, false>(u, vd{}, l, h);
        la = l[0];
        lb = l[1];
    }

    void rule(double from, double to, int64_t nodes) {
        if (N == ANYMAX_LAPLACE)
            panels(at, from, to, nodes / 4, kinks, kink_count, edges);
        else
            trapezoid(at, from, to, nodes);
        for (int64_t q = 0; q < at.count; q += width<double>) {
            vd l, h;
            law<N, false>(load(at.u + q), vd{}, l, h);
            store(at.lt + q, l);
            store(at.ht + q, h * unit<N>);
        }
        memset(at.l, 0, (size_t)at.count * 8);
        memset(at.s, 0, (size_t)at.count * 8);
        memset(at.t, 0, (size_t)at.count * 8);
    }

    // -- scores one by one

    // The scores from pos on into zh, zl, w, g; where there is a cut only those above it, and `index` tells which. Returns the next pos.
    int64_t load_block(int64_t pos, int64_t &got, double &top_z) {
        constexpr int64_t W = width<double>;
        const int64_t n = row.n;
        if (pos == loaded_pos) {
            got = loaded_count;
            top_z = loaded_high;
            return loaded_next;
        }
        loaded_pos = pos;
        int64_t next;
        vd most = all<vd>(-FAR);
        if (cut == -inf64) {
            next = pos + BLOCK < n ? pos + BLOCK : n;
            got = next - pos;
            const int64_t padded = round_up(got, width<E>);
            for (int64_t j = 0; j < padded; j += W) {
                const vd z = load_z(row, pos + j);
                most = larger(most, z);
                put_z(zh + j, zl + j, z);
                if (row.g) store_narrow(g + j, load_g(row, pos + j));
            }
            for (int64_t j = 0; j < got; j++) w[j] = E(1);
            for (int64_t j = got; j < padded; j++) w[j] = E(0);
            if (row.top >= pos && row.top < next) w[row.top - pos] = g[row.top - pos] = E(0);
        } else {
            next = pos;
            got = 0;
            while (next < n && got + W <= BLOCK) {
                const vd z = load_z(row, next);
                uint32_t in = bits((vl)(z > cut));
                if (in) {
                    const vd gz = row.g ? load_g(row, next) : vd{};
                    most = larger(most, z);
                    for (; in; in &= in - 1) {
                        const int k = __builtin_ctz(in);
                        if (next + k >= n) break;
                        const double zk = z[k], a = sizeof(E) == 8 ? zk : (zk + GRID) - GRID;
                        zh[got] = (E)a;
                        zl[got] = (E)(zk - a);
                        w[got] = E(next + k == row.top ? 0 : 1);
                        g[got] = next + k == row.top ? E(0) : (E)gz[k];
                        index[got++] = next + k;
                    }
                }
                next += W;
            }
            for (int64_t j = got; j < round_up(got, width<E>); j++) {
                zh[j] = E(-FAR);
                zl[j] = w[j] = g[j] = E(0);
            }
        }
        loaded_count = got;
        loaded_high = top_z = ANYMAX_UNIT::top(most);
        return loaded_next = next;
    }

    // f(view) for all scores or points. Each view is given room for h at `nodes` nodes while there is any: the same views every time.
    template <class F>
    ANYMAX_INLINE void each(int64_t nodes, F f) {
        int64_t used = 0;
        each_single(nodes, used, [&](const View<E> &view, int64_t, int64_t) { f(view); });
        each_point(nodes, used, [&](const View<E> &view, int64_t) { f(view); });
    }
    ANYMAX_INLINE E *room(int64_t nodes, int64_t m, int64_t &used) {
        if (nodes == 0 || used + nodes * m > CACHE * 8 / (int64_t)sizeof(E)) return nullptr;
        E *p = cache + used;
        used += nodes * m;
        return p;
    }
    template <class F>
    ANYMAX_INLINE void each_single(int64_t nodes, int64_t &used, F f) {
        if (!single) return;
        for (int64_t pos = 0; pos < row.n;) {
            int64_t got;
            double top_z;
            const int64_t next = load_block(pos, got, top_z), m = round_up(got, width<E>);
            if (got) f(View<E>{zh, zl, w, g, m, top_z, room(nodes, m, used)}, pos, got);
            pos = next;
        }
    }
    template <class F>
    ANYMAX_INLINE void each_point(int64_t nodes, int64_t &used, F f) {
        for (int64_t k = 0; k < points; k += BLOCK) {
            const int64_t m = points - k < BLOCK ? points - k : BLOCK;
            f(View<E>{ph + k, pl + k, pw + k, pg + k, m, (double)ph[k] + (sizeof(E) == 8 ? 0.0 : (double)pl[k]), room(nodes, m, used)}, k);
        }
    }

    // -- cells

    void set_cells(double from) {
        origin = from;
        if (N == ANYMAX_NORMAL) {
            bend = 4.0;
            width_ = sizeof(E) == 8 ? 4.0 : row.n < 8192 ? 4.0 : row.n < 131072 ? 3.0 : 2.0;
        } else {
            bend = 0.0;
            width_ = N == ANYMAX_LOGISTIC ? (sizeof(E) == 8 ? 1.5 : 1.0) : (sizeof(E) == 8 ? 0.5 : 0.32);
        }
        per = 1.0 / width_;
        // as far down as the lowest score, or as there is anything left of one
        double y = origin - (row.low - row.high) * row.inv;
        const double far = reach<N, E> + (N == ANYMAX_NORMAL ? 8.0 : N == ANYMAX_LOGISTIC ? 31.0 : 0.0);
        y = y < 0.0 ? 0.0 : y < far ? y : far;
        const double last = (N == ANYMAX_NORMAL ? y * (y + 2.0 * bend) : y) * per + 2.0;
        cells = last < (double)CELLS ? (int64_t)last : CELLS;
    }

    ANYMAX_INLINE void locate(int64_t pos) {
        constexpr double MAGIC = 6755399441055744.0;  // 1.5 * 2^52
        const double out = (double)cells;
        const int64_t m = row.n - pos < CHUNK ? round_up(row.n - pos, 8) : CHUNK;
        for (int64_t j = 0; j < m; j += width<double>) {
            const vd y = origin - load_z(row, pos + j);
            vd s = (N == ANYMAX_NORMAL ? y * (y + 2.0 * bend) : y) * per - 0.5;
            s = smaller(s, all<vd>(out));
            if (N == ANYMAX_LAPLACE) s = s < -0.5 ? all<vd>(out) : s;
            const vd shifted = s + MAGIC, c = shifted - MAGIC;
            const vl cell = (vl)shifted - (vl)all<vd>(MAGIC);
            __builtin_memcpy(cell_of + j, &cell, sizeof cell);
            store_narrow(t_of + j, 2.0 * (s - c));
        }
    }

    template <bool G>
    void add_moments() {
        const int64_t rows = cells + 1, copy = rows * 8;
        memset(moments, 0, (size_t)(rows * K) * 8);
        if (G) memset(moments1, 0, (size_t)(rows * K) * 8);
        if (K == 8) {
            memset(sums, 0, (size_t)copy * 8);
            if (G) memset(sums1, 0, (size_t)copy * 8);
        }
        const int64_t flush = 8 * cells > CHUNK ? round_up(8 * cells, CHUNK) : CHUNK;
        int64_t due = flush;
        for (int64_t pos = 0; pos < row.n; pos += CHUNK) {
            const int64_t m = row.n - pos < CHUNK ? row.n - pos : CHUNK;
            locate(pos);
            if (row.top >= pos && row.top < pos + m) {  // not among the moments: nothing may cancel against it
                top_cell = cell_of[row.top - pos];
                top_t = t_of[row.top - pos];
                cell_of[row.top - pos] = cells;
            }
            if (G)
                for (int64_t j = 0; j < m; j += width<double>) store_narrow(value + j, load_g(row, pos + j));
            for (int64_t j = 0; j < m; j++) {
                const E t = t_of[j], gv = G ? value[j] : E(0);
                if constexpr (K == 8) {
                    const int64_t k = cell_of[j] * 8 + (j & 1) * copy;
                    add_powers<G>(sums + k, sums1 + k, t, gv);
                } else {
                    const int64_t k = cell_of[j] * 16;
                    add_powers<G>(moments + k, moments1 + k, t, gv);
                }
            }
            due -= CHUNK;
            if (K == 8 && (due <= 0 || pos + CHUNK >= row.n)) {
                flush_sums(sums, moments, copy);
                if (G) flush_sums(sums1, moments1, copy);
                due = flush;
            }
        }
    }
    static void flush_sums(float *from, double *to, int64_t copy) {
        for (int64_t k = 0; k < copy; k += width<float>) {
            const vf a = load(from + k);
            const vf b = load(from + k + copy);
            constexpr int64_t half = width<double>;
            store(to + k, load(to + k) + (ANYMAX_UNIT::low(a) + ANYMAX_UNIT::low(b)));
            store(to + k + half, load(to + k + half) + (ANYMAX_UNIT::high(a) + ANYMAX_UNIT::high(b)));
            store(from + k, vf{});
            store(from + k + copy, vf{});
        }
    }

    // The weights of a cell's points, from its moments.
    __attribute__((noinline)) static void weights(const double *moment, E *to) {
        double c[K], out[K] = {};
        for (int k = 0; k < K; k++) {
            double a = 0.0;
            for (int j = 0; j <= k; j++) a += T.power[k][j] * moment[j];
            c[k] = a;
        }
        for (int k = 0; k < K; k++)
            for (int m = 0; m < K; m++) out[m] += T.fit[k][m] * c[k];
        for (int m = 0; m < K; m++) to[m] = (E)out[m];
    }
    // The powers of the polynomial that has these values at a cell's points.
    __attribute__((noinline)) static void interpolate(const E *values, E *to) {
        double out[K] = {};
        for (int k = 0; k < K; k++) {
            double a = 0.0;
            for (int m = 0; m < K; m++) a += T.fit[k][m] * (double)values[m];
            for (int j = 0; j <= k; j++) out[j] += T.power[k][j] * a;
        }
        for (int m = 0; m < K; m++) to[m] = (E)out[m];
    }

    // Cells for the scores up to `from`, the others one by one; all of them where that is cheaper.
    void summarise(double from) {
        set_cells(from);
        if (row.g)
            add_moments<true>();
        else
            add_moments<false>();
        // the top score's cell is there even where it is empty: p is evaluated in it
        filled_count = 0;
        double in_cells = 0.0;
        for (int64_t c = 0; c < cells; c++) {
            in_cells += moments[c * K];
            if (moments[c * K] > 0.0 || c == top_cell) filled[filled_count++] = c;
        }
        if (4.0 * (double)(filled_count * K) > 3.0 * in_cells) {
            cells = 0;
            return;
        }
        summed = true;
        points = filled_count * K;
        for (int64_t i = 0; i < filled_count; i++) {
            const int64_t c = filled[i], k = i * K;
            for (int m = 0; m < K; m += width<double>) {
                vd s;
                for (int j = 0; j < width<double>; j++) s[j] = T.point[m + j];
                s = (0.5 * s + ((double)c + 0.5)) * width_;
                if (N == ANYMAX_NORMAL) s = s / (root2(s + bend * bend) + bend);
                put_z(ph + k + m, pl + k + m, origin - s);
            }
            weights(moments + c * K, pw + k);
            if (row.g) weights(moments1 + c * K, pg + k);
        }
        for (; points % width<E>; points++) {  // whole vectors
            ph[points] = E(-FAR);
            pl[points] = pw[points] = pg[points] = E(0);
        }
        single = N == ANYMAX_LAPLACE;
        cut = from;
        loaded_pos = -1;
    }

    // -- results

    // log G at the nodes; `mode` as in collect().
    template <int MODE>
    void sweep() {
        each(MODE ? at.count : 0, [&](const View<E> &view) { collect<N, MODE>(view, at); });
    }

    void weigh() {
        for (int64_t q = 0; q < at.count; q += width<double>) store(at.c0 + q, load(at.w + q) * exp(load(at.lt + q) + load(at.l + q)));
    }

    void forward(E *p) {
        rule(low, high, count);
        sweep<1>();
        weigh();
        int64_t used = 0;
        if (!summed) {  // the sum of what is there, so that it is 1
            vd norm{};
            if (cut > -inf64) memset(p, 0, (size_t)row.n * sizeof(E));
            each_single(at.count, used, [&](const View<E> &view, int64_t pos, int64_t got) {
                apply<N, 1>(view, at, a0, a1);
                for (int64_t j = got; j < view.m; j++) a0[j] = E(0);
                for (int64_t j = 0; j < view.m; j += width<E>) norm = widen_add(norm, load(a0 + j));
                if (cut > -inf64)
                    for (int64_t j = 0; j < got; j++) p[index[j]] = a0[j];
                else
                    memcpy(p + pos, a0, (size_t)got * sizeof(E));
            });
            divide(p, row.n, sum(norm));
            return;
        }
        double norm = 0.0;
        if (single) {
            used = 0;
            each_single(at.count, used, [&](const View<E> &view, int64_t, int64_t got) {
                apply<N, 1>(view, at, a0, a1);
                for (int64_t j = 0; j < got; j++) norm += (double)a0[j];
            });
        }
        each_point(at.count, used, [&](const View<E> &view, int64_t k) { apply<N, 1>(view, at, p0 + k, p1 + k); });
        for (int64_t k = 0; k < K; k++) poly[cells * K + k] = E(0);
        for (int64_t i = 0; i < filled_count; i++) {
            E *to = poly + filled[i] * K;
            interpolate(p0 + i * K, to);
            for (int k = 0; k < K; k++) norm += (double)to[k] * moments[filled[i] * K + k];
        }
        if (top_cell < cells) norm += (double)horner(poly + top_cell * K, top_t);
        const vd inv = all<vd>(norm);
        for (int64_t pos = 0; pos < row.n; pos += CHUNK) {
            const int64_t m = row.n - pos < CHUNK ? row.n - pos : CHUNK;
            locate(pos);
            evaluate(poly, value, m);
            int64_t j = 0;
            for (; j + width<double> <= m; j += width<double>) store_narrow(p + pos + j, larger(load_wide(value + j), vd{}) / inv);
            for (; j < m; j++) p[pos + j] = (E)(larger((double)value[j], 0.0) / norm);
        }
        if (single) {
            used = 0;
            each_single(at.count, used, [&](const View<E> &view, int64_t, int64_t got) {
                apply<N, 1>(view, at, a0, a1);
                for (int64_t j = 0; j < got; j++) p[index[j]] = (E)((double)a0[j] / norm);
            });
        }
    }

    ANYMAX_INLINE static E horner(const E *c, E t) {
        E y = c[K - 1];
        for (int k = K - 2; k >= 0; k--) y = y * t + c[k];
        return y;
    }
    // The polynomials at the scores that were located last.
    ANYMAX_INLINE void evaluate(const E *powers, E *to, int64_t m) {
        if constexpr (K == 8) {
            for (int64_t j = 0; j < m; j += 4) {
                f4 c[8], t;
                for (int h = 0; h < 2; h++) {
                    f4 r[4];
                    for (int i = 0; i < 4; i++) __builtin_memcpy(&r[i], powers + cell_of[j + i] * 8 + 4 * h, sizeof(f4));
                    const f4 a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5), b = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
                    const f4 e = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5), f = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
                    c[4 * h] = __builtin_shufflevector(a, e, 0, 1, 4, 5);
                    c[4 * h + 1] = __builtin_shufflevector(a, e, 2, 3, 6, 7);
                    c[4 * h + 2] = __builtin_shufflevector(b, f, 0, 1, 4, 5);
                    c[4 * h + 3] = __builtin_shufflevector(b, f, 2, 3, 6, 7);
                }
                __builtin_memcpy(&t, t_of + j, sizeof t);
                f4 y = c[7];
                for (int k = 6; k >= 0; k--) y = y * t + c[k];
                __builtin_memcpy(to + j, &y, sizeof y);
            }
        } else {
            for (int64_t j = 0; j < m; j++) to[j] = horner(powers + cell_of[j] * K, t_of[j]);
        }
    }
    static void divide(E *p, int64_t n, double norm) {
        int64_t j = 0;
        for (; j + width<double> <= n; j += width<double>) store_narrow(p + j, load_wide(p + j) / norm);
        for (; j < n; j++) p[j] = (E)((double)p[j] / norm);
    }

    void vjp(E *out) {
        rule(low, high, count);
        sweep<2>();
        weigh();
        const double top_g = (double)row.g[row.top] - row.mid;
        double norm = 0.0;
        for (int64_t q = 0; q < at.count; q++) {
            const double s = at.s[q] + at.ht[q], t = at.t[q] + at.ht[q] * top_g, wg = at.c0[q];
            norm += wg * s;
            at.c0[q] = wg * s;
            at.c1[q] = wg * t;
        }
        norm = 1.0 / norm;
        for (int64_t q = 0; q < at.count; q++) {
            at.c0[q] *= norm;
            at.c1[q] *= norm;
        }
        int64_t used = 0;
        if (summed) {
            if (single) each_single(at.count, used, [&](const View<E> &, int64_t, int64_t) {});
            each_point(at.count, used, [&](const View<E> &view, int64_t k) { apply<N, 2>(view, at, p0 + k, p1 + k); });
            for (int64_t k = 0; k < K; k++) poly[cells * K + k] = poly1[cells * K + k] = E(0);
            for (int64_t i = 0; i < filled_count; i++) {
                interpolate(p0 + i * K, poly + filled[i] * K);
                interpolate(p1 + i * K, poly1 + filled[i] * K);
            }
            for (int64_t pos = 0; pos < row.n; pos += CHUNK) {
                const int64_t m = row.n - pos < CHUNK ? row.n - pos : CHUNK;
                locate(pos);
                evaluate(poly, value, m);
                evaluate(poly1, value1, m);
                finish(out, pos, m);
            }
        }
        used = 0;
        if (!summed && cut > -inf64) memset(out, 0, (size_t)row.n * sizeof(E));
        each_single(at.count, used, [&](const View<E> &view, int64_t pos, int64_t got) {
            apply<N, 2>(view, at, a0, a1);
            const double inv = row.inv;
            for (int64_t j = 0; j < got; j++) {
                const int64_t i = cut > -inf64 ? index[j] : pos + j;
                const bool in = row.x[i] > -infinity<E>;
                out[i] = in ? (E)((((double)row.g[i] - row.mid) * (double)a0[j] - (double)a1[j]) * inv) : E(0);
            }
        });
    }
    void finish(E *out, int64_t pos, int64_t m) {
        constexpr int64_t W = width<double>;
        int64_t j = 0;
        for (; j + W <= m; j += W) {
            const vd v = (load_g(row, pos + j) * load_wide(value + j) - load_wide(value1 + j)) * row.inv;
            store_narrow(out + pos + j, load_wide(row.x + pos + j) > -inf64 ? v : vd{});
        }
        for (; j < m; j++) {
            const double v = (((double)row.g[pos + j] - row.mid) * (double)value[j] - (double)value1[j]) * row.inv;
            out[pos + j] = row.x[pos + j] > -infinity<E> ? (E)v : E(0);
        }
    }

    // E max(z + eps) - E eps = INT F(u) - G(u) du.
    double excess() {
        rule(ends_for(N, row.n, sizeof(E) == 8 && count >= 64 ? 1e-13 : 1e-9).at[0], high, 2 * count);
        double log_f, none;
        top_logs(low, low, log_f, none);
        skip_gone(at, low, log_g_low - log_f, sizeof(E) == 8);
        sweep<0>();
        return rest_integral(at);
    }
    static double rest_integral(const Nodes &at) {
        vd out{};
        for (int64_t q = 0; q < at.count; q += width<double>) {
            const vd rest = larger(smaller(load(at.l + q), vd{}), all<vd>(-50.0));
            const vd e = exp(rest), less = e - 1.0;
            const vd gone = e < 1.0 ? less * (rest / log(e)) : rest;  // expm1(rest)
            out -= load(at.w + q) * exp(load(at.lt + q)) * gone;
        }
        return sum(out);
    }
};

// -- uniform noise ---------------------------------------------------------------------------------------------------------------------------

// On [-1, 0]: F(v) = 1 + v. Only scores above the first node count, and those are few, so that fp64 serves both types. A score's support ends
// inside a panel; its weights there are the integrals of the panel's polynomial up to there.
template <class C>
struct Uniform {
    Row<C> row;
    int64_t count;
    Nodes at;
    double *edges, *kinks, *z, *g, *a0, *a1;
    int64_t *index, kink_count;
    double low, high, log_g_low, ties, ties_g;  // scores equal to the top one, it included

    int64_t place(double *base, int64_t nodes) {
        Arena arena{base, 0};
        at = take_nodes(arena, nodes);
        edges = arena.take(most_edges(nodes));
        kinks = arena.take(KINKS);
        z = arena.take(BLOCK);
        g = arena.take(BLOCK);
        a0 = arena.take(BLOCK);
        a1 = arena.take(BLOCK);
        index = (int64_t *)arena.take(BLOCK);
        return arena.used;
    }

    Uniform(const Row<C> &r, int64_t nodes, double *work) : row(r), count(nodes), ties(0.0), ties_g(0.0) {
        place(work, nodes);
        constexpr int64_t W = width<double>;
        for (int64_t i = 0; i < row.n; i += W) {
            const uint32_t same = bits((vl)(load_z(row, i) >= 0.0));
            if (!same) continue;
            ties += (double)__builtin_popcount(same);
            if (row.g) {
                const vd v = load_g(row, i);
                for (int64_t k = 0; k < W; k++) ties_g += same >> k & 1 ? v[k] : 0.0;
            }
        }
        find_ends(ends_for(ANYMAX_UNIFORM, row.n, mass()), low, high, log_g_low, [&](double a, double b, double &la, double &lb) {
            la = (ties - 1.0) * ::log1p(a);
            lb = (ties - 1.0) * ::log1p(b);
            each(a < b ? a : b, [&](int64_t m, double) {
                la += log_product(m, a);
                lb += log_product(m, b);
            });
            la += ::log1p(a);
            lb += ::log1p(b);
        });
        kink_count = highest(row, kinks);
    }
    double mass() const { return sizeof(C) == 8 && count >= 64 ? 1e-13 : 1e-9; }

    void rule(double from, int64_t nodes) {
        panels(at, from, high, row.n > KINKS ? nodes : nodes / 4, kinks, kink_count, edges);
        for (int64_t q = 0; q < at.count; q++) {
            at.lt[q] = ::log1p(at.u[q]);
            at.ht[q] = 1.0 / (1.0 + at.u[q]);
            at.l[q] = (ties - 1.0) * at.lt[q];
            at.s[q] = ties * at.ht[q];
            at.t[q] = ties_g * at.ht[q];
        }
    }

    // f(m, highest): z, g and index of up to BLOCK scores above `cut` and below the top, m of them, -FAR up to a multiple of the vector.
    template <class F>
    ANYMAX_INLINE void each(double cut, F f) {
        constexpr int64_t W = width<double>;
        int64_t m = 0;
        double most = -FAR;
        for (int64_t i = 0; i < row.n; i += W) {
            const vd v = load_z(row, i);
            uint32_t in = bits((vl)(v > cut)) & bits((vl)(v < 0.0));
            if (in) {
                const vd gv = row.g ? load_g(row, i) : vd{};
                for (; in; in &= in - 1) {
                    const int k = __builtin_ctz(in);
                    z[m] = v[k];
                    most = larger(most, z[m]);
                    g[m] = gv[k];
                    index[m++] = i + k;
                }
            }
            if (m && (m + W > BLOCK || i + W >= row.n)) {
                for (int64_t j = m; j < round_up(m, W); j++) {
                    z[j] = -FAR;
                    g[j] = 0.0;
                }
                f(m, most);
                m = 0;
                most = -FAR;
            }
        }
    }

    // log prod (1 + min(u - z, 0)), as a product and as what it lacks to 1: of the two, the one that is right.
    double log_product(int64_t m, double u) {
        vd out{};
        for (int64_t j = 0; j < m;) {
            vd product = all<vd>(1.0), lack{};
            const int64_t end = j + 8 * width<double> < m ? j + 8 * width<double> : m;
            for (; j < end; j += width<double>) {
                const vd v = smaller(u - load(z + j), vd{});
                lack = lack + (v + lack * v);
                product = product + product * v;
            }
            out += lack > -0.5 ? log1p(lack) : log(product);
        }
        return sum(out);
    }

    // h of four or so scores at node i of a panel.
    ANYMAX_INLINE static vd hazard(vd zj, double u, double left, double right, int i) {
        vd h = 1.0 / (1.0 + smaller(u - zj, vd{}));
        if (!bits((vl)(zj < right))) return h;
        vd part = zj < right ? vd{} : all<vd>(1.0);
        const vl inside = (vl)(zj > left) & (vl)(zj < right);
        if (bits(inside)) {
            const vd t = (zj - left) * (2.0 / (right - left)) - 1.0;
            vd s = all<vd>(GAUSS_PART[PANEL][i]);
            for (int k = PANEL - 1; k >= 0; k--) s = s * t + GAUSS_PART[k][i];
            part = inside ? s : part;
        }
        return h * part;
    }

    template <int MODE>
    void sweep() {
        each(at.u[0] < low ? at.u[0] : low, [&](int64_t m, double most) {
            for (int64_t q = at.first; q < at.count; q++) {
                const double left = edges[q / PANEL], right = edges[q / PANEL + 1], u = at.u[q];
                if (most <= left) break;
                at.l[q] += log_product(m, u);
                if (MODE == 0) continue;
                vd s{}, t{};
                for (int64_t j = 0; j < m; j += width<double>) {
                    const vd h = hazard(load(z + j), u, left, right, (int)(q % PANEL));
                    s += h;
                    if (MODE > 1) t += h * load(g + j);
                }
                at.s[q] += sum(s);
                at.t[q] += sum(t);
            }
        });
        for (int64_t q = 0; q < at.count; q++) at.c0[q] = at.w[q] * ::exp(at.lt[q] + at.l[q]);
    }

    template <int R>
    void apply(int64_t m, double most) {
        const int64_t padded = round_up(m, width<double>);
        memset(a0, 0, (size_t)padded * 8);
        if (R > 1) memset(a1, 0, (size_t)padded * 8);
        for (int64_t q = 0; q < at.count; q++) {
            const double left = edges[q / PANEL], right = edges[q / PANEL + 1], u = at.u[q];
            if (most <= left) break;
            for (int64_t j = 0; j < m; j += width<double>) {
                const vd h = hazard(load(z + j), u, left, right, (int)(q % PANEL));
                store(a0 + j, load(a0 + j) + h * at.c0[q]);
                if (R > 1) store(a1 + j, load(a1 + j) + h * at.c1[q]);
            }
        }
    }

    void forward(C *p) {
        rule(low, count);
        sweep<1>();
        double own = 0.0;
        for (int64_t q = 0; q < at.count; q++) own += at.c0[q] * at.ht[q];
        double norm = ties * (double)(C)own;
        memset(p, 0, (size_t)row.n * sizeof(C));
        each(low, [&](int64_t m, double most) {
            apply<1>(m, most);
            for (int64_t j = 0; j < m; j++) {
                const C v = (C)larger(a0[j], 0.0);
                norm += (double)v;
                p[index[j]] = v;
            }
        });
        constexpr int64_t W = width<double>;
        const double top_p = (double)(C)own / norm;
        for (int64_t i = 0; i < row.n; i += W) {
            const vd v = load_z(row, i);
            if (!bits((vl)(v > low))) continue;
            for (int64_t k = 0; k < W && i + k < row.n; k++) p[i + k] = (C)(v[k] >= 0.0 ? top_p : (double)p[i + k] / norm);
        }
    }

    void vjp(C *out) {
        rule(low, count);
        sweep<2>();
        double norm = 0.0, own = 0.0, own1 = 0.0;
        for (int64_t q = 0; q < at.count; q++) norm += at.c0[q] * at.s[q];
        for (int64_t q = 0; q < at.count; q++) {
            const double wg = at.c0[q] / norm;
            at.c0[q] = wg * at.s[q];
            at.c1[q] = wg * at.t[q];
            own += at.c0[q] * at.ht[q];
            own1 += at.c1[q] * at.ht[q];
        }
        memset(out, 0, (size_t)row.n * sizeof(C));
        each(low, [&](int64_t m, double most) {
            apply<2>(m, most);
            for (int64_t j = 0; j < m; j++) out[index[j]] = (C)((g[j] * a0[j] - a1[j]) * row.inv);
        });
        constexpr int64_t W = width<double>;
        for (int64_t i = 0; i < row.n; i += W) {
            const vd v = load_z(row, i);
            if (!bits((vl)(v >= 0.0))) continue;
            for (int64_t k = 0; k < W && i + k < row.n; k++)
                if (v[k] >= 0.0) out[i + k] = (C)((((double)row.g[i + k] - row.mid) * own - own1) * row.inv);
        }
    }

    double excess() {
        rule(ends_for(ANYMAX_UNIFORM, row.n, mass()).at[0], 2 * count);
        skip_gone(at, low, log_g_low - ::log1p(low), sizeof(C) == 8);
        sweep<0>();
        return Solver<ANYMAX_LAPLACE, double>::rest_integral(at);
    }
};

// -- Gumbel noise: softmax(z) --------------------------------------------------------------------------------------------------------------------

template <class C>
struct Gumbel {
    Row<C> row;
    double rest;  // the sum of exp(z) but for the top score's

    Gumbel(const Row<C> &r, int64_t, double *) : row(r) {
        vd s{};
        for (int64_t i = 0; i < row.n; i += width<double>) {
            vd e = exp(load_z(row, i));
            if (row.top >= i && row.top < i + width<double>) e[row.top - i] = 0.0;
            s += e;
        }
        rest = sum(s);
    }
    void forward(C *p) {
        for (int64_t i = 0; i < row.n; i += width<double>) put(p, i, exp(load_z(row, i)) / (1.0 + rest));
    }
    void vjp(C *out) {
        vd s{};
        for (int64_t i = 0; i < row.n; i += width<double>) s += exp(load_z(row, i)) * load_g(row, i);
        const double middle = sum(s) / (1.0 + rest);
        for (int64_t i = 0; i < row.n; i += width<double>)
            put(out, i, exp(load_z(row, i)) / (1.0 + rest) * (load_g(row, i) - middle) * row.inv);
    }
    void put(C *to, int64_t i, vd v) {
        if (i + width<double> <= row.n) return store_narrow(to + i, v);
        for (int64_t k = 0; i + k < row.n; k++) to[i + k] = (C)v[k];
    }
    double excess() { return ::log1p(rest); }
};

template <class C, class F>
ANYMAX_INLINE void with_solver(int noise, const Row<C> &row, int64_t nodes, double *work, F f) {
    nodes = nodes < 8 ? 8 : nodes;  // the panels' least
    switch (noise) {
        case ANYMAX_NORMAL: {
            Solver<ANYMAX_NORMAL, C> solver(row, nodes, work);
            return f(solver);
        }
        case ANYMAX_LOGISTIC: {
            Solver<ANYMAX_LOGISTIC, C> solver(row, nodes, work);
            return f(solver);
        }
        case ANYMAX_LAPLACE: {
            Solver<ANYMAX_LAPLACE, C> solver(row, nodes, work);
            return f(solver);
        }
        case ANYMAX_UNIFORM: {
            Uniform<C> solver(row, nodes, work);
            return f(solver);
        }
        default: {
            Gumbel<C> solver(row, nodes, work);
            return f(solver);
        }
    }
}

// While it lives, results below the smallest normal number are 0: hazards far from a node are, and such numbers are slow.
struct Flush {
#if defined(__SSE2__)
    unsigned kept = _mm_getcsr();
    Flush() { _mm_setcsr(kept | 0x8000); }
    ~Flush() { _mm_setcsr(kept); }
#endif
};

}  // namespace perturb

// Doubles of scratch that the functions below want.
int64_t perturb_work(int64_t n, int64_t nodes) {
    nodes = nodes < 8 ? 8 : nodes;
    const int64_t most = perturb::most_nodes(nodes);
    int64_t cells = 0;
    if (n >= perturb::SMALL) {
        const int64_t rows = perturb::CELLS + 1, points = perturb::CELLS * perturb::ORDER + perturb::BLOCK;
        cells = 4 * perturb::CHUNK + 4 * rows * perturb::ORDER + 2 * rows * 8 + rows + 6 * points;
    }
    return 9 * most + perturb::most_edges(nodes) + perturb::KINKS + 7 * perturb::BLOCK + perturb::CACHE + cells + 256;
}

// p(x); x is finite but for -inf (masked classes: probability 0), one class at least is finite. tau, unless it is NULL, becomes E max(x + noise).
template <class C>
void perturb_forward(int noise, double scale, int64_t nodes, const C *x, int64_t n, C *p, double *tau, double *work) {
    [[maybe_unused]] const perturb::Flush flush;
    const perturb::Row<C> row = perturb::read_row(x, n, scale);
    perturb::with_solver(noise, row, nodes, work, [&](auto &solver) {
        solver.forward(p);
        if (tau) *tau = row.high + scale * (perturb::mean(noise) + solver.excess());
    });
}

// J^T g, with p = p(x); p may be NULL.
template <class C>
void perturb_vjp(int noise, double scale, int64_t nodes, const C *x, const C *p, const C *g, int64_t n, C *out, double *work) {
    [[maybe_unused]] const perturb::Flush flush;
    perturb::Row<C> row = perturb::read_row(x, n, scale);
    row.g = g;
    row.mid = (double)g[row.top];
    if (p) {  // a constant in g changes nothing; without it less cancels
        vd s{};
        for (int64_t i = 0; i < n; i += width<double>) {
            vd v{};
            if (i + width<double> <= n)
                v = load_wide(p + i);
            else
                for (int64_t k = 0; i + k < n; k++) v[k] = (double)p[i + k];
            s += v * perturb::load_g(row, i);
        }
        row.mid += sum(s);
    }
    perturb::with_solver(noise, row, nodes, work, [&](auto &solver) { solver.vjp(out); });
}

// E max(x + noise) - E noise - x[target], for a masked target infinite; p, unless it is NULL, becomes p(x).
template <class C>
double perturb_loss(int noise, double scale, int64_t nodes, const C *x, int64_t n, int64_t target, C *p, double *work) {
    [[maybe_unused]] const perturb::Flush flush;
    const perturb::Row<C> row = perturb::read_row(x, n, scale);
    double value = 0.0;
    perturb::with_solver(noise, row, nodes, work, [&](auto &solver) {
        if (p) solver.forward(p);
        value = (row.high - (double)x[target]) + scale * solver.excess();
    });
    return value;
}

}  // namespace ANYMAX_UNIT
