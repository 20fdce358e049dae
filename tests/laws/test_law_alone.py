"""A row's result does not depend on the other rows of its call, on their number or on the threads: not by one bit.

So it is on the CPU, wherever the C++ engine has the operation. Array code takes each entry by the framework's own functions, whose last
bit depends on where in memory the entry lies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from cases import FIRST, each, on, takes_an_index
from engine_state import by_threads, instructions
from kinds import KINDS, back

import anymax as am
from anymax.kernels import native, order
from anymax.kernels.tasks import Sinkhorn as Task
from anymax.transport import Sinkhorn

torch = pytest.importorskip("torch")
if isinstance(native.load(), str):
    pytest.skip(f"no compiled library: {native.load()}", allow_module_level=True)
native.engine_for(torch.empty(0))

ENGINES = (native.ENGINE, order.ENGINE)
ROWS = {1: 40, 3: 1000, 10: 1000, 17: 200, 31: 1000, 33: 1000, 128: 200, 300: 80, 400: 80, 1000: 60, 2100: 60, 5000: 60}
SOON = (3, 31, 33, 400)
MOST = {"PerturbMax": 128}  # classes
PARTS = ((0, 1), (3, 1), (5, 1), (39, 1), (0, 2), (7, 3), (9, 4), (2, 7), (5, 33))  # (the first row, how many)


def scores(n, count=None):
    """Rows of different breadths; some have equal scores, a masked class, or scores that are far apart."""
    count = count or ROWS[n]
    random = np.random.default_rng(n)
    x = random.normal(size=(count, n)) * random.choice([0.02, 1.0, 1.0, 2.0, 8.0], size=(count, 1))
    x[5::11] = np.round(2 * x[5::11]) / 2
    if n > 1:
        x[3::13, 0] = -np.inf
    return x + 0.1


def numbers(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape)


def bytes_of(result):
    """Of an array of any kind, or of each of several."""
    if isinstance(result, tuple):
        return tuple(map(bytes_of, result))
    if isinstance(result, torch.Tensor):
        result = result.detach().contiguous()
        if result.dtype == torch.bfloat16:
            result = result.view(torch.int16)
    return back(result).tobytes()


class Verb(NamedTuple):
    call: Callable  # (mapping, scores, cotangents, targets)
    ops: tuple  # of the engine
    of_an_index: bool = False


def by_torch(verb):
    """The gradient by the scores, of torch."""

    def gradient(mapping, x, g, t):
        x = x.clone().requires_grad_()
        y = verb(mapping, x, g, t)
        y = torch.where(torch.isfinite(y), y * (g if y.ndim > 1 else g[:, 0]), 0.0)
        return torch.autograd.grad(y.sum(), x)[0]

    return gradient


def apply(mapping, x, g, t):
    return am.apply(mapping, x)


def log_apply(mapping, x, g, t):
    return am.log_apply(mapping, x)


def loss(mapping, x, g, t):
    return am.fenchel_young(mapping, x, t, reduction="none")


def threshold(mapping, x, g, t):
    return tuple(am.threshold(mapping, x))


VERBS = {
    "apply": Verb(apply, ("forward",)),
    "log_apply": Verb(log_apply, ("log_forward",)),
    "loss": Verb(loss, ("index_loss",), of_an_index=True),
    "threshold": Verb(threshold, ("threshold",)),
}
GRADIENTS = {
    "apply": Verb(by_torch(apply), ("forward", "vjp")),
    "log_apply": Verb(by_torch(log_apply), ("log_forward", "log_vjp")),
    "loss": Verb(by_torch(loss), ("index_loss",), of_an_index=True),
}


def holds(call, x, *others):
    """`call` of a part of the rows gives that part of what it gives of all."""
    whole = call(x, *others)
    for start, count in PARTS:
        if start + count <= len(x):
            part = slice(start, start + count)
            want = tuple(a[part] for a in whole) if isinstance(whole, tuple) else whole[part]
            assert bytes_of(call(x[part], *(a[part] for a in others))) == bytes_of(want), (
                f"rows {start} to {start + count - 1}"
            )


def asked(case, verb, x):
    """False where the map has no such operation, or the engine leaves it to array code."""
    n = x.shape[-1]
    if case.mass > n or n > MOST.get(case.row, n):
        return False
    if verb.of_an_index and not (case.mapping.facts.has_potential and takes_an_index(case.mapping)):
        return False
    if "threshold" in verb.ops and not case.mapping.has_threshold:
        return False
    return all(any(e.refuse(op, case.mapping, x) is None for e in ENGINES) for op in verb.ops)


def of_lengths(case, verb, make, lengths):
    """The law for each length, of arrays that `make` makes."""
    mapping = on(case.mapping, make)
    for n in lengths:
        x = make(scores(n))
        if asked(case, verb, x):
            t = make(np.random.default_rng(1).integers(n, size=len(x)))
            holds(lambda *a, verb=verb: verb.call(mapping, *a), x, make(numbers(*x.shape)), t)


# the short battery has p and its gradient in fp32
soon = pytest.mark.whole(lambda name, dtype: name != "apply" or str(dtype) not in ("float32", "torch.float32"))


def of(dtype):
    return lambda a: torch.as_tensor(np.array(a)).to(dtype if np.asarray(a).dtype == np.float64 else torch.int64)


@soon
@each()
@pytest.mark.parametrize("name", VERBS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numpy(case, name, dtype):
    of_lengths(case, VERBS[name], lambda a: a.astype(dtype) if a.dtype == np.float64 else a, SOON)


@soon
@each()
@pytest.mark.parametrize("name", VERBS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_torch(case, name, dtype):
    of_lengths(case, VERBS[name], of(dtype), ROWS)


@soon
@each()
@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_gradients(case, name, dtype):
    of_lengths(case, GRADIENTS[name], of(dtype), ROWS)


@pytest.mark.skipif("jax" not in KINDS, reason="without JAX")
@pytest.mark.whole(lambda case, name: case.row not in ("Softmax", "Sparsemax") or name != "apply")
@each(FIRST)
@pytest.mark.parametrize("name", ["apply", "loss", "gradient"])
def test_jax(case, name):
    import jax

    def gradient(mapping, x, g, t):
        return jax.grad(lambda a: (am.apply(mapping, a) * g).sum())(x)

    verb = Verb(gradient, ("forward", "vjp")) if name == "gradient" else VERBS[name]
    of_lengths(case, verb, KINDS["jax"], (33, 400))


@each(FIRST)
def test_columns(case):
    """Rows whose classes lie far apart: the same as rows side by side."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for n in (10, 33, 400):
            x, g = of(dtype)(scores(n)), of(dtype)(numbers(ROWS[n], n))
            if not asked(case, GRADIENTS["apply"], x):
                continue
            mapping = on(case.mapping, torch.as_tensor)

            def columns(*a, mapping=mapping):
                free = a[0].T.contiguous().requires_grad_()
                p = am.apply(mapping, free, axis=0)
                return p.detach().T, torch.autograd.grad(p, free, a[1].T.contiguous())[0].T

            holds(columns, x, g)


@each(FIRST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [33, 1000, 100_000])
def test_threads(case, dtype, n):
    x, mapping = of(dtype)(scores(n, max(2, 100_000 // n))), on(case.mapping, torch.as_tensor)
    if asked(case, GRADIENTS["apply"], x):
        call = GRADIENTS["apply"].call
        one, two = by_threads((1, 2), lambda: (am.apply(mapping, x), call(mapping, x, torch.ones_like(x), None)))
        assert bytes_of(one) == bytes_of(two)


@each(FIRST)
def test_segments(case):
    """A segment among others is a row alone, whatever their lengths are; and so is its gradient."""
    lengths = np.random.default_rng(0).choice([1, 3, 10, 17, 31, 33, 128, 300, 400], size=150)
    mapping = on(case.mapping, torch.as_tensor)
    for dtype in (torch.float32, torch.float64, torch.float16):
        rows = [of(dtype)(scores(n, 14)[i % 14]) for i, n in enumerate(lengths)]
        if not asked(case, GRADIENTS["apply"], rows[0].new_zeros(1, 33)):
            continue

        def both(rows, mapping=mapping):
            x = torch.cat(rows).requires_grad_()
            p = am.segment_apply(mapping, x, lengths=[len(r) for r in rows])
            g = torch.cat([torch.linspace(-1, 1, len(r), dtype=r.dtype) for r in rows])
            sizes = [len(r) for r in rows]
            return list(zip(p.detach().split(sizes), torch.autograd.grad(p, x, g)[0].split(sizes)))

        whole = both(rows)
        for i in range(0, len(rows), 7):
            if len(rows[i]) >= case.mass:
                p, slope = both(rows[i : i + 1])[0]
                assert bytes_of(p) == bytes_of(whole[i][0]), (len(rows[i]), "p")
                assert bytes_of(slope) == bytes_of(whole[i][1]), (len(rows[i]), "gradient")
                assert bytes_of(am.apply(mapping, rows[i])) == bytes_of(p), (len(rows[i]), "a row")


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax15", "sigsoftmax"])
def test_draws(name):
    """With a seed for each row."""
    for n in (10, 33, 400, 5000):
        x = of(torch.float32)(scores(n, 60))
        holds(
            lambda x, t: tuple(am.sample(name, x, generator=t.tolist(), return_log_prob=True)[:2]), x, torch.arange(60)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(4, 4), (7, 3), (16, 16), (20, 31), (32, 32), (33, 33), (40, 70), (130, 5)], ids=str)
@pytest.mark.parametrize("isa", native.load().isas())
def test_sinkhorn(isa, dtype, shape):
    """A matrix in a lane, or alone."""
    x, g = of(dtype)(numbers(45, *shape)), of(dtype)(numbers(45, *shape))
    x[11] *= 30  # beyond the numbers that go by factors
    with instructions(isa):
        for iterations, temperature in ((20, 1.0), (3, 0.4)):
            solve = Sinkhorn(iterations=iterations, temperature=temperature)

            def both(x, g, solve=solve):
                free = x.clone().requires_grad_()
                p = solve(free)
                return p.detach(), torch.autograd.grad(p, free, g)[0]

            holds(both, x, g)
        holds(lambda x: native.ENGINE.sinkhorn_limit(Task(None, None, 300, 1.0), x, 1e-3), x)


@each(FIRST)
@pytest.mark.parametrize("n", [10, 33, 400])
def test_output_layer(case, n):
    """Products that are exact, whichever way they are summed: then a row's loss is its own."""
    if case.mass != 1 or not case.mapping.facts.has_potential or not takes_an_index(case.mapping):
        return
    random = np.random.default_rng(n)
    x, weight = (torch.as_tensor(random.integers(-4, 5, shape).astype("float32")) / 4 for shape in ((45, 8), (n, 8)))
    if asked(case, VERBS["loss"], x.new_zeros(45, n)):
        mapping = on(case.mapping, torch.as_tensor)
        targets = torch.as_tensor(random.integers(n, size=45))
        holds(lambda x, t: am.linear_loss(x, weight, t, mapping, reduction="none"), x, targets)
