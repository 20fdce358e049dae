"""The tests of the tests: every map has its places, and every law sees a planted fault."""

import dataclasses
import importlib
import math
import pathlib
import re

import laws
import numpy as np
import oracles
import pytest
from cases import CASES, TABLE

import anymax as am
from anymax.kernels import fused, order
from anymax.mappings import CATALOGUE

ROOT = pathlib.Path(am.__file__).parent


# -- the table ------------------------------------------------------------------------------------------------------------


def missing_rows(catalogue, table):
    return {kind.__name__ for kind in catalogue} ^ {row.name for row in table}


def test_every_map_has_a_row():
    assert not missing_rows(CATALOGUE, TABLE)
    for row in TABLE:
        assert row.cases
        for case in row.cases:
            assert type(case.mapping).__name__ == row.name
    assert len({c.id for c in CASES}) == len(CASES)


def test_a_map_without_a_row_is_seen():
    class Newmax(am.Sparsemax):
        pass

    assert missing_rows((*CATALOGUE, Newmax), TABLE) == {"Newmax"}
    assert missing_rows(CATALOGUE, TABLE[1:]) == {TABLE[0].name}


def test_the_catalogue_is_complete():
    """Every file of mappings/ adds a family, and every family is public."""
    files = {path.stem for path in (ROOT / "mappings").glob("*.py")} - {"__init__"}
    assert {kind.__module__.rsplit(".", 1)[1] for kind in CATALOGUE} == {f for f in files if not f.startswith("_")}
    for kind in CATALOGUE:
        assert getattr(am, kind.__name__) is kind
        assert kind.name in kind.__module__


REPOSITORY = pathlib.Path(__file__).parents[2]
# file -> what it must say of a map (a pattern with its class C and its name N), and of which maps
PLACES = {
    "src/anymax/mappings/{N}.py": r"^class {C}\(",
    "src/anymax/mappings/__init__.py": r'^    "{C}",$',
    "tests/laws/cases.py": r'Row\(\s*"{C}"',
    "docs/maps/{N}.md": r"^## Gradient",
}
WITH_A_KERNEL = {"src/anymax/kernels/link*.py": r'"{K}"'}
# the page has no bounds of classes, and shows maps whose rows have one sum
WITH_NUMBERS_ALONE = {"src/anymax/explorer/maps.mjs": r"\b{C}\("}


def missing_places(kind, root=REPOSITORY):
    """The files that don't know a map, each with what it should say."""
    places = PLACES
    if kind.kernel and kind.kernel not in (*order.KERNELS, fused.KERNEL):
        places = places | WITH_A_KERNEL | ({} if kind.per_class or kind is am.Softpick else WITH_NUMBERS_ALONE)
    out = []
    for file, pattern in places.items():
        words = {"C": kind.__name__, "N": kind.name, "K": kind.kernel}
        texts = [path.read_text(encoding="utf-8") for path in root.glob(file.format(**words))]
        wanted = pattern.format(**words)
        if not any(re.search(wanted, text, flags=re.M) for text in texts):
            out.append(f"{file.format(**words)}: nothing like {wanted}")
    return out


@pytest.mark.skipif(not (REPOSITORY / "CHANGELOG.md").exists(), reason="only in the repository")
def test_a_map_has_all_its_places():
    """Every file that must know a map, for all maps at once."""
    found = {kind.__name__: missing_places(kind) for kind in CATALOGUE}
    lines = [f"{name}: {line}" for name, missing in found.items() for line in missing]
    assert not lines, "\n".join(lines)
    for row in TABLE:
        for case in row.cases:
            assert case.oracle.__module__ == "oracles", f"{case.id}: its oracle belongs in tests/laws/oracles.py"
    required = dataclasses.MISSING
    for kind in set(CATALOGUE) - {am.Ratio}:  # whose functions have ready-made kinds instead
        given = {f.name for f in dataclasses.fields(kind) if f.default is required and f.default_factory is required}
        assert given <= kind.example.keys(), f"{kind.__name__}: `example` says what its fields without a default are"


@pytest.mark.skipif(not (REPOSITORY / "CHANGELOG.md").exists(), reason="only in the repository")
def test_a_map_that_nobody_knows_is_missing_everywhere():
    class Newmax(am.Sparsemax):
        name = "newmax"
        kernel = "newmax"

    said = missing_places(Newmax)
    assert len(said) == len(PLACES) + len(WITH_A_KERNEL) + len(WITH_NUMBERS_ALONE)
    assert {"src/anymax/mappings/newmax.py", "tests/laws/cases.py", "docs/maps/newmax.md"} <= {
        line.split(": ")[0] for line in said
    }


# -- planted faults ---------------------------------------------------------------------------------------------------------


def right(x, axis=-1, dim=None, mask=None):
    return am.sparsemax(x, axis if dim is None else dim, mask=mask)


def apart(change):
    """Sparsemax with its result changed."""
    return lambda x, **options: change(right(x, **options), x)


def low_precision(x, **options):
    return right(np.asarray(x, np.float16).astype(x.dtype), **options)


def by_position(p, x):
    q = p * (1 + 0.001 * np.arange(p.shape[-1]))
    s = q.sum(-1, keepdims=True)
    return (q / np.where(s == 0, 1, s)).astype(p.dtype)


def loose_tau(p, x):
    return np.where(p > 0, p + 1e-3, 0).astype(p.dtype)


def shifted(p, x):
    """Softmax without its invariance."""
    q = p * (1 + 0.01 * np.tanh(np.where(np.isfinite(x), x, 0)))
    s = q.sum(-1, keepdims=True)
    return q / np.where(s == 0, 1, s)


def spread(p, x):
    return np.full_like(p, np.nan) if np.isnan(p).any() else p


def cured(p, x):
    return np.nan_to_num(p)


def modifying(x, **options):
    p = right(x, **options)
    if x.flags.writeable and x.size:
        x[(0,) * x.ndim] = 0
    return p


def contiguous_only(x, **options):
    return right(np.frombuffer(x.tobytes("A"), x.dtype).reshape(x.shape), **options)


def last_axis_only(x, axis=-1, dim=None):
    return right(x)


def bad_mask(x, **options):
    return right(np.where(np.isneginf(x), 0.0, x), **options)


def overflowing(x, **options):
    with np.errstate(all="ignore"):
        return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def single_row(x, **options):
    if x.shape[0] == 0:
        raise AssertionError("no rows")
    return right(x, **options)


def lukewarm(x, **options):
    return right(np.asarray(x) * 1e-8, **options)


def jacobian_of(change):
    return lambda x: change(am.jacobian(am.Sparsemax(), x))


def loss_of(change):
    return lambda x, y: change(float(am.sparsemax_loss(x, y)), x, y)


def targets(n):
    return [np.eye(n)[0], np.full(n, 1 / n)]


ROWS = [laws.scores(5, sigma=s, seed=i) for i, s in enumerate((0.3, 1.0, 2.0))]
residual = oracles.kkt_entmax(2.0)
exact = oracles.budget(1)
accuracy_rows = [laws.scores(63, seed=1), laws.scores(5, sigma=0.1, seed=2) + 100]
halved = lambda j: 0.5 * j  # noqa: E731
tilted = lambda j: j + 1e-3 * np.outer(np.arange(5), np.ones(5))  # noqa: E731

# fault -> (law, the law held against the right map, the law held against a wrong one)
FAULTS = {
    "not normalised": (laws.simplex, (right,), (apart(lambda p, x: p * p.dtype.type(1.00001)),)),
    "negative": (laws.simplex, (right,), (apart(lambda p, x: p - p.dtype.type(1e-3)),)),
    "another dtype": (laws.simplex, (right,), (apart(lambda p, x: p.astype(np.float64)),)),
    "mass on the masked": (laws.masked, (right,), (bad_mask,)),
    "mask forgotten": (laws.masked, (right,), (lambda x, **o: right(x),)),
    "by position": (laws.permutation, (right,), (apart(by_position),)),
    "out of order": (laws.monotone, (right,), (apart(lambda p, x: p[..., ::-1]),)),
    "not shift-invariant": (laws.shift, (right,), (apart(shifted),)),
    "lukewarm at temperature 0": (laws.cold, (right,), (lukewarm,)),
    "cold at temperature infinity": (laws.warm, (right,), (lambda x, **o: right(x * 1e32),)),
    "threshold off by 1e-3": (laws.kkt, (right, residual), (apart(loose_tau), residual)),
    "another map": (laws.kkt, (right, residual), (lambda x, **o: am.entmax(x, 1.99), residual)),
    "half precision": (laws.accuracy, (right, exact, 4, 8, accuracy_rows), (low_precision, exact, 4, 8, accuracy_rows)),
    "ten ulp": (
        laws.accuracy,
        (right, exact, 4, 8, accuracy_rows),
        (apart(lambda p, x: p * (1 + 10 * np.finfo(p.dtype).eps)), exact, 4, 8, accuracy_rows),
    ),
    "half the derivative": (
        laws.jacobian,
        (right, jacobian_of(lambda j: j), ROWS, True, True),
        (right, jacobian_of(halved), ROWS, True, True),
    ),
    "a tilted derivative": (
        laws.jacobian,
        (right, jacobian_of(lambda j: j), ROWS, True, True),
        (right, jacobian_of(tilted), ROWS, True, True),
    ),
    "an asymmetric map": (
        laws.jacobian,
        (lambda x: am.taylor_softmax(x), lambda x: am.jacobian(am.Taylor(2), x), ROWS, False, False),
        (lambda x: am.taylor_softmax(x), lambda x: am.jacobian(am.Taylor(2), x), ROWS, True, False),
    ),
    "a negative loss": (
        laws.loss_facts,
        (right, loss_of(lambda v, x, y: v), targets, ROWS),
        (right, loss_of(lambda v, x, y: v - 1.0), targets, ROWS),
    ),
    "the gradient of another loss": (
        laws.loss_facts,
        (right, loss_of(lambda v, x, y: v), targets, ROWS),
        (right, loss_of(lambda v, x, y: 1.01 * v), targets, ROWS),
    ),
    "a loss that is not convex": (
        laws.loss_facts,
        (right, loss_of(lambda v, x, y: v), targets, ROWS),
        (right, loss_of(lambda v, x, y: math.sqrt(v)), targets, ROWS),
    ),
    "the last axis only": (laws.axes, (right,), (last_axis_only,)),
    "contiguous only": (laws.views, (right,), (contiguous_only,)),
    "inputs modified": (laws.views, (right,), (modifying,)),
    "an empty batch": (laws.empty, (right,), (single_row,)),
    "poison spreads": (laws.poison, (right,), (apart(spread),)),
    "poison is silent": (laws.poison, (right,), (apart(cured),)),
    "overflow": (laws.extremes, (right,), (overflowing,)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_turns_its_law_red(fault):
    law, good, bad = FAULTS[fault]
    law(*good)
    with pytest.raises(AssertionError):
        law(*bad)


def test_every_law_has_a_fault():
    every = {
        name for name, f in vars(laws).items() if callable(f) and getattr(f, "__module__", "") == laws.__name__
    } - {"scores", "check", "close", "same", "one"}
    assert every == {law.__name__ for law, _, _ in FAULTS.values()}


def test_a_wrong_oracle_is_seen():
    """The oracles disagree with each other as soon as one is wrong by a little."""
    x = laws.scores(5, sigma=0.3, seed=3)
    assert oracles.worst_ulps(right(x), oracles.entmax(2.0)(x)) < 4
    assert oracles.worst_ulps(right(x), oracles.entmax(2.0 + 1e-9)(x)) > 100


def test_the_public_name_of_a_map_is_the_file_and_the_id():
    for kind in CATALOGUE:
        assert importlib.import_module(f"anymax.mappings.{kind.name}").__dict__[kind.__name__] is kind
        assert kind.__doc__
        assert ">>>" in kind.__doc__ or kind is am.PerturbMax
