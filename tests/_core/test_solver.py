"""The generic threshold finder against the closed forms, on the rows that are hard for either."""

import laws
import numpy as np
import oracles
import pytest

import anymax as am
from anymax._core.solve import root

CLOSED = {
    "softmax": am.Softmax(),
    "sparsemax": am.Sparsemax(),
    "entmax-4/3": am.Entmax(4 / 3),
    "entmax-1.5": am.Entmax(1.5),
    "entmax-2": am.Entmax(2.0),
}

ROWS = {
    "normal": laws.scores(507, seed=70),
    "narrow": laws.scores(507, sigma=1e-3, seed=71),
    "wide": laws.scores(507, sigma=100.0, seed=72),
    "geometric": -(2.0 ** -np.arange(0.0, 60.0)),
    "geometric down": -(2.0 ** np.arange(-52.0, 10.0)),
    "ties": np.repeat([0.0, -0.25, -0.5], 21),
    "ties at the edge": np.r_[0.0, np.full(62, -1.0)],
    "flat": np.zeros(262_144),
    "nearly flat": laws.scores(65536, sigma=1e-9, seed=73),
    "one dominates": np.r_[0.0, np.full(506, -1e6)],
    "one and a shelf": np.r_[0.0, np.full(65535, -0.9)],
    "one": np.zeros(1),
    "steps": -np.arange(507) / 507.0,
    "huge": np.array([0.0, -1e300, -1.0]),
}


@pytest.mark.whole(lambda row: row not in ("normal", "narrow", "geometric", "ties at the edge", "huge"))
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("id", CLOSED)
def test_closed_form_and_search_agree(id, row):
    mapping = CLOSED[id]
    y = ROWS[row] - ROWS[row].max()
    keep = np.ones(y.shape, bool)
    with np.errstate(all="ignore"):
        closed, found = mapping.closed(y, keep, np), mapping.search(y, keep, np)
        p, q = (mapping.at(y, np.zeros(1), level, np) for level in (closed, found))
    # a running sum is rounded as often as the row is long: `solve` takes the closed form as a start only
    laws.close(p, q, 1e-13 if y.size < 1000 else 3e-9)
    for r in (p, q):  # each is a solution by itself
        laws.close(r.sum(), 1.0, 1e-4 if y.size > 1000 else 1e-12)
    if id != "softmax" and oracles.EXTENDED and y.size <= 65536:
        alpha = 2.0 if id == "sparsemax" else float(mapping.alpha)
        exact = oracles.entmax_long(y, alpha)
        assert oracles.worst_ulps(am.apply(mapping, y), exact) <= 8


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("alpha", [0.5, 1.1, 1.75, 3.0, 10.0])
def test_search_of_any_alpha(alpha, row):
    """No closed form: the row sums to 1 and keeps its order, however hard."""
    for dtype in (np.float64, np.float32):
        x = np.clip(ROWS[row], -np.finfo(dtype).max, None).astype(dtype)
        p = am.entmax(x, alpha)
        # measured: in flat rows every class is rounded alike, and so is the fp32 sum that the last Newton step looks at
        single = 5e-7 if x.size > 1000 else 2e-7
        laws.close(p.astype(np.float64).sum(), 1.0, single if dtype is np.float32 else 3e-14)
        order = np.argsort(x, kind="stable")
        assert (np.diff(p[order]) >= 0).all()


def test_masked_entries_do_not_count():
    y = np.array([[0.0, 0.0, -0.1, 0.0, -3.0]])
    keep = np.array([[True, False, True, False, True]])
    for mapping in CLOSED.values():
        for solver in (mapping.closed, mapping.search):
            level = solver(y, keep, np)
            alone = solver(y[keep][None], np.ones((1, 3), bool), np)
            laws.close(level, alone, 1e-15)


def counted(f):
    calls = []

    def evaluate(level):
        calls.append(level)
        return f(level)

    return evaluate, calls


def test_root_is_newton_where_newton_is_good():
    evaluate, calls = counted(lambda t: (t * t - 2.0, -(t * t - 2.0) / (2 * t)))
    t = root(evaluate, np.array([[0.0]]), np.array([[2.0]]), np)
    laws.close(t, [[2**0.5]], 1e-15)
    assert len(calls) <= 7


@pytest.mark.parametrize("step", [1e9, -1e9, np.nan, 0.4, -0.4], ids=str)
def test_root_is_bisection_where_newton_is_bad(step):
    """A Newton step that is nonsense costs time, never the answer."""
    evaluate, calls = counted(lambda t: (t**3 - 0.3, np.full_like(t, step)))
    t = root(evaluate, np.array([[0.0]]), np.array([[1.0]]), np)
    laws.close(t, [[0.3 ** (1 / 3)]], 2e-15)
    assert len(calls) <= 120


def test_rows_converge_each_by_itself():
    targets = np.array([[0.0], [1e-12], [0.5], [1.0], [np.nan]])
    t = root(lambda t: (t - targets, 0.1 * (targets - t)), np.zeros((5, 1)), np.ones((5, 1)), np)
    laws.close(t[:4], targets[:4], 4e-15)


@pytest.mark.parametrize("alpha", [4.0, 10.0])
def test_flat_rows_of_a_steep_link(alpha):
    """Powers of probabilities are small numbers there, whose differences are those of the scores."""
    x = np.asarray([0.0, 1e-7, 2e-7, 3e-7, 7e-7])
    with am.use("reference"):
        p = am.entmax(x, alpha)
    c = alpha - 1.0
    assert p.sum() == pytest.approx(1.0, abs=1e-14)
    levels = p**c / c - x
    np.testing.assert_allclose(levels, levels[0], atol=1e-12)
