// Random calls of the C ABI, each of them from a seed: every operation, map, dtype and layout, with operands in memory blocks
// of exactly the size they need. Built with sanitizers by tools/sanitize.sh.
//
//   fuzz SEED                                                    one case again, in words
//   fuzz [--from SEED] [--seconds N] [--calls N] [--step K]      cases SEED, SEED + K, ... until one of the limits is met
//   fuzz --digests [--from SEED] [--calls N]                     a digest of each case's results, to compare two builds bit for
//   bit fuzz --refused                                               calls that must be refused fuzz --threads [--seconds N]
//   eight threads call at once, beside others that change the settings fuzz --writers [--seconds N] calls, while another thread
//   writes to what they read as an index fuzz --fork                                                  a process that forks
//   while its threads are at work
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "doors/pool.h"
#include "core/unit.h"
#include "limits.hpp"
#include "maps.hpp"
#include "doors/xla_ffi_abi.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#include <sanitizer/common_interface_defs.h>
#endif

extern "C" {
xla_error *anymax_xla(xla_call *call);
}

namespace {

const anymax_unit *unit_in_use() {
    const std::string name = anymax_isa();
#if defined(ANYMAX_HAVE_AVX512)
    if (name == "avx512") return &anymax_unit_avx512;
#endif
#if defined(ANYMAX_HAVE_AVX2)
    if (name == "avx2") return &anymax_unit_avx2;
#endif
#if defined(ANYMAX_HAVE_NEON)
    if (name == "neon") return &anymax_unit_neon;
#endif
#if defined(ANYMAX_HAVE_BASELINE)
    if (name == "baseline") return &anymax_unit_baseline;
#endif
    return nullptr;
}

std::vector<std::string> isas() {
    std::vector<std::string> all;
    std::string rest = anymax_isas();
    for (size_t comma; !rest.empty(); rest = comma == std::string::npos ? "" : rest.substr(comma + 1)) {
        comma = rest.find(',');
        all.push_back(rest.substr(0, comma));
    }
    return all;
}

const char *const OP[] = {"forward", "log", "vjp", "log_vjp", "loss", "loss_grad", "threshold", "largest", "slope"};
const char *const DTYPE[] = {"f32", "f64", "bf16", "f16"};

constexpr double INF = __builtin_huge_val();
const double NaN = __builtin_nan("");

// -- what is said where something is wrong ----------------------------------------------------------

char words[4096];  // the case in hand
bool verbose = false;

void say_case() {
    if (!words[0]) return;
    const char *head = "\ncase: ";
    (void)!write(2, head, strlen(head));
    (void)!write(2, words, strlen(words));
    (void)!write(2, "\n", 1);
}

[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char *form, ...) {
    va_list rest;
    va_start(rest, form);
    fflush(stdout);
    fprintf(stderr, "wrong: ");
    vfprintf(stderr, form, rest);
    va_end(rest);
    say_case();
    abort();
}

void too_long(int) {
    const char *text = "wrong: the case does not end";
    (void)!write(2, text, strlen(text));
    say_case();
    _exit(3);
}

// -- random numbers ---------------------------------------------------------------------------------

struct Random {
    uint64_t state;

    explicit Random(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull) { next(); }
    uint64_t next() {
        uint64_t z = state += 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
    int64_t below(int64_t n) { return (int64_t)(next() % (uint64_t)n); }
    double real() { return (double)(next() >> 11) * 0x1p-53; }
    double real(double low, double high) { return low + (high - low) * real(); }
    bool chance(double p) { return real() < p; }
    double normal() {
        double s = 0.0;
        for (int i = 0; i < 6; i++) s += real() - real();
        return s;
    }
    template <class T>
    T pick(std::initializer_list<T> of) {
        return of.begin()[below((int64_t)of.size())];
    }
};

// -- numbers of each type ---------------------------------------------------------------------------

int64_t size_of(int32_t dtype) { return dtype == ANYMAX_F64 ? 8 : dtype == ANYMAX_F32 ? 4 : 2; }
double largest_of(int32_t dtype) { return dtype == ANYMAX_F64 ? 1.7e308 : dtype == ANYMAX_F16 ? 65504.0 : 3.38e38; }

double decode(const void *from, int32_t dtype) {
    if (dtype == ANYMAX_F64) {
        double v;
        memcpy(&v, from, 8);
        return v;
    }
    float v;
    if (dtype == ANYMAX_F32) {
        memcpy(&v, from, 4);
        return (double)v;
    }
    uint16_t h;
    memcpy(&h, from, 2);
    if (dtype == ANYMAX_BF16) {
        uint32_t u = (uint32_t)h << 16;
        memcpy(&v, &u, 4);
        return (double)v;
    }
    const int exponent = h >> 10 & 31, part = h & 1023;
    const double size = exponent == 31 ? (part ? NaN : INF) : exponent ? ldexp(1024 + part, exponent - 25) : ldexp(part, -24);
    return h >> 15 ? -size : size;
}

void encode(void *to, int32_t dtype, double v) {
    if (dtype == ANYMAX_F64) {
        memcpy(to, &v, 8);
        return;
    }
    const float f = (float)v;
    if (dtype == ANYMAX_F32) {
        memcpy(to, &f, 4);
        return;
    }
    uint16_t h;
    if (dtype == ANYMAX_BF16) {
        uint32_t u;
        memcpy(&u, &f, 4);
        h = v != v ? 0x7fc0 : (uint16_t)((u + (fabs(v) == INF ? 0 : 0x7fff + (u >> 16 & 1))) >> 16);
    } else {
        const double a = fabs(v);
        const uint16_t sign = signbit(v) ? 0x8000 : 0;
        if (v != v)
            h = 0x7e00;
        else if (a >= 65520.0)
            h = sign | 0x7c00;
        else {
            int e = a > 0 ? ilogb(a) : -99;
            if (e < -14) e = -14;
            const double part = nearbyint(ldexp(a, 10 - e));  // 1024 and above: normal
            h = (uint16_t)(sign + (part >= 1024.0 ? (uint16_t)((e + 14) * 1024 + (int)part) : (uint16_t)part));
        }
    }
    memcpy(to, &h, 2);
}

// -- operands, each in a block of its own -----------------------------------------------------------

struct Block {
    char *data = nullptr;
    int64_t size = 0;

    Block() = default;
    Block(const Block &) = delete;
    Block(Block &&b) : data(b.data), size(b.size) { b.data = nullptr, b.size = 0; }
    Block &operator=(Block &&b) {
        std::swap(data, b.data), std::swap(size, b.size);
        return *this;
    }
    ~Block() { free(data); }
    void make(int64_t bytes, int byte) {
        free(data);
        size = bytes;
        data = (char *)malloc((size_t)bytes);
        memset(data, byte, (size_t)bytes);
    }
    std::vector<char> copy() const { return std::vector<char>(data, data + size); }
    bool is(const std::vector<char> &v) const {
        return (int64_t)v.size() == size && (size == 0 || memcmp(data, v.data(), v.size()) == 0);
    }
};

struct Shape {
    int64_t outer, inner, n;
    int64_t rows() const { return outer * inner; }
};

// Where the elements of an operand lie.
struct Layout {
    int64_t outer, inner, cls, first, count;  // the first element's place, and how many places there are
    int64_t at(const Shape &s, int64_t row, int64_t i) const {
        return first + row / s.inner * outer + row % s.inner * inner + i * cls;
    }
};

enum { PLAIN, PADDED, ANY, TURNED };

Layout layout_of(Random &random, const Shape &s, int kind, bool shared) {
    const int64_t size[3] = {s.outer, s.inner, s.n};
    int order[3] = {2, 1, 0};  // the innermost first
    int64_t stride[3], step = 1;
    if (kind == TURNED) order[0] = 1, order[1] = 2;
    if (kind == ANY) {
        std::swap(order[0], order[random.below(3)]);
        std::swap(order[1], order[1 + random.below(2)]);
        if (random.chance(0.3)) step = 2 + random.below(3);
    }
    for (int a : order) {
        const bool none = shared && kind == ANY && random.chance(0.3);
        stride[a] = none ? 0 : step;
        if (!none) step = step * (size[a] > 0 ? size[a] : 1) + (kind != PLAIN && random.chance(0.5) ? random.below(9) : 0);
        if (kind == ANY && random.chance(0.2)) stride[a] = -stride[a];
    }
    int64_t low = 0, high = 0;
    for (int a = 0; a < 3; a++) {
        int64_t reach = size[a] > 0 ? (size[a] - 1) * stride[a] : 0;
        (reach < 0 ? low : high) += reach;
    }
    const int64_t lead = kind != PLAIN && random.chance(0.5) ? random.below(16) : 0;
    return Layout{stride[0], stride[1], stride[2], lead - low, s.rows() && s.n ? lead + high - low + 1 : 0};
}

struct Operand {
    Block block;
    Layout layout{};
    Shape shape{};
    int32_t dtype = 0;  // -1: bytes

    int64_t item() const { return dtype < 0 ? 1 : size_of(dtype); }
    void make(const Shape &s, int32_t type, const Layout &l, int byte = 0xff) {
        shape = s, dtype = type, layout = l;
        block.make(l.count * item(), byte);
    }
    char *place(int64_t row, int64_t i) const { return block.data + layout.at(shape, row, i) * item(); }
    double get(int64_t row, int64_t i) const {
        return dtype < 0 ? (double)(uint8_t)*place(row, i) : decode(place(row, i), dtype);
    }
    void set(int64_t row, int64_t i, double v) {
        if (dtype < 0)
            *place(row, i) = (char)(int)v;
        else
            encode(place(row, i), dtype, v);
    }
    anymax_view view() const {
        return block.data ? anymax_view{block.data + layout.first * item(), layout.outer, layout.inner, layout.cls}
                          : anymax_view{};
    }
    bool shared() const {
        return (layout.outer == 0 && shape.outer > 1) || (layout.inner == 0 && shape.inner > 1) ||
               (layout.cls == 0 && shape.n > 1);
    }
};

// -- a case: all that a call reads ------------------------------------------------------------------

struct Case {
    int32_t op = 0, map = 0, dtype = 0, noise = 0;
    int64_t nodes = 0, k = 0;  // k: of ANYMAX_LARGEST
    Shape shape{};
    double param = 0.0;
    std::vector<double> per_row;
    bool wild = false;  // a parameter at the ends of its range: no law but that of memory
    bool in_place = false;
    bool junk = false;                                           // p or the support are not those of x
    Operand x, p, g, mask, upper;                                // upper: of ANYMAX_BOUNDED, in the wide dtype
    Block params, index, scale, tau, s_index, s_value, s_count;  // those that are read
    bool saves = false, reads_support = false, with_tau = false, reads_tau = false, with_slope = false;
    bool by_bounds = false, by_param = true;  // what is wanted of ANYMAX_SLOPE
    int64_t capacity = 0;
    Layout out{};

    int32_t wide() const { return dtype == ANYMAX_F64 ? ANYMAX_F64 : ANYMAX_F32; }
    double param_of(int64_t row) const { return per_row.empty() ? param : per_row[row]; }
    bool softmax(int64_t row) const { return map == ANYMAX_SOFTMAX || (map == ANYMAX_ENTMAX && param_of(row) == 1.0); }
    double bound(int64_t row, int64_t i) const { return std::min(upper.get(row, i), 1.0); }
    double score(int64_t row, int64_t i) const { return mask.block.data && mask.get(row, i) == 0.0 ? -INF : x.get(row, i); }
    int64_t target(int64_t row) const { return ((const int64_t *)index.data)[row]; }
    Shape result() const { return op == ANYMAX_LARGEST ? Shape{shape.outer, shape.inner, k} : shape; }
    bool to_rows() const { return by_bounds || (op != ANYMAX_LOSS && op != ANYMAX_THRESHOLD && op != ANYMAX_SLOPE); }
};

struct Result {
    std::vector<uint64_t> out, value, tau, slope, positions, count, index, saved;  // bits; NaNs are made alike
    int64_t width = 0, capacity = 0;
};

// Where two results differ, "" where they do not; row `skip` is not looked at.
std::string difference(const Result &a, const Result &b, int64_t skip) {
    std::string where;
    const auto part = [&](const char *name, const std::vector<uint64_t> &p, const std::vector<uint64_t> &q, int64_t width) {
        for (size_t i = 0; i < p.size() && where.empty(); i++)
            if (p[i] != q[i] && (int64_t)i / width != skip) {
                char text[160];
                snprintf(text, sizeof text, "%s of row %ld, place %ld, is %#lx, not %#lx", name, (long)i / width,
                         (long)i % width, q[i], p[i]);
                where = text;
            }
        if (p.size() != q.size()) where = name;
    };
    part("out", a.out, b.out, a.width), part("value", a.value, b.value, 1), part("tau", a.tau, b.tau, 1),
        part("slope", a.slope, b.slope, 1);
    part("positions", a.positions, b.positions, a.width), part("support.count", a.count, b.count, 1);
    part("support.index", a.index, b.index, a.capacity), part("support.value", a.saved, b.saved, a.capacity);
    return where;
}

uint64_t bits_of(const char *from, int32_t dtype) {
    if (const double v = decode(from, dtype); v != v) return ~0ull;
    uint64_t b = 0;
    memcpy(&b, from, (size_t)size_of(dtype));
    return b;
}
// Of all that the calls of one case gave.
uint64_t digest = 0;
void digest_of(uint64_t word) { digest = (digest ^ word) * 0x100000001b3ull, digest ^= digest >> 29; }
void digest_of(const Result &r) {
    for (const auto *part : {&r.out, &r.value, &r.tau, &r.slope, &r.positions, &r.count, &r.index, &r.saved})
        for (const uint64_t word : *part) digest_of(word);
}

double number(uint64_t bits, int32_t dtype) { return bits == ~0ull ? NaN : decode(&bits, dtype); }

struct How {
    int pool = 0, threads = 1;
    int direct = 0;        // 1: the unit itself with all rows, told to bypass the caches; 2: and with a team
    int64_t row = -1;      // this row alone
    bool cleared = false;  // into zeros
};

// One call with fresh outputs: what it reads must stay as it was, and so must the bytes between what it writes.
Result perform(const Case &c, const How &how) {
    const Shape shape = c.shape, result = c.result();
    const int64_t rows = shape.rows();
    const int64_t wide = size_of(c.wide());
    Operand out;
    Block value, tau, slope, positions, s_index, s_value, s_count;
    anymax_call call;
    memset(&call, 0, sizeof call);
    call.op = c.op, call.map = c.map, call.dtype = c.dtype, call.noise = c.noise, call.nodes = c.nodes;
    call.outer = shape.outer, call.inner = shape.inner, call.n = shape.n,
    call.param = c.op == ANYMAX_LARGEST ? (double)c.k : c.param;
    call.params = (const double *)c.params.data;
    call.x = c.x.view(), call.p = c.p.view(), call.g = c.g.view(), call.mask = c.mask.view(), call.upper = c.upper.view();
    call.index = (const int64_t *)c.index.data, call.scale = c.scale.data;
    call.pool = how.pool;
    std::vector<char> before;
    if (c.to_rows()) {
        if (c.in_place) {
            out.shape = shape, out.dtype = c.dtype, out.layout = c.x.layout;
            out.block.make(c.x.block.size, 0);
            memcpy(out.block.data, c.x.block.data, (size_t)c.x.block.size);
            call.x = out.view();
        } else {
            out.make(result, c.dtype, c.out, how.cleared ? 0 : 0xa5);
            call.fresh = how.cleared ? 2 : 0;
        }
        call.out = out.view();
        before = out.block.copy();
    }
    if (c.op == ANYMAX_LOSS || (c.op == ANYMAX_SLOPE && c.by_param)) value.make(rows * wide, 0xa5), call.value = value.data;
    if (c.with_slope) slope.make(rows * wide, 0xa5), call.slope = slope.data;
    if (c.op == ANYMAX_THRESHOLD || (c.op == ANYMAX_LOSS && c.with_tau)) tau.make(rows * wide, 0xa5), call.tau = tau.data;
    if (c.reads_tau) call.tau = c.tau.data;
    if (c.op == ANYMAX_LARGEST) positions.make(rows * c.k * 8, 0xa5), call.positions = (int64_t *)positions.data;
    if (c.saves) {
        s_index.make(rows * c.capacity * 4, 0xa5), s_value.make(rows * c.capacity * wide, 0xa5), s_count.make(rows * 4, 0xa5);
        call.support = anymax_support{(int32_t *)s_index.data, s_value.data, (int32_t *)s_count.data, c.capacity};
    }
    if (c.reads_support)
        call.support = anymax_support{(int32_t *)c.s_index.data, c.s_value.data, (int32_t *)c.s_count.data, c.capacity};

    const Block *inputs[] = {&c.x.block, &c.p.block, &c.g.block, &c.mask.block, &c.params,  &c.index,
                             &c.scale,   &c.tau,     &c.s_index, &c.s_value,    &c.s_count, &c.upper.block};
    std::vector<std::vector<char>> held;
    for (const Block *b : inputs) held.push_back(b->copy());

    if (how.row >= 0) {  // the same memory, seen as one row
        const int64_t r = how.row, o = r / shape.inner, i = r % shape.inner;
        for (anymax_view *v : {&call.x, &call.p, &call.g, &call.out})
            if (v->data) v->data = (char *)v->data + (o * v->outer + i * v->inner) * size_of(c.dtype);
        if (call.mask.data) call.mask.data = (char *)call.mask.data + o * call.mask.outer + i * call.mask.inner;
        if (call.upper.data) call.upper.data = (char *)call.upper.data + (o * call.upper.outer + i * call.upper.inner) * wide;
        if (call.params) call.params += r;
        if (call.index) call.index += r;
        if (call.scale) call.scale = (const char *)call.scale + r * wide;
        if (call.value) call.value = (char *)call.value + r * wide;
        if (call.tau) call.tau = (char *)call.tau + r * wide;
        if (call.slope) call.slope = (char *)call.slope + r * wide;
        if (call.positions) call.positions += r * c.k;
        if (call.support.count) {
            call.support.count += r, call.support.index += r * c.capacity;
            call.support.value = (char *)call.support.value + r * c.capacity * wide;
        }
        call.outer = call.inner = 1;
    }
    anymax_set_num_threads(how.threads);
#if defined(__SSE2__)
    const unsigned csr = _mm_getcsr() & 0xffc0u;
#endif
    int code = how.direct
                   ? unit_in_use()->rows(&call, 0, call.outer * call.inner, 1, how.direct == 2 ? anymax_pool_run : nullptr)
                   : anymax_run(&call);
    if (code) fail("the call was refused: %s", anymax_error(code));
#if defined(__SSE2__)
    if ((_mm_getcsr() & 0xffc0u) != csr) fail("the rounding mode was changed");
#endif
    for (size_t i = 0; i < held.size(); i++)
        if (!inputs[i]->is(held[i]))
            fail("operand %zu of x, p, g, mask, params, index, scale, tau, support, upper was written to", i);

    Result r;
    r.width = result.n, r.capacity = c.capacity > 0 ? c.capacity : 1;
    const auto row_read = [&](int64_t row) { return how.row < 0 || how.row == row; };
    if (c.to_rows()) {
        std::vector<char> after = out.block.copy();
        r.out.reserve((size_t)(rows * result.n));
        const int64_t size = out.item();
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = 0; i < result.n; i++) {
                const char *at = out.place(row, i);
                r.out.push_back(row_read(row) ? bits_of(at, c.dtype) : 0);
                if (row_read(row))
                    memcpy(after.data() + (at - out.block.data), before.data() + (at - out.block.data), (size_t)size);
            }
        if (after != before) fail("bytes beside the result were written to");
    }
    const auto numbers = [&](const Block &from, std::vector<uint64_t> &to) {
        for (int64_t i = 0; i < from.size / wide; i++) to.push_back(row_read(i) ? bits_of(from.data + i * wide, c.wide()) : 0);
    };
    numbers(value, r.value);
    numbers(tau, r.tau);
    numbers(slope, r.slope);
    for (int64_t i = 0; i < positions.size / 8; i++)
        r.positions.push_back(row_read(i / c.k) ? ((const uint64_t *)positions.data)[i] : 0);
    if (c.saves)
        for (int64_t row = 0; row < rows; row++) {
            const int32_t count = ((const int32_t *)s_count.data)[row];
            if (row_read(row) && (count < -1 || count > c.capacity))
                fail("row %ld: a support of %d in a capacity of %ld", row, count, c.capacity);
            r.count.push_back(row_read(row) ? (uint64_t)(int64_t)count : 0);
            for (int64_t i = 0; i < c.capacity; i++) {
                const bool is = row_read(row) && i < count;
                r.index.push_back(is ? (uint64_t)((const int32_t *)s_index.data)[row * c.capacity + i] : 0);
                r.saved.push_back(is ? bits_of(s_value.data + (row * c.capacity + i) * wide, c.wide()) : 0);
            }
        }
    return r;
}

// -- making a case ----------------------------------------------------------------------------------

enum Values { NORMAL, EQUAL, TIES, HUGE_ONES, TINY, OFFSET, WIDE, SORTED, PEAK, SPREADS };

void fill_scores(Random &random, Case &c, std::vector<const char *> &said) {
    static const char *const names[] = {"normal", "equal", "ties", "huge", "tiny", "offset", "wide", "sorted", "peak"};
    const double most = largest_of(c.dtype);
    const int kind = (int)random.below(SPREADS);
    const double sigma = random.pick({0.01, 1.0, 1.0, 3.0, 30.0, 1000.0}), common = random.normal();
    const bool masks = random.chance(0.35), poisons = random.chance(0.25);
    const double share = random.pick({0.05, 0.5, 0.95});
    said.push_back(names[kind]);
    if (masks) said.push_back("masked");
    if (poisons) said.push_back("poisoned");
    const int64_t rows = c.shape.rows(), n = c.shape.n;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t peak = random.below(n);
        for (int64_t i = 0; i < n; i++) {
            double v = 0.0;
            switch (kind) {
                case NORMAL: v = random.normal() * sigma; break;
                case EQUAL: v = common * sigma; break;
                case TIES: v = (double)random.below(4) * 0.5 - 1.0; break;
                case HUGE_ONES: v = random.normal() * pow(10.0, random.real(2.0, log10(most))); break;
                case TINY: v = random.normal() * pow(10.0, random.real(c.dtype == ANYMAX_F64 ? -323.0 : -45.0, -6.0)); break;
                case OFFSET: v = 1e4 * (common < 0 ? -1.0 : 1.0) + random.normal(); break;
                case WIDE: v = random.normal() * pow(10.0, random.real(-6.0, 4.0)); break;
                case SORTED: v = (double)i * sigma / (double)n * (common < 0 ? -1.0 : 1.0); break;
                default: v = i == peak ? 5.0 * sigma : random.normal() * 0.01; break;
            }
            if (random.next() % 64 == 0) v = random.chance(0.5) ? -0.0 : 0.0;
            c.x.set(r, i, v > most ? most : v < -most ? -most : v);
        }
        if (masks) {
            if (random.chance(0.15))
                for (int64_t i = 0; i < n; i++) c.x.set(r, i, -INF);
            else
                for (int64_t i = 0; i < n; i++)
                    if (random.chance(share)) c.x.set(r, i, -INF);
        }
        if (poisons && random.chance(0.3)) c.x.set(r, random.below(n), random.chance(0.6) ? NaN : INF);
    }
}

double a_param(Random &random, int32_t map, int64_t n, bool &wild) {
    const double count = (double)n;
    switch (map) {
        case ANYMAX_ENTMAX:
            if (random.chance(0.04)) return wild = true, random.pick({1e-300, 1e-3, 0.02, 40.0, 1e3, 1e300, 1.0 + 2.3e-16});
            return random.chance(0.25) ? pow(10.0, random.real(-1.0, 1.0))
                                       : random.pick({1.0,        1.25,       4.0 / 3.0,  1.5, 2.0, 1.5, 2.0,   1.0 + 1e-9,
                                                      1.0 - 1e-9, 1.0 + 1e-3, 1.0 - 1e-3, 1.1, 1.3, 1.7, 1.999, 2.001,
                                                      0.1,        0.5,        0.9,        2.5, 3.0, 5.0, 10.0});
        case ANYMAX_BUDGET:
            if (random.chance(0.04)) return wild = true, random.pick({1e-300, 1e300, 9.3e18, 1e19});
            return random.chance(0.4)
                       ? random.real(0.01, count)
                       : random.pick({1.0, 2.0, 3.0, 0.5, 1.5, 2.7, count, count - 0.5, count + 3.0, count / 2.0});
        case ANYMAX_NORMMAX:
            if (random.chance(0.04)) return wild = true, random.pick({1.0 + 1e-15, 1.0 + 1e-9, 1e3, 1e299});
            return random.chance(0.3) ? 1.0 + pow(10.0, random.real(-2.0, 1.0))
                                      : random.pick({1.01, 1.1, 1.5, 2.0, 3.0, 4.0, 10.0});
        case ANYMAX_TOPK:
            return floor(random.pick({1.0, 2.0, 3.0, 5.0, 8.0, 32.0, count / 2.0 + 1.0, count, count + 5.0, 2147483647.0,
                                      2147483648.0, 4294967296.0, 9e15}));
        case ANYMAX_TOPP:
            return random.chance(0.4) ? random.real(1e-3, 1.0)
                                      : random.pick({0.1, 0.5, 0.9, 0.99, 1.0, 1e-300, 1e-9, 1.0 - 1e-12});
        case ANYMAX_TAYLOR: return random.pick({2.0, 2.0, 4.0, 6.0, 8.0, 16.0, 64.0});
        case ANYMAX_SOFTPICK: return random.pick({1e-8, 1e-8, 0.0, 1.0, 1e3});
        case ANYMAX_BOUNDED:
            return random.chance(0.3) ? random.real(1.0, 2.0)
                                      : random.pick({1.0, 1.0, 1.25, 1.3, 4.0 / 3.0, 1.5, 1.5, 2.0, 2.0, 1.0 + 1e-9});
        case ANYMAX_PERTURB:
            if (random.chance(0.03)) return wild = true, random.pick({1e-300, 1e300, 1e-30, 1e30});
            return random.pick({0.1, 0.5, 1.0, 1.0, 3.0, 20.0});
        default: return 0.0;
    }
}

bool takes_params(int32_t map) { return MAPS[map].per_row; }
bool sparse(int32_t map) { return is_sparse(map); }
bool has(int32_t op, int32_t map) {
    if (op == ANYMAX_SLOPE) return MAPS[map].slope;
    if (op == ANYMAX_LOG || op == ANYMAX_LOG_VJP) return MAPS[map].log || map == ANYMAX_ENTMAX;
    if (op == ANYMAX_LOSS || op == ANYMAX_LOSS_GRAD || op == ANYMAX_THRESHOLD) return has_loss(map);
    return true;
}

int64_t a_length(Random &random, int32_t map) {
    const double r = random.real();
    if (map == ANYMAX_PERTURB) {
        if (r < 0.01) return random.pick<int64_t>({5000, 70000});
        if (r < 0.1) return random.pick<int64_t>({1000, 2048, 2049, 4096, 4097});
    } else {
        if (r < 0.004) return random.pick<int64_t>({262144, 300000, 262145});
        if (r < 0.012) return random.pick<int64_t>({65536, 65537, 70000, 131072});
        if (r < 0.15) return random.pick<int64_t>({2047, 2048, 2049, 4096, 4097, 5000});
        if (r < 0.2) return 1 + random.below(5000);
    }
    if (r < 0.3) return 1 + random.below(300);
    return random.pick<int64_t>({1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 1000});
}

void describe(uint64_t seed, const Case &c, const std::vector<const char *> &said, const std::string &isa) {
    int at = snprintf(words, sizeof words, "seed %llu: %s of %s, %s, by %s; outer %ld, inner %ld, n %ld; ",
                      (unsigned long long)seed, OP[c.op], MAPS[c.map].name, DTYPE[c.dtype], isa.c_str(), (long)c.shape.outer,
                      (long)c.shape.inner, (long)c.shape.n);
    const auto add = [&](const char *form, auto... values) {
        if (at < (int)sizeof words) at += snprintf(words + at, sizeof words - (size_t)at, form, values...);
    };
    if (c.op == ANYMAX_LARGEST)
        add("k %ld; ", (long)c.k);
    else if (c.per_row.empty())
        add("param %.17g; ", c.param);
    else
        add("params %.17g, ...; ", c.per_row[0]);
    if (c.map == ANYMAX_PERTURB) add("noise %d, nodes %ld; ", c.noise, (long)c.nodes);
    const auto strides = [&](const char *name, const Operand &o) {
        if (o.block.data) add("%s (%ld, %ld, %ld); ", name, (long)o.layout.outer, (long)o.layout.inner, (long)o.layout.cls);
    };
    strides("x", c.x), strides("p", c.p), strides("g", c.g), strides("mask", c.mask);
    if (c.to_rows())
        add("out (%ld, %ld, %ld)%s; ", (long)c.out.outer, (long)c.out.inner, (long)c.out.cls, c.in_place ? " in place" : "");
    if (c.saves || c.reads_support) add("support %ld %s; ", (long)c.capacity, c.saves ? "saved" : "read");
    if (c.with_tau || c.reads_tau) add("tau; ");
    if (c.junk) add("junk; ");
    if (c.wild) add("wild; ");
    for (const char *s : said) add("%s ", s);
}

// The same scores, contiguous, for another operation.
void borrow_scores(const Case &from, Case &to, int32_t op) {
    Random none(0);
    to.op = op, to.map = from.map, to.dtype = from.dtype, to.noise = from.noise, to.nodes = from.nodes, to.param = from.param;
    to.shape = from.shape, to.per_row = from.per_row;
    const Layout plain = layout_of(none, to.shape, PLAIN, false);
    to.x.make(to.shape, to.dtype, plain);
    to.out = plain;
    for (int64_t r = 0; r < to.shape.rows(); r++)
        for (int64_t i = 0; i < to.shape.n; i++) to.x.set(r, i, from.score(r, i));
    if (from.upper.block.data) {
        to.upper.make(to.shape, to.wide(), plain);
        for (int64_t r = 0; r < to.shape.rows(); r++)
            for (int64_t i = 0; i < to.shape.n; i++) to.upper.set(r, i, from.upper.get(r, i));
    }
    if (!from.per_row.empty()) {
        to.params.make(from.params.size, 0);
        memcpy(to.params.data, from.params.data, (size_t)from.params.size);
    }
}

void put_bits(Block &to, int64_t i, uint64_t bits, int64_t size) { memcpy(to.data + i * size, &bits, (size_t)size); }

void keep_support(Case &c, const Result &r) {
    const int64_t rows = c.shape.rows(), wide = size_of(c.wide());
    c.reads_support = true;
    c.s_index.make(rows * c.capacity * 4, 0xff), c.s_value.make(rows * c.capacity * wide, 0xff), c.s_count.make(rows * 4, 0);
    for (int64_t row = 0; row < rows; row++) {
        put_bits(c.s_count, row, r.count[row], 4);
        for (int64_t i = 0; i < (int64_t)r.count[row]; i++) {
            put_bits(c.s_index, row * c.capacity + i, r.index[row * r.capacity + i], 4);
            put_bits(c.s_value, row * c.capacity + i, r.saved[row * r.capacity + i], wide);
        }
    }
}

void make(Random &random, Case &c, std::vector<const char *> &said) {
    do {
        c.op = random.chance(0.35) ? (int32_t)ANYMAX_FORWARD : (int32_t)random.below(ANYMAX_OPS),
        c.map = (int32_t)random.below(ANYMAX_MAPS);
    } while (!has(c.op, c.map));
    if (c.op == ANYMAX_LARGEST) c.map = ANYMAX_TOPK;
    c.dtype = random.chance(0.5) ? (int32_t)random.below(2) : (int32_t)random.below(4);
    if (c.map == ANYMAX_PERTURB) {
        c.noise = (int32_t)random.below(5);
        c.nodes = random.chance(0.02) ? random.pick<int64_t>({1, 500, 4096})
                                      : random.pick<int64_t>({2, 3, 5, 8, 16, 32, 32, 64, 100});
    }
    const int64_t n = a_length(random, c.map);
    int64_t rows = random.chance(0.02)  ? 0
                   : random.chance(0.3) ? 1 + random.below(70)
                                        : random.pick<int64_t>({1, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 70});
    const double large = random.real();
    const int64_t room = large < 0.6 ? 1500 : large < 0.93 || c.map == ANYMAX_PERTURB ? 12000 : 90000;
    if (rows * n > room) rows = room / n > 0 ? room / n : random.chance(0.7) ? 1 : 2;
    const bool two = random.chance(0.45) && rows > 1;
    int64_t inner = 1;
    if (two) inner = random.chance(0.3) ? rows : 1 + random.below(rows);
    c.shape = Shape{inner > 0 ? (rows + inner - 1) / inner : rows, inner, n};
    rows = c.shape.rows();
    const bool tame = random.chance(0.3);  // as a framework would call it
    const auto kind = [&] {
        return tame                  ? (int)PLAIN
               : random.chance(0.25) ? (int)PLAIN
               : random.chance(0.3)  ? (int)TURNED
               : random.chance(0.3)  ? (int)PADDED
                                     : (int)ANY;
    };

    if (c.op == ANYMAX_LARGEST)
        c.k = random.chance(0.5) ? 1 + random.below(n) : std::min(n, random.pick<int64_t>({1, 2, 3, 10, n}));
    else
        c.param = a_param(random, c.map, n, c.wild);
    if (c.map == ANYMAX_ENTMAX && (c.op == ANYMAX_LOG || c.op == ANYMAX_LOG_VJP)) c.param = 1.0, c.wild = false;
    if (takes_params(c.map) && c.op != ANYMAX_LARGEST && c.op != ANYMAX_LOG && c.op != ANYMAX_LOG_VJP && random.chance(0.25) &&
        rows) {
        c.params.make(rows * 8, 0xff);
        const bool wild = random.chance(0.1);
        c.wild = false;
        for (int64_t r = 0; r < rows; r++) {
            double v = a_param(random, c.map, n, c.wild);
            if (wild && random.chance(0.3)) c.wild = true, v = random.pick({NaN, INF, -INF, 0.0, -1.0, -1e300, 1e300, -0.5});
            c.per_row.push_back(v);
            encode(c.params.data + r * 8, ANYMAX_F64, v);
        }
    }
    c.x.make(c.shape, c.dtype, layout_of(random, c.shape, kind(), true));
    fill_scores(random, c, said);
    if (c.map == ANYMAX_BOUNDED) {
        Layout layout = layout_of(random, c.shape, kind(), true);
        c.upper.make(c.shape, c.wide(), layout);
        const double share = random.pick({0.2, 0.9, 1.0, 1.5, 3.0, 20.0}) / (double)n, holes = random.chance(0.3) ? 0.3 : 0.0;
        const bool alike = random.chance(0.3);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < n; i++)
                c.upper.set(r, i,
                            random.chance(holes) ? 0.0
                            : alike              ? share
                                                 : random.pick({share, 2.0 * share, share * random.real(), 1.0, 7.0}));
        if (random.chance(0.03) && rows)
            c.wild = true, c.upper.set(random.below(rows), random.below(n), random.pick({NaN, -1.0, INF, -INF}));
    }
    if (random.chance(c.op == ANYMAX_FORWARD ? 0.3 : 0.15)) {
        c.mask.make(c.shape, -1, layout_of(random, c.shape, kind(), true));
        const double share = random.pick({0.02, 0.5, 0.95, 1.0});
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < n; i++) c.mask.set(r, i, random.chance(share) ? (double)(1 + random.below(255)) : 0.0);
    }
    c.out = layout_of(random, c.result(), kind(), false);
    if ((c.op == ANYMAX_FORWARD || c.op == ANYMAX_LOG) && !c.x.shared() && random.chance(0.15))
        c.in_place = true, c.out = c.x.layout;
    if (random.chance(0.4) && (c.op == ANYMAX_FORWARD || (c.op == ANYMAX_LOSS && (sparse(c.map) || random.chance(0.2)))))
        c.saves = true, c.capacity = random.pick<int64_t>({0, 1, 3, 16, 64, n, n + 2});
    if (c.op == ANYMAX_LOSS) c.with_tau = random.chance(0.5), c.with_slope = MAPS[c.map].slope && random.chance(0.5);

    if (c.op == ANYMAX_SLOPE && c.map == ANYMAX_BOUNDED)
        c.by_bounds = random.chance(0.7), c.by_param = !c.by_bounds || random.chance(0.5);

    if (c.op == ANYMAX_VJP || c.op == ANYMAX_LOG_VJP || c.op == ANYMAX_SLOPE) {
        Case f;
        borrow_scores(c, f, c.op == ANYMAX_LOG_VJP ? ANYMAX_LOG : ANYMAX_FORWARD);
        if (c.op != ANYMAX_LOG_VJP && random.chance(0.4))
            f.saves = true, c.capacity = f.capacity = random.pick<int64_t>({0, 1, 3, 16, 64, n, n + 2});
        const Result p = perform(f, How{-1, 1, 0, -1});
        if (f.saves) keep_support(c, p);
        c.p.make(c.shape, c.dtype, layout_of(random, c.shape, kind(), random.chance(0.3)));
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < n; i++) c.p.set(r, i, number(p.out[r * n + i], c.dtype));
        for (int64_t r = 0; r < rows && !c.junk; r++)
            for (int64_t i = 0; i < n && !c.junk; i++) c.junk = bits_of(c.p.place(r, i), c.dtype) != p.out[r * n + i];
        if (random.chance(0.04) && !c.reads_support) {
            c.junk = true;
            for (int64_t r = 0; r < rows; r++)
                for (int64_t i = 0; i < n; i++) c.p.set(r, i, random.pick({0.0, 1.0, -1.0, NaN, INF, -INF, 0.5, 1e-30}));
        }
        c.g.make(c.shape, c.dtype, layout_of(random, c.shape, kind(), true));
        const double sigma = random.pick({1.0, 1.0, 1e-3, 100.0});
        // where p is 0 nothing is asked of g; a support knows smaller p than 16 bits hold
        const bool holes = random.chance(0.3) && !c.g.shared() && !c.junk && !c.reads_support;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < n; i++) {
                const bool out = needs_scores(c.map)      ? c.score(r, i) == -INF
                                 : c.op == ANYMAX_LOG_VJP ? c.p.get(r, i) == -INF
                                                          : c.p.get(r, i) == 0.0;
                const double v = random.normal() * sigma;
                c.g.set(r, i, holes && out ? random.pick({NaN, INF, -INF}) : v);
            }
        if (!needs_scores(c.map) && random.chance(0.8)) c.x.block = Block();
    }
    if (c.op == ANYMAX_LOSS || c.op == ANYMAX_LOSS_GRAD) {
        c.index.make(rows * 8, 0);
        for (int64_t r = 0; r < rows; r++) {
            int64_t t = random.below(n);
            if (random.chance(0.1)) t = random.pick<int64_t>({-1, -100, n, n + 7, INT64_MAX, INT64_MIN});
            memcpy(c.index.data + r * 8, &t, 8);
        }
    }
    if (c.op == ANYMAX_LOSS_GRAD) {
        const int64_t wide = size_of(c.wide());
        c.scale.make(rows * wide, 0);
        for (int64_t r = 0; r < rows; r++)
            encode(c.scale.data + r * wide, c.wide(), random.pick({1.0, 0.25, -1.0, random.normal(), 0.0}));
        if (random.chance(0.5)) {
            Case f;
            borrow_scores(c, f, ANYMAX_LOSS);
            f.index.make(c.index.size, 0);
            memcpy(f.index.data, c.index.data, (size_t)c.index.size);
            f.with_tau = c.reads_tau = c.map == ANYMAX_SOFTMAX;
            f.saves = sparse(c.map);
            c.capacity = f.capacity = random.pick<int64_t>({0, 1, 3, 16, 64, n, n + 2});
            const Result held = perform(f, How{-1, 1, 0, -1});
            if (f.saves) keep_support(c, held);
            if (c.reads_tau) {
                c.tau.make(rows * wide, 0);
                for (int64_t r = 0; r < rows; r++) put_bits(c.tau, r, held.tau[r], wide);
            }
        }
    }
}

// -- the laws ---------------------------------------------------------------------------------------

struct Row {
    bool bad = false;               // NaN or +inf
    int64_t count = 0, first = -1;  // entries that are not masked, the place of the largest
    double top = -INF, bottom = INF;
};

Row look(const Case &c, int64_t row) {
    Row is;
    for (int64_t i = 0; i < c.shape.n; i++) {
        const double v = c.score(row, i);
        if (v != v || v == INF) is.bad = true;
        if (v == -INF) continue;
        is.count++;
        if (v > is.top) is.top = v, is.first = i;
        if (v < is.bottom) is.bottom = v;
    }
    return is;
}

// What the results of a row may be off by, relative to what they add up to.
double slack(const Case &c, int64_t n) {
    switch (c.dtype) {
        case ANYMAX_F64: return 1e-12 + (double)n * 1e-16;
        case ANYMAX_F32: return 4e-6;
        case ANYMAX_BF16: return 5e-3;
        default: return 1e-3 + (double)n * 4e-8;
    }
}

// What a row of Softpick sums to.
double picked(const Case &c, int64_t r) {
    const double top = std::max(look(c, r).top, 0.0);
    long double above = 0.0, all = c.param * exp(-top);
    for (int64_t i = 0; i < c.shape.n; i++) {
        const double x = c.score(r, i);
        if (!(x > -INF)) continue;
        const double u = x > 0.0 ? -exp(x - top) * expm1(-x) : exp(-top) * expm1(x);
        all += fabs(u), above += std::max(u, 0.0);
    }
    return all > 0.0 ? (double)(above / all) : 0.0;
}

void check_forward(const Case &c, const Result &got) {
    const int64_t n = c.shape.n;
    std::vector<int64_t> order((size_t)n);
    for (int64_t r = 0; r < c.shape.rows(); r++) {
        const Row row = look(c, r);
        const double param = c.param_of(r);
        const auto p = [&](int64_t i) { return number(got.out[r * n + i], c.dtype); };
        for (int64_t i = 0; i < n; i++) {
            const double v = p(i);
            if (row.bad          ? v == v && !c.wild
                : row.count == 0 ? v != 0.0 && !c.wild
                                 : !c.wild && (!(v >= 0.0) || !(v <= 1.0 + slack(c, 0))))
                fail("row %ld, class %ld: p = %g where %s", r, i, v,
                     row.bad          ? "all are to be NaN"
                     : row.count == 0 ? "all are to be 0"
                                      : "it is to be in [0, 1]");
            if (!row.bad && !c.wild && c.score(r, i) == -INF && v != 0.0) fail("row %ld, class %ld is masked: p = %g", r, i, v);
        }
        if (row.bad || row.count == 0 || c.wild) continue;
        if (c.map == ANYMAX_TAYLOR && param > 8.0 && row.top < -2.0) continue;  // no digit is left where the terms cancel
        long double exact = 0.0;
        int64_t inside = 0;
        for (int64_t i = 0; i < n; i++) exact += p(i), inside += p(i) > 0.0;
        const double sum = (double)exact;
        double room = 0.0;
        for (int64_t i = 0; i < n && c.map == ANYMAX_BOUNDED; i++) {
            if (c.score(r, i) > -INF) room += c.bound(r, i);
            if (p(i) > c.bound(r, i) * (1.0 + (c.dtype == ANYMAX_BF16 ? 5e-3 : 1e-3 * (c.dtype == ANYMAX_F16))) +
                           (c.dtype == ANYMAX_F16 ? 6e-8 : 0.0))
                fail("row %ld, class %ld: p = %.17g above its bound, %.17g", r, i, p(i), c.bound(r, i));
        }
        const double goal = c.map == ANYMAX_BOUNDED                  ? std::min(room, 1.0)
                            : c.map == ANYMAX_BUDGET                 ? std::min(param, (double)row.count)
                            : c.map == ANYMAX_RELU && row.top <= 0.0 ? 0.0
                            : c.map == ANYMAX_SOFTPICK               ? picked(c, r)
                                                                     : 1.0;
        const double more = c.map == ANYMAX_PERTURB ? 1e-6 : 0.0;
        const double step = c.dtype == ANYMAX_F64   ? 0x1p-1074
                            : c.dtype == ANYMAX_F32 ? 0x1p-149
                            : c.dtype == ANYMAX_F16 ? 0x1p-24
                                                    : 0x1p-133;  // of the numbers near 0, as Softpick of scores near 0 has
        if (!(fabs(sum - goal) <= (slack(c, n) + more) * goal + (double)n * step))
            fail("row %ld adds up to %.17g, not %.17g", r, sum, goal);
        if (c.map == ANYMAX_TOPK && (double)inside > param) fail("row %ld has %ld classes of at most %g", r, inside, param);
        if (c.map != ANYMAX_TAYLOR && c.map != ANYMAX_PERTURB && c.map != ANYMAX_BOUNDED) {  // a larger score never has less
            for (int64_t i = 0; i < n; i++) order[(size_t)i] = i;
            std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return c.score(r, a) < c.score(r, b); });
            const double ulp = c.dtype == ANYMAX_F64 ? 0x1p-52 : c.dtype == ANYMAX_F32 ? 0x1p-23 : 0.0;
            const double least = c.dtype == ANYMAX_F64 ? 1e-307 : 1e-37;
            const bool exact = c.softmax(r) || c.map == ANYMAX_SPARSEMAX || c.map == ANYMAX_BUDGET || c.map == ANYMAX_TOPK ||
                               c.map == ANYMAX_TOPP;
            int64_t most = -1, next = -1;
            for (int64_t k = 0; k < n; k++) {
                const int64_t i = order[(size_t)k];
                if (k > 0 && c.score(r, i) > c.score(r, order[(size_t)k - 1])) most = next;
                if (most >= 0 && p(i) < p(most) * (1.0 - (exact ? 1.01 : 16.0) * ulp) - least)
                    fail("row %ld: class %ld has score %.17g and p %.17g, class %ld score %.17g and p %.17g", r, i,
                         c.score(r, i), p(i), most, c.score(r, most), p(most));
                if (next < 0 || p(i) > p(next)) next = i;
            }
        }
    }
    if (!c.saves) return;
    for (int64_t r = 0; r < c.shape.rows(); r++) {
        const int64_t count = (int64_t)got.count[r];
        if (count < 0) continue;
        std::vector<char> listed((size_t)n);
        for (int64_t k = 0; k < count; k++) {
            const uint64_t i = got.index[r * got.capacity + k];
            if (i >= (uint64_t)n || listed[i]) fail("row %ld: class %lu in the support", r, i);
            listed[i] = 1;
            uint64_t as = 0;
            const double v = number(got.saved[r * got.capacity + k], c.wide());
            encode(&as, c.dtype, v);
            if (as != got.out[r * n + i] && !(v == 0.0))
                fail("row %ld, class %lu: %g in the support, %g in the row", r, i, v, number(got.out[r * n + i], c.dtype));
        }
        for (int64_t i = 0; i < n; i++)
            if (!listed[(size_t)i] && number(got.out[r * n + i], c.dtype) != 0.0)
                fail("row %ld: class %ld is not in the support", r, i);
    }
}

void check_log(const Case &c, const Result &got) {
    const int64_t n = c.shape.n;
    for (int64_t r = 0; r < c.shape.rows(); r++) {
        const Row row = look(c, r);
        double sum = 0.0;
        for (int64_t i = 0; i < n; i++) {
            const double v = number(got.out[r * n + i], c.dtype);
            if (row.bad ? v == v : v != v || v > slack(c, 0)) fail("row %ld, class %ld: log p = %g", r, i, v);
            if (!row.bad && c.score(r, i) == -INF && v != -INF) fail("row %ld, class %ld is masked: log p = %g", r, i, v);
            sum += exp(v);
        }
        const double loose = c.dtype == ANYMAX_BF16 ? 0.05 : slack(c, n) * 10.0;
        if (!row.bad && row.count && !(fabs(sum - 1.0) <= loose)) fail("row %ld: p adds up to %.17g", r, sum);
    }
}

void check_vjp(const Case &c, const Result &got) {
    const int64_t n = c.shape.n;
    if (c.junk || c.wild) return;
    for (int64_t r = 0; r < c.shape.rows(); r++) {
        const double alpha = c.param_of(r);
        double sum = 0.0, size = 0.0, mass = 0.0, sense = 0.0, steepest = 0.0, most_g = 0.0;
        bool bad = false;
        for (int64_t i = 0; i < n; i++) {
            double p = c.p.get(r, i), g = c.g.get(r, i), v = number(got.out[r * n + i], c.dtype);
            if (c.op == ANYMAX_LOG_VJP) p = exp(p);
            bad = bad || p != p;
            mass += p;
            const double power = c.map == ANYMAX_NORMMAX || (c.map == ANYMAX_ENTMAX && !c.softmax(r)) ? 2.0 - alpha
                                 : sparse(c.map)                                                      ? 0.0
                                                                                                      : 1.0;
            const double s = p > 0.0 ? pow(p, power) : 0.0;
            sense += s, steepest = std::max(steepest, s);
            if (p > 0.0) most_g = std::max(most_g, fabs(g));
            sum += v, size += fabs(v) + (c.op == ANYMAX_LOG_VJP && p > 0.0 ? fabs(g) : 0.0);
        }
        if (bad) continue;
        if (c.map == ANYMAX_RELU) steepest = 1.0 / look(c, r).top;
        if (c.map == ANYMAX_NORMMAX) steepest *= std::max(1.0, pow(n, 2.0)) / (alpha - 1.0);
        if (c.op == ANYMAX_LOG_VJP) steepest *= std::max(1.0, 2e-3 * n);  // p times the sum of all g
        if (steepest * most_g > largest_of(c.dtype) * 1e-3) continue;
        for (int64_t i = 0; i < n; i++) {
            const double v = number(got.out[r * n + i], c.dtype);
            if (!(fabs(v) < INF)) fail("row %ld, class %ld: a derivative of %g", r, i, v);
            if (c.op == ANYMAX_VJP && c.map < ANYMAX_TAYLOR && !c.reads_support && c.p.get(r, i) == 0.0 && v != 0.0)
                fail("row %ld, class %ld: %g outside the support", r, i, v);
        }
        if (needs_scores(c.map)) continue;
        double bound =
            (slack(c, n) + (c.map == ANYMAX_BUDGET ? 0.0 : fabs(mass - 1.0))) * (size + most_g * std::max(sense, 1.0));
        if (c.map == ANYMAX_NORMMAX) bound *= std::max(1.0, 1.0 / (alpha - 1.0)) * 4.0;
        if (c.dtype == ANYMAX_F16) bound += (double)n * 3e-8;  // its numbers end at 6e-8
        if (steepest > 1e6 && (alpha > 2.0)) continue;
        if (!(fabs(sum) <= bound)) fail("row %ld: the derivatives add up to %g where %g is allowed", r, sum, bound);
    }
}

// The derivative by alpha or k as the formulas say it, in long doubles.
void check_slope(const Case &c, const Result &got) {
    if (c.junk || c.wild || (c.reads_support && c.dtype > ANYMAX_F64))
        return;  // what such a support holds has more digits than p
    const int64_t n = c.shape.n;
    if (c.map == ANYMAX_BOUNDED && c.dtype > ANYMAX_F64) return;  // nor does p tell which classes have their bounds
    for (int64_t r = 0; r < c.shape.rows(); r++) {
        const double v = c.by_param ? number(got.value[r], c.wide()) : 0.0, alpha = c.param_of(r);
        const auto at_bound = [&](int64_t i) { return c.map == ANYMAX_BOUNDED && c.p.get(r, i) >= c.bound(r, i); };
        const long double by = (long double)alpha - 1.0L;
        long double s_sum = 0, s_g = 0, size_g = 0, least = 1, power = 0, power_log = 0, most = 0, free = 0, free_g = 0,
                    mass = 0;
        bool bad = false, any = false;
        for (int64_t i = 0; i < n; i++) {
            const long double p = c.p.get(r, i), g = c.g.get(r, i);
            bad = bad || p != p, any = any || (p > 0 && !at_bound(i));
            if (!(p > 0) || at_bound(i)) continue;
            least = std::min(least, p), most = std::max(most, p), mass += p;
            const long double s = c.map == ANYMAX_NORMMAX ? p : powl(p, 1 - by), l = logl(p);
            s_sum += s, s_g += s * g, size_g += s * fabsl(g);
            power += powl(p, alpha), power_log += powl(p, alpha) * l;
            if (p < 1) free += 1, free_g += g;
        }
        if (c.by_param && (bad ? v == v : !any && v != 0.0)) fail("row %ld: a slope of %g", r, v);
        for (int64_t i = 0; i < n && c.by_bounds; i++) {
            const double d = number(got.out[r * n + i], c.dtype), g = c.g.get(r, i);
            const bool full = at_bound(i) && c.upper.get(r, i) <= 1.0;
            if (bad ? d == d : !full && d != 0.0) fail("row %ld, class %ld: a slope of %g by its bound", r, i, d);
            const long double want = g - (any ? s_g / s_sum : 0), size = fabsl(want) + fabs(g) + (any ? size_g / s_sum : 0);
            if (!bad && full && least > (c.dtype == ANYMAX_F64 ? 1e-200L : 1e-37L) &&
                fabsl(d - want) > (c.dtype == ANYMAX_F64 ? 1e-11L : 2e-6L) * size)
                fail("row %ld, class %ld: a slope of %.9g by its bound, not %.9Lg", r, i, d, want);
        }
        if (!c.by_param || bad || !any || least < (c.dtype == ANYMAX_F64 ? 1e-200L : 1e-37L) ||
            fabsl(mass - 1) > 0.1L * (c.map != ANYMAX_BUDGET && c.map != ANYMAX_BOUNDED) || alpha > 12.0)
            continue;
        long double want = 0, size = 0, rounding = 1e-30L;
        const long double mean = s_g / s_sum, norm = powl(power, 1.0L / alpha),
                          rise = norm / alpha * (power_log / power - logl(norm)) * powl(norm, by);
        for (int64_t i = 0; i < n && c.map != ANYMAX_BUDGET; i++) {
            const long double p = c.p.get(r, i), l = p > 0 ? logl(p) : 0, z = -by * l;
            if (!(p > 0) || at_bound(i)) continue;
            const long double d = c.map == ANYMAX_NORMMAX ? (rise * powl(p, 1 - by) - p * l) / by
                                  : by >= 0.5L            ? p * (1 - by * l) / (by * by)
                                  : fabsl(z) < 1e-4L      ? -p * l * l * (0.5L + z / 6 + z * z / 24)
                                                          : -p * (expm1l(z) - z) / (by * by);
            want += d * (c.g.get(r, i) - mean), size += fabsl(d) * (fabsl(c.g.get(r, i) - mean)),
                rounding += 1e-15L * fabsl(d * mean);
        }
        if (c.map == ANYMAX_BUDGET) want = free > 0 ? free_g / free : 0, size = fabsl(want) + (free > 0 ? 1 : 0) * 100;
        if (!(fabsl(v - want) <= (c.dtype == ANYMAX_F64 ? 1e-9L : 1e-5L) * size + rounding))
            fail("row %ld: a slope of %.9g, not %.9Lg, of %.9Lg", r, v, want, size);
    }
}

void check_loss(const Case &c, const Result &got) {
    for (int64_t r = 0; r < c.shape.rows(); r++) {
        const Row row = look(c, r);
        const int64_t t = c.target(r);
        const double v = number(got.value[r], c.wide());
        if (c.with_slope) {
            const double slope = number(got.slope[r], c.wide());
            if (t < 0 && slope != 0.0) fail("row %ld is left out: slope %g", r, slope);
            if (t >= c.shape.n && slope == slope) fail("row %ld, target %ld: slope %g", r, t, slope);
            if (t >= 0 && t < c.shape.n && !c.wild &&
                (row.bad          ? slope == slope
                 : row.count == 0 ? slope != 0.0
                                  : slope != slope))
                fail("row %ld: slope %g", r, slope);
        }
        if (t < 0 && v != 0.0) fail("row %ld is left out: loss %g", r, v);
        if (t >= c.shape.n && v == v) fail("row %ld, target %ld: loss %g", r, t, v);
        if (t < 0 || t >= c.shape.n || c.wild) continue;
        if (row.bad ? v == v : !(v >= 0.0)) fail("row %ld: loss %g", r, v);
        if (row.bad) continue;
        if (c.score(r, t) == -INF && v != INF) fail("row %ld: loss %g of a masked target", r, v);
        if (c.score(r, t) > -INF && row.top - row.bottom < 1e30 && !(v < INF)) fail("row %ld: loss %g", r, v);
        if (c.score(r, t) > -INF && v + 1e-6 + 1e-6 * (row.top - row.bottom) < (row.top - c.score(r, t)) - 1.0 &&
            c.map != ANYMAX_PERTURB && c.map != ANYMAX_BUDGET)
            fail("row %ld: loss %g of a target that is %g below the top", r, v, row.top - c.score(r, t));
    }
}

void check_loss_grad(const Case &c, const Result &got) {
    const int64_t n = c.shape.n;
    Case f;
    borrow_scores(c, f, ANYMAX_FORWARD);
    if (c.dtype > ANYMAX_F64) {  // the probabilities with more digits than the result has
        f.dtype = ANYMAX_F32;
        f.x.make(f.shape, f.dtype, f.x.layout);
        for (int64_t r = 0; r < f.shape.rows(); r++)
            for (int64_t i = 0; i < n; i++) f.x.set(r, i, c.score(r, i));
    }
    const Result p = perform(f, How{-1, 1, 0, -1});
    for (int64_t r = 0; r < c.shape.rows(); r++) {
        const Row row = look(c, r);
        const int64_t t = c.target(r);
        const double scale = decode(c.scale.data + r * size_of(c.wide()), c.wide());
        for (int64_t i = 0; i < n; i++) {
            const double v = number(got.out[r * n + i], c.dtype);
            if (t < 0 ? v != 0.0 : (t >= n || (row.bad && !c.wild)) && v == v)
                fail("row %ld, class %ld, target %ld: gradient %g", r, i, t, v);
            if (t < 0 || t >= n || row.bad || c.wild) continue;
            const double want = scale * (number(p.out[r * n + i], f.dtype) - (i == t ? 1.0 : 0.0));
            const double bound = (c.dtype == ANYMAX_F64 ? 1e-12 : c.dtype == ANYMAX_F32 ? 2e-5 : slack(c, 0)) * fabs(scale);
            if (!(fabs(v - want) <= bound)) fail("row %ld, class %ld, target %ld: gradient %.9g, not %.9g", r, i, t, v, want);
        }
    }
}

void check_threshold(const Case &c, const Result &got) {
    const int64_t n = c.shape.n;
    for (int64_t r = 0; r < c.shape.rows(); r++) {
        const Row row = look(c, r);
        const double tau = number(got.tau[r], c.wide());
        if (c.wild) continue;
        if (row.bad ? tau == tau : row.count == 0 ? tau != -INF : tau != tau) fail("row %ld: threshold %g", r, tau);
        if (row.bad || row.count == 0 || row.top - row.bottom > 1e30 || fabs(row.top) > 1e30) continue;
        if (!(fabs(tau) < INF)) fail("row %ld: threshold %g", r, tau);
        const double digits = (c.dtype == ANYMAX_F64 ? 1e-13 : 1e-6) * (1.0 + fabs(row.top));
        long double sum = 0.0;
        if (c.softmax(r)) {
            for (int64_t i = 0; i < n; i++) sum += exp(c.score(r, i) - row.top);
            const double want = row.top + (double)logl(sum);
            if (!(fabs(want - tau) <= digits * 4.0)) fail("row %ld: logsumexp %.17g, not %.17g", r, tau, want);
        } else if (c.map == ANYMAX_SPARSEMAX) {
            for (int64_t i = 0; i < n; i++) sum += std::max(c.score(r, i) - tau, 0.0);
            if (!(fabs((double)sum - 1.0) <= digits * (double)n * 4.0))
                fail("row %ld: above the threshold %.17g there is %.17g", r, tau, (double)sum);
        }
    }
}

void check_largest(const Case &c, const Result &got) {
    const int64_t n = c.shape.n, k = c.k;
    std::vector<int64_t> order((size_t)n);
    for (int64_t r = 0; r < c.shape.rows(); r++) {
        const Row row = look(c, r);
        std::iota(order.begin(), order.end(), 0);
        if (!row.bad)
            std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return c.score(r, a) > c.score(r, b); });
        for (int64_t i = 0; i < k; i++) {
            const int64_t at = (int64_t)got.positions[r * k + i];
            const double v = number(got.out[r * k + i], c.dtype);
            if (at != order[(size_t)i]) fail("row %ld: number %ld of the largest is %ld, not %ld", r, i, at, order[(size_t)i]);
            if (row.bad ? v == v : v != c.score(r, at)) fail("row %ld: number %ld of the largest is %g", r, i, v);
        }
    }
}

void check(const Case &c, const Result &got) {
    switch (c.op) {
        case ANYMAX_FORWARD: return check_forward(c, got);
        case ANYMAX_LOG: return check_log(c, got);
        case ANYMAX_VJP:
        case ANYMAX_LOG_VJP: return check_vjp(c, got);
        case ANYMAX_LOSS: return check_loss(c, got);
        case ANYMAX_LOSS_GRAD: return check_loss_grad(c, got);
        case ANYMAX_THRESHOLD: return check_threshold(c, got);
        case ANYMAX_SLOPE: return check_slope(c, got);
        default: return check_largest(c, got);
    }
}

// -- the same again, otherwise ----------------------------------------------------------------------

int64_t made[ANYMAX_OPS][ANYMAX_MAPS], calls = 0;

Result counted(const Case &c, const How &how) {
    calls++;
    return perform(c, how);
}

void compare(const Result &a, const Result &b, int64_t skip, const char *what) {
    const std::string where = difference(a, b, skip);
    if (!where.empty()) fail("%s: %s", what, where.c_str());
}

void poison(Operand &o, int64_t row) {
    if (!o.block.data || o.dtype < 0) return;
    for (int64_t i = 0; i < o.shape.n; i++) o.set(row, i, NaN);
}

void again(Random &random, Case &c, const Result &first) {
    const int64_t rows = c.shape.rows();
    if (rows == 0) return;
    if (random.chance(0.6)) {
        const How how{0, 1 + (int)random.below(3), 0, -1};
        compare(first, counted(c, how), -1, "with another number of threads");
    }
    if (random.chance(0.3)) {
        const How how{0, 2, 1 + (int)random.below(2), -1};
        compare(first, counted(c, how), -1, "written bypassing the caches");
    }
    if (c.to_rows() && c.op != ANYMAX_LARGEST && random.chance(0.3)) {
        const How how{0, 2, (int)random.below(3), -1, true};
        compare(first, counted(c, how), -1, "written into zeros");
    }
    // The nucleus may end a class sooner or later where its mass is p but for rounding, and polynomials of high order lose
    // digits below 0.
    const bool alike = c.map != ANYMAX_TOPP && !(c.map == ANYMAX_TAYLOR && c.param > 16.0);
    if (c.op == ANYMAX_FORWARD && !c.wild && alike && random.chance(0.2)) {
        const std::string isa = anymax_isa();
        for (const std::string &other : isas()) {
            anymax_set_isa(other.c_str());
            const Result got = counted(c, How{-1, 1, 0, -1});
            for (size_t i = 0; i < got.out.size(); i++) {
                const double a = number(first.out[i], c.dtype), b = number(got.out[i], c.dtype);
                if (!(fabs(a - b) <= 8.0 * slack(c, 0)) && !(a != a && b != b))
                    fail("row %ld, class %ld: %.17g by %s, %.17g by %s", (long)i / c.shape.n, (long)i % c.shape.n, a,
                         isa.c_str(), b, other.c_str());
            }
        }
        anymax_set_isa(isa.c_str());
    }
    if (random.chance(0.4)) {
        const int64_t row = random.below(rows);
        const Result one = counted(c, How{-1, 1, 0, row});
        Result want = first;
        const auto keep = [&](std::vector<uint64_t> &v, int64_t width) {
            for (size_t i = 0; i < v.size(); i++)
                if ((int64_t)i / width != row) v[i] = 0;
        };
        keep(want.out, want.width), keep(want.value, 1), keep(want.tau, 1), keep(want.slope, 1),
            keep(want.positions, want.width), keep(want.count, 1);
        keep(want.index, want.capacity), keep(want.saved, want.capacity);
        compare(want, one, -1, "the row alone");
    }
    if (rows > 1 && random.chance(0.4) && !c.x.shared() && !c.p.shared() && !c.g.shared()) {
        const int64_t row = random.below(rows);
        poison(c.x, row), poison(c.p, row), poison(c.g, row);
        compare(first, counted(c, How{0, 2, 0, -1}), row, "beside a poisoned row");
    }
}

void short_calls(const Case &c, const Result &first, Random &random) {
    if (c.shape.rows() == 0 || c.shape.inner != 1 || c.mask.block.data || !c.per_row.empty() || c.in_place ||
        c.map == ANYMAX_PERTURB || c.map == ANYMAX_BOUNDED)
        return;
    if ((c.op != ANYMAX_FORWARD && c.op != ANYMAX_LOG) || c.saves) return;
    if (c.x.layout.outer != c.shape.n || c.x.layout.cls != 1 || c.out.outer != c.shape.n || c.out.cls != 1) return;
    const int64_t code = c.op | c.map << 8 | c.dtype << 16 | random.below(2) << 24;
    Operand out;
    out.make(c.shape, c.dtype, c.out, 0xa5);
    calls++;
    const int said = anymax_rows(code, c.x.view().data, out.view().data, c.shape.rows(), c.shape.n, c.param);
    if (c.map == ANYMAX_BUDGET && !(c.param <= (double)c.shape.n)) {
        if (said != ANYMAX_BAD_PARAM) fail("the short call took a budget of %g for %ld classes", c.param, (long)c.shape.n);
        return;
    }
    if (said) fail("the short call was refused: %s", anymax_error(said));
    for (int64_t r = 0; r < c.shape.rows(); r++)
        for (int64_t i = 0; i < c.shape.n; i++)
            if (bits_of(out.place(r, i), c.dtype) != first.out[r * c.shape.n + i])
                fail("the short call differs in row %ld, class %ld", r, i);
}

// What XLA lends: threads that take a task now, or a queue that is emptied when the call is over; it may refuse one.
struct Lender {
    std::mutex lock;
    std::condition_variable wake;
    std::deque<std::pair<void (*)(void *), void *>> tasks;
    std::vector<std::thread> team;
    bool over = false;
    int refuses = 1 << 30;

    explicit Lender(int workers) {
        for (int i = 0; i < workers; i++)
            team.emplace_back([this] {
                std::unique_lock<std::mutex> held(lock);
                for (;;) {
                    wake.wait(held, [this] { return over || !tasks.empty(); });
                    if (tasks.empty()) return;
                    const auto one = tasks.front();
                    tasks.pop_front();
                    held.unlock();
                    one.first(one.second);
                    held.lock();
                }
            });
    }
    ~Lender() {
        {
            std::lock_guard<std::mutex> held(lock);
            over = true;
        }
        wake.notify_all();
        for (auto &t : team) t.join();
        for (const auto &one : tasks) one.first(one.second);
    }
    static xla_error *schedule(xla_schedule_args *a) {
        Lender *l = (Lender *)a->context;
        std::lock_guard<std::mutex> held(l->lock);
        if (l->refuses-- == 0) return (xla_error *)new int(0);
        l->tasks.emplace_back(a->task, a->data);
        l->wake.notify_one();
        return nullptr;
    }
    static xla_error *threads(xla_threads_args *a) { return *a->count = 4, nullptr; }
    static void destroy(xla_error_destroy_args *a) { delete (int *)a->error; }
    static xla_error *create(xla_error_args *a) { fail("XLA is told: %s", a->message); }
};

bool known_to_xla(const Case &c) {
    return c.op == ANYMAX_FORWARD && c.map != ANYMAX_BOUNDED && !c.mask.block.data && !c.saves && c.shape.rows() > 0;
}

// A forward pass as XLA calls for it.
void by_xla(const Case &c, const Result &want, Lender &lender) {
    Case plain;
    borrow_scores(c, plain, c.op);
    Operand out;
    out.make(c.shape, c.dtype, plain.out, 0xa5);
    int64_t dims[2] = {c.shape.rows(), c.shape.n}, rows[1] = {c.shape.rows()};
    const int32_t dtypes[] = {XLA_F32, XLA_F64, XLA_BF16, XLA_F16};
    xla_buffer x{sizeof x, nullptr, dtypes[c.dtype], plain.x.block.data, 2, dims},
        p{sizeof p, nullptr, dtypes[c.dtype], out.block.data, 2, dims};
    xla_buffer params{sizeof params, nullptr, XLA_F64, plain.params.data, 1, rows};
    int32_t buffers[] = {XLA_IS_BUFFER, XLA_IS_BUFFER},
            scalars[] = {XLA_IS_SCALAR, XLA_IS_SCALAR, XLA_IS_SCALAR, XLA_IS_SCALAR, XLA_IS_SCALAR, XLA_IS_SCALAR};
    void *operands[] = {&x, &params}, *results[] = {&p};
    int64_t values[] = {c.map, c.nodes, c.noise, c.op, 0, c.params.data ? 1 : 0};
    memcpy(&values[4], &c.param, 8);
    xla_text names[] = {{"map", 3}, {"nodes", 5}, {"noise", 5}, {"op", 2}, {"param", 5}, {"per_row", 7}}, *name[6];
    xla_scalar scalar[6];
    void *items[6];
    for (int i = 0; i < 6; i++) name[i] = &names[i], scalar[i] = xla_scalar{XLA_S64, &values[i]}, items[i] = &scalar[i];
    xla_api api;
    memset(&api, 0, sizeof api);
    api.size = sizeof api, api.error_create = Lender::create, api.error_destroy = Lender::destroy,
    api.schedule = Lender::schedule, api.threads = Lender::threads;
    xla_call call{sizeof call,
                  nullptr,
                  &api,
                  (xla_context *)&lender,
                  XLA_EXECUTE,
                  {sizeof(xla_list), nullptr, c.params.data ? 2 : 1, buffers, operands},
                  {sizeof(xla_list), nullptr, 1, buffers, results},
                  {sizeof(xla_attributes), nullptr, 6, scalars, name, items}};
    if (anymax_xla(&call)) fail("XLA's call was refused");
    for (int64_t r = 0; r < c.shape.rows(); r++)
        for (int64_t i = 0; i < c.shape.n; i++)
            if (bits_of(out.place(r, i), c.dtype) != want.out[r * c.shape.n + i])
                fail("XLA's call differs in row %ld, class %ld", r, i);
}

// -- linear attention -------------------------------------------------------------------------------

// Random heads and their gradients, against the whole matrix in doubles; and the same bits however the work is shared out.
template <class C>
void linear_heads(Random &random, const std::string &isa) {
    anymax_linear_call c;
    memset(&c, 0, sizeof c);
    const int64_t most = random.chance(0.1) ? 400 : 30;
    c.dtype = sizeof(C) == 8 ? ANYMAX_F64 : ANYMAX_F32, c.causal = random.chance(0.5);
    c.heads = 1 + random.below(3), c.groups = 1 + random.below(2), c.queries = random.below(most), c.keys = random.below(most);
    c.d = random.below(random.chance(0.2) ? 70 : 12), c.dv = random.below(random.chance(0.2) ? 70 : 20),
    c.scale = random.real(-1.0, 1.0);
    Block q, k, v, lengths;
    const auto made_of = [&](Block &to, int64_t count) {
        to.make(count * (int64_t)sizeof(C), 0);
        for (int64_t i = 0; i < count; i++) ((C *)to.data)[i] = (C)random.normal();
    };
    made_of(q, c.heads * c.groups * c.queries * c.d), made_of(k, c.heads * c.keys * c.d), made_of(v, c.heads * c.keys * c.dv);
    const int64_t lost =
        c.queries && c.d && random.chance(0.3) ? random.below(c.heads * c.groups * c.queries) : -1;  // a query that is poisoned
    if (lost >= 0) ((C *)q.data)[lost * c.d + random.below(c.d)] = (C)random.pick({NaN, INF});
    lengths.make(c.heads * 8, 0);
    for (int64_t h = 0; h < c.heads; h++) ((int64_t *)lengths.data)[h] = random.below(c.keys + 1);
    c.q = q.data, c.k = k.data, c.v = v.data;
    if (random.chance(0.3)) c.lengths = (const int64_t *)lengths.data;
    snprintf(words + strlen(words), sizeof words - strlen(words),
             "; linear attention by %s, %s: %ld heads, %ld groups, %ld queries, %ld keys, d %ld, dv %ld%s%s", isa.c_str(),
             DTYPE[c.dtype], (long)c.heads, (long)c.groups, (long)c.queries, (long)c.keys, (long)c.d, (long)c.dv,
             c.causal ? ", causal" : "", c.lengths ? ", with lengths" : "");
    Block first;
    for (int turn = 0; turn < 3; turn++) {
        Block out;
        out.make(c.heads * c.groups * c.queries * c.dv * (int64_t)sizeof(C), 0x5a);
        c.out = out.data, c.pool = turn ? 0 : -1, c.threads = turn ? (int32_t)(1 + random.below(4)) : 1;
        anymax_set_num_threads(c.threads);
        calls++;
        if (const int code = anymax_linear(&c)) fail("the call was refused: %s", anymax_error(code));
        if (turn && !first.is(out.copy())) fail("the work was shared out, and the result differs");
        if (!turn) first = std::move(out);
        if (!turn)
            for (int64_t i = 0; i < first.size / (int64_t)sizeof(C); i++)
                digest_of(bits_of(first.data + i * (int64_t)sizeof(C), c.dtype));
    }
    // The gradients of sums of out g, in doubles, each with the sum of the magnitudes of what it adds up.
    const int64_t rows = c.heads * c.groups * c.queries;
    Block g, below;
    made_of(g, rows * c.dv);
    below.make(rows * (int64_t)sizeof(C), 0x5a);
    c.g = g.data, c.below = below.data, c.out = first.data;
    if (const int code = anymax_linear(&c)) fail("the call for the denominators was refused: %s", anymax_error(code));
    Block made[3];
    const int64_t sizes[] = {q.size, k.size, v.size};
    for (int turn = 0; turn < 2; turn++) {
        Block now[3];
        for (int i = 0; i < 3; i++) now[i].make(sizes[i], 0x5a);
        c.dq = now[0].data, c.dk = now[1].data, c.dv_ = now[2].data, c.pool = turn ? 0 : -1,
        c.threads = turn ? (int32_t)(1 + random.below(4)) : 1;
        anymax_set_num_threads(c.threads);
        calls++;
        if (const int code = anymax_linear_vjp(&c)) fail("the gradient was refused: %s", anymax_error(code));
        for (int i = 0; i < 3; i++) {
            if (turn && !made[i].is(now[i].copy())) fail("the work was shared out, and gradient %d differs", i);
            if (!turn) made[i] = std::move(now[i]);
        }
        for (int i = 0; !turn && i < 3; i++)
            for (int64_t j = 0; j < sizes[i] / (int64_t)sizeof(C); j++)
                digest_of(bits_of(made[i].data + j * (int64_t)sizeof(C), c.dtype));
    }
    std::vector<double> want[3], size[3];
    for (int i = 0; i < 3; i++) want[i].resize((size_t)sizes[i] / sizeof(C)), size[i].resize((size_t)sizes[i] / sizeof(C));
    const auto at = [](const void *data, int64_t i) { return (double)((const C *)data)[i]; };
    const double digits = sizeof(C) == 8 ? 1e-13 : 1e-5;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t h = row / (c.groups * c.queries), there = c.lengths ? c.lengths[h] : c.keys,
                      seen = c.causal && row % c.queries < there ? row % c.queries + 1 : there;
        std::vector<double> sum((size_t)c.dv), big((size_t)c.dv), s((size_t)seen), steep((size_t)seen);
        double total = 0.0, most = 0.0;
        for (int64_t l = 0; l < seen; l++) {
            const int64_t key = h * c.keys + l;
            for (int64_t i = 0; i < c.d; i++) {
                const double product = c.scale * at(c.q, row * c.d + i) * at(c.k, key * c.d + i);
                s[(size_t)l] += product, steep[(size_t)l] += fabs(product);
            }
            const double w = 1.0 + s[(size_t)l] * (1.0 + 0.5 * s[(size_t)l]),
                         all = 1.0 + steep[(size_t)l] * (1.0 + 0.5 * steep[(size_t)l]);
            total += w, most += all;
            for (int64_t e = 0; e < c.dv; e++)
                sum[(size_t)e] += w * at(c.v, key * c.dv + e), big[(size_t)e] += all * fabs(at(c.v, key * c.dv + e));
        }
        double mean = 0.0, mean_big = 0.0;  // of g out
        for (int64_t e = 0; e < c.dv; e++) {
            const double got = at(first.data, row * c.dv + e), mine = seen ? sum[(size_t)e] / total : 0.0;
            if (row == lost ? seen && !std::isnan(got)
                            : !(fabs(got - mine) <= digits * (big[(size_t)e] + fabs(mine) * most) / (seen ? total : 1.0)))
                fail("row %ld, value %ld: %.9g, and not %.9g", (long)row, (long)e, got, mine);
            mean += mine * at(c.g, row * c.dv + e),
                mean_big += (seen ? (big[(size_t)e] + fabs(mine) * most) / total : 0.0) * fabs(at(c.g, row * c.dv + e));
        }
        for (int64_t l = 0; l < seen; l++) {
            const int64_t key = h * c.keys + l;
            const double w = 1.0 + s[(size_t)l] * (1.0 + 0.5 * s[(size_t)l]),
                         all = 1.0 + steep[(size_t)l] * (1.0 + 0.5 * steep[(size_t)l]), over = most / total;
            double dw = -mean, dw_big = mean_big;
            for (int64_t e = 0; e < c.dv; e++) {
                const double by = at(c.g, row * c.dv + e), value = at(c.v, key * c.dv + e);
                dw += by * value, dw_big += fabs(by * value);
                want[2][(size_t)(key * c.dv + e)] += w / total * by,
                    size[2][(size_t)(key * c.dv + e)] += all / total * over * fabs(by);
            }
            const double ds = dw / total * (1.0 + s[(size_t)l]) * c.scale,
                         ds_big = dw_big / total * over * (1.0 + steep[(size_t)l]) * fabs(c.scale);
            for (int64_t i = 0; i < c.d; i++) {
                want[0][(size_t)(row * c.d + i)] += ds * at(c.k, key * c.d + i),
                    size[0][(size_t)(row * c.d + i)] += ds_big * fabs(at(c.k, key * c.d + i));
                want[1][(size_t)(key * c.d + i)] += ds * at(c.q, row * c.d + i),
                    size[1][(size_t)(key * c.d + i)] += ds_big * fabs(at(c.q, row * c.d + i));
            }
        }
    }
    for (int i = 0; i < 3; i++)
        for (size_t j = 0; j < want[i].size(); j++)
            if (!std::isnan(want[i][j]) && lost < 0 &&
                !(fabs(at(made[i].data, (int64_t)j) - want[i][j]) <= 4.0 * digits * (1e-3 * (size[i][j] > 0.0) + size[i][j])))
                fail("gradient %d, entry %ld: %.9g, and not %.9g", i, (long)j, at(made[i].data, (int64_t)j), want[i][j]);
}

// -- truncations and draws --------------------------------------------------------------------------

// Random rows, steps and a map: what is left is never empty where a row has a class, holds what is drawn, is as many as the k
// largest say, and is the same however the work is shared out and whatever a neighbour holds.
void decoded(Random &random, const std::string &isa) {
    anymax_decode_call c;
    memset(&c, 0, sizeof c);
    c.dtype = (int32_t)random.below(4), c.rows = 1 + random.below(6), c.n = 1 + random.below(random.chance(0.2) ? 20000 : 300),
    c.draws = 1 + random.below(3);
    c.stride = c.n, c.map = random.pick({(int32_t)ANYMAX_SOFTMAX, (int32_t)ANYMAX_SOFTMAX, (int32_t)ANYMAX_SPARSEMAX,
                                         (int32_t)ANYMAX_ENTMAX, (int32_t)ANYMAX_TOPP});
    c.param = c.map == ANYMAX_ENTMAX ? random.real(1.01, 2.5) : 0.9;
    Block x, u;
    x.make(c.rows * c.n * size_of(c.dtype), 0), u.make(c.rows * c.draws * 8, 0);
    const bool ties = random.chance(0.3);
    for (int64_t i = 0; i < c.rows * c.n; i++) {
        const double v = random.normal() * 3.0;
        encode(x.data + i * size_of(c.dtype), c.dtype, random.chance(0.05) ? -INF : ties ? floor(v) : v);
    }
    const int64_t lost = random.chance(0.2) ? random.below(c.rows) : -1;
    if (lost >= 0) encode(x.data + (lost * c.n + random.below(c.n)) * size_of(c.dtype), c.dtype, NaN);
    for (int64_t i = 0; i < c.rows * c.draws; i++)
        ((double *)u.data)[i] = random.chance(0.1) ? 0.0 : random.chance(0.1) ? 1.0 - 0x1p-53 : random.real();
    std::vector<anymax_step> steps((size_t)random.below(5));
    int64_t most = c.n;
    for (anymax_step &step : steps) {
        step.kind = (int32_t)random.below(ANYMAX_STEPS), step.least = (int32_t)(random.chance(0.3) ? random.below(8) : 1),
        step.value = random.real(1e-6, 1.0);
        if (step.kind == ANYMAX_TEMPERATURE) step.value = random.chance(0.1) ? 0.0 : random.real(0.1, 3.0);
        if (step.kind == ANYMAX_LARGEST_SCORES)
            step.value = (double)(1 + random.below(c.n)),
            most = std::min<int64_t>(most, std::max<int64_t>((int64_t)step.value, step.least));
        if (step.kind == ANYMAX_DEVIATIONS) step.value *= 4.0;
    }
    c.steps = steps.data(), c.count = (int64_t)steps.size(), c.x = x.data, c.u = (const double *)u.data;
    snprintf(words + strlen(words), sizeof words - strlen(words), "; %ld steps by %s, %s: %ld rows of %ld", (long)c.count,
             isa.c_str(), DTYPE[c.dtype], (long)c.rows, (long)c.n);
    Block keep, index, log_p, listed, counts;
    for (int turn = 0; turn < 2; turn++) {
        Block k, i, l, classes, sizes;
        k.make(c.rows * c.n, 7), i.make(c.rows * c.draws * 8, 0x5a), l.make(c.rows * c.draws * 8, 0x5a);
        classes.make(c.rows * c.n * 4, 0x5a), sizes.make(c.rows * 8, 0x5a);
        c.keep = (uint8_t *)k.data, c.index = (int64_t *)i.data, c.log_p = (double *)l.data, c.pool = turn ? 0 : -1;
        c.listed = (int32_t *)classes.data, c.counts = (int64_t *)sizes.data;
        anymax_set_num_threads(turn ? (int)(1 + random.below(4)) : 1);
        calls++;
        if (const int code = anymax_decode(&c)) fail("the draw was refused: %s", anymax_error(code));
        if (turn && (!keep.is(k.copy()) || !index.is(i.copy()) || !log_p.is(l.copy())))
            fail("the work was shared out, and the draws differ");
        if (turn && (!listed.is(classes.copy()) || !counts.is(sizes.copy())))
            fail("the work was shared out, and the supports differ");
        if (!turn) keep = std::move(k), index = std::move(i), log_p = std::move(l);
        if (!turn) listed = std::move(classes), counts = std::move(sizes);
    }
    for (int64_t r = 0; r < c.rows; r++) {
        int64_t left = 0, live = 0;
        for (int64_t i = 0; i < c.n; i++) {
            const bool there = decode(x.data + (r * c.n + i) * size_of(c.dtype), c.dtype) != -INF,
                       kept = keep.data[r * c.n + i] == 1;
            if (keep.data[r * c.n + i] & ~1) fail("row %ld: a byte that is no truth value", (long)r);
            if (kept && !there) fail("row %ld keeps a class of -inf", (long)r);
            left += kept, live += there;
        }
        if (r != lost && (live ? left < 1 : left)) fail("row %ld of %ld classes has %ld left", (long)r, (long)live, (long)left);
        if (r != lost && left > most) fail("row %ld has %ld left, and not at most %ld", (long)r, (long)left, (long)most);
        const int32_t *const support = (const int32_t *)listed.data + r * c.n;
        const int64_t size = ((int64_t *)counts.data)[r];
        if (size < 0 || size > left || ((r == lost || !live) && size)) fail("row %ld lists %ld classes", (long)r, (long)size);
        for (int64_t k = 0; k < size && size < c.n; k++)
            if (support[k] < 0 || support[k] >= c.n || keep.data[r * c.n + support[k]] != 1 ||
                (k && support[k - 1] >= support[k]))
                fail("row %ld lists the class %ld", (long)r, (long)support[k]);
        for (int64_t d = r * c.draws; d < (r + 1) * c.draws; d++) {
            const int64_t drawn = ((int64_t *)index.data)[d];
            const double log_of = ((double *)log_p.data)[d];
            if (r == lost || !live) {
                if (drawn != -1) fail("row %ld has no class to draw, and %ld was", (long)r, (long)drawn);
                continue;
            }
            if (drawn < 0 || drawn >= c.n || keep.data[r * c.n + drawn] != 1)
                fail("row %ld: the class %ld is not left, and was drawn", (long)r, (long)drawn);
            if (size < c.n && !std::binary_search(support, support + size, (int32_t)drawn))
                fail("row %ld: the class %ld is not listed, and was drawn", (long)r, (long)drawn);
            if (!(log_of <= 1e-6) || log_of == -INF) fail("row %ld: log p %g", (long)r, log_of);
        }
    }
}

// -- ragged rows ------------------------------------------------------------------------------------

// Random segments, heads, layouts and orders: each row is what a call of it alone makes, to the last bit, however many threads
// share the work.
void ragged(Random &random, const std::string &isa) {
    anymax_call c;
    memset(&c, 0, sizeof c);
    c.map = (int32_t)random.below(ANYMAX_BOUNDED), c.dtype = (int32_t)random.below(4);  // all but Bounded, the last
    const MapRow &map = MAPS[c.map];
    std::vector<int32_t> ops = {ANYMAX_FORWARD, ANYMAX_FORWARD, ANYMAX_VJP};
    if (map.log) ops.insert(ops.end(), {ANYMAX_LOG, ANYMAX_LOG_VJP});
    if (has_loss(c.map)) ops.insert(ops.end(), {ANYMAX_LOSS, ANYMAX_LOSS_GRAD, ANYMAX_THRESHOLD});
    if (map.slope) ops.insert(ops.end(), {ANYMAX_SLOPE, ANYMAX_LOSS});
    c.op = ops[(size_t)random.below((int64_t)ops.size())];
    c.param = c.map == ANYMAX_TAYLOR                              ? 2.0
              : c.map == ANYMAX_TOPK                              ? (double)(1 + random.below(6))
              : c.map == ANYMAX_TOPP                              ? 0.9
              : c.map == ANYMAX_BUDGET || c.map == ANYMAX_PERTURB ? 1.0
                                                                  : random.pick({1.5, 2.0, 1.25, random.real(1.05, 3.0)});
    c.noise = (int32_t)random.below(5), c.nodes = 32;
    c.outer = random.below(14),
    c.inner = random.pick({(int64_t)1, (int64_t)1, (int64_t)2, (int64_t)3, (int64_t)4, (int64_t)8, (int64_t)17});
    const int64_t size = size_of(c.dtype), wide = c.dtype == ANYMAX_F64 ? 8 : 4, heads = c.inner, rows = c.outer * heads;
    std::vector<int64_t> ptr = {0};
    const int64_t usual = 1 + random.below(c.map == ANYMAX_PERTURB ? 12 : 70);
    for (int64_t s = 0; s < c.outer; s++)
        ptr.push_back(ptr.back() + (random.chance(0.2)                              ? 0
                                    : random.chance(0.5)                            ? usual
                                    : random.chance(0.1) && c.map != ANYMAX_PERTURB ? random.below(3000)
                                                                                    : random.below(usual + 20)));
    c.n = ptr.back();
    std::vector<int64_t> order((size_t)c.n);
    std::iota(order.begin(), order.end(), 0);
    const bool mixed = random.chance(0.4);
    for (int64_t e = c.n; mixed && e > 1; e--) std::swap(order[(size_t)e - 1], order[(size_t)random.below(e)]);
    const bool across = random.chance(0.3), row_params = map.per_row && random.chance(0.3);  // heads one after another
    const int64_t pad = random.chance(0.3) ? 3 : 0, cls = across ? 1 : heads + pad, inner = across ? c.n + pad : 1;
    const int64_t places = c.n && rows ? (c.n - 1) * cls + (heads - 1) * inner + 1 : 0;
    Block x, p, g, out, index, scale, result, slope, params;
    for (Block *b : {&x, &p, &g}) {
        b->make(places * size, 0);
        for (int64_t i = 0; i < places; i++)
            encode(b->data + i * size, c.dtype, random.chance(0.03) && b == &x ? -INF : random.normal() * 2.0);
    }
    out.make(places * size, 0xa5), index.make(rows * 8, 0), scale.make(rows * wide, 0), result.make(rows * wide, 0xa5),
        slope.make(rows * wide, 0xa5), params.make(rows * 8, 0);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t n = ptr[(size_t)(r / heads) + 1] - ptr[(size_t)(r / heads)];
        ((int64_t *)index.data)[r] = n && random.chance(0.9) ? random.below(n) : -1;
        encode(scale.data + r * wide, wide == 8 ? ANYMAX_F64 : ANYMAX_F32, random.real(0.1, 2.0));
        ((double *)params.data)[r] = c.map == ANYMAX_TOPP     ? random.real(0.3, 1.0)
                                     : c.map == ANYMAX_BUDGET ? 1.0
                                                              : random.pick({1.5, 2.0, random.real(1.05, 3.0)});
    }
    const auto view = [&](Block &b) { return anymax_view{b.data, 0, inner, cls}; };
    const bool backward = c.op == ANYMAX_VJP || c.op == ANYMAX_LOG_VJP || c.op == ANYMAX_SLOPE,
               to_rows = c.op != ANYMAX_LOSS && c.op != ANYMAX_THRESHOLD && c.op != ANYMAX_SLOPE;
    c.params = row_params && c.op != ANYMAX_LOG && c.op != ANYMAX_LOG_VJP ? (const double *)params.data : nullptr;
    if (c.op != ANYMAX_SLOPE) c.x = view(x);
    if (backward) c.p = view(p), c.g = view(g);
    if (to_rows) c.out = view(out);
    if (c.op == ANYMAX_LOSS || c.op == ANYMAX_LOSS_GRAD) c.index = (const int64_t *)index.data;
    if (c.op == ANYMAX_LOSS_GRAD) c.scale = scale.data;
    if (c.op == ANYMAX_LOSS || c.op == ANYMAX_SLOPE) c.value = result.data;
    if (c.op == ANYMAX_LOSS && MAPS[c.map].slope && random.chance(0.5)) c.slope = slope.data;
    if (c.op == ANYMAX_THRESHOLD) c.tau = result.data;
    const std::vector<int64_t> bounds = ptr;  // of exactly their sizes
    anymax_segments segments{bounds.data(), mixed && c.n ? order.data() : nullptr, nullptr};
    Block kept, nothing;
    if (segments.order && (c.op == ANYMAX_FORWARD || c.op == ANYMAX_VJP || c.op == ANYMAX_SLOPE) && random.chance(0.5)) {
        kept.make(c.n * heads * size, 0xa5), segments.kept = kept.data;
        for (int64_t i = 0; c.op != ANYMAX_FORWARD && i < c.n * heads; i++)
            memcpy(kept.data + i * size, p.data + (order[(size_t)(i / heads)] * cls + i % heads * inner) * size, (size_t)size);
        if (c.op != ANYMAX_FORWARD) nothing.make(places * size, 0), c.p = view(nothing);
    }
    snprintf(words + strlen(words), sizeof words - strlen(words),
             "; segments by %s, op %d, map %d, %s: %ld of %ld heads, %ld entries", isa.c_str(), c.op, c.map, DTYPE[c.dtype],
             (long)c.outer, (long)heads, (long)c.n);
    c.pool = random.chance(0.5) ? 0 : -1;
    anymax_set_num_threads((int)(1 + random.below(4)));
    calls++;
    if (const int code = anymax_run_segments(&c, &segments)) fail("the segments were refused: %s", anymax_error(code));
    std::vector<bool> written((size_t)places, false);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t s = r / heads, h = r % heads, first = ptr[(size_t)s], n = ptr[(size_t)s + 1] - first;
        const auto place = [&](int64_t k) { return order[(size_t)(first + k)] * cls + h * inner; };
        const char *each = result.data + r * wide;
        const int32_t kind = wide == 8 ? ANYMAX_F64 : ANYMAX_F32;
        if (!n) {
            const double empty = c.op == ANYMAX_THRESHOLD ? -INF : 0.0;
            if (!to_rows && decode(each, kind) != empty)
                fail("segment %ld has no entry and the number %g", (long)s, decode(each, kind));
            if (c.slope && decode(slope.data + r * wide, kind) != 0.0)
                fail("segment %ld has no entry and the slope %g", (long)s, decode(slope.data + r * wide, kind));
            continue;
        }
        Block rx, rp, rg, rout;
        for (auto [to, from] : {std::pair<Block *, Block *>{&rx, &x}, {&rp, &p}, {&rg, &g}}) {
            to->make(n * size, 0);
            for (int64_t k = 0; k < n; k++) memcpy(to->data + k * size, from->data + place(k) * size, (size_t)size);
        }
        rout.make(n * size, 0xa5);
        char number[8] = {}, own_slope[8] = {};
        anymax_call one = c;
        one.outer = one.inner = 1, one.n = n, one.pool = -1;
        const auto row = [&](const anymax_view &v, Block &b) { return v.data ? anymax_view{b.data, n, 0, 1} : anymax_view{}; };
        one.x = row(c.x, rx), one.p = row(c.p, rp), one.g = row(c.g, rg), one.out = row(c.out, rout);
        if (one.params) one.params += r;
        if (one.index) one.index += r;
        if (one.scale) one.scale = scale.data + r * wide;
        if (one.value) one.value = number;
        if (one.tau) one.tau = number;
        if (one.slope) one.slope = own_slope;
        calls++;
        if (const int code = anymax_run(&one)) fail("row %ld alone was refused: %s", (long)r, anymax_error(code));
        if (!to_rows && bits_of(each, kind) != bits_of(number, kind))
            fail("row %ld is %.9g, and alone %.9g", (long)r, decode(each, kind), decode(number, kind));
        if (c.slope && bits_of(slope.data + r * wide, kind) != bits_of(own_slope, kind))
            fail("the slope of row %ld is %.9g, and alone %.9g", (long)r, decode(slope.data + r * wide, kind),
                 decode(own_slope, kind));
        for (int64_t k = 0; to_rows && k < n; k++) {
            written[(size_t)place(k)] = true;
            const char *got = out.data + place(k) * size;
            if (segments.kept && c.op == ANYMAX_FORWARD &&
                memcmp(kept.data + ((first + k) * heads + h) * size, got, (size_t)size))
                fail("entry %ld of row %ld is kept as another", (long)k, (long)r);
            if (bits_of(got, c.dtype) != bits_of(rout.data + k * size, c.dtype))
                fail("entry %ld of row %ld is %.9g, and alone %.9g", (long)k, (long)r, decode(got, c.dtype),
                     decode(rout.data + k * size, c.dtype));
        }
    }
    for (int64_t i = 0; i < places * size; i++)
        if (!written[(size_t)(i / size)] && out.data[i] != (char)0xa5)
            fail("byte %ld between the entries was written", (long)i);
    // what must be refused
    if (c.outer && c.n && rows) {
        std::vector<int64_t> wrong = ptr;
        wrong[(size_t)random.below((int64_t)wrong.size())] += random.chance(0.5) ? c.n + 1 : -c.n - 1;
        const anymax_segments bad{wrong.data(), segments.order, nullptr};
        if (anymax_run_segments(&c, &bad) == 0) fail("bounds that don't ascend were served");
        if (mixed) {
            order[(size_t)random.below(c.n)] = random.chance(0.5) ? c.n : -1;
            const anymax_segments strange{bounds.data(), order.data(), nullptr};
            if (anymax_run_segments(&c, &strange) == 0) fail("an order with an entry out of range was served");
        }
    }
}

// -- orders, choices, Sinkhorn, tables, an index ----------------------------------------------------

// `to` becomes what `call` writes to it, the same bits by one thread and by several.
template <class F>
void twice(Random &random, Block &to, int64_t bytes, const char *what, F call) {
    Block other;
    for (int turn = 0; turn < 2; turn++) {
        Block &now = turn ? other : to;
        now.make(bytes, 0x5a);
        anymax_set_num_threads(turn ? (int)(1 + random.below(4)) : 1);
        calls++;
        if (const int code = call(now.data, turn ? 0 : -1)) fail("%s: refused: %s", what, anymax_error(code));
    }
    if (!to.is(other.copy())) fail("%s: the work was shared out, and the result differs", what);
}

template <class C>
void random_rows(Random &random, Block &to, int64_t rows, int64_t n, int64_t lost) {
    to.make(rows * n * (int64_t)sizeof(C), 0);
    const bool ties = random.chance(0.3), masks = random.chance(0.3);
    const double sigma = random.pick({0.1, 3.0, 100.0});
    for (int64_t i = 0; i < rows * n; i++) {
        const double v = random.normal() * sigma;
        ((C *)to.data)[i] = (C)(masks && random.chance(0.2) ? -INF : ties ? floor(v) : v);
    }
    if (lost >= 0) ((C *)to.data)[lost * n + random.below(n)] = (C)random.pick({NaN, INF});
}

template <class C>
void ordered(Random &random, const std::string &isa) {
    anymax_order_call c;
    memset(&c, 0, sizeof c);
    c.dtype = sizeof(C) == 8 ? ANYMAX_F64 : ANYMAX_F32, c.rows = random.below(6),
    c.n = 1 + random.below(random.chance(0.1) ? 5000 : 300);
    if (random.chance(0.005)) c.rows = 1, c.n = SHARED_ROW + random.below(PIECE);
    c.sorted = random.chance(0.5), c.descending = random.chance(0.5), c.kl = random.chance(0.5),
    c.strength = pow(10.0, random.real(-3.0, 2.0));
    const int64_t rows = c.rows, n = c.n, lost = rows && random.chance(0.2) ? random.below(rows) : -1;
    snprintf(words + strlen(words), sizeof words - strlen(words),
             "; an order by %s, %s: %ld rows of %ld, sorted %d, descending %d, kl %d, strength %g", isa.c_str(), DTYPE[c.dtype],
             (long)rows, (long)n, c.sorted, c.descending, c.kl, c.strength);
    Block x, order, out, g, back;
    random_rows<C>(random, x, rows, n, lost), random_rows<C>(random, g, rows, n, -1);
    for (int64_t i = 0; i < rows * n; i++)
        if (!(((C *)g.data)[i] > -INF)) ((C *)g.data)[i] = 0;
    c.x = x.data;
    twice(random, order, rows * n * 4, "the classes in order", [&](char *to, int pool) {
        Block unused;
        unused.make(x.size, 0);
        c.order = (int32_t *)to, c.out = unused.data, c.pool = pool;
        return anymax_order(&c);
    });
    c.order = random.chance(0.5) ? (int32_t *)order.data : nullptr;
    twice(random, out, x.size, "an order", [&](char *to, int pool) { return c.out = to, c.pool = pool, anymax_order(&c); });
    c.order = (int32_t *)order.data, c.p = out.data, c.g = g.data;
    twice(random, back, x.size, "its gradient",
          [&](char *to, int pool) { return c.out = to, c.pool = pool, anymax_order_vjp(&c); });
    const auto at = [n](const Block &b, int64_t r, int64_t i) { return (double)((const C *)b.data)[r * n + i]; };
    for (int64_t r = 0; r < rows; r++) {
        std::vector<char> named((size_t)n);
        int64_t there = 0;
        double most = 0.0, sum = 0.0, sum_of_x = 0.0;
        for (int64_t j = 0; j < n; j++) {
            const uint32_t i = (uint32_t)c.order[r * n + j] & 0x7fffffffu;
            if (i >= (uint64_t)n || named[i]++) fail("row %ld: the order names class %u", (long)r, i);
            if (r == lost) {
                if (at(out, r, j) == at(out, r, j) || at(back, r, j) == at(back, r, j))
                    fail("row %ld is poisoned, and has a number", (long)r);
                continue;
            }
            const double v = at(x, r, j), p = at(out, r, j);
            if (!(fabs(p) < INF)) fail("row %ld, class %ld: %g", (long)r, (long)j, p);
            if (v > -INF) there++, sum_of_x += v, most = std::max(most, fabs(v));
            sum += p;
        }
        if (c.order[r * n] >= 0) fail("row %ld: the first block does not begin at its first place", (long)r);
        if (r == lost || c.kl) continue;
        const double want = c.sorted ? sum_of_x : 0.5 * (double)there * ((double)there + 1.0),
                     size = c.sorted ? most * (double)n + (double)(n * n) / c.strength : (double)(n * n);
        if (!(fabs(sum - want) <= (sizeof(C) == 8 ? 1e-9 : 1e-4) * (1.0 + size)))
            fail("row %ld adds up to %g, not %g", (long)r, sum, want);
        for (int64_t j = 1; j < n && !c.sorted; j++) {
            const int64_t a = c.order[r * n + j - 1] & 0x7fffffff, b = c.order[r * n + j] & 0x7fffffff;
            if (at(x, r, b) > -INF && at(out, r, b) > at(out, r, a) * (1.0 + 1e-5) + 1e-5)
                fail("row %ld: class %ld ranks above class %ld", (long)r, (long)b, (long)a);
        }
    }
    if (!rows) return;
    const int32_t held = c.order[0];
    for (const int32_t wrong : {(int32_t)n, INT32_MIN | (int32_t)n, held & INT32_MAX, -1}) {
        c.order[0] = wrong, c.out = back.data;
        if (anymax_order_vjp(&c) != ANYMAX_BAD_SUPPORT) fail("an order that begins with %d was served", wrong);
    }
}

// Fusedmax: groups have one p each, and x - p - tau is a difference of prices that are at most the strength.
template <class C>
void fused(Random &random, const std::string &isa) {
    anymax_fused_call c;
    memset(&c, 0, sizeof c);
    c.dtype = sizeof(C) == 8 ? ANYMAX_F64 : ANYMAX_F32, c.rows = random.below(6),
    c.n = 1 + random.below(random.chance(0.1) ? 5000 : 300), c.strength_step = random.chance(0.5);
    const int64_t rows = c.rows, n = c.n, lost = rows && random.chance(0.2) ? random.below(rows) : -1;
    std::vector<double> strength((size_t)rows + 1);
    for (double &s : strength) s = random.chance(0.1) ? 0.0 : pow(10.0, random.real(-3.0, 2.0));
    snprintf(words + strlen(words), sizeof words - strlen(words), "; fusedmax by %s, %s: %ld rows of %ld, strength %g",
             isa.c_str(), DTYPE[c.dtype], (long)rows, (long)n, strength[0]);
    Block x, begins, out, g, back, slope;
    random_rows<C>(random, x, rows, n, lost), random_rows<C>(random, g, rows, n, -1);
    for (int64_t i = 0; i < rows * n; i++)
        if (!(((C *)g.data)[i] > -INF)) ((C *)g.data)[i] = 0;
    c.x = x.data, c.strength = strength.data();
    twice(random, begins, rows * n, "the groups", [&](char *to, int pool) {
        Block unused;
        unused.make(x.size, 0);
        c.begins = (uint8_t *)to, c.out = unused.data, c.pool = pool;
        return anymax_fused(&c);
    });
    c.begins = random.chance(0.5) ? (uint8_t *)begins.data : nullptr;
    twice(random, out, x.size, "fusedmax", [&](char *to, int pool) { return c.out = to, c.pool = pool, anymax_fused(&c); });
    c.begins = (uint8_t *)begins.data, c.p = out.data, c.g = g.data;
    slope.make(rows * 8, 0);
    c.slope = random.chance(0.5) ? (double *)slope.data : nullptr;
    twice(random, back, x.size, "its gradient",
          [&](char *to, int pool) { return c.out = to, c.pool = pool, anymax_fused_vjp(&c); });
    const auto at = [n](const Block &b, int64_t r, int64_t i) { return (double)((const C *)b.data)[r * n + i]; };
    for (int64_t r = 0; r < rows; r++) {
        double sum = 0.0, before = 0.0, moved = 0.0;
        bool any = false;
        for (int64_t i = 0; i < n; i++) {
            const double p = at(out, r, i);
            if (r == lost) {
                if (p == p || at(back, r, i) == at(back, r, i)) fail("row %ld is poisoned, and has a number", (long)r);
                continue;
            }
            if (!(p >= 0.0 && p <= 1.0 + 1e-6)) fail("row %ld, class %ld: %g", (long)r, (long)i, p);
            sum += p, moved += at(back, r, i);
            if (!(at(x, r, i) > -INF)) {
                if (p != 0.0 || at(back, r, i) != 0.0) fail("row %ld: the masked class %ld has a number", (long)r, (long)i);
                continue;
            }
            if (any && !c.begins[r * n + i] && p != before)
                fail("row %ld: class %ld has not the p of its group", (long)r, (long)i);
            any = true, before = p;
        }
        const double near = (sizeof(C) == 8 ? 1e-10 : 1e-5) * (double)(1 + n);
        if (r != lost && any && !(fabs(sum - 1.0) <= near)) fail("row %ld adds up to %g", (long)r, sum);
        if (r != lost && !(fabs(moved) <= 1e3 * near)) fail("the gradient of row %ld adds up to %g", (long)r, moved);
    }
    std::vector<char> wrong((size_t)(rows * n), (char)0xff);  // no groups of these rows: nothing breaks
    c.begins = (uint8_t *)wrong.data(), c.out = back.data;
    if (anymax_fused_vjp(&c)) fail("groups that are all of size 1 were refused");
}

// The k largest of each row: with groups only that they are classes, each once.
void chosen(Random &random, const std::string &isa) {
    anymax_choice_call c;
    memset(&c, 0, sizeof c);
    c.dtype = (int32_t)random.below(4), c.rows = random.below(6), c.groups = random.pick<int64_t>({1, 1, 2, 8});
    c.n = c.groups * (1 + random.below(40)), c.kept = 1 + random.below(c.groups), c.most = 1 + random.below(c.n / c.groups),
    c.k = 1 + random.below(c.n);
    snprintf(words + strlen(words), sizeof words - strlen(words),
             "; a choice by %s, %s: %ld rows of %ld, k %ld, %ld of %ld groups, by %ld", isa.c_str(), DTYPE[c.dtype],
             (long)c.rows, (long)c.n, (long)c.k, (long)c.kept, (long)c.groups, (long)c.most);
    Block x, index;
    const int64_t size = size_of(c.dtype);
    x.make(c.rows * c.n * size, 0);
    for (int64_t i = 0; i < c.rows * c.n; i++) {
        const double v = random.normal() * 3.0;
        encode(x.data + i * size, c.dtype,
               random.chance(0.02)    ? -INF
               : random.chance(0.001) ? NaN
               : random.chance(0.3)   ? floor(v)
                                      : v);
    }
    c.x = x.data;
    twice(random, index, c.rows * c.k * 8, "a choice",
          [&](char *to, int pool) { return c.index = (int64_t *)to, c.pool = pool, anymax_choose(&c); });
    for (int64_t r = 0; r < c.rows; r++) {
        const auto score = [&](int64_t i) { return decode(x.data + (r * c.n + i) * size, c.dtype); };
        std::vector<int64_t> order;
        bool bad = false;
        for (int64_t i = 0; i < c.n; i++) bad = bad || score(i) != score(i);
        for (int64_t i = 0; i < c.n && !bad; i++)
            if (score(i) > -INF) order.push_back(i);
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return score(a) > score(b); });
        order.resize((size_t)c.n, -1);
        std::vector<char> named((size_t)c.n);
        for (int64_t j = 0; j < c.k; j++) {
            const int64_t i = ((const int64_t *)index.data)[r * c.k + j];
            if (i < -1 || i >= c.n || (i >= 0 && (bad || score(i) == -INF || named[(size_t)i]++)))
                fail("row %ld: class %ld was chosen", (long)r, (long)i);
            if (c.groups == 1 && i != order[(size_t)j])
                fail("row %ld: choice %ld is %ld, not %ld", (long)r, (long)j, (long)i, (long)order[(size_t)j]);
        }
    }
}

// The sums of columns, which each iteration makes last; gradients alone are to be numbers.
template <class C>
void transported(Random &random, const std::string &isa) {
    anymax_sinkhorn_call c;
    memset(&c, 0, sizeof c);
    c.dtype = sizeof(C) == 8 ? ANYMAX_F64 : ANYMAX_F32, c.count = random.below(40), c.n = 1 + random.below(12),
    c.m = 1 + random.below(12);
    if (random.chance(0.1)) c.count = 1 + random.below(2), c.n = 1 + random.below(150), c.m = 1 + random.below(150);
    c.iterations = 1 + random.below(6), c.temperature = random.pick({0.3, 1.0, 10.0});
    const int64_t entries = c.n * c.m, lost = c.count && random.chance(0.2) ? random.below(c.count) : -1;
    snprintf(words + strlen(words), sizeof words - strlen(words),
             "; Sinkhorn by %s, %s: %ld matrices of %ld x %ld, %ld iterations", isa.c_str(), DTYPE[c.dtype], (long)c.count,
             (long)c.n, (long)c.m, (long)c.iterations);
    Block x, rows, g, out, left;
    x.make(c.count * entries * (int64_t)sizeof(C), 0), rows.make(c.n * (int64_t)sizeof(C), 0), left.make(c.count * 8, 0);
    for (int64_t i = 0; i < c.count * entries; i++) ((C *)x.data)[i] = (C)random.normal();
    if (lost >= 0) ((C *)x.data)[lost * entries + random.below(entries)] = (C)random.pick({NaN, INF});
    double total = 0.0;
    for (int64_t i = 0; i < c.n; i++) total += (double)(((C *)rows.data)[i] = (C)random.real(0.1, 2.0));
    c.x = x.data, c.rows = random.chance(0.5) ? rows.data : nullptr;
    if (random.chance(0.3)) c.tolerance = 1e-2, c.left = (double *)left.data, c.iterations++;
    twice(random, out, x.size, "Sinkhorn", [&](char *to, int pool) { return c.out = to, c.pool = pool, anymax_sinkhorn(&c); });
    for (int64_t k = 0; k < c.count; k++)
        for (int64_t j = 0; j < c.m; j++) {
            double sum = 0.0;
            for (int64_t i = 0; i < c.n; i++) sum += (double)((C *)out.data)[k * entries + i * c.m + j];
            const double want = (c.rows ? total : (double)c.n) / (double)c.m;
            if (k == lost ? sum == sum : !(fabs(sum - want) <= (sizeof(C) == 8 ? 1e-10 : 1e-4) * want))
                fail("matrix %ld, column %ld: %g, not %g", (long)k, (long)j, sum, want);
        }
    random_rows<C>(random, g, c.count, entries, -1);
    for (int64_t i = 0; i < c.count * entries; i++)
        if (!(((C *)g.data)[i] > -INF)) ((C *)g.data)[i] = 0;
    c.g = g.data, c.tolerance = 0.0;
    c.out = out.data, c.pool = 0;
    if (const int code = anymax_sinkhorn(&c)) fail("Sinkhorn's gradient: refused: %s", anymax_error(code));
    for (int64_t i = 0; i < c.count * entries; i++)
        if (i / entries != lost && !(fabs((double)((C *)out.data)[i]) < INF))
            fail("matrix %ld: a derivative of %g", (long)(i / entries), (double)((C *)out.data)[i]);
}

// The link max(t, 0), which is that of sparsemax, as a table; and s = p, which gives the gradient of softmax.
void by_table(Random &random, const std::string &isa) {
    constexpr int SHIFT = 20;
    const auto bits = [](float v) {
        uint32_t b;
        memcpy(&b, &v, 4);
        return b;
    };
    const float low = 0x1p-20f, high = 4.0f;
    const uint32_t first = bits(low) >> SHIFT, last = (bits(high) - 1) >> SHIFT;
    std::vector<float> cells;
    for (uint32_t k = first; k <= last; k++) {
        const uint32_t from = k << SHIFT, to = (k + 1) << SHIFT;
        float a, b;
        memcpy(&a, &from, 4), memcpy(&b, &to, 4);
        cells.insert(cells.end(), {a, b - a, 0.0f, 0.0f});
    }
    anymax_tabled_call c;
    memset(&c, 0, sizeof c);
    c.dtype = random.pick({(int32_t)ANYMAX_F32, (int32_t)ANYMAX_F32, (int32_t)ANYMAX_BF16, (int32_t)ANYMAX_F16});
    c.rows = random.below(6), c.n = 1 + random.below(random.chance(0.1) ? 3000 : 200), c.mass = c.most = 1.0;
    c.link = anymax_table{cells.data(), (int64_t)cells.size() / 4, SHIFT, 1, 0.0, 1.0, 1.0, low, high, 0.0f, high};
    const int64_t lost = c.rows && random.chance(0.2) ? random.below(c.rows) : -1, size = size_of(c.dtype);
    snprintf(words + strlen(words), sizeof words - strlen(words), "; a table by %s, %s: %ld rows of %ld", isa.c_str(),
             DTYPE[c.dtype], (long)c.rows, (long)c.n);
    Block scores, x, g, out, tau;
    random_rows<float>(random, scores, c.rows, c.n, lost);
    x.make(c.rows * c.n * size, 0), g.make(x.size, 0), tau.make(c.rows * 4, 0x5a);
    for (int64_t i = 0; i < c.rows * c.n; i++)
        encode(x.data + i * size, c.dtype, (double)((float *)scores.data)[i]),
            encode(g.data + i * size, c.dtype, random.normal());
    c.x = x.data, c.tau = random.chance(0.5) ? (float *)tau.data : nullptr;
    twice(random, out, x.size, "a table", [&](char *to, int pool) { return c.out = to, c.pool = pool, anymax_tabled(&c); });
    const double loose = c.dtype == ANYMAX_F32 ? 1e-4 : 2e-2;
    const auto at = [&](const Block &b, int64_t i) { return decode(b.data + i * size, c.dtype); };
    for (int64_t r = 0; r < c.rows; r++) {
        double sum = 0.0;
        bool bad = false, any = false;
        for (int64_t i = r * c.n; i < (r + 1) * c.n; i++)
            bad = bad || !(at(x, i) < INF), any = any || at(x, i) > -INF, sum += at(out, i);
        if (bad ? sum == sum : !(fabs(sum - (double)any) <= loose)) fail("row %ld adds up to %g", (long)r, sum);
    }
    const Block p = std::move(out);
    Block back;
    c.x = p.data, c.g = g.data, c.tau = nullptr;
    twice(random, back, x.size, "a table's gradient",
          [&](char *to, int pool) { return c.out = to, c.pool = pool, anymax_tabled(&c); });
    for (int64_t r = 0; r < c.rows; r++) {
        double mass = 0.0, mean = 0.0;
        for (int64_t i = r * c.n; i < (r + 1) * c.n; i++) mass += at(p, i), mean += at(p, i) * at(g, i);
        for (int64_t i = r * c.n; i < (r + 1) * c.n && mass > 0.5; i++)
            if (!(fabs(at(back, i) - at(p, i) * (at(g, i) - mean / mass)) <= 4.0 * loose))
                fail("row %ld: a derivative of %g", (long)r, at(back, i));
    }
}

// An index is sorted as std::stable_sort does it, and its first entry out of range is named.
void indexed(Random &random) {
    const int64_t count = random.below(random.chance(0.1) ? 300000 : 300),
                  segments = 1 + random.below(random.chance(0.5) ? 5 : 400);
    std::vector<int64_t> index((size_t)count), ptr((size_t)segments + 1, 7), order((size_t)count, 7), want((size_t)count);
    for (int64_t &s : index) s = random.below(segments);
    const bool in_order = random.chance(0.4);
    if (in_order) std::sort(index.begin(), index.end());
    int64_t stray = -1;
    if (count && random.chance(0.2))
        stray = random.below(count), index[(size_t)stray] = random.pick<int64_t>({-1, segments, INT64_MAX, INT64_MIN});
    snprintf(words + strlen(words), sizeof words - strlen(words),
             "; an index of %ld entries and %ld segments, in order %d, stray %ld", (long)count, (long)segments, in_order,
             (long)stray);
    anymax_set_num_threads((int)(1 + random.below(4)));
    calls++;
    const int64_t done =
        anymax_sort_segments(index.data(), count, segments, ptr.data(), order.data(), random.chance(0.5) ? 0 : -1);
    if (stray >= 0) {
        if (done != -1 - stray) fail("entry %ld is out of range, and the answer is %ld", (long)stray, (long)done);
        return;
    }
    std::iota(want.begin(), want.end(), 0);
    std::stable_sort(want.begin(), want.end(), [&](int64_t a, int64_t b) { return index[(size_t)a] < index[(size_t)b]; });
    const bool was = std::is_sorted(index.begin(), index.end());
    if (done != (was ? count : 0) || (!was && order != want)) fail("the index was not sorted: %ld", (long)done);
    std::vector<int64_t> bounds((size_t)segments + 1);
    for (const int64_t s : index) bounds[(size_t)s + 1]++;
    std::partial_sum(bounds.begin(), bounds.end(), bounds.begin());
    if (ptr != bounds) fail("the bounds of %ld segments are wrong", (long)segments);
}

// A twister is that of the standard library, however its numbers are asked for; and what becomes of them is Gumbel noise.
void noises(Random &random, const std::string &isa) {
    snprintf(words + strlen(words), sizeof words - strlen(words), "; noise by %s", isa.c_str());
    const uint32_t seed = (uint32_t)random.below(1 << 30);
    std::mt19937 theirs(seed);
    int64_t state[ANYMAX_TWISTER_WORDS] = {seed}, next = 0, left = 1;
    for (int64_t i = 1; i < ANYMAX_TWISTER_WORDS; i++)
        state[i] = (uint32_t)(1812433253u * ((uint32_t)state[i - 1] ^ ((uint32_t)state[i - 1] >> 30)) + (uint32_t)i);
    for (int turn = 0; turn < 4; turn++) {
        const int64_t count = random.below(1500);
        Block pairs, out;
        pairs.make(2 * count * 4, 0x5a), out.make(count * 4, 0x5a);
        calls += 2;
        if (anymax_twister(state, &next, &left, (float *)pairs.data, 2 * count) ||
            anymax_gumbel((const float *)pairs.data, (float *)out.data, count))
            fail("noise was refused");
        for (int64_t i = 0; i < 2 * count; i++)
            if (((float *)pairs.data)[i] != (float)(theirs() & 0xffffff) * 0x1p-24f) fail("number %ld is another", (long)i);
        for (int64_t i = 0; i < count; i++) {
            const double u = ((float *)pairs.data)[2 * i] + 0x1p-24f * ((float *)pairs.data)[2 * i + 1],
                         want = -log(-log1p(-std::min(std::max(u, 0x1p-48), 1.0 - 0x1p-24)));
            if (!(fabs(((float *)out.data)[i] - want) <= 4e-7 * (1.0 + fabs(want))))
                fail("noise %ld is %.9g, not %.9g", (long)i, ((float *)out.data)[i], want);
        }
    }
}

void one_case(uint64_t seed, const std::vector<std::string> &units) {
    Random random(seed);
    const std::string isa = units[(size_t)random.below((int64_t)units.size())];
    anymax_set_isa(isa.c_str());
    snprintf(words, sizeof words, "seed %llu, while it is made", (unsigned long long)seed);
    Case c;
    std::vector<const char *> said;
    alarm(300);
    make(random, c, said);
    describe(seed, c, said, isa);
    if (verbose) printf("%s\n", words);
    if (getenv("FUZZROW"))
        for (int64_t i = 0, r = atoi(getenv("FUZZROW")); i < c.shape.n; i++) printf("%.17g\n", c.score(r, i));
    made[c.op][c.map]++;
    const Result got = counted(c, How{random.chance(0.5) ? 0 : -1, 1 + (int)random.below(3), 0, -1});
    digest_of(got);
    check(c, got);
    short_calls(c, got, random);
    if (known_to_xla(c) && random.chance(0.3)) {
        Lender lender(0);
        lender.refuses = random.chance(0.3) ? 1 : 1 << 30;
        by_xla(c, got, lender);
    }
    again(random, c, got);
    if (random.chance(0.2)) decoded(random, isa);
    if (random.chance(0.4)) ragged(random, isa);
    if (random.chance(0.1)) (random.chance(0.5) ? linear_heads<float> : linear_heads<double>)(random, isa);
    if (random.chance(0.2)) (random.chance(0.5) ? ordered<float> : ordered<double>)(random, isa);
    if (random.chance(0.2)) (random.chance(0.5) ? fused<float> : fused<double>)(random, isa);
    if (random.chance(0.2)) chosen(random, isa);
    if (random.chance(0.1)) (random.chance(0.5) ? transported<float> : transported<double>)(random, isa);
    if (random.chance(0.2)) by_table(random, isa);
    if (random.chance(0.2)) indexed(random);
    if (random.chance(0.02)) noises(random, isa);
    alarm(0);
    words[0] = 0;
}

// -- calls that must be refused ---------------------------------------------------------------------

void refused() {
    const int64_t rows = 3, n = 40, k = 5;
    std::vector<char> bytes((size_t)(rows * n) * 8);
    const auto outputs = [&] { return std::vector<char>((size_t)(rows * n) * 8, 0x5a); };
    int count = 0;
    for (int32_t op = 0; op < ANYMAX_OPS; op++)
        for (int32_t map = 0; map < ANYMAX_MAPS; map++)
            for (int32_t dtype = 0; dtype < 4; dtype++) {
                std::vector<char> out = outputs(), value = outputs(), tau = outputs(), positions = outputs(),
                                  s_index = outputs(), s_value = outputs(), s_count = outputs();
                std::vector<int64_t> index((size_t)rows, 1);
                std::vector<double> params((size_t)rows, 1.5);
                anymax_call good;
                memset(&good, 0, sizeof good);
                good.op = op, good.map = map, good.dtype = dtype, good.outer = rows, good.inner = 1, good.n = n,
                good.nodes = 16;
                good.param = op == ANYMAX_LARGEST   ? (double)k
                             : map == ANYMAX_TOPP   ? 0.5
                             : map == ANYMAX_TOPK   ? 3.0
                             : map == ANYMAX_TAYLOR ? 2.0
                                                    : 1.5;
                if (op == ANYMAX_LOG || op == ANYMAX_LOG_VJP) good.param = map == ANYMAX_ENTMAX ? 1.0 : good.param;
                const anymax_view view{bytes.data(), n, 0, 1};
                good.x = good.p = good.g = good.upper = view;
                good.out = anymax_view{out.data(), op == ANYMAX_LARGEST ? k : n, 0, 1};
                good.index = index.data(), good.scale = bytes.data(), good.value = value.data(), good.tau = tau.data();
                good.positions = (int64_t *)positions.data();
                good.pool = -1;
                const auto refuse = [&](const anymax_call &bad, const char *what) {
                    snprintf(words, sizeof words, "%s of %s, %s, with %s", OP[op], MAPS[map].name, DTYPE[dtype], what);
                    count++;
                    const int code = anymax_run(&bad);
                    if (code == 0) fail("the call was served");
                    if (!anymax_error(code) || !strcmp(anymax_error(code), "unknown error")) fail("code %d has no words", code);
                    for (const auto *v : {&out, &value, &tau, &positions, &s_index, &s_value, &s_count})
                        if (*v != outputs()) fail("the call was refused, and yet wrote");
                };
                const auto with = [&](const char *what, auto change) {
                    anymax_call bad = good;
                    change(bad);
                    refuse(bad, what);
                };
                if (!has(op, map)) {
                    refuse(good, "nothing else wrong");
                    continue;
                }
                if (op == ANYMAX_LARGEST && map != ANYMAX_TOPK && map != ANYMAX_SOFTMAX)
                    continue;  // `param` is k and the map's at once
                with("an operation below all", [](anymax_call &c) { c.op = -1; });
                with("an operation above all", [](anymax_call &c) { c.op = ANYMAX_OPS; });
                with("a map below all", [](anymax_call &c) { c.map = -1; });
                with("a map above all", [](anymax_call &c) { c.map = ANYMAX_MAPS; });
                with("a dtype below all", [](anymax_call &c) { c.dtype = -1; });
                with("a dtype above all", [](anymax_call &c) { c.dtype = 4; });
                with("no classes", [](anymax_call &c) { c.n = 0; });
                with("fewer than no classes", [](anymax_call &c) { c.n = -1; });
                with("2^31 classes", [](anymax_call &c) { c.n = (int64_t)1 << 31; });
                with("INT64_MAX classes", [](anymax_call &c) { c.n = INT64_MAX; });
                with("fewer than no rows", [](anymax_call &c) { c.outer = -1; });
                with("fewer than no inner rows", [](anymax_call &c) { c.inner = -1; });
                with("fewer than no rows, twice", [](anymax_call &c) { c.outer = c.inner = -1; });
                with("too many rows", [](anymax_call &c) { c.outer = INT64_MAX; });
                with("too many rows, in two", [](anymax_call &c) { c.outer = c.inner = (int64_t)1 << 33; });
                if (op != ANYMAX_VJP && op != ANYMAX_LOG_VJP && op != ANYMAX_SLOPE)
                    with("no x", [](anymax_call &c) { c.x.data = nullptr; });
                if ((op == ANYMAX_VJP || op == ANYMAX_SLOPE) && needs_scores(map))
                    with("no x", [](anymax_call &c) { c.x.data = nullptr; });
                if (op == ANYMAX_VJP || op == ANYMAX_LOG_VJP || op == ANYMAX_SLOPE) {
                    with("no p", [](anymax_call &c) { c.p.data = nullptr; });
                    with("no g", [](anymax_call &c) { c.g.data = nullptr; });
                }
                if (op != ANYMAX_LOSS && op != ANYMAX_THRESHOLD && op != ANYMAX_SLOPE)
                    with("no out", [](anymax_call &c) { c.out.data = nullptr; });
                if (op == ANYMAX_LOSS || op == ANYMAX_LOSS_GRAD) with("no index", [](anymax_call &c) { c.index = nullptr; });
                if (op == ANYMAX_LOSS || op == ANYMAX_SLOPE)
                    with("no value", [](anymax_call &c) { c.value = nullptr, c.out.data = nullptr; });
                if (op == ANYMAX_LOSS && !MAPS[map].slope) with("a slope", [&](anymax_call &c) { c.slope = positions.data(); });
                if (op == ANYMAX_LOSS_GRAD) with("no scale", [](anymax_call &c) { c.scale = nullptr; });
                if (op == ANYMAX_THRESHOLD) with("no tau", [](anymax_call &c) { c.tau = nullptr; });
                if (op == ANYMAX_LARGEST) with("no positions", [](anymax_call &c) { c.positions = nullptr; });
                if (map == ANYMAX_ENTMAX || map == ANYMAX_BUDGET || map == ANYMAX_NORMMAX || map == ANYMAX_TOPK ||
                    map == ANYMAX_TOPP || map == ANYMAX_TAYLOR || map == ANYMAX_PERTURB || op == ANYMAX_LARGEST)
                    for (double v : {NaN, INF, -INF, 0.0, -0.0, -1.0, -1e300})
                        if (v != 0.0 || map != ANYMAX_BUDGET || op == ANYMAX_LARGEST)
                            with("a parameter out of range", [v](anymax_call &c) { c.param = v; });
                if (map == ANYMAX_BOUNDED) with("no bounds", [](anymax_call &c) { c.upper.data = nullptr; });
                if (map == ANYMAX_BOUNDED) with("alpha > 2", [](anymax_call &c) { c.param = 2.5; });
                if (map == ANYMAX_NORMMAX) with("alpha = 1", [](anymax_call &c) { c.param = 1.0; });
                if (map == ANYMAX_TOPP) with("p > 1", [](anymax_call &c) { c.param = 1.0 + 1e-15; });
                if (map == ANYMAX_TOPK) with("k < 1", [](anymax_call &c) { c.param = 0.99; });
                if (map == ANYMAX_TOPK) with("k of 1e16", [](anymax_call &c) { c.param = 1e16; });
                if (map == ANYMAX_TOPK || op == ANYMAX_LARGEST) with("k of 2.5", [](anymax_call &c) { c.param = 2.5; });
                if (map == ANYMAX_TAYLOR) {
                    with("an odd order", [](anymax_call &c) { c.param = 3.0; });
                    with("order 2.5", [](anymax_call &c) { c.param = 2.5; });
                    with("order 66", [](anymax_call &c) { c.param = 66.0; });
                }
                if (op == ANYMAX_LARGEST) with("k > n", [&](anymax_call &c) { c.param = (double)n + 1.0; });
                if (map == ANYMAX_PERTURB) {
                    with("no nodes", [](anymax_call &c) { c.nodes = 0; });
                    with("fewer than no nodes", [](anymax_call &c) { c.nodes = -5; });
                    with("too many nodes", [](anymax_call &c) { c.nodes = 4097; });
                    with("no such noise", [](anymax_call &c) { c.noise = 5; });
                    with("no such noise", [](anymax_call &c) { c.noise = -1; });
                }
                if (!takes_params(map)) with("parameters of rows", [&](anymax_call &c) { c.params = params.data(); });
                if (op == ANYMAX_FORWARD || op == ANYMAX_LOSS || op == ANYMAX_VJP || op == ANYMAX_LOSS_GRAD ||
                    op == ANYMAX_SLOPE) {
                    const anymax_support support{(int32_t *)s_index.data(), s_value.data(), (int32_t *)s_count.data(), n};
                    with("a support without indices", [&](anymax_call &c) { c.support = support, c.support.index = nullptr; });
                    with("a support without values", [&](anymax_call &c) { c.support = support, c.support.value = nullptr; });
                    with("a support of less than nothing",
                         [&](anymax_call &c) { c.support = support, c.support.capacity = -1; });
                }
                if (op == ANYMAX_VJP || op == ANYMAX_LOSS_GRAD || op == ANYMAX_SLOPE) {
                    std::vector<int32_t> at((size_t)(rows * n), 0), held((size_t)rows, 2);
                    for (int64_t i = 0; i < rows * n; i++) at[(size_t)i] = (int32_t)(i % n);
                    const auto changed = [&](const char *what, auto change) {
                        const std::vector<int32_t> index_then = at, count_then = held;
                        change();
                        with(what,
                             [&](anymax_call &c) { c.support = anymax_support{at.data(), bytes.data(), held.data(), n}; });
                        at = index_then, held = count_then;
                    };
                    changed("a support beyond its row", [&] { at[(size_t)n + 1] = (int32_t)n; });
                    changed("a support before its row", [&] { at[(size_t)n] = -1; });
                    changed("a support out of order", [&] { at[(size_t)n] = 1, at[(size_t)n + 1] = 0; });
                    changed("a class twice in a support", [&] { at[(size_t)n + 1] = 0; });
                    changed("a support above its capacity", [&] { held[1] = (int32_t)n + 1; });
                    changed("a support of less than nothing", [&] { held[1] = -2; });
                }
                anymax_call empty = good;
                empty.outer = 0;
                empty.x.data = empty.p.data = empty.g.data = empty.out.data = nullptr, empty.index = nullptr;
                if (anymax_run(&empty) != 0) fail("a call of no rows was refused");
            }
    snprintf(words, sizeof words, "calls without a call");
    if (anymax_run(nullptr) == 0 || anymax_decode(nullptr) == 0 || anymax_run_segments(nullptr, nullptr) == 0)
        fail("nothing was served");
    if (anymax_rows(0, nullptr, nullptr, 1, 1, 0.0) == 0) fail("nothing was served");
    for (int64_t code : {(int64_t)ANYMAX_VJP, (int64_t)ANYMAX_LOSS, (int64_t)ANYMAX_LARGEST, (int64_t)255, (int64_t)200 << 8,
                         (int64_t)9 << 16, (int64_t)-1, INT64_MIN})
        if (anymax_rows(code, bytes.data(), bytes.data(), 1, n, 1.5) == 0)
            fail("the short call with code %ld was served", (long)code);
    const anymax_linear_call fine{ANYMAX_F32,
                                  0,
                                  -1,
                                  1,
                                  1,
                                  1,
                                  rows,
                                  rows,
                                  n,
                                  n,
                                  1.0,
                                  bytes.data(),
                                  bytes.data(),
                                  bytes.data(),
                                  bytes.data(),
                                  nullptr,
                                  bytes.data(),
                                  bytes.data(),
                                  bytes.data(),
                                  bytes.data(),
                                  bytes.data()};
    const int64_t stray[] = {rows + 1}, negative[] = {-1};
    const auto unfit = [&](const char *what, auto change) {
        anymax_linear_call bad = fine;
        change(bad);
        snprintf(words, sizeof words, "linear attention with %s", what);
        count++;
        if (anymax_linear_vjp(&bad) == 0) fail("the gradient was served");
        if (bad.below && bad.g && bad.dv_ && anymax_linear(&bad) == 0) fail("the call was served");
    };
    unfit("halves", [](anymax_linear_call &c) { c.dtype = ANYMAX_BF16; });
    unfit("fewer than no heads", [](anymax_linear_call &c) { c.heads = -1; });
    unfit("2^40 keys", [](anymax_linear_call &c) { c.keys = (int64_t)1 << 40; });
    unfit("too many features", [](anymax_linear_call &c) { c.d = 5000; });
    unfit("no q", [](anymax_linear_call &c) { c.q = nullptr; });
    unfit("no k", [](anymax_linear_call &c) { c.k = nullptr; });
    unfit("no v", [](anymax_linear_call &c) { c.v = nullptr; });
    unfit("no out", [](anymax_linear_call &c) { c.out = nullptr; });
    unfit("a length beyond the keys", [&](anymax_linear_call &c) { c.lengths = stray; });
    unfit("a length below 0", [&](anymax_linear_call &c) { c.lengths = negative; });
    unfit("no denominators", [](anymax_linear_call &c) { c.below = nullptr; });
    unfit("no g", [](anymax_linear_call &c) { c.g = nullptr; });
    unfit("no dv", [](anymax_linear_call &c) { c.dv_ = nullptr; });
    if (anymax_linear(nullptr) == 0 || anymax_linear_vjp(nullptr) == 0) fail("nothing was served");
    const auto refuse_each =
        [&](const char *what, const auto &fine, int (*run)(decltype(&fine)),
            std::initializer_list<void (*)(std::remove_const_t<std::remove_reference_t<decltype(fine)>> &)> changes) {
            for (const auto change : changes) {
                auto bad = fine;
                change(bad);
                snprintf(words, sizeof words, "%s, changed", what), count++;
                if (run(&bad) == 0) fail("the call was served");
            }
            if (run(nullptr) == 0) fail("nothing was served");
        };
    std::vector<int32_t> in_order((size_t)(rows * n), INT32_MIN);
    std::vector<int64_t> places((size_t)(rows * n));
    using Order = anymax_order_call;
    const Order an_order{ANYMAX_F32,   -1,           1,           1, 0, rows, n, 1.0, bytes.data(), in_order.data(),
                         bytes.data(), bytes.data(), bytes.data()};
    for (const auto run : {anymax_order, anymax_order_vjp})
        refuse_each("an order", an_order, run,
                    {[](Order &c) { c.dtype = ANYMAX_BF16; }, [](Order &c) { c.rows = -1; }, [](Order &c) { c.n = 0; },
                     [](Order &c) { c.n = INT64_MAX; }, [](Order &c) { c.rows = INT64_MAX; },
                     [](Order &c) { c.strength = 0.0; }, [](Order &c) { c.strength = NaN; }, [](Order &c) { c.strength = INF; },
                     [](Order &c) { c.x = nullptr; }, [](Order &c) { c.out = nullptr; }});
    using Fused = anymax_fused_call;
    const double one = 1.0;
    const Fused a_fused{ANYMAX_F32,   -1,           rows,         n,      &one, 0, bytes.data(), (uint8_t *)bytes.data(),
                        bytes.data(), bytes.data(), bytes.data(), nullptr};
    for (const auto run : {anymax_fused, anymax_fused_vjp})
        refuse_each("fusedmax", a_fused, run,
                    {[](Fused &c) { c.dtype = ANYMAX_BF16; }, [](Fused &c) { c.rows = -1; }, [](Fused &c) { c.n = 0; },
                     [](Fused &c) { c.n = INT64_MAX; }, [](Fused &c) { c.rows = INT64_MAX; }, [](Fused &c) { c.x = nullptr; },
                     [](Fused &c) { c.out = nullptr; }});
    refuse_each("fusedmax", a_fused, anymax_fused,
                {[](Fused &c) { c.strength = nullptr; }, [](Fused &c) { c.strength_step = 2; },
                 [](Fused &c) { c.strength_step = -1; }});
    refuse_each("the gradient of fusedmax", a_fused, anymax_fused_vjp,
                {[](Fused &c) { c.begins = nullptr; }, [](Fused &c) { c.p = nullptr; }, [](Fused &c) { c.g = nullptr; }});
    using Choice = anymax_choice_call;
    refuse_each(
        "a choice", Choice{ANYMAX_F32, -1, rows, n, bytes.data(), 3, 4, 2, 2, places.data()}, anymax_choose,
        {[](Choice &c) { c.dtype = 4; }, [](Choice &c) { c.rows = -1; }, [](Choice &c) { c.n = 0; }, [](Choice &c) { c.k = 0; },
         [](Choice &c) { c.k = 41; }, [](Choice &c) { c.groups = 3; }, [](Choice &c) { c.groups = 0; },
         [](Choice &c) { c.kept = 5; }, [](Choice &c) { c.kept = 0; }, [](Choice &c) { c.most = 11; },
         [](Choice &c) { c.most = 0; }, [](Choice &c) { c.x = nullptr; }, [](Choice &c) { c.index = nullptr; }});
    using Sinkhorn = anymax_sinkhorn_call;
    refuse_each(
        "Sinkhorn",
        Sinkhorn{ANYMAX_F32, -1, 1, rows, n, 3, 1.0, bytes.data(), nullptr, nullptr, 0, 0, nullptr, bytes.data(), 0.0, nullptr},
        anymax_sinkhorn,
        {[](Sinkhorn &c) { c.dtype = ANYMAX_F16; }, [](Sinkhorn &c) { c.count = -1; }, [](Sinkhorn &c) { c.n = 0; },
         [](Sinkhorn &c) { c.m = INT64_MAX; }, [](Sinkhorn &c) { c.rows_step = -1; }, [](Sinkhorn &c) { c.iterations = 0; },
         [](Sinkhorn &c) { c.temperature = NaN; }, [](Sinkhorn &c) { c.tolerance = -1.0; },
         [](Sinkhorn &c) { c.tolerance = 0.1; }, [](Sinkhorn &c) { c.x = nullptr; }, [](Sinkhorn &c) { c.out = nullptr; }});
    using Tabled = anymax_tabled_call;
    const anymax_table table{(const float *)bytes.data(), 16, 20, 1, 0.0, 1.0, 1.0, 1.0f, 2.0f, 0.0f, 1.0f};
    refuse_each(
        "a table", Tabled{ANYMAX_F32, -1, rows, n, 1.0, 1.0, table, bytes.data(), nullptr, bytes.data(), nullptr},
        anymax_tabled,
        {[](Tabled &c) { c.dtype = ANYMAX_F64; }, [](Tabled &c) { c.n = 0; }, [](Tabled &c) { c.rows = INT64_MAX; },
         [](Tabled &c) { c.mass = 0.0; }, [](Tabled &c) { c.most = NaN; }, [](Tabled &c) { c.link.cells = nullptr; },
         [](Tabled &c) { c.link.count = 1; }, [](Tabled &c) { c.link.shift = 30; }, [](Tabled &c) { c.link.sign = 0; },
         [](Tabled &c) { c.link.low = 0.0f; }, [](Tabled &c) { c.link.high = (float)INF; }, [](Tabled &c) { c.x = nullptr; }});
    for (int code = -300; code < 300; code++)
        if (!anymax_error(code) || !anymax_error(code)[0]) fail("code %d has no words", code);
    if (anymax_set_isa(nullptr) == 0 || anymax_set_isa("") == 0 || anymax_set_isa("none") == 0)
        fail("an instruction set that is none was chosen");
    for (int threads : {INT32_MIN, -1, 0, 1, 7, 100000, INT32_MAX}) {
        anymax_set_num_threads(threads);
        if (anymax_get_num_threads() < 1 || anymax_get_num_threads() > 1024) fail("%d threads", anymax_get_num_threads());
    }
    anymax_set_parallel(nullptr);
    if (anymax_abi() != ANYMAX_ABI) fail("ABI %d", anymax_abi());
    words[0] = 0;
    printf("refused: %d calls\n", count);
}

// -- threads ----------------------------------------------------------------------------------------

struct Known {
    Case c;
    Result want;
};

// Cases that are large enough for more than one thread, and some that are not, with what one thread makes of them.
void known_cases(std::vector<Known> &all, size_t large, size_t small, uint64_t seed) {
    int long_ones = 0;
    for (size_t has_large = 0, has_small = 0; has_large < large || has_small < small; seed++) {
        Random random(seed);
        Known known;
        std::vector<const char *> said;
        make(random, known.c, said);
        const Case &c = known.c;
        const int64_t elements = c.shape.rows() * c.shape.n;
        size_t &has = elements >= 32768 ? has_large : has_small;
        if (has >= (elements >= 32768 ? large : small) || elements > 400000 || (c.map == ANYMAX_PERTURB && c.nodes > 32))
            continue;
        if (elements > 50000 && long_ones++ >= 4) continue;
        has++;
        describe(seed, c, said, anymax_isa());
        known.want = perform(c, How{-1, 1, 0, -1});
        all.push_back(std::move(known));
    }
    words[0] = 0;
}

// A framework's parallel_for of two threads.
int lent(int64_t begin, int64_t end, int64_t grain, anymax_task task, void *context) {
    const int64_t half = begin + (end - begin) / 2 / (grain > 0 ? grain : 1) * (grain > 0 ? grain : 1);
    std::thread other([&] {
        if (half > begin) task(begin, half, context);
    });
    if (end > half) task(half, end, context);
    other.join();
    return 0;
}

void threads(double seconds, uint64_t seed) {
    std::vector<Known> all;
    known_cases(all, 40, 20, seed);
    anymax_set_parallel(lent);
    Lender lender(2);
    std::atomic<bool> over{false};
    std::atomic<int64_t> done{0};
    const auto work = [&](uint64_t me) {
        Random random(seed * 1000 + me);
        while (!over.load()) {
            const Known &known = all[(size_t)random.below((int64_t)all.size())];
            done++;
            if (known_to_xla(known.c) && random.chance(0.3)) {
                by_xla(known.c, known.want, lender);
                continue;
            }
            const Result got = perform(known.c, How{random.chance(0.2)   ? 1
                                                    : random.chance(0.1) ? -1
                                                                         : 0,
                                                    1 + (int)random.below(4), 0, -1});
            const std::string where = difference(known.want, got, -1);
            if (!where.empty())
                fail("%s of %s, %s, n %ld, beside other threads: %s", OP[known.c.op], MAPS[known.c.map].name,
                     DTYPE[known.c.dtype], (long)known.c.shape.n, where.c_str());
        }
    };
    std::vector<std::thread> team;
    for (uint64_t i = 0; i < 8; i++) team.emplace_back(work, i);
    const auto start = std::chrono::steady_clock::now();
    const std::string isa = anymax_isa();
    while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds) {
        anymax_set_num_threads(1 + (int)(done.load() % 5));
        anymax_set_isa(isa.c_str());
        if (!strstr(anymax_isas(), isa.c_str())) fail("the instruction set in use is none of %s", anymax_isas());
        anymax_set_parallel(done.load() % 2 ? lent : nullptr);  // a call for it runs in one thread where there is none
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    over = true;
    for (auto &t : team) t.join();
    printf("threads: %ld calls by 8 threads (%s)\n", (long)done.load(), isa.c_str());
}

// -- another thread that writes ---------------------------------------------------------------------

// What is read as an index, while another thread writes to it: whatever comes out, no memory is touched but that of the call.
void writers(double seconds) {
    constexpr int64_t COUNT = 60000, SEGMENTS = 500, N = 300, ROWS = COUNT / N;
    std::vector<int64_t> index(COUNT), ptr(SEGMENTS + 1), order(COUNT), place(COUNT), lengths(8, 20), target(ROWS, 3);
    std::vector<double> values(ROWS, 5.0);
    std::vector<float> x(COUNT), out(COUNT), scale(ROWS, 1.0f);
    Random random(1);
    for (int64_t i = 0; i < COUNT; i++) x[(size_t)i] = (float)random.normal(), place[(size_t)i] = COUNT - 1 - i;
    std::atomic<bool> over{false};
    std::thread writer([&] {
        Random own(2);
        const int64_t some[] = {0, 1, SEGMENTS - 1, SEGMENTS, -1, COUNT, INT64_MAX, INT64_MIN, 77, N, 20, 21};
        while (!over.load()) {
            const int64_t v = some[own.below(12)], at = own.below(COUNT);
            __atomic_store_n(&index[(size_t)at], own.chance(0.5) ? own.below(SEGMENTS) : v, __ATOMIC_RELAXED);
            __atomic_store_n(&place[(size_t)at], own.chance(0.9) ? own.below(COUNT) : v, __ATOMIC_RELAXED);
            __atomic_store_n(&lengths[(size_t)own.below(8)], v, __ATOMIC_RELAXED);
            __atomic_store_n(&target[(size_t)own.below(ROWS)], v, __ATOMIC_RELAXED);
            const double value = own.pick({5.0, NaN, -1.0, 1e300, 0.0});
            __atomic_store(&values[(size_t)own.below(ROWS)], (double *)&value, __ATOMIC_RELAXED);
            if (own.chance(0.001)) {  // for a while all is well, lest every call be refused at once
                for (int64_t i = 0; i < COUNT; i++) {
                    __atomic_store_n(&index[(size_t)i], (i * 7) % SEGMENTS, __ATOMIC_RELAXED);
                    __atomic_store_n(&place[(size_t)i], COUNT - 1 - i, __ATOMIC_RELAXED);
                }
                for (int64_t &l : lengths) __atomic_store_n(&l, 20, __ATOMIC_RELAXED);
                for (double &u : values) __atomic_store_n((int64_t *)&u, 0x4014000000000000, __ATOMIC_RELAXED);
            }
        }
    });
    snprintf(words, sizeof words, "beside a thread that writes");
    std::vector<int64_t> bounds(ROWS + 1);
    for (int64_t r = 0; r <= ROWS; r++) bounds[(size_t)r] = r * N;
    int64_t done = 0, served = 0;
    const auto start = std::chrono::steady_clock::now();
    for (; std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds; done++) {
        served += anymax_sort_segments(index.data(), COUNT, SEGMENTS, ptr.data(), order.data(), -1) >= 0;
        anymax_call c;
        memset(&c, 0, sizeof c);
        c.op = ANYMAX_FORWARD, c.map = ANYMAX_SPARSEMAX, c.outer = ROWS, c.inner = 1, c.n = COUNT, c.pool = -1;
        c.x = anymax_view{x.data(), 0, 1, 1}, c.out = anymax_view{out.data(), 0, 1, 1};
        const anymax_segments segments{bounds.data(), place.data(), nullptr};
        served += anymax_run_segments(&c, &segments) == 0;
        c.op = ANYMAX_LOSS_GRAD, c.n = N, c.index = target.data(), c.scale = scale.data();
        c.x = anymax_view{x.data(), N, 0, 1}, c.out = anymax_view{out.data(), N, 0, 1};
        served += anymax_run(&c) == 0;
        anymax_linear_call l;
        memset(&l, 0, sizeof l);
        l.pool = -1, l.threads = 1, l.heads = 8, l.groups = 1, l.queries = 5, l.keys = 20, l.d = 4, l.dv = 4, l.scale = 0.5;
        l.q = x.data(), l.k = x.data() + 1000, l.v = x.data() + 2000, l.out = out.data(), l.lengths = lengths.data();
        served += anymax_linear(&l) == 0;
        anymax_decode_call d;
        memset(&d, 0, sizeof d);
        const anymax_step step{ANYMAX_LARGEST_SCORES, 1, 5.0};
        std::vector<uint8_t> keep(COUNT);
        d.pool = -1, d.rows = ROWS, d.n = d.stride = N, d.x = x.data(), d.steps = &step, d.count = 1, d.values = values.data(),
        d.keep = keep.data();
        served += anymax_decode(&d) == 0;
    }
    over = true;
    writer.join();
    words[0] = 0;
    printf("writers: %ld rounds of 5 calls, %ld calls served\n", (long)done, (long)served);
}

// -- fork -------------------------------------------------------------------------------------------

void forks(int times, uint64_t seed) {
    std::vector<Known> all;
    known_cases(all, 12, 4, seed);
    anymax_set_num_threads(4);
    // The pool is at work while the process forks. Its threads have all begun and ask for no memory: a sanitizer's allocator is
    // not made for that.
    struct Spin {
        std::atomic<bool> over{false};
        std::atomic<int> busy{0};
    } spin;
    std::thread other([&] {
        const auto task = [](int64_t, int64_t, void *context) {
            Spin *s = (Spin *)context;
            s->busy++;
            while (!s->over.load()) usleep(100);
        };
        anymax_pool_run(0, 4, 1, task, &spin);
    });
    while (spin.busy.load() < 4) usleep(100);
    for (int i = 0; i < times; i++) {
        const pid_t child = fork();
        if (child < 0) fail("no fork");
        if (child == 0) {
            alarm(120);
            for (const Known &known : all)
                if (!difference(known.want, perform(known.c, How{0, 3, 0, -1}), -1).empty()) _exit(4);
            _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) fail("a forked child ended with %d", status);
    }
    spin.over = true;
    other.join();
    for (const Known &known : all)
        if (!difference(known.want, perform(known.c, How{0, 3, 0, -1}), -1).empty())
            fail("the parent's results differ after its children's");
    printf("fork: %d children\n", times);
}

void say_counts() {
    printf("%-11s", "");
    for (const MapRow &m : MAPS) printf("%11s", m.name);
    for (int op = 0; op < ANYMAX_OPS; op++) {
        printf("\n%-11s", OP[op]);
        for (int map = 0; map < ANYMAX_MAPS; map++) printf("%11ld", (long)made[op][map]);
    }
    printf("\n");
}

}  // namespace

int main(int count, char **argument) {
    signal(SIGALRM, too_long);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    __sanitizer_set_death_callback(say_case);
#endif
    uint64_t from = 1, step = 1;
    int64_t most = INT64_MAX;
    double seconds = 1e9;
    std::string mode;
    bool table = false, one = false, digests = false;
    for (int i = 1; i < count; i++) {
        const std::string word = argument[i];
        const char *next = i + 1 < count ? argument[i + 1] : "";
        if (word == "--from")
            from = strtoull(next, nullptr, 10), i++;
        else if (word == "--step")
            step = strtoull(next, nullptr, 10), i++;
        else if (word == "--calls")
            most = strtoll(next, nullptr, 10), i++;
        else if (word == "--seconds")
            seconds = strtod(next, nullptr), i++;
        else if (word == "--table")
            table = true;
        else if (word == "--digests")
            digests = true;
        else if (word == "--refused" || word == "--threads" || word == "--writers" || word == "--fork")
            mode = word;
        else if (word.find_first_not_of("0123456789") == std::string::npos)
            from = strtoull(word.c_str(), nullptr, 10), most = 1, one = true;
        else
            return fprintf(stderr, "fuzz: what is %s?\n", word.c_str()), 2;
    }
    setvbuf(stdout, nullptr, _IOLBF, 0);
    if (mode == "--refused") return refused(), 0;
    if (mode == "--threads") return threads(seconds < 1e9 ? seconds : 20.0, from), 0;
    if (mode == "--writers") return writers(seconds < 1e9 ? seconds : 10.0), 0;
    if (mode == "--fork") return forks(10, from), 0;
    verbose = one;
    const std::vector<std::string> units = isas();
    const auto start = std::chrono::steady_clock::now();
    int64_t cases = 0;
    for (uint64_t seed = from; cases < most; seed += step) {
        if (!one && std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > seconds) break;
        digest = 0;
        one_case(seed, units);
        cases++;
        if (digests) printf("%llu %016llx\n", (unsigned long long)seed, (unsigned long long)digest);
    }
    if (table) say_counts();
    printf("fuzz: %ld cases, %ld calls, from seed %llu in steps of %llu\n", (long)cases, (long)calls, (unsigned long long)from,
           (unsigned long long)step);
    return 0;
}
