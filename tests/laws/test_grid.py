"""The grid of `grid.py`: every cell has the numbers of NumPy's rows and their derivatives, or the sentence that refuses it."""

import contextlib
import functools

import numpy as np
import pytest
from grid import (
    APART,
    CLASS_WEIGHT,
    CLASSES,
    EACH,
    GRID,
    IDENTITY,
    LAYERS,
    LAYOUTS,
    LIKELY,
    PLAINLY,
    REFERENCE,
    REFUSED,
    ROWS,
    SCORES,
    SHARDED,
    SHARES,
    TARGET,
    TEACHER,
    X,
    cells,
    refusal,
)
from kinds import MAKERS, back, generator
from layout_cases import VERBS
from processes import together

import anymax as A

torch = pytest.importorskip("torch")
CELLS = cells()
STEP = 1e-6
SIZES = (4, 2)  # of the shards
PARTED = ("apply", "log_apply")  # on several processes: each has its part
BRIEF_ON_JAX = ("apply, alpha of entmax", "fenchel_young, alpha of entmax", "log_prob")


def _x64(kind):
    return pytest.importorskip("jax").enable_x64(True) if kind == "jax" else contextlib.nullcontext()


@pytest.fixture
def one_group(request):
    """A default group of this process alone, for classes on processes in a program of torch."""
    cell = request.node.callspec.params["cell"]
    if cell.layout in SHARDED and (cell.kind, cell.how) == ("torch", "compiled"):
        request.getfixturevalue("one_process")


def _operands(row, layout="rows", kind="numpy", some=slice(None)):
    """What comes after the scores: targets are entries in segments."""
    known = {"reference": REFERENCE[some], "identity": IDENTITY}
    if any(name in known for name in row.arguments):
        return [MAKERS[kind](known[name]) for name in row.arguments]
    known = {"target": TARGET, "likely": LIKELY[:, 0], "ids": LIKELY, "teacher": TEACHER, "shares": SHARES}
    found = [known[name][some] for name in row.arguments]
    if layout == "segments":
        found = [a + CLASSES * np.arange(ROWS) if a.dtype.kind == "i" else a.reshape(-1) for a in found]
    return [MAKERS[kind](a) for a in found]


def _call(row, layout, kind, x, value, after, part=slice(None), **place):
    """The verb of a layout at a value of its parameter, for a part of the classes; where one class has all of p a draw is no chance."""
    name = row.layouts[layout]
    function = name if callable(name) else getattr(LAYOUTS[layout], name)
    changed = {"weight": lambda: MAKERS[kind](CLASS_WEIGHT[part]), "generator": lambda: generator(kind)}
    options = {name: changed[name]() if name in changed else option for name, option in row.options.items()} | place
    if row.make is None or isinstance(row.make, str):
        before, options = (), options | ({row.make: value} if row.make else {})
    else:
        before = (row.make(value),)
    scores = [x]
    if layout in LAYERS:
        scores.append(MAKERS[kind](IDENTITY[part]))
        return function(*scores, *after, *before, **options)
    return function(*before, *scores, *after, **options)


def _list(out):
    return list(out) if isinstance(out, tuple) else [out]


# -- the oracle: one row and one number at a time ---------------------------------------------------------------------------------


def _on_rows(row, x, values):
    """What the verb gives for each row by itself, by the reference; the mean of a loss is that of its rows."""
    mean = row.options.get("reduction") == "mean"
    single = row._replace(options={**row.options, "reduction": "none"}) if mean else row
    with A.use("reference"):
        each = [
            _list(_call(single, "rows", "numpy", x[i : i + 1], float(values[i]), _operands(row, some=slice(i, i + 1))))
            for i in range(ROWS)
        ]
    if any(np.ndim(part) == 0 for parts in each for part in parts):
        raise ValueError('a row of the grid whose verb sums over rows must say its reduction: EACH, or "mean"')
    found = [np.concatenate([np.asarray(part) for part in parts]) for parts in zip(*each)]
    return [np.mean(found[0])] if mean else found


def _weights(found):
    rng = np.random.default_rng(5)
    return [rng.normal(size=part.shape) for part in found]


def _sum(found):
    """A number of all that the verb gives, to take derivatives of."""
    return sum((np.where(np.isfinite(part), part, 0.0) * w).sum() for part, w in zip(found, _weights(found)))


def _values(row, each):
    return row.value + (0.1 * np.arange(ROWS) if each else np.zeros(ROWS))


def _expected(cell):
    return _numbers(cell.row, cell.parameter.endswith("array"))


@functools.cache
def _numbers(name, each):
    """The values; the derivatives of `_sum` by the scores and by the parameter of each row, by central differences."""
    row, values = GRID[name], _values(GRID[name], each)
    x = SCORES[row.scores]
    found = _on_rows(row, x, values)
    if not row.smooth:
        return found, None, None
    by_scores, by_values = np.zeros_like(x), np.zeros(ROWS)
    for at in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[at] = STEP
        by_scores[at] = (_sum(_on_rows(row, x + step, values)) - _sum(_on_rows(row, x - step, values))) / (2 * STEP)
    for i in range(ROWS):
        step = STEP * (np.arange(ROWS) == i)
        by_values[i] = (_sum(_on_rows(row, x, values + step)) - _sum(_on_rows(row, x, values - step))) / (2 * STEP)
    return found, by_scores, by_values


# -- a cell: f(scores [ROWS, CLASSES], parameter) -> what the verb gives, in the layout of rows -------------------------------------


def _function(cell, row):
    if cell.layout == "segments":
        return functools.partial(_segments, cell, row)
    if cell.layout in SHARDED:
        return functools.partial(_mesh if cell.kind == "jax" else _processes, cell, row)
    return lambda x, value: _list(_call(row, cell.layout, cell.kind, x, value, _operands(row, cell.layout, cell.kind)))


def _segments(cell, row, x, value):
    after, lengths = _operands(row, "segments", cell.kind), [CLASSES] * ROWS
    found = _list(_call(row, "segments", cell.kind, x.reshape(-1), value, after, lengths=lengths))
    if row.names["rows"] == "sample":  # the number of an entry
        return [found[0] - CLASSES * MAKERS[cell.kind](np.arange(ROWS))]
    return [part.reshape(x.shape) if part.shape == (x.shape[0] * x.shape[1],) else part for part in found]


def _mesh(cell, row, x, value):
    """The classes on an axis of a mesh that has one device."""
    import jax
    from jax.sharding import Mesh, PartitionSpec

    own, every = PartitionSpec(None, "classes"), PartitionSpec()

    def one(x, value):
        return tuple(_list(_call(row, cell.layout, "jax", x, value, _operands(row, kind="jax"), axis_name="classes")))

    f = jax.shard_map(
        one, mesh=Mesh(np.array(jax.devices()[:1]), ("classes",)), in_specs=(every if cell.layout in LAYERS else own, every),
        out_specs=own if row.layouts[cell.layout] in PARTED else every, check_vma=False,
    )  # fmt: skip
    return list(f(x, value))


def _processes(cell, row, x, value):
    """The classes on a default group of one process."""
    return _list(_call(row, cell.layout, "torch", x, value, _operands(row, kind="torch")))


def _threads(cell, row, value):
    """(values, the derivatives of `_sum` by the scores and by the parameter) with the classes on two processes."""
    ends, learns = np.cumsum((0, *SIZES)), cell.parameter.startswith("learned")
    parted = row.layouts[cell.layout] in PARTED

    def one(group):
        part = slice(ends[group.rank], ends[group.rank + 1])
        scores = SCORES[row.scores] if cell.layout in LAYERS else SCORES[row.scores][:, part]
        x, own = torch.tensor(scores, requires_grad=row.smooth), value
        if learns:
            own = value.detach().clone().requires_grad_()
        cut = {"shares": (slice(None), part), "identity": part}
        after = [a[cut.get(name, ())] for name, a in zip(row.arguments, _operands(row, kind="torch"))]
        found = _list(_call(row, cell.layout, "torch", x, own, after, part, group=group))
        if row.smooth:
            weights = [w[:, part] if parted else w for w in _weights(_expected(cell)[0])]
            _total(found, [torch.tensor(w) for w in weights], torch).backward()
        return [part.detach() for part in found], x.grad, own.grad if learns else None

    found = together(len(SIZES), one)
    values = [torch.cat(parts, -1) if parted else parts[0] for parts in zip(*(f[0] for f in found))]
    for other in found[1:]:  # each process has the derivative by the parameter, and by the features of a layer
        if learns:
            torch.testing.assert_close(found[0][2], other[2])
        if cell.layout in LAYERS:
            torch.testing.assert_close(found[0][1], other[1])
    if cell.layout in LAYERS or not row.smooth:
        return values, found[0][1], found[0][2]
    return values, torch.cat([f[1] for f in found], -1), found[0][2]


def _total(found, weights, xp):
    """`_sum` of a framework's arrays."""
    return sum(
        (xp.where(xp.isfinite(part), part, 0.0 * weights[0].reshape(-1)[0]) * w).sum()
        for part, w in zip(found, weights)
    )


def _leaf(cell, row):
    """The parameter of a cell: a number, or an array of the framework in the layout's shape."""
    if cell.parameter == "number":
        return row.value
    if not cell.parameter.endswith("array"):
        return MAKERS[cell.kind](np.array(row.value))
    values = _values(row, each=True)
    return MAKERS[cell.kind](values if cell.layout == "segments" else values[:, None])


def _computed(cell, row):
    """(values, derivatives by the scores, by the parameter) of a cell; None for one that was not asked for."""
    value, f = _leaf(cell, row), _function(cell, row)
    learns = cell.parameter.startswith("learned")
    if cell.kind == "numpy":
        return f(SCORES[row.scores], value), None, None
    weights = [MAKERS[cell.kind](w) for w in _weights(_expected(cell)[0])]
    if cell.kind == "torch":
        if learns:
            value.requires_grad_()
        if cell.layout in SHARDED and cell.how == "eager":
            return _threads(cell, row, value)
        x = torch.tensor(SCORES[row.scores], requires_grad=row.smooth)
        if cell.how == "compiled":
            torch.compiler.reset()  # the programs of other cells count against a limit
            # processes communicate outside of graphs
            f = torch.compile(f, backend="aot_eager", fullgraph=cell.layout not in SHARDED)
        found = f(x, value)
        if row.smooth:
            _total(found, weights, torch).backward()
        return [part.detach() for part in found], x.grad, value.grad if learns else None
    import jax
    import jax.numpy as jnp

    x, wrap = jnp.asarray(SCORES[row.scores]), jax.jit if cell.how == "compiled" else lambda g: g
    if cell.parameter == "number":
        f = functools.partial(lambda f, number, x, _: f(x, number), f, value)
        value = jnp.asarray(0.0)
    if not row.smooth:
        return wrap(f)(x, value), None, None

    def total(x, value):
        found = f(x, value)
        return _total(found, weights, jnp), found

    (_, found), (by_scores, by_value) = wrap(jax.value_and_grad(total, (0, 1), has_aux=True))(x, value)
    return found, by_scores, by_value if learns else None


def _brief(cell):
    """The cells of the short battery: NumPy and torch without a compiler, and a few of JAX."""
    if cell.kind == "jax":
        return cell.how == "compiled" and cell.parameter == "learned" and cell.row in BRIEF_ON_JAX
    return cell.how == "eager"


def _rare(cell):
    """The cells that are left to `--all`: operations of JAX one by one; of torch's programs all but some that learn a parameter."""
    if cell.kind == "jax":
        return cell.how == "eager"
    return cell.how == "compiled" and not (cell.parameter.startswith("learned") and cell.row.startswith("apply"))


@pytest.mark.weekly(lambda cell: _rare(cell))
@pytest.mark.whole(lambda cell: not _brief(cell))
# both warnings are those of torch.compile
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning", "ignore:The .grad attribute")
@pytest.mark.parametrize("cell", [cell for cell in CELLS if not refusal(cell)], ids=lambda cell: cell.id)
def test_served(cell, one_group):
    row = GRID[cell.row]
    with _x64(cell.kind):
        values, by_scores, by_value = _computed(cell, row)
    want, want_scores, want_values = _expected(cell)
    for got, expected in zip(values, want, strict=True):
        np.testing.assert_allclose(back(got), expected, rtol=1e-9, atol=1e-11, err_msg="the values")
    if by_scores is not None:
        np.testing.assert_allclose(
            back(by_scores), want_scores, rtol=1e-6, atol=1e-7, err_msg="the derivative by the scores"
        )
    if by_value is not None:
        each = want_values if cell.parameter.endswith("array") else want_values.sum()
        np.testing.assert_allclose(
            back(by_value).reshape(np.shape(each)), each, rtol=1e-6, atol=1e-7, err_msg="by the parameter"
        )


@pytest.mark.weekly(lambda cell: _rare(cell))
@pytest.mark.whole(lambda cell: not _brief(cell))
@pytest.mark.parametrize("cell", [cell for cell in CELLS if refusal(cell)], ids=lambda cell: cell.id)
def test_refused(cell, one_group):
    error, words = refusal(cell)
    with _x64(cell.kind), pytest.raises(error, match=words):
        _computed(cell, GRID[cell.row])


# "each row by itself" and where a draw begins have no formula
NEUTRAL = {("reduction", "none"), ("generator", 0)}


def _keywords(row):
    """The keywords that the oracle of a row passes on: an option that the verb ignores would be right in every cell."""
    return [n for n, v in row.options.items() if (n, v) not in NEUTRAL] + (
        [row.make] if isinstance(row.make, str) else []
    )


def test_every_option_has_a_formula():
    assert PLAINLY.keys() == {name for name, row in GRID.items() if _keywords(row)}


@pytest.mark.parametrize("name", PLAINLY)
def test_an_option_does_what_it_says(name):
    """The values of a row from its formula, which calls the verb without the options, if at all."""
    row = GRID[name]
    plain = row._replace(options={n: v for n, v in row.options.items() if n not in _keywords(row)} | EACH)

    def loss(target):
        return _call(plain, "rows", "numpy", X, row.value, [target])

    np.testing.assert_allclose(_numbers(name, False)[0][0], PLAINLY[name](loss, row.value), rtol=1e-9)


@pytest.mark.parametrize("name", [name for name, row in GRID.items() if row.make and row.smooth])
def test_a_parameter_changes_the_result(name):
    assert np.abs(_numbers(name, False)[2]).max() > 1e-3


def test_a_row_that_sums_says_so():
    row = GRID["fenchel_young, mean"]._replace(options={})
    with pytest.raises(ValueError, match="must say its reduction"):
        _on_rows(row, X, _values(row, False))


def test_every_verb_of_a_layout_has_a_row():
    """A verb that `layout_cases` has in two layouts and more is asked about in each of them."""
    asked = {(layout, name) for row in GRID.values() for layout, name in row.layouts.items()}
    for name, verb in VERBS.items():
        there = {
            "rows": name,
            "segments": verb.segments,
            "layer": verb.layer,
            "shards": verb.shards,
            "layer on shards": verb.layer,
        }
        there = {layout: n for layout, n in there.items() if n and (layout, n) not in APART}
        if len(there) > 1:
            assert there.items() <= asked, f"no row of the grid asks for {sorted(set(there.items()) - asked)}"


def test_every_refusal_is_of_a_cell():
    for pattern in REFUSED:
        assert any(cell.fits(pattern) for cell in CELLS), f"no cell is {pattern}"
