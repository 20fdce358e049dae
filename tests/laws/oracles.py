"""What is true of a map, from mathematics alone: 50-digit solvers, KKT residuals, finite differences. Shares no code with src.

A `row` is a 1-D NumPy array without masks; an oracle gives its probabilities as a list of mpmath numbers, or as longdoubles.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import mpmath as mp
import numpy as np

DIGITS = 50
EXTENDED = np.finfo(np.longdouble).nmant >= 63  # a longdouble is more than a double here


def exact(fn):
    """Run an oracle at 50 digits, on the row's numbers as they are."""

    def run(row):
        with mp.workdps(DIGITS):
            return fn([mp.mpf(float(v)) for v in row])

    return run


def bisect(f, low, high, steps=200):
    """The root of an increasing f by the Illinois method: secants in a bracket that shrinks from both ends."""
    f_low, f_high = f(low), f(high)
    if f_low == 0 or low == high:
        return low
    if f_high == 0:
        return high
    side = 0
    for step in range(steps):
        middle = (f_low * high - f_high * low) / (f_low - f_high)
        if not low < middle < high or step % 6 == 5:
            middle = (low + high) / 2
        f_middle = f(middle)
        if f_middle == 0 or high - low <= mp.eps * 4 * abs(high):
            return middle
        if f_middle < 0:
            low, f_low = middle, f_middle
            f_high = f_high / 2 if side < 0 else f_high  # the Illinois rule: neither end stands still
            side = -1
        else:
            high, f_high = middle, f_middle
            f_low = f_low / 2 if side > 0 else f_low
            side = 1
        if abs(f_middle) < mp.mpf(10) ** (-DIGITS + 8):
            return middle
    return (low + high) / 2


# -- solvers at 50 digits ---------------------------------------------------------------------------------------------------


@exact
def softmax(x):
    e = [mp.exp(v - max(x)) for v in x]
    return [v / mp.fsum(e) for v in e]


def entmax(alpha):
    """alpha-entmax; above 1 by the probability of the smallest supported score, so that the edge's slope can't hurt."""
    alpha = Fraction(alpha)
    if alpha == 1:
        return softmax

    @exact
    def solve(x):
        c = mp.mpf(alpha.numerator) / alpha.denominator - 1
        if c < 0:
            return dense(x, c)
        ranked = sorted(x, reverse=True)
        size = 0
        for v in ranked:  # v is supported if those above it would not fill the row at tau = v
            if mp.fsum(mp.power(c * (u - v), 1 / c) for u in ranked[:size] if u > v) >= 1:
                break
            size += 1
        edge = ranked[size - 1]
        gaps = [c * (v - edge) for v in ranked[:size]]

        # by q = d^(1/c) where that is the smoother one; d = c (edge - tau)
        bend = c if c > 1 else mp.mpf(1)

        def mass(q):
            return mp.fsum(mp.power(q**bend + g, 1 / c) for g in gaps) - 1

        d = bisect(mass, mp.mpf(0), min(mp.mpf(size) ** -c, 1 - max(gaps)) ** (1 / bend)) ** bend
        return [mp.power(d + c * (v - edge), 1 / c) if v >= edge else mp.mpf(0) for v in x]

    def dense(x, c):
        top = max(x)

        def powers(q):  # q is the largest probability
            return [mp.power(q**c + c * (v - top), 1 / c) for v in x]

        q = bisect(lambda q: mp.fsum(powers(q)) - 1, 1 / mp.mpf(len(x)), mp.mpf(1))
        return powers(q)

    return solve


def budget(k):
    """The capped simplex in rational numbers: exact."""
    k = Fraction(k)

    def solve(row):
        x = [Fraction(float(v)) for v in row]

        def p(tau):
            return [min(max(v - tau, Fraction(0)), Fraction(1)) for v in x]

        kinks = sorted(set(x) | {v - 1 for v in x})
        low, high = 0, len(kinks) - 1  # the sum falls from n at the first kink to 0 at the last
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if sum(p(kinks[middle])) >= k else (low, middle)
        a, b = kinks[low], kinks[high]
        mass_a, mass_b = sum(p(a)), sum(p(b))
        tau = a if mass_a == mass_b else a + (mass_a - k) * (b - a) / (mass_a - mass_b)
        with mp.workdps(DIGITS):
            return [mp.mpf(v.numerator) / v.denominator for v in p(tau)]

    return solve


RISING = {  # the shapes of a budget that has neither zeros nor ones: (F and how it rises, for numbers of mpmath)
    "sigmoid": (lambda t: 1 / (1 + mp.exp(-t)), lambda p: p * (1 - p)),
    "laplace": (lambda t: mp.exp(t) / 2 if t < 0 else 1 - mp.exp(-t) / 2, lambda p: min(p, 1 - p)),
}


def open_budget(k, shape):
    """`F(x - tau)` with sum k, by bisection on tau."""
    rising, _ = RISING[shape]

    @exact
    def solve(x):
        if k == len(x):
            return [mp.mpf(1) for _ in x]
        far = mp.log(mp.mpf(len(x)) / min(mp.mpf(k), len(x) - mp.mpf(k))) + 1
        level = bisect(lambda t: mp.fsum(rising(v + t) for v in x) - k, -max(x) - far, -min(x) + far)
        return [rising(v + level) for v in x]

    return solve


def normmax(alpha):
    """`p ~ (x - tau)^(1/(a-1))` with `sum (x - tau)^(a/(a-1)) = 1`, by the distance of tau to the smallest supported score."""
    alpha = Fraction(alpha)

    @exact
    def solve(x):
        a = mp.mpf(alpha.numerator) / alpha.denominator
        b, r = a / (a - 1), 1 / (a - 1)
        ranked = sorted(x, reverse=True)
        size = 0
        for v in ranked:
            if mp.fsum(mp.power(u - v, b) for u in ranked[:size] if u > v) >= 1:
                break
            size += 1
        edge = ranked[size - 1]
        gaps = [v - edge for v in ranked[:size]]
        # in log d, for d may be many orders below 1
        d = mp.exp(bisect(lambda s: mp.fsum(mp.power(mp.exp(s) + g, b) for g in gaps) - 1, mp.mpf(-400), mp.mpf(0)))
        w = [mp.power(d + v - edge, r) if v >= edge else mp.mpf(0) for v in x]
        return [v / mp.fsum(w) for v in w]

    return solve


def ratio(u):
    """`u(x) / sum u` for u on mpmath numbers."""

    @exact
    def solve(x):
        w = [u(v) for v in x]
        z = mp.fsum(w)
        return [v / z if z else mp.mpf(0) for v in w]

    return solve


def taylor(order):
    return ratio(lambda v: mp.fsum(v**m / mp.factorial(m) for m in range(order + 1)))


def sigsoftmax(row):
    top = max(float(v) for v in row)
    return exact(lambda x: _normalised([mp.exp(v - top) / (1 + mp.exp(-v)) for v in x]))(row)


@exact
def softpick(x):
    """The definition, without an epsilon."""
    w = [mp.expm1(v) for v in x]
    z = mp.fsum(abs(v) for v in w)
    return [max(v, 0) / z if z else mp.mpf(0) for v in w]


def sink(oracle, score):
    """The map of the row and one class more, whose probability is left out."""
    return lambda row: oracle(np.append(np.asarray(row, np.float64), score))[:-1]


def _normalised(w):
    z = mp.fsum(w)
    return [v / z for v in w]


def ranks(strength, kl=False):
    """The projection on the permutahedron at 50 digits, from isotonic regression of the sorted scores."""

    @exact
    def solve(x):
        n, strong = len(x), mp.mpf(strength)
        order = sorted(range(n), key=lambda i: -x[i])
        z = [(x[i] - max(x)) / strong for i in order]
        w = [mp.mpf(n - j) for j in range(n)]
        blocks = []  # pooled until their values fall
        for j in range(n):
            a, b, start = (mp.exp(z[j]), w[j], j) if kl else (z[j] - w[j], mp.mpf(1), j)
            while blocks and blocks[-1][0] / blocks[-1][1] <= a / b:
                a0, b0, start = blocks.pop()
                a, b = a + a0, b + b0
            blocks.append((a, b, start))
        p = [mp.mpf(0)] * n
        ends = [start for _, _, start in blocks[1:]] + [n]
        for (a, b, start), end in zip(blocks, ends):
            for j in range(start, end):
                p[order[j]] = mp.exp(z[j]) * b / a if kl else z[j] - a / b
        return p

    return solve


def sparse_softmax(k=None, p=None):
    """Softmax over the first k in order of score and position, or over as many as reach the mass p."""

    @exact
    def solve(x):
        order = sorted(range(len(x)), key=lambda i: (-x[i], i))
        e = [mp.exp(v - max(x)) for v in x]
        if k is not None:
            kept = order[:k]
        else:
            kept, mass, all_mass = [], mp.mpf(0), mp.fsum(e)
            for i in order:
                if mass >= mp.mpf(p) * all_mass:
                    break
                kept.append(i)
                mass += e[i]
        z = mp.fsum(e[i] for i in kept)
        return [e[i] / z if i in kept else mp.mpf(0) for i in range(len(x))]

    return solve


_CDF = {  # (log of the cdf, log of the density, (lower, upper), kinks)
    "normal": (
        lambda v: np.vectorize(lambda t: math.log(0.5 * math.erfc(-t / math.sqrt(2))))(v),
        lambda v: -0.5 * v * v - 0.5 * math.log(2 * math.pi),
        (-9.0, 9.0),
        (),
    ),
    "gumbel": (lambda v: -np.exp(-v), lambda v: -v - np.exp(-v), (-4.0, 40.0), ()),
    "logistic": (
        lambda v: -np.logaddexp(0, -v),
        lambda v: -np.logaddexp(0, v) - np.logaddexp(0, -v),
        (-38.0, 38.0),
        (),
    ),
    "uniform": (lambda v: np.log(np.clip(v, 0, 1)), lambda v: np.log(1.0 * ((v >= 0) & (v <= 1))), (0.0, 1.0), (0, 1)),
}


def perturb_max(noise):
    """`INT f_i prod_{j != i} F_j` by 30 Gauss points in each of many panels, whose edges include every kink."""
    log_cdf, log_pdf, (lower, upper), kinks = _CDF[noise]
    nodes, weights = np.polynomial.legendre.leggauss(30)

    def solve(row):
        x = np.asarray(row, dtype=np.float64)
        x = x - x.max()
        edges = np.unique(np.clip([*np.linspace(lower, upper, 41), *(v + k for v in x for k in kinks)], lower, upper))
        p = np.zeros_like(x)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            for a, b in itertools.pairwise(edges):
                if b - a < 1e-15:
                    continue
                v = ((a + b) / 2 + (b - a) / 2 * nodes)[:, None] - x
                logs = log_cdf(np.maximum(v, -30.0 if noise == "normal" else -600.0))
                whole = logs.sum(1, keepdims=True)
                f = np.where(np.isfinite(logs), np.exp(whole - logs + log_pdf(v)), 0.0)
                p += (weights[:, None] * (b - a) / 2 * f).sum(0)
        return [mp.mpf(float(v)) for v in p]

    return solve


# -- long rows: longdouble, vectorised, checked against the above by test_law_accuracy.py -------------------------------------


def entmax_long(x, alpha):
    """entmax of rows up to millions in longdouble; above 1 by bisection on the logarithm of edge - tau."""
    x = np.asarray(x).astype(np.longdouble)
    if alpha == 1:
        e = np.exp(x - x.max())
        return e / e.sum()
    c = np.longdouble(alpha) - 1

    def powers(base):
        """(c base)^(1/c), with 0 at 0."""
        return np.exp(np.log(c * np.where(base > 0, base, 1)) / c) * (base > 0)

    if alpha < 1:  # dense: by the largest probability q
        low, high = np.longdouble(0), np.longdouble(1)
        for _ in range(80):
            q = (low + high) / 2
            p = np.exp(np.log(q**c + c * (x - x.max())) / c)
            low, high = (q, high) if p.sum() < 1 else (low, q)
        return p
    return _by_edge(x, powers, powers, np.log(1 / c))


def budget_long(x, k):
    x = np.asarray(x).astype(np.longdouble)
    low, high = x.min() - 1, x.max()
    for _ in range(90):
        tau = (low + high) / 2
        low, high = (tau, high) if np.clip(x - tau, 0, 1).sum() > k else (low, tau)
    return np.clip(x - low, 0, 1)


def normmax_norm(p, alpha):
    """(`||p||_alpha`, its derivative by alpha at a constant p) at 300 digits, in which no power is lost beside another."""
    with mp.workdps(300):
        p, a = [mp.mpf(float(v)) for v in p if v > 0], mp.mpf(float(alpha))
        mass = mp.fsum(v**a for v in p)
        norm = mass ** (1 / a)
        return norm, norm / a * (mp.fsum(v**a * mp.log(v) for v in p) / mass - mp.log(norm))


def normmax_derivatives(p, g, alpha):
    """(J^T g, <g, dp/dalpha>) of a row of p, at 300 digits."""
    norm, rise = normmax_norm(p, alpha)
    with mp.workdps(300):
        p, g, a = [mp.mpf(float(v)) for v in p], [mp.mpf(float(v)) for v in g], mp.mpf(float(alpha))
        mean = mp.fsum(v * h for v, h in zip(p, g, strict=True) if v)
        w = [v * (norm / v) ** (a - 1) / (a - 1) if v else mp.mpf(0) for v in p]
        wh = [k * (h - mean) if k else k for k, h in zip(w, g, strict=True)]
        total = mp.fsum(wh)
        own = mp.fsum(v * mp.log(v) * (h - mean) for v, h in zip(p, g, strict=True) if v) / (a - 1)
        return [float(v - q * total) for v, q in zip(wh, p, strict=True)], float(rise * total - own)


def normmax_long(x, alpha):
    x = np.asarray(x).astype(np.longdouble)
    b, r = np.longdouble(alpha) / (np.longdouble(alpha) - 1), 1 / (np.longdouble(alpha) - 1)

    def powers(exponent):
        return lambda base: np.where(base > 0, base, 1) ** exponent * (base > 0)

    w = _by_edge(x, powers(b), powers(r), np.longdouble(0))
    return w / w.sum()


def _by_edge(x, constraint, link, s_high):
    """link(x - tau) with sum constraint(x - tau) = 1, by the distance of tau to the smallest supported score."""
    ranked = np.sort(x)[::-1]
    low, high = 0, len(x)  # index of an entry that is in the support, and of one that is not
    while high - low > 1:
        middle = (low + high) // 2
        inside = constraint(ranked[:middle] - ranked[middle]).sum() < 1
        low, high = (middle, high) if inside else (low, middle)
    edge = ranked[low]
    gaps = ranked[: low + 1] - edge
    s_low = np.longdouble(-400.0)  # log(edge - tau)
    for _ in range(80):
        s = (s_low + s_high) / 2
        s_low, s_high = (s, s_high) if constraint(gaps + np.exp(s)).sum() < 1 else (s_low, s)
    return np.where(x >= edge, link(np.where(x >= edge, x - edge, 0) + np.exp(s_low)), 0)


# -- errors -----------------------------------------------------------------------------------------------------------------


def worst_ulps(p, reference):
    """The largest error, in ulps of the largest probability of the reference, in the dtype of p."""
    p = np.asarray(p)
    if isinstance(reference, list):
        top = float(max(reference))
        error = float(max(abs(mp.mpf(float(a)) - b) for a, b in zip(p, reference)))
    else:
        top = float(reference.max())
        error = float(np.max(np.abs(p.astype(reference.dtype) - reference)))
    return error / float(np.spacing(p.dtype.type(top)))


def total_variation(p, reference):
    if isinstance(reference, list):
        return 0.5 * float(mp.fsum(abs(mp.mpf(float(a)) - b) for a, b in zip(p, reference)))
    return 0.5 * float(np.sum(np.abs(np.asarray(p).astype(reference.dtype) - reference)))


# -- KKT: x - grad Omega(p) is one number tau on the support, and x <= tau + grad Omega(0) off it -------------------------------


def kkt_residual(x, p, slope, rate, cap=math.inf):
    """How far p is from optimal, as a first-order error of a probability.

    slope(p) is the gradient of Omega, rate(p) = dp/dx at constant tau: errors of x count as errors of p, at most one to one.
    """
    x, p = np.asarray(x, dtype=np.float64), np.asarray(p, dtype=np.float64)
    inside, full = (p > 0) & (p < cap), p >= cap
    tau_of = np.full_like(x, math.nan)
    tau_of[inside] = x[inside] - slope(p)[inside]
    if inside.any():
        weight = np.minimum(1.0, rate(p)[inside])
        main = np.argmax(weight)
        tau = tau_of[inside][main]
        worst = float(np.max(np.abs(tau_of[inside] - tau) * weight))
    else:
        tau, worst = float(np.max(x[~full], initial=-math.inf)), 0.0
    floor = slope(np.full_like(p, 1e-307))  # not at 0: a probability may have underflowed
    outside = (p == 0) & np.isfinite(floor)
    worst = max(worst, float(np.max(x[outside] - floor[outside] - tau, initial=0.0)))
    if full.any():
        worst = max(worst, float(np.max(tau + slope(p)[full] - x[full], initial=0.0)))
    return worst


def kkt_entmax(alpha):
    c = alpha - 1

    def slope(p):
        with np.errstate(all="ignore"):
            return np.log(p) if c == 0 else np.expm1(c * np.log(p)) / c

    def rate(p):
        with np.errstate(all="ignore"):
            return np.where(p > 0, p ** (1 - c), 0.0)

    return lambda x, p: kkt_residual(x, p, slope, rate)


def kkt_budget(k):
    return lambda x, p: max(kkt_residual(x, p, lambda q: q, np.ones_like, cap=1.0), abs(math.fsum(p) - k))


def kkt_open_budget(k, shape):
    """How far p is from F(x - tau), with the tau of the class whose p says most about it."""
    rising, rate = RISING[shape]

    def residual(x, p):
        if k == len(x):
            return float(np.max(np.abs(p - 1)))
        main = max(range(len(p)), key=lambda i: rate(p[i]))
        if rate(p[main]) == 0:  # all are 0 or 1 after rounding: those at 1 are far above the others
            gap = np.min(x[p == 1]) - np.max(x[p == 0], initial=-math.inf)
            return math.inf if gap < 36 else abs(math.fsum(p) - k)
        q = mp.mpf(float(p[main]))
        inverse = mp.log(q / (1 - q)) if shape == "sigmoid" else mp.log(2 * q) if q < 0.5 else -mp.log(2 * (1 - q))
        want = [float(rising(mp.mpf(float(v)) - mp.mpf(float(x[main])) + inverse)) for v in x]
        return max(float(np.max(np.abs(p - want))), abs(math.fsum(p) - k))

    return residual


def kkt_ranks(strength, kl):
    """Whether p is a mixture of orderings, and the gradient of the objective lies in the cone of those that p is on the border of.

    In descending order the sums of the first j are at most those of n, n - 1, ...; `x / strength - Omega'(p)` may fall only where the sum
    is reached, and must not rise.
    """

    def residual(x, p):
        order = np.argsort(-x, kind="stable")
        q, w = p[order], np.arange(len(x), 0.0, -1.0)
        slack = np.cumsum((w - q).astype(np.longdouble)).astype(float)
        price = x[order] / strength - (np.log(q) if kl else q)
        fall = -np.diff(price)
        rate = q[:-1] if kl else 1.0
        wrong = np.where(slack[:-1] > 1e-9 * len(x), np.abs(fall), np.maximum(-fall, 0.0)) * np.minimum(1.0, rate)
        scale = len(x) * max(1.0, 1.0 / strength)
        return max(np.max(wrong, initial=0.0), max(np.max(-slack, initial=0.0), abs(slack[-1])) / len(x)) / scale

    return residual


def kkt_normmax(alpha):
    def residual(x, p):
        p = np.asarray(p, dtype=np.float64)
        norm = np.sum(p**alpha) ** (1 / alpha)

        def rate(p):
            with np.errstate(all="ignore"):
                return np.where(p > 0, p ** (2 - alpha) * norm ** (alpha - 1) / (alpha - 1), 0.0)

        return kkt_residual(x, p, lambda q: (q / norm) ** (alpha - 1), rate)

    return residual


# -- derivatives and brute force -------------------------------------------------------------------------------------------------


def differences(f, x, h=1e-4):
    """The Jacobian [out, in] of f at x by a central difference of order 4."""
    x = np.asarray(x, dtype=np.float64)
    columns = []
    for i in range(x.size):
        e = np.zeros_like(x)
        e.flat[i] = h
        columns.append((8 * (f(x + e) - f(x - e)) - (f(x + 2 * e) - f(x - 2 * e))) / (12 * h))
    return np.stack([np.asarray(c) for c in columns], axis=-1)


def brute_force(x, omega, parts=200):
    """argmax of <p, x> - omega(p) over a grid of the 3-class simplex: right to about 1/parts."""
    best, argument = -math.inf, None
    for i in range(parts + 1):
        for j in range(parts + 1 - i):
            p = np.array([i, j, parts - i - j]) / parts
            value = float(p @ x) - omega(p)
            if value > best:
                best, argument = value, p
    return argument


def bounded(u, alpha):
    """`min(entmax's link, u_i)` with a sum of 1, by bisection; the bounds themselves where they sum to less."""
    c = mp.mpf(alpha) - 1

    @exact
    def solve(x):
        most = [min(mp.mpf(float(b)), 1) for b in np.broadcast_to(u, len(x))]
        if mp.fsum(most) <= 1:
            return most

        def p(tau):
            free = [mp.exp(v - tau) if c == 0 else mp.power(max(c * (v - tau), 0), 1 / c) for v in x]
            return [min(a, b) for a, b in zip(free, most, strict=True)]

        # at max x - omega'(1) and above no class has more than 1; far below all have their bounds
        high = max(x) + 1 + (mp.log(len(x)) if c == 0 else 0)
        low = min(x) - 60 / max(c, mp.mpf("0.1")) - 60
        return p(bisect(lambda tau: 1 - mp.fsum(p(tau)), low, high))

    return solve


def _taut_string(y, strength):
    """Total variation denoising in rational numbers: the shortest string from (0, 0) to (n, sum y) in a tube around the sums of y."""
    n, sums = len(y), [Fraction(0)]
    for v in y:
        sums.append(sums[-1] + v)
    low = [s - strength for s in sums]
    high = [s + strength for s in sums]
    low[0] = high[0] = sums[0]
    low[n] = high[n] = sums[n]
    out, at, height = [], 0, sums[0]
    while at < n:
        # the largest slope below all upper ends so far, and the smallest above all lower ones
        steepest, flattest = None, None
        for j in range(at + 1, n + 1):
            up, down = (high[j] - height) / (j - at), (low[j] - height) / (j - at)
            if steepest is not None and down > steepest[0]:  # the string bends down at an upper end
                slope, end = steepest
                break
            if flattest is not None and up < flattest[0]:
                slope, end = flattest
                break
            if steepest is None or up <= steepest[0]:
                steepest = (up, j)
            if flattest is None or down >= flattest[0]:
                flattest = (down, j)
            slope, end = steepest if j == n else (None, None)
        out += [slope] * (end - at)
        height, at = height + slope * (end - at), end
    return out


def fusedmax(strength):
    """Sparsemax of the taut string, in rational numbers: exact."""

    def solve(row):
        v = _taut_string([Fraction(float(a)) for a in row], Fraction(strength))
        order = sorted(v, reverse=True)
        tau = max((sum(order[:k]) - 1) / k for k in range(1, len(order) + 1))
        with mp.workdps(DIGITS):
            return [mp.mpf(w.numerator) / w.denominator for w in (max(a - tau, Fraction(0)) for a in v)]

    return solve
