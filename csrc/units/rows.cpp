// The kernels of single rows for one instruction set, and the choice among the families. This and the other files of units/ are compiled once for each
// set, with its own flags and -DANYMAX_UNIT=<name>.
#include "core/families.hpp"

#include "plan.hpp"

#include "shapes/backward.hpp"
#include "links/curve.hpp"
#include "shapes/dense.hpp"
#include "shapes/sparse.hpp"

namespace ANYMAX_UNIT {

// What a row of a sparse map is found to be.
template <class C>
struct Support {
    const int32_t *index;
    const double *p;
    int64_t count;
    double tau;
    bool sound, any;
};

template <class C>
static Support<C> poisoned(bool sound, bool any) {
    return Support<C>{nullptr, nullptr, 0, sound ? -inf64 : not_a_number<double>, sound, any};
}

template <class C, class L>
static C bound_of(const L &link, const Scan<C> &s, double &level);

// The row is read once: `known`, where it is not NULL, takes what a scan found, and keeps it from the next.
template <class C>
static Scan<C> scanned(const C *x, int64_t n, Scan<C> *known, Scratch &scratch, const Team &team) {
    if (known && known->cells) return *known;
    const Scan<C> s = scan(x, n, scratch, team);
    if (known) *known = s;
    return s;
}

template <class C, class L>
static Support<C> threshold_row(const L &link, const C *x, int64_t n, Finish finish, Scan<C> *known, Scratch &scratch, const Team &team) {
    const Scan<C> s = scanned(x, n, known, scratch, team);
    if (scratch.failed || !s.sound || s.top == -infinity<C>) return poisoned<C>(s.sound, s.top != -infinity<C>);
    C bound = -infinity<C>;
    double level = link.start;
    if (link.whole) {
        bound = bound_of(link, s, level);
    }
    Candidates<C> c = bound == -infinity<C> ? collect_from(x, n, s, bound, scratch) : collect(x, n, s, bound, scratch);
    double *y = widen(c, s.top, scratch);
    if (scratch.failed) return poisoned<C>(true, false);
    Root root = solve(link, y, c.count, level);
    values(link, root, y, c.count, finish);
    double tau = (double)s.top + (finish == NORMMAX_FINISH ? -root.level : link.tau(root.level));
    return Support<C>{c.index, y, c.count, tau, true, true};
}

// The sums of all the cells at a level; none where they would take too long beside what they save.
template <class C, int R>
static Sums2 sums_of_cells(const Power<R> &link, const Scan<C> &s, double level) {
    if (s.block < 16) return Sums2{0.0, 0.0};
    return sweep<C, R>(s.cells, s.count * width<C>, Ground<C, R>(s.top, link.tau(level)));
}
static Sums2 sums_of_cells(const Curve &curve, const Scan<float> &s, double level) {
    return curve_sums(curve, s.cells, s.count * width<float>, s.top, (float)level);
}
template <class C>
static Sums2 sums_of_cells(const AnyPower &link, const Scan<C> &s, double level) {
    const auto at = link.at(level);
    const vec<C> high = splat(s.top);
    vd wide0{}, wide1{};
    for (int64_t k = 0; k < s.count; k++) {
        vec<C> value, rate;
        at.terms(load(s.cells + k * width<C>) - high, value, rate);
        wide0 = widen_add(wide0, value), wide1 = widen_add(wide1, rate);
    }
    return Sums2{sum(wide0), sum(wide1)};
}

// Where to begin on a row: a level that is surely not too low, and the bound that all of the support lies above. A few of the cells tell enough where the
// support is small; of a long row of much alike scores they all do.
template <class C, class L>
static C bound_of(const L &link, const Scan<C> &s, double &level) {
    const double margin = sizeof(C) == 4 ? 2e-5 : 1e-12;
    auto above = [&] { return (C)(link.reach(level) - margin / link.slope * 0.5); };
    if (s.level > 0.0) {
        level = s.level;
        return above();
    }
    auto loosened = [&](double guess) {
        const double loose = link.near_one() ? guess + margin * (1.0 + fabs(guess)) : guess + margin;
        return loose < link.start ? loose : link.start;
    };
    level = loosened((double)level_of_cells(link, s));
    if (link.near_one() || cells_above(s, above()) * 4 < s.count * width<C>) return above();
    double guess = level;
    for (int turn = 0; turn < 8; turn++) {
        const Sums2 sums = sums_of_cells(link, s, guess);
        const double fall = link.step(sums.s0, sums.s1);
        if (!(fall > 0.0) || !(fall < guess)) break;
        guess -= fall;
        if (fall <= 0.01 * sums.s0 / sums.s1) break;
    }
    level = loosened(guess);
    return above();
}

template <class C>
static Support<C> curve_row(double slope, double r, const C *x, int64_t n, Finish finish, Scan<C> *known, Scratch &scratch, const Team &team) {
    if constexpr (sizeof(C) == 4) {
        const Curve curve(slope, r);
        const Scan<C> s = scanned(x, n, known, scratch, team);
        if (scratch.failed || !s.sound || s.top == -infinity<C>) return poisoned<C>(s.sound, s.top != -infinity<C>);
        double level;
        const C bound = bound_of(curve, s, level);
        Candidates<C> c = collect(x, n, s, bound, scratch);
        if (scratch.failed) return poisoned<C>(true, false);
        const double *p = curve_root(curve, c, s.top, level, finish, scratch);
        if (scratch.failed) return poisoned<C>(true, false);
        return Support<C>{c.index, p, c.count, (double)s.top + curve.tau(level), true, true};
    } else {
        return threshold_row(AnyPower(slope, r), x, n, finish, known, scratch, team);
    }
}

template <class C>
static Support<C> steep_row(double c, const C *x, int64_t n, Scratch &scratch, const Team &team) {
    Scan<C> s = scan(x, n, scratch, team);
    if (scratch.failed || !s.sound || s.top == -infinity<C>) return poisoned<C>(s.sound, s.top != -infinity<C>);
    C bound = (C)(-1.0 / c * (1.0 + 1e-6));
    if (cells_above(s, bound) > 12) bound = larger(bound, (C)steep_bound(c, s));
    if (!(bound < 0)) bound = C(-1e-37);  // the largest score itself is above any
    Candidates<C> k = collect(x, n, s, bound, scratch);
    double *y = widen(k, s.top, scratch);
    double *above = scratch.take<double>(SORTED, k.count + width<double>);
    if (scratch.failed) return poisoned<C>(true, false);
    double tau = steep(c, y, k.count, above);
    return Support<C>{k.index, y, k.count, (double)s.top + tau, true, true};
}

// Of y in whole vectors the level in [0, 1] where clip(y + level, 0, 1) sums to k, but for `lost` of the terms that lie between.
struct Filled {
    double level, lost;
};
static Filled budget_level(const double *y, int64_t count, double k) {
    double low = 0.0, high = 1.0, level = 0.5, excess = 0.0;
    int64_t inside = 0;
    for (int turn = 0; turn < 200; turn++) {
        vd s0{};
        vl s1{};
        int64_t full = 0;
        for (int64_t i = 0; i < count;) {  // sums of blocks: a long row rounds no more than a short one
            vd block{};
            for (const int64_t end = i + 64 * width<double> < count ? i + 64 * width<double> : count; i < end; i += width<double>) {
                vd t = load(y + i) + level;
                vl in = (t > vd{}) & (t < 1.0), whole = t >= 1.0;
                block += in ? t : vd{};
                s1 += in;
                full += __builtin_popcount(bits(whole));
            }
            s0 += block;
        }
        inside = 0;
        for (int64_t j = 0; j < width<double>; j++) inside -= s1[j];
        excess = (sum(s0) - k) + (double)full;
        if (excess > 0.0)
            high = level;
        else
            low = level;
        double next = inside ? level - excess / (double)inside : 0.5 * (low + high);
        if (excess == 0.0 || next == level) break;
        if (!(next > low && next < high)) next = 0.5 * (low + high);
        if (!(next > low && next < high)) break;
        level = next;
    }
    return Filled{level, inside ? excess / (double)inside : 0.0};
}

// clip(y + level, 0, 1) that sums to k: the anchor is the ceil(k)-th largest score, where the level lies in [0, 1].
template <class C>
static Support<C> budget_row(double k, const C *x, int64_t n, Scratch &scratch, const Team &team) {
    Scan<C> s = scan(x, n, scratch, team);
    if (scratch.failed || !s.sound || s.top == -infinity<C> || k != k) return poisoned<C>(s.sound && k == k, s.top != -infinity<C>);
    int64_t rank_ = k < (double)n ? (int64_t)::ceil(k) : n;
    if (rank_ < 1) rank_ = 1;
    const C reached = reached_by(s, rank_);
    C bound = reached;
    if (reached != -infinity<C>) {
        const C slack = C(1e-6) * (C(1) + (reached < 0 ? -reached : reached));
        bound = reached - C(1) - slack;
        if (s.block == 16 && cells_above(s, bound - s.top) * 2 > s.count * width<C>) {  // of a long row of much alike scores: by all its cells
            const int64_t cells = s.count * width<C>;
            double *y = scratch.take<double>(WIDE, cells);
            if (!y) return poisoned<C>(true, false);
            for (int64_t i = 0; i < cells; i += width<double>) store(y + i, load_wide(s.cells + i) - (double)reached);
            bound = larger(bound, reached - (C)(budget_level(y, cells, k).level * (1.0 + 1e-6)) - slack);
        }
    }
    Candidates<C> c = collect_from(x, n, s, bound, scratch);
    if (scratch.failed) return poisoned<C>(true, false);
    const int64_t count = c.count;
    if (count < rank_) rank_ = count;
    const C edge = select(c.value, count, rank_, 0, lowest_of(c.value, count), count, s.top);
    C anchor = s.top;
    for (int64_t i = 0; i < count; i++) anchor = c.value[i] >= edge && c.value[i] < anchor ? c.value[i] : anchor;
    double *y = widen(c, anchor, scratch);
    if (scratch.failed) return poisoned<C>(true, false);
    if (k >= (double)count) {
        for (int64_t i = 0; i < count; i++) y[i] = 1.0;
        return Support<C>{c.index, y, count, (double)lowest_of(c.value, count) - 1.0, true, true};
    }
    const auto [level, lost] = budget_level(y, count, k);
    for (int64_t i = 0; i < count; i++) {
        double t = y[i] + level;
        if (t > 0.0 && t < 1.0) {
            t -= lost;
            t = t < 0.0 ? 0.0 : t > 1.0 ? 1.0 : t;
        }
        y[i] = t <= 0.0 ? 0.0 : t >= 1.0 ? 1.0 : t;
    }
    return Support<C>{c.index, y, count, (double)anchor - level, true, true};
}

template <class C>
static Support<C> truncated(Kept<C> &kept, double &z, Scratch &scratch) {
    if (scratch.failed || !kept.sound || !kept.any) return poisoned<C>(kept.sound, kept.any);
    z = exponentials(kept);
    double *p = scratch.take<double>(WIDE, kept.count + 8);
    if (!p) return poisoned<C>(true, false);
    const double scale = 1.0 / z;
    for (int64_t i = 0; i < kept.count; i++) p[i] = (double)kept.value[i] * scale;
    return Support<C>{kept.index, p, kept.count, (double)kept.top + ::log(z), true, true};
}

// The non-zeros of a row of a map that has zeros.
template <class C>
static Support<C> support_of(Link link, double param, const C *x, int64_t n, Scratch &scratch, const Team &team, Scan<C> *known = nullptr) {
    const double c = param - 1.0;
    double z;
    switch (link) {
        case POWER1: return threshold_row(Power<1>(), x, n, ENTMAX_FINISH, known, scratch, team);
        case POWER2: return threshold_row(Power<2>(), x, n, ENTMAX_FINISH, known, scratch, team);
        case POWER3:
            if (sizeof(C) == 8) return threshold_row(Power<3>(), x, n, ENTMAX_FINISH, known, scratch, team);
            return curve_row(c, 1.0 / c, x, n, ENTMAX_FINISH, known, scratch, team);
        case POWER4:
            if (sizeof(C) == 8) return threshold_row(Power<4>(), x, n, ENTMAX_FINISH, known, scratch, team);
            return curve_row(c, 1.0 / c, x, n, ENTMAX_FINISH, known, scratch, team);
        case CURVE: return curve_row(c, 1.0 / c, x, n, ENTMAX_FINISH, known, scratch, team);
        case ANY_POWER: return threshold_row(AnyPower(c, 1.0 / c), x, n, ENTMAX_FINISH, known, scratch, team);
        case STEEP: return steep_row(c, x, n, scratch, team);
        case NORM: return curve_row(1.0, param / c, x, n, NORMMAX_FINISH, known, scratch, team);
        case CAPPED: return budget_row(param, x, n, scratch, team);
        case LARGEST: {
            Kept<C> kept = largest_row(x, n, (int64_t)param, scratch, team);
            return truncated(kept, z, scratch);
        }
        case NUCLEUS: {
            Kept<C> kept = nucleus_row(x, n, param, scratch, team);
            return truncated(kept, z, scratch);
        }
        default: return poisoned<C>(false, true);
    }
}

// -- one row of each operation ------------------------------------------------------------------------------------------------

template <class C>
static void save_support(const anymax_call &call, int64_t row, const Support<C> &found) {
    const anymax_support &to = call.support;
    if (!to.count) return;
    int64_t at = 0, cap = to.capacity;
    int32_t *index = to.index + row * cap;
    C *value = (C *)to.value + row * cap;
    if (!found.sound) {
        to.count[row] = -1;
        return;
    }
    const double least = vanishing(call.dtype);
    for (int64_t i = 0; i < found.count; i++) {
        if (!(found.p[i] > least)) continue;
        if (at == cap) {
            to.count[row] = -1;
            return;
        }
        index[at] = found.index[i];
        value[at++] = (C)found.p[i];
    }
    to.count[row] = (int32_t)at;
}

// The same of a row of results.
template <class C>
static void save_nonzeros(const anymax_call &call, int64_t row, const C *p, Scratch &scratch) {
    const anymax_support &to = call.support;
    const Candidates<C> found = nonzeros(p, call.n, (C)vanishing(call.dtype), to.capacity, scratch);
    const bool fits = found.count <= to.capacity;
    to.count[row] = fits ? (int32_t)found.count : -1;
    if (!fits || scratch.failed) return;
    memcpy(to.index + row * to.capacity, found.index, (size_t)found.count * sizeof(int32_t));
    memcpy((C *)to.value + row * to.capacity, found.value, (size_t)found.count * sizeof(C));
}

// Of a nucleus, whose probabilities then lie in its e.
template <class C>
static void save_nucleus(const anymax_call &call, int64_t row, const NucleusRow<C> &nucleus, Scratch &scratch) {
    write(nucleus.e, 0, nucleus.n, false, nucleus);
    save_nonzeros(call, row, nucleus.e, scratch);
}

template <class C>
static void perturb_probabilities(const anymax_call &call, const C *x, int64_t n, C *p, double *tau, Scratch &scratch) {
    double *work = scratch.take<double>(WORK, perturb_work(n, call.nodes));
    if (work) perturb_forward<C>(call.noise, call.param, call.nodes, x, n, p, tau, work);
}

// Sparsemax and entmax 3/2, 4/3, 5/4 of a row that is short or mostly support. False: the candidates serve it better.
template <class C, int R>
static bool swept_row(const anymax_call &call, int64_t row, Way way, const C *x, Scan<C> &known, const Sink<C> &out, Scratch &scratch, const Team &team) {
    const int64_t n = call.n;
    const Scan<C> s = scanned(x, n, &known, scratch, team);
    if (scratch.failed || !s.sound || s.top == -infinity<C>) return false;
    double level;
    C bound = bound_of(Power<R>(), s, level);
    known.level = level;
    if (way == SWEEP_CROWDED && !crowded(s, bound)) return false;
    const Edge edge = sweep_root<C, R>(x, n, s.top, Power<R>().tau(level));
    C *to = out.direct && (out.direct != x || !call.support.count) ? out.direct : scratch.take<C>(RESULT, n);
    if (!to) return true;
    pieces(team, n, [&](int64_t, int64_t b, int64_t e) { sweep_write<C, R>(to, x, b, e, n, s.top, edge, out.past && to == out.direct); });
    if (call.support.count) save_nonzeros(call, row, to, scratch);
    if (to != out.direct) {
        if (out.direct)
            memcpy(out.direct, to, (size_t)n * sizeof(C));
        else
            deliver(out, to);
    }
    return true;
}

template <class C>
static bool swept(const anymax_call &call, int64_t row, Way way, Link link, const C *x, Scan<C> &known, const Sink<C> &out, Scratch &scratch, const Team &team) {
    switch (link) {
        case POWER1: return swept_row<C, 1>(call, row, way, x, known, out, scratch, team);
        case POWER2: return swept_row<C, 2>(call, row, way, x, known, out, scratch, team);
        case POWER3: return swept_row<C, 3>(call, row, way, x, known, out, scratch, team);
        default: return swept_row<C, 4>(call, row, way, x, known, out, scratch, team);
    }
}

template <class C>
static void forward_row(const anymax_call &call, int64_t row, Way way, Link link, double param, const C *x, const Sink<C> &out, Scratch &scratch,
                        const Team &team) {
    const int64_t n = call.n;
    if (call.support.count) call.support.count[row] = -1;
    if (link == EXPONENTIAL) return softmax_row(x, n, out, false, scratch, team);
    Scan<C> known{};
    if ((way == SWEEP || way == SWEEP_CROWDED) && swept(call, row, way, link, x, known, out, scratch, team)) return;
    if (way == COUNT && largest_dense(x, n, (int64_t)param, out, scratch)) return;
    NucleusRow<C> nucleus;
    if (way == WEIGH && nucleus_row(x, n, param, nucleus, scratch)) {
        if (scratch.failed) return;
        if (!call.support.count) return emit_over(out, nucleus.e, nucleus);
        save_nucleus(call, row, nucleus, scratch);
        return emit_over(out, nucleus.e, [&](int64_t i) ANYMAX_EACH { return load_or(nucleus.e, i, n, C(0)); });
    }
    if (has_zeros(link)) {
        const Support<C> found = support_of(link, param, x, n, scratch, team, &known);
        if (scratch.failed) return;
        save_support(call, row, found);
        if (!found.sound) return fill(out, not_a_number<C>);
        return spread(out, found.index, found.p, found.count, team);
    }
    C high;
    bool sound;
    scan_top(x, n, high, sound);
    if (!sound) return fill(out, not_a_number<C>);
    if (high == -infinity<C>) return zeros(out, team);
    if (link != PERTURBED) return with_ratio(link, param, x, n, high, [&](const auto &u) { ratio_row(x, n, u, out, scratch); });
    C *p = out.direct && out.direct != x ? out.direct : scratch.take<C>(RESULT, n);
    if (!p) return;
    perturb_probabilities(call, x, n, p, nullptr, scratch);
    if (p != out.direct) deliver(out, p);
}

template <class C>
static void log_row(const anymax_call &call, Link link, double param, const C *x, const Sink<C> &out, Scratch &scratch, const Team &team) {
    const int64_t n = call.n;
    if (link == EXPONENTIAL) return softmax_row(x, n, out, true, scratch, team);
    if (link == SIGMOID) {
        C high;
        bool sound;
        scan_top(x, n, high, sound);
        if (!sound) return fill(out, not_a_number<C>);
        if (high == -infinity<C>) return fill(out, -infinity<C>);
        const SigmoidWeight<C> u(high);
        C *e = scratch.take<C>(EXTRA, n);
        if (!e) return;
        const vec<C> l = splat((C)::log(weight_sum(x, n, u, e)));
        return emit(out, scratch, team, [=](int64_t i) ANYMAX_EACH {
            vec<C> v = load_or(x, i, n, C(0));
            return v > -infinity<C> ? u.logarithm(v) - l : splat(-infinity<C>);
        });
    }
    Kept<C> kept = link == LARGEST ? largest_row(x, n, (int64_t)param, scratch, team) : nucleus_row(x, n, param, scratch, team);
    if (scratch.failed) return;
    if (!kept.sound) return fill(out, not_a_number<C>);
    fill(out, -infinity<C>);
    if (!kept.any) return;
    double z = exponentials(kept);
    const C l = (C)::log(z);
    for (int64_t i = 0; i < kept.count; i++) put(out, kept.index[i], (C)(x[kept.index[i]] - kept.top) - l);
}

// For log p: g - p sum g over the classes that have a probability; sigsoftmax multiplies by (log u)' = 1 + sigmoid(-x).
template <class C>
static void log_vjp_row(const anymax_call &call, const C *x, const C *log_p, const C *g, const Sink<C> &out, Scratch &scratch, const Team &team) {
    const int64_t n = call.n;
    constexpr int64_t W = width<C>;
    vd wide{};
    for (int64_t i = 0; i < n; i += W) {
        vec<C> l = load_or(log_p, i, n, -infinity<C>), h = load_or(g, i, n, C(0));
        wide = widen_add(wide, l == -infinity<C> ? vec<C>{} : h);
    }
    const vec<C> total = splat((C)sum(wide));
    const bool sigmoid = link_of(call.map, call.param) == SIGMOID;
    emit(out, scratch, team, [=](int64_t i) ANYMAX_EACH {
        vec<C> l = load_or(log_p, i, n, -infinity<C>), h = load_or(g, i, n, C(0));
        vec<C> d = h - exp(l) * total;
        if (sigmoid) {
            vec<C> s = load_or(x, i, n, C(0)), e = exp(-absolute(s));
            d = d * (C(1) + (s < vec<C>{} ? splat(C(1)) : e) / (e + C(1)));
        }
        return l == -infinity<C> ? vec<C>{} : d;
    });
}

template <class C>
static double tau_row(const anymax_call &call, Link link, double param, const C *x, Scratch &scratch, const Team &team) {
    if (link == EXPONENTIAL) return lse_row(x, call.n, nullptr, scratch, team);
    if (has_zeros(link)) return support_of(link, param, x, call.n, scratch, team).tau;
    C high;
    bool sound;
    scan_top(x, call.n, high, sound);
    if (!sound || high == -infinity<C>) return sound ? -inf64 : not_a_number<double>;
    C *p = scratch.take<C>(RESULT, call.n);
    double tau = 0.0;
    if (p) perturb_probabilities(call, x, call.n, p, &tau, scratch);
    return tau;
}

// The loss for a target class: Omega*(x) - x_t, as sum p_j (x_j - x_t) - Omega(p), where nothing large cancels.
template <class C>
static double loss_row(const anymax_call &call, int64_t row, Way way, Link link, double param, const C *x, int64_t t, Scratch &scratch, const Team &team) {
    const int64_t n = call.n;
    const double aim = (double)x[t];
    double value = 0.0;
    if (call.support.count) call.support.count[row] = -1;
    if (link == EXPONENTIAL) {
        double rest = 0.0, tau = lse_row(x, n, &rest, scratch, team);
        if (call.tau) ((C *)call.tau)[row] = (C)tau;
        if (tau != tau) return tau;
        if (aim == -inf64) return inf64;
        C high;
        bool sound;
        scan_top(x, n, high, sound);
        return ((double)high - aim) + rest;
    }
    NucleusRow<C> nucleus;
    if (way == WEIGH && nucleus_row(x, n, param, nucleus, scratch)) {
        if (scratch.failed) return 0.0;
        if (call.support.count) save_nucleus(call, row, nucleus, scratch);
        value = ((double)nucleus.high - aim) + ::log1p(nucleus.mass - 1.0);
        return value > 0.0 ? value : 0.0;
    }
    if (has_zeros(link)) {
        const Support<C> found = support_of(link, param, x, n, scratch, team);
        if (scratch.failed) return 0.0;
        save_support(call, row, found);
        if (call.tau) ((C *)call.tau)[row] = (C)found.tau;
        if (!found.sound) return not_a_number<double>;
        if (aim == -inf64 || !found.any) return inf64;
        if (link == LARGEST || link == NUCLEUS) {
            double rest = 0.0;
            int64_t tied = -1;
            C high = -infinity<C>;
            for (int64_t i = 0; i < found.count; i++) high = larger(high, x[found.index[i]]);
            for (int64_t i = 0; i < found.count; i++) {
                C v = x[found.index[i]];
                if (v == high)
                    tied++;
                else
                    rest += ::exp((double)v - (double)high);
            }
            value = ((double)high - aim) + ::log1p(rest + (double)tied);
            return value > 0.0 ? value : 0.0;
        }
        double norm = 0.0;
        const double c = param - 1.0;
        for (int64_t i = 0; i < found.count; i++) {
            const double p = found.p[i];
            if (!(p > 0.0)) continue;
            value += p * ((double)x[found.index[i]] - aim);
            if (link == POWER1 || link == CAPPED)
                value -= 0.5 * p * (p - 1.0);
            else if (link == NORM)
                norm += ::exp(param * ::log(p));
            else
                value -= p * ::expm1(c * ::log(p)) / (c * param);
        }
        if (link == NORM) value -= ::expm1(::log(norm) / param);
        return value > 0.0 ? value : 0.0;
    }
    C high;
    bool sound;
    scan_top(x, n, high, sound);
    if (!sound) return not_a_number<double>;
    if (aim == -inf64) return inf64;
    double *work = scratch.take<double>(WORK, perturb_work(n, call.nodes));
    if (scratch.failed) return 0.0;
    value = perturb_loss<C>(call.noise, call.param, call.nodes, x, n, t, nullptr, work);
    return value > 0.0 ? value : 0.0;
}

// scale (p - y), of the p > 0 at the indices.
template <class C, class P>
static void put_gradient(const Sink<C> &out, const int32_t *index, const P *p, int64_t count, int64_t t, C scale, Scratch &scratch, const Team &team) {
    double *scaled = scratch.take<double>(EXTRA, count + 8);
    if (!scaled) return;
    for (int64_t i = 0; i < count; i++) scaled[i] = (double)p[i] * (double)scale;
    spread(out, index, scaled, count, team);
    put(out, t, (C)((value_at(index, p, count, t) - 1.0) * (double)scale));
}

// scale (p - y) for a target class.
template <class C>
static void loss_gradient_row(const anymax_call &call, int64_t row, Way way, Link link, double param, const C *x, int64_t t, C scale, const Sink<C> &out, Scratch &scratch,
                              const Team &team) {
    const int64_t n = call.n;
    if (link == EXPONENTIAL) {
        C high;
        bool sound;
        scan_top(x, n, high, sound);
        if (!sound) return fill(out, not_a_number<C>);
        if (high == -infinity<C>) {
            zeros(out, team);
            return put(out, t, -scale);
        }
        const C own = x[t];
        double rest;  // logsumexp less the maximum; a saved one far from 0 has lost too many digits of that
        if (call.tau && fabs((double)high) <= (sizeof(C) == 4 ? 32.0 : 4096.0))
            rest = (double)((const C *)call.tau)[row] - (double)high;
        else
            lse_row(x, n, &rest, scratch, team);
        exp_row(x, high, (C)(::exp(-rest) * (double)scale), out, scratch, team);
        double p = ::exp(((double)own - (double)high) - rest);
        return put(out, t, (C)((p - 1.0) * (double)scale));
    }
    if (call.support.count && call.support.count[row] >= 0) {
        const int64_t at = row * call.support.capacity;
        return put_gradient(out, call.support.index + at, (const C *)call.support.value + at, call.support.count[row], t, scale, scratch, team);
    }
    NucleusRow<C> nucleus;
    if (way == WEIGH && nucleus_row(x, n, param, nucleus, scratch)) {
        if (scratch.failed) return;
        const int64_t first = t / width<C> * width<C>;
        const double own = (double)nucleus(first)[t - first];
        const vec<C> by = splat(scale);
        emit_over(out, nucleus.e, [&](int64_t i) ANYMAX_EACH {
            const vec<C> p = nucleus(i);
            return p == vec<C>{} ? p : p * by;
        });
        return put(out, t, (C)((own - 1.0) * (double)scale));
    }
    if (has_zeros(link)) {
        const Support<C> found = support_of(link, param, x, n, scratch, team);
        if (scratch.failed) return;
        if (!found.sound) return fill(out, not_a_number<C>);
        return put_gradient(out, found.index, found.p, found.count, t, scale, scratch, team);
    }
    C high;
    bool sound;
    scan_top(x, n, high, sound);
    C *p = scratch.take<C>(EXTRA, n);
    if (!p) return;
    if (!sound) return fill(out, not_a_number<C>);
    if (high == -infinity<C>)
        memset(p, 0, (size_t)n * sizeof(C));
    else
        perturb_probabilities(call, x, n, p, nullptr, scratch);
    const C own = p[t];
    emit(out, scratch, team, [=](int64_t i) ANYMAX_EACH { return load_or(p, i, n, C(0)) * scale; });
    put(out, t, (own - C(1)) * scale);
}

template <class C>
static void vjp_any(const anymax_call &call, int64_t row, Link link, double param, const C *x, const C *p, const void *g, const Sink<C> &out, Scratch &scratch,
                    const Team &team) {
    const int64_t n = call.n;
    if (MAPS[call.map].scores) {
        C high;
        bool sound;
        scan_top(x, n, high, sound);
        if (!sound) return fill(out, not_a_number<C>);
        if (high == -infinity<C>) return zeros(out, team);
        const C *h = stage<C>(g, call.g.cls, call.dtype, nullptr, 0, n, scratch, STAGED_G);
        if (!h) return;
        if (link != PERTURBED) return with_ratio(link, param, x, n, high, [&](const auto &u) { ratio_vjp_row(u, x, p, h, n, out, scratch, team); });
        C *to = scratch.take<C>(RESULT, n);
        double *work = scratch.take<double>(WORK, perturb_work(n, call.nodes));
        if (scratch.failed) return;
        perturb_vjp<C>(call.noise, call.param, call.nodes, x, p, h, n, to, work);
        return emit(out, scratch, team, [=](int64_t i) ANYMAX_EACH { return load_or(to, i, n, C(0)); });
    }
    const Sensitivity s(link, param, sizeof(C) == 4);
    if (call.support.count && call.support.count[row] >= 0) {
        const int64_t cap = call.support.capacity;
        return vjp_found(s, call.support.index + row * cap, (const C *)call.support.value + row * cap, call.support.count[row], g, call.g.cls,
                         call.dtype, out, scratch, team);
    }
    vjp_row(s, p, g, call.g.cls, call.dtype, n, out, scratch, team);
}

template <class C>
static void largest_of(const anymax_call &call, int64_t row, const C *x, Sink<C> out, Scratch &scratch, const Team &team) {
    const int64_t n = call.n, k = (int64_t)call.param;
    out.n = k;
    int64_t *at = call.positions + row * k;
    Kept<C> kept = largest_row(x, n, k, scratch, team);
    if (scratch.failed) return;
    if (!kept.sound || !kept.any) {
        for (int64_t i = 0; i < k; i++) {
            at[i] = i;
            put(out, i, kept.sound ? -infinity<C> : not_a_number<C>);
        }
        return;
    }
    // a heap of (value, -index): the largest first, equal ones by their place
    C *v = kept.value;
    int32_t *index = kept.index;
    int64_t size = kept.count;
    auto before = [&](C a, int32_t i, C b, int32_t j) { return a > b || (a == b && i < j); };
    auto sift = [&](int64_t i, int64_t end) {
        C w = v[i];
        int32_t m = index[i];
        for (int64_t child; (child = 2 * i + 1) < end; i = child) {
            if (child + 1 < end && before(v[child + 1], index[child + 1], v[child], index[child])) child++;
            if (!before(v[child], index[child], w, m)) break;
            v[i] = v[child], index[i] = index[child];
        }
        v[i] = w, index[i] = m;
    };
    for (int64_t i = size / 2 - 1; i >= 0; i--) sift(i, size);
    int64_t i = 0;
    for (int64_t left = size; left > 0; i++) {
        put(out, i, v[0]);
        at[i] = index[0];
        left--;
        v[0] = v[left], index[0] = index[left];
        if (left) sift(0, left);
    }
    for (int64_t j = 0; i < k && j < n; j++)  // fewer finite scores than k: the masked ones follow, by their place
        if (x[j] == -infinity<C>) {
            put(out, i, -infinity<C>);
            at[i++] = j;
        }
}

// -- layouts ------------------------------------------------------------------------------------------------------------------------

template <class C>
void by_rows(const anymax_call &call, int64_t begin, int64_t end, bool past, const Team &team, Scratch &scratch) {
    const int64_t n = call.n, size = item(call.dtype), inner = call.inner;
    const bool reads_x = call.x.data != nullptr;
    const bool to_rows = call.op == ANYMAX_FORWARD || call.op == ANYMAX_LOG || call.op == ANYMAX_VJP || call.op == ANYMAX_LOG_VJP || call.op == ANYMAX_LOSS_GRAD;
    const bool turn_x = reads_x && inner > 1 && sideways(call.x, n) && !call.mask.data, turn_result = to_rows && inner > 1 && sideways(call.out, n);
    C *turned = nullptr, *result = nullptr;
    int64_t first = 0, held = 0;  // the rows that `turned` and `result` hold
    Link link = call.params ? NO_LINK : link_of(call.map, call.param);
    Way way = row_plan(call, link);
    for (int64_t r = begin; r < end && !scratch.failed; r++) {
        const int64_t o = inner == 1 ? r : r / inner, i = inner == 1 ? 0 : r - o * inner;
        const double param = call.params ? call.params[r] : call.param;
        if (call.params) link = link_of(call.map, param), way = row_plan(call, link);
        if ((turn_x || turn_result) && r >= first + held) {
            first = r;
            held = GROUP;
            if (held > inner - i) held = inner - i;
            if (held > end - r) held = end - r;
            if (turn_x) {
                turned = scratch.take<C>(STAGED, GROUP * n);
                if (!turned) break;
                turn_in(at(call.x, size, o, i), call.x.cls, call.dtype, held, n, turned);
            }
            if (turn_result && !(result = scratch.take<C>(TURNED, GROUP * n))) break;
        }
        const C *x = nullptr;
        if (turn_x)
            x = turned + (r - first) * n;
        else if (reads_x) {
            const uint8_t *mask = call.mask.data ? (const uint8_t *)at(call.mask, 1, o, i) : nullptr;
            x = stage<C>(at(call.x, size, o, i), call.x.cls, call.dtype, mask, call.mask.cls, n, scratch, STAGED);
            if (!x) break;
        }
        Sink<C> out{};
        if (call.out.data) {
            char *row = (char *)at(call.out, size, o, i);
            out = sink_at<C>(call, row, n, past);
            if (out.past && out.direct && inner == 1 && r + 1 < end && x == (const C *)at(call.x, size, o, 0)) out.next = (const C *)at(call.x, size, o + 1, 0);
            if (turn_result) {
                C *to = result + (r - first) * n;
                out = Sink<C>{to, 1, sizeof(C) == 8 ? ANYMAX_F64 : ANYMAX_F32, to, false, n, nullptr};
            }
        }
        switch (call.op) {
            case ANYMAX_FORWARD: forward_row(call, r, way, link, param, x, out, scratch, team); break;
            case ANYMAX_LOG: log_row(call, link, param, x, out, scratch, team); break;
            case ANYMAX_VJP: {
                if (call.support.count) saved_ahead<C>(call, r, end);
                const bool saved = call.support.count && call.support.count[r] >= 0;
                const C *p = saved ? nullptr : stage<C>(at(call.p, size, o, i), call.p.cls, call.dtype, nullptr, 0, n, scratch, STAGED_P);
                if (saved || p) vjp_any(call, r, link, param, x, p, at(call.g, size, o, i), out, scratch, team);
                break;
            }
            case ANYMAX_LOG_VJP: {
                const C *p = stage<C>(at(call.p, size, o, i), call.p.cls, call.dtype, nullptr, 0, n, scratch, STAGED_P);
                const C *g = stage<C>(at(call.g, size, o, i), call.g.cls, call.dtype, nullptr, 0, n, scratch, STAGED_G);
                if (p && g) log_vjp_row(call, x, p, g, out, scratch, team);
                break;
            }
            case ANYMAX_LOSS: {
                const int64_t t = call.index[r];
                double v = 0.0;
                if (t >= n)
                    v = not_a_number<double>;
                else if (t >= 0)
                    v = loss_row(call, r, way, link, param, x, t, scratch, team);
                if ((t < 0 || t >= n) && call.support.count) call.support.count[r] = 0;
                ((C *)call.value)[r] = (C)v;
                break;
            }
            case ANYMAX_LOSS_GRAD: {
                const int64_t t = call.index[r];
                const C scale = ((const C *)call.scale)[r];
                if (t < 0)
                    zeros(out, team);
                else if (t >= n)
                    fill(out, not_a_number<C>);
                else
                    loss_gradient_row(call, r, way, link, param, x, t, scale, out, scratch, team);
                break;
            }
            case ANYMAX_THRESHOLD: ((C *)call.tau)[r] = (C)tau_row(call, link, param, x, scratch, team); break;
            case ANYMAX_LARGEST: largest_of(call, r, x, out, scratch, team); break;
        }
        if (turn_result && r == first + held - 1) {
            const int64_t fo = first / inner, fi = first - fo * inner;
            turn_out(result, held, n, (void *)at(call.out, size, fo, fi), call.out.cls, call.dtype);
        }
    }
}

template void by_rows<float>(const anymax_call &, int64_t, int64_t, bool, const Team &, Scratch &);
template void by_rows<double>(const anymax_call &, int64_t, int64_t, bool, const Team &, Scratch &);

// The inner rows of an outer one, as outer rows of a call of their own.
static anymax_call inner_rows(anymax_call call, int64_t o) {
    const int64_t first = o * call.inner, size = call.dtype == ANYMAX_F64 ? 8 : 4;
    anymax_view *const views[] = {&call.x, &call.p, &call.g, &call.out, &call.mask};
    for (anymax_view *v : views)
        if (v->data) *v = anymax_view{(void *)at(*v, v == &call.mask ? 1 : item(call.dtype), o, 0), v->inner, 0, v->cls};
    anymax_support &s = call.support;
    if (s.count) s.index += first * s.capacity, s.value = (char *)s.value + first * s.capacity * size, s.count += first;
    if (call.index) call.index += first;
    if (call.scale) call.scale = (const char *)call.scale + first * size;
    if (call.value) call.value = (char *)call.value + first * size;
    if (call.tau) call.tau = (char *)call.tau + first * size;
    call.outer = call.inner, call.inner = 1;
    return call;
}

template <class C>
static int run_rows(const anymax_call &call, const Plan &plan, int64_t begin, int64_t end, bool past, const Team &team) {
    Scratch scratch;
    switch (plan.way) {
        case TILE:
        case TILE_LOSS: run_tiles<C>(call, plan, begin, end, past, team, scratch); break;
        case BATCH: run_batches(call, plan, begin, end, past, team, scratch); break;
        case BATCH_LOSS: run_batch_losses(call, plan, begin, end, past, team, scratch); break;
        case DENSE_BACKWARD:
        case SAVED_BACKWARD:
        case SAVED_GRADIENT: run_backward(call, plan, begin, end, past, team, scratch); break;
        default: by_rows<C>(call, begin, end, past, team, scratch);
    }
    if (past) fence();
    return scratch.failed ? ANYMAX_NO_MEMORY : 0;
}

static int run_plan(const anymax_call &call, const Plan &plan, int64_t begin, int64_t end, bool past, const Team &team) {
    if (call.dtype == ANYMAX_F64) return run_rows<double>(call, plan, begin, end, past, team);
    return run_rows<float>(call, plan, begin, end, past, team);
}

static int rows(const anymax_call *call, int64_t begin, int64_t end, int past, anymax_parallel team) {
    const Plan way = plan(*call);
    if (!way.outer) return run_plan(*call, way, begin, end, past != 0, Team{team});
    int code = 0;
    for (int64_t r = begin; r < end && !code;) {
        const int64_t o = r / call->inner, i = r - o * call->inner, count = call->inner - i < end - r ? call->inner - i : end - r;
        code = run_plan(inner_rows(*call, o), way, i, i + count, past != 0, Team{team});
        r += count;
    }
    return code;
}

static const char *plan_name(const anymax_call *call) { return WAY_NAMES[plan(*call).way]; }

#if defined(ANYMAX_NO_ATTENTION)
constexpr decltype(anymax_unit::linear) linear = nullptr, linear_vjp = nullptr;
#endif

}  // namespace ANYMAX_UNIT

#define ANYMAX_JOIN2(a, b) a##b
#define ANYMAX_JOIN(a, b) ANYMAX_JOIN2(a, b)
extern "C" const anymax_unit ANYMAX_JOIN(anymax_unit_, ANYMAX_UNIT) = {ANYMAX_UNIT::rows, ANYMAX_UNIT::plan_name, ANYMAX_UNIT::worth_saving, ANYMAX_UNIT::linear, ANYMAX_UNIT::linear_vjp};
