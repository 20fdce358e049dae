"""What a case is: a shape, its peers and its bars; and the cases of the maps. `setup` makes the calls of a case."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import anymax
from anymax import kernels
from anymax.kernels import reference
from anymax.mappings import CATALOGUE

OURS = "anymax"
WIDEST = "widest"  # of a case that compares a map with itself: the costliest width against the cheapest

SIGMA = {"normal": 1.0, "peaked": 8.0, "flat": 0.02}
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}

SMALL = ((65536, 8), (65536, 128), (512, 1000), (1024, 1024), (64, 32000), (8, 128000))
SHAPES = (*SMALL, (8, 1000000), (4096, 32000))
GRADIENT_SHAPES = ((65536, 8), (65536, 128), (512, 1000), (1024, 1024), (64, 32000), (8, 128000), (4096, 32000))
LOSS_SHAPES = ((64, 32000), (8, 128000))
HUGE = (4096, 32000)
DICTIONARY = ((8, 1000000), HUGE)

SPARSE = ("sparsemax", "entmax15", "sparse_softmax")
ALL_SPARSE = ("sparsemax", "entmax15", "entmax 4/3", "entmax 1.25", "budget", "normmax", "sparse_softmax")
BARRED = ("softmax", "entmax", "perturb_max", *ALL_SPARSE)
FIGURES = tuple(kind.name for kind in CATALOGUE if kind.kernel and kind.name not in BARRED)  # with a kernel and no bar

GROUPS = {
    "forward": "Forward into out=",
    "fresh": "Forward into a fresh array",
    "softmax": "Softmax and its logarithms",
    "numpy": "NumPy",
    "backward": "Backward alone",
    "both": "Forward and backward",
    "loss": "Losses, forward and backward",
    "package": "Against the package entmax",
    "learned": "A learned parameter, forward and backward",
    "own map": "Maps of one's own, without a kernel",
    "jax": "JAX under jit",
    "overhead": "What a call costs, one row of ten scores",
    "width": "The same 4,000,000 scores in rows of 1,000 to 1,000,000",
    "dtype": "Other dtypes, into out=",
    "layout": "Other axes, tiny rows, one long row, masks",
    "attention": "Attention, one head of 64 features",
    "decoding": "Decoding and distributions, rows x vocabulary",
    "ordering": "Soft ranks, soft sorting and Fusedmax, forward and backward",
    "ragged": "Ragged rows: entries x segments x heads",
    "output layer": "Output layers, forward and backward: rows x classes",
    "transport": "Transport: Sinkhorn, matrices x rows x columns",
    "token statistics": "Token statistics, forward and backward: rows x vocabulary, pairs x features",
    "routing": "Routers: tokens x experts",
    "sinks": "Sinks and single classes, rows x classes",
    "sklearn": "Fitting a linear classifier: rows x features x classes",
    "gpu forward": "GPU: forward into out=",
    "gpu backward": "GPU: backward alone",
    "gpu loss": "GPU: losses, forward and backward",
    "gpu package": "GPU: against other packages",
    "gpu attention": "GPU: causal attention",
    "gpu ragged": "GPU: ragged rows, entries x segments x heads",
    "gpu output layer": "GPU: output layers, forward and backward, rows x classes",
    "gpu token statistics": "GPU: token statistics, forward and backward, rows x vocabulary, pairs x features",
    "gpu call": "GPU: what a call costs the host, outside of CUDA graphs",
    "gpu decoding": "GPU: one query against a cache, local scores, in CUDA graphs",
}


@dataclasses.dataclass(frozen=True)
class Bar:
    """What a ratio is taken against and how far it may go; neither limit: a figure only."""

    peer: str
    at_most: float | None = None  # our time / the peer's time
    at_least: float | None = None  # the peer's time / our time: how many times faster

    def met(self, ratio: float) -> bool | None:
        """`ratio` is our time over the peer's."""
        if self.at_most is not None:
            return ratio <= self.at_most
        return None if self.at_least is None else 1.0 / ratio >= self.at_least


@dataclasses.dataclass
class Workload:
    """The calls of a case. The first contender is ours, unless a bar compares widths."""

    contenders: dict[str, Callable[[], Any]]
    check: Callable[[], str | None]  # what is wrong with our result, if anything
    engine: str = ""
    moved: int = 0  # bytes: the scores read once, the result written once
    context: Any = None


@dataclasses.dataclass(frozen=True)
class Case:
    group: str
    map: str
    shape: tuple[int, ...]
    setup: Callable[[Case], Workload]
    bars: tuple[Bar, ...]
    distribution: str = "normal"
    dtype: str = "float32"
    axis: int = -1
    note: str = ""
    needs: tuple[str, ...] = ("torch",)
    full: bool = False  # only with --full

    @property
    def name(self) -> str:
        words = [self.map, "x".join(map(str, self.shape)), self.distribution]
        words += [self.dtype] if self.dtype != "float32" else []
        words += [self.note] if self.note else []
        return " ".join(words)

    @property
    def key(self) -> str:
        return f"{self.group}/{self.name}"

    @property
    def n(self) -> int:
        return self.shape[self.axis]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


# -- the maps ---------------------------------------------------------------------------------------------------------


def kept(n: int) -> int:
    """The k of the maps that have one."""
    return 50 if n >= 100 else n // 2


def calls(name: str, n: int) -> tuple[Callable[..., Any], anymax.Mapping]:
    """The public function of a map, its parameters filled in, and the mapping that it stands for."""
    k = kept(n)
    if name in FIGURES:
        mapping = next(kind(**kind.example) for kind in CATALOGUE if kind.name == name)
        return functools.partial(anymax.apply, mapping), mapping
    function, options, mapping = {
        "softmax": (anymax.softmax, {}, anymax.Softmax()),
        "sparsemax": (anymax.sparsemax, {}, anymax.Sparsemax()),
        "entmax15": (anymax.entmax15, {}, anymax.Entmax(1.5)),
        "entmax 4/3": (anymax.entmax, {"alpha": 4 / 3}, anymax.Entmax(4 / 3)),
        "entmax 1.25": (anymax.entmax, {"alpha": 1.25}, anymax.Entmax(1.25)),
        "budget": (anymax.budget, {"k": k}, anymax.Budget(k)),
        "normmax": (anymax.normmax, {}, anymax.NormMax()),
        "sparse_softmax": (anymax.sparse_softmax, {"k": k}, anymax.SparseSoftmax(k=k)),
        "nucleus": (anymax.sparse_softmax, {"p": 0.9}, anymax.SparseSoftmax(p=0.9)),
        "perturb_max": (anymax.perturb_max, {"nodes": 32}, anymax.PerturbMax(nodes=32)),
        "log_softmax": (anymax.log_softmax, {}, anymax.Softmax()),
        "logsumexp": (anymax.logsumexp, {}, anymax.Softmax()),
        "sparsemax_loss": (anymax.sparsemax_loss, {}, anymax.Sparsemax()),
        "entmax15_loss": (anymax.entmax15_loss, {}, anymax.Entmax(1.5)),
        "sparse_softmax_loss": (anymax.sparse_softmax_loss, {"k": k}, anymax.SparseSoftmax(k=k)),
        "cross_entropy": (anymax.cross_entropy, {}, anymax.Softmax()),
    }[name]
    return functools.partial(function, **options) if options else function, mapping


def engine(op: str, mapping: anymax.Mapping, x: Any, otherwise: str = "forward") -> str:
    """The name of the engine that serves an operation; `otherwise` is the one it is made of where it isn't one."""
    return kernels.choose(op if op in kernels.OPS else otherwise, mapping, x).name


def operation(case: Case) -> str:
    return {"log_softmax": "log_forward", "logsumexp": "threshold"}.get(case.map, "forward")


# -- is the result right? ---------------------------------------------------------------------------------------------


def few(rows: int) -> list[int]:
    return sorted({0, rows // 2, rows - 1})


def some_rows(x: Any, axis: int = -1) -> Any:
    """The first, the middle and the last of what does not lie along the classes."""
    return x[:, few(x.shape[1])] if axis == 0 else x[few(x.shape[0])]


def differs(got: Any, want: Any, dtype: str, slack: float = 0.0) -> str | None:
    """A sentence where two results disagree by more than rounding; `slack` is what rounding the scores may do."""
    got, want = _double(got), _double(want)
    if got.shape != want.shape:
        return f"shape {got.shape}, the reference has {want.shape}"
    allowed = TOLERANCE[dtype] * abs(want).max() + slack
    error = abs(got - want).max()
    return None if error <= allowed else f"off by {error:.2g} where {allowed:.2g} is allowed"


def _double(x: Any) -> Any:
    import numpy as np

    return np.asarray(x.detach().double().cpu() if hasattr(x, "detach") else x, dtype=np.float64)


def rounding(x: Any) -> float:
    return 1e-6 * float(abs(x).max())


def check_forward(case: Case, function: Callable[..., Any], x: Any, result: Callable[[], Any]) -> Callable[[], Any]:
    def check() -> str | None:
        got, rows = some_rows(result(), case.axis), some_rows(x, case.axis)
        with anymax.use("reference"):
            want = function(rows, axis=case.axis)
        return differs(got, want, case.dtype, rounding(rows))

    return check


# -- torch ------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def scores(shape: tuple[int, ...], distribution: str, dtype: str) -> Any:
    import torch

    generator = torch.Generator().manual_seed(len(shape) + shape[-1])
    x = torch.randn(shape, generator=generator).mul_(SIGMA[distribution])
    return x.to(getattr(torch, dtype))


def scores_of(case: Case) -> Any:
    return scores(case.shape, case.distribution, case.dtype)


@functools.lru_cache(maxsize=1)
def incoming(shape: tuple[int, ...]) -> Any:
    """A gradient to pull back."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _moved(x: Any) -> int:
    return 2 * x.numel() * x.element_size()


def into_out(case: Case) -> Workload:
    import torch

    x, axis = scores_of(case), case.axis
    function, mapping = calls(case.map, case.n)
    out = torch.empty_like(x)
    contenders = {
        OURS: lambda: function(x, axis=axis, out=out),
        "torch.softmax": lambda: torch.softmax(x, axis, out=out),
        "copy": lambda: out.copy_(x),
    }
    check = check_forward(case, function, x, contenders[OURS])
    return Workload(contenders, check, engine("forward", mapping, x), _moved(x))


def fresh(case: Case) -> Workload:
    import torch

    x, axis = scores_of(case), case.axis
    function, mapping = calls(case.map, case.n)
    peer = {"log_softmax": "torch.log_softmax", "logsumexp": "torch.logsumexp"}.get(case.map, "torch.softmax")
    theirs = getattr(torch, peer.removeprefix("torch."))
    contenders = {OURS: lambda: function(x, axis=axis), peer: lambda: theirs(x, axis), "copy": lambda: x.clone()}
    check = check_forward(case, function, x, contenders[OURS])
    return Workload(contenders, check, engine(operation(case), mapping, x), _moved(x))


def masked(case: Case) -> Workload:
    import torch

    x = scores_of(case)
    function, mapping = calls(case.map, case.n)
    keep = torch.rand(case.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    drop = ~keep
    contenders = {
        OURS: lambda: function(x, mask=keep),
        "torch.softmax of masked_fill": lambda: torch.softmax(x.masked_fill(drop, -math.inf), -1),
        "copy": lambda: x.clone(),
    }

    def check() -> str | None:
        pick = few(len(x))
        with anymax.use("reference"):
            want = function(x[pick], mask=keep[pick])
        return differs(contenders[OURS]()[pick], want, case.dtype, rounding(x[pick]))

    return Workload(contenders, check, engine("forward", mapping, x), _moved(x))


def backward(case: Case) -> Workload:
    import torch

    x = scores_of(case).clone().requires_grad_()
    g = incoming(case.shape)
    function, mapping = calls(case.map, case.n)
    p, q = function(x), torch.softmax(x, -1)
    frozen = x.detach()
    contenders = {
        OURS: lambda: torch.autograd.grad(p, x, g, retain_graph=True),
        "torch.softmax": lambda: torch.autograd.grad(q, x, g, retain_graph=True),
        "copy": lambda: frozen.clone(),
    }
    check = _check_gradient(case, mapping, frozen, p, g, contenders[OURS])
    return Workload(contenders, check, engine("vjp", mapping, frozen), _moved(x))


def forward_backward(case: Case) -> Workload:
    import torch

    x = scores_of(case).clone().requires_grad_()
    g = incoming(case.shape)
    function, mapping = calls(case.map, case.n)
    frozen = x.detach()
    contenders = {
        OURS: lambda: torch.autograd.grad(function(x), x, g),
        "torch.softmax": lambda: torch.autograd.grad(torch.softmax(x, -1), x, g),
    }
    if case.size > 1000:
        contenders["copy"] = lambda: frozen.clone()
    check = _check_gradient(case, mapping, frozen, function(frozen), g, contenders[OURS])
    return Workload(contenders, check, engine("vjp", mapping, frozen), _moved(x) if case.size > 1000 else 0)


def _check_gradient(case: Case, mapping: Any, x: Any, p: Any, g: Any, result: Callable[[], Any]) -> Callable[[], Any]:
    """Against the reference's gradient at our own p: one class at the edge of the support may be in or out of it."""

    def check() -> str | None:
        pick = few(len(x))
        want = reference.ENGINE.vjp(mapping, x[pick], p.detach()[pick], g[pick])
        return differs(result()[0][pick], want, case.dtype)

    return check


def loss(case: Case) -> Workload:
    import torch

    x = scores_of(case).clone().requires_grad_()
    t = torch.randint(case.n, case.shape[:1], generator=torch.Generator().manual_seed(1))
    function, mapping = calls(case.map, case.n)
    frozen = x.detach()
    contenders = {
        OURS: lambda: torch.autograd.grad(function(x, t), x),
        "F.cross_entropy": lambda: torch.autograd.grad(torch.nn.functional.cross_entropy(x, t), x),
        "copy": lambda: frozen.clone(),
    }

    def check() -> str | None:
        pick = few(len(x))
        got = contenders[OURS]()[0][pick] * (len(x) / len(pick))
        values = function(frozen, t, reduction="none")[pick]
        part = frozen[pick].requires_grad_()
        with anymax.use("reference"):
            want = torch.autograd.grad(function(part, t[pick]), part)[0]
            losses = function(frozen[pick], t[pick], reduction="none")
        slack = rounding(part.detach())
        return differs(got, want, case.dtype, slack) or differs(values, losses, case.dtype, slack)

    return Workload(contenders, check, engine("index_loss", mapping, frozen, "loss"), _moved(x))


def against_package(case: Case) -> Workload:
    import entmax
    import torch

    x = scores_of(case)
    function, mapping = calls(case.map, case.n)
    k = kept(case.n)
    theirs: dict[str, dict[str, Callable[[], Any]]] = {
        "sparsemax": {
            "entmax.sparsemax": lambda: entmax.sparsemax(x),
            "entmax.sparsemax_bisect": lambda: entmax.sparsemax_bisect(x),
        },
        "entmax15": {
            "entmax.entmax15": lambda: entmax.entmax15(x),
            "entmax.entmax_bisect": lambda: entmax.entmax_bisect(x),
        },
        "entmax 1.25": {"entmax.entmax_bisect": lambda: entmax.entmax_bisect(x, alpha=1.25)},
        "normmax": {"entmax.normmax_bisect": lambda: entmax.normmax_bisect(x)},
        "budget": {"entmax.budget_bisect": lambda: entmax.budget_bisect(x, budget=k)},
    }
    contenders = {OURS: lambda: function(x), **theirs[case.map]}
    check = check_forward(case, function, x, contenders[OURS])
    return Workload(contenders, check, engine("forward", mapping, x), _moved(x), torch.no_grad())


RECORDED = "recorded, forward alone"


def one_row(case: Case) -> Workload:
    """Overhead: the plainest call that there is."""
    import torch

    x = scores_of(case)
    function, mapping = calls(case.map, case.n)
    out = torch.empty_like(x)
    if case.note == RECORDED:
        given = x.clone().requires_grad_()
        ours, theirs = (lambda: function(given)), (lambda: torch.softmax(given, -1))
    elif "out=" in case.note:
        ours, theirs = (lambda: function(x, out=out)), (lambda: torch.softmax(x, -1, out=out))
    else:
        ours, theirs = (lambda: function(x)), (lambda: torch.softmax(x, -1))
    context = torch.no_grad() if "no_grad" in case.note else None
    check = check_forward(case, function, x, ours)
    return Workload({OURS: ours, "torch.softmax": theirs}, check, engine("forward", mapping, x), 0, context)


def widths(case: Case) -> Workload:
    """One map on the same number of scores in rows of several widths."""
    import torch

    contenders: dict[str, Callable[[], Any]] = {}
    checks = []
    for n in (1_000, 10_000, 100_000, 1_000_000):
        x = torch.randn((case.size // n, n), generator=torch.Generator().manual_seed(n))
        function, mapping = calls(case.map, n)
        call = functools.partial(function, x, out=torch.empty_like(x))
        contenders[f"n={n:,}"] = call
        checks.append(check_forward(case, function, x, call))
    check = lambda: next((wrong for wrong in (c() for c in checks) if wrong), None)  # noqa: E731
    return Workload(contenders, check, engine("forward", mapping, x), _moved(x))


# -- NumPy and JAX ----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def plain_scores(shape: tuple[int, ...], distribution: str) -> Any:
    import numpy as np

    x = np.random.default_rng(shape[-1]).standard_normal(shape, dtype=np.float32)
    x *= np.float32(SIGMA[distribution])
    return x


def on_numpy(case: Case) -> Workload:
    from scipy import special

    x = plain_scores(case.shape, case.distribution)
    function, mapping = calls(case.map, case.n)
    peer = case.map if case.map in ("log_softmax", "logsumexp") else "softmax"
    theirs = getattr(special, peer)
    contenders = {
        OURS: lambda: function(x, axis=-1),
        f"scipy.special.{peer}": lambda: theirs(x, axis=-1),
        "copy": lambda: x.copy(),
    }
    check = check_forward(case, function, x, contenders[OURS])
    return Workload(contenders, check, engine(operation(case), mapping, x), 2 * x.nbytes)


def on_jax(case: Case) -> Workload:
    import jax
    import jax.numpy as jnp

    x = jnp.asarray(plain_scores(case.shape, case.distribution))
    function, mapping = calls(case.map, case.n)
    ours, theirs, copy = jax.jit(function), jax.jit(jax.nn.softmax), jax.jit(jnp.copy)
    contenders = {
        OURS: lambda: ours(x).block_until_ready(),
        "jax.nn.softmax": lambda: theirs(x).block_until_ready(),
        "copy": lambda: copy(x).block_until_ready(),
    }

    def check() -> str | None:
        pick = few(len(x))
        rows = x[jnp.asarray(pick)]
        with anymax.use("reference"):
            want = function(rows)
        return differs(ours(x)[jnp.asarray(pick)], want, case.dtype, rounding(rows))

    chosen: list[str] = []
    jax.eval_shape(lambda x: (chosen.append(engine("forward", mapping, x)), x)[1], x)
    return Workload(contenders, check, chosen[0], 2 * x.nbytes)


# -- the table --------------------------------------------------------------------------------------------------------


def forward_bars(shape: tuple[int, ...], distribution: str, copy: bool) -> tuple[Bar, ...]:
    limit = 1.5 if distribution == "flat" else 0.8 if distribution == "normal" and shape[-1] >= 1000 else 1.0
    bars = (Bar("torch.softmax", at_most=limit),)
    return (*bars, Bar("copy", at_least=0.6)) if copy else bars


def _forward() -> Iterator[Case]:
    for shape in SHAPES:
        for distribution in SIGMA:
            for name in SPARSE:
                bars = forward_bars(shape, distribution, copy=shape == HUGE and distribution == "normal")
                yield Case("forward", name, shape, into_out, bars, distribution)
        if shape[-1] >= 1000:
            yield Case("forward", "entmax 1.25", shape, into_out, (Bar("torch.softmax", at_most=2.5),))
        if shape in ((512, 1000), (64, 32000)):
            yield Case("forward", "perturb_max", shape, into_out, (Bar("torch.softmax", at_most=40.0),))
            for name in FIGURES:
                yield Case("forward", name, shape, into_out, (Bar("torch.softmax"),))
    for shape in SHAPES:
        for name in SPARSE:
            yield Case("fresh", name, shape, fresh, forward_bars(shape, "normal", copy=False))


def _softmax() -> Iterator[Case]:
    for shape in SHAPES:
        limit = 0.7 if shape in DICTIONARY else None
        yield Case("softmax", "softmax", shape, into_out, (Bar("torch.softmax", at_most=limit),))
    for shape in ((65536, 8), (1024, 1024), (64, 32000), *DICTIONARY):
        yield Case("softmax", "log_softmax", shape, fresh, (Bar("torch.log_softmax"),))
        yield Case("softmax", "logsumexp", shape, fresh, (Bar("torch.logsumexp"),))
    needs = ("scipy",)
    for shape in ((64, 32000), *DICTIONARY):
        limit = 10.0 if shape in DICTIONARY else None
        bars = (Bar("scipy.special.softmax", at_least=limit),)
        yield Case("numpy", "softmax", shape, on_numpy, bars, needs=needs)
        yield Case("numpy", "log_softmax", shape, on_numpy, (Bar("scipy.special.log_softmax"),), needs=needs)
        yield Case("numpy", "logsumexp", shape, on_numpy, (Bar("scipy.special.logsumexp"),), needs=needs)
        yield Case("numpy", "sparsemax", shape, on_numpy, (Bar("scipy.special.softmax"),), needs=needs)


def _gradients() -> Iterator[Case]:
    for shape in GRADIENT_SHAPES:
        for name in ALL_SPARSE:
            yield Case("backward", name, shape, backward, (Bar("torch.softmax", at_most=0.5),))
    for name in ALL_SPARSE:
        yield Case("backward", name, (20_000, 150), backward, (Bar("torch.softmax", at_most=1.0),))
    for shape in GRADIENT_SHAPES:
        for name in ALL_SPARSE:
            yield Case("both", name, shape, forward_backward, (Bar("torch.softmax"),))
    for shape in LOSS_SHAPES:
        for name in ("sparsemax_loss", "entmax15_loss", "sparse_softmax_loss", "cross_entropy"):
            yield Case("loss", name, shape, loss, (Bar("F.cross_entropy", at_most=0.8),))
    for shape in ((128, 10), (4096, 10), (4096, 100), (512, 1000)):
        for name in ("sparsemax_loss", "entmax15_loss", "cross_entropy"):
            yield Case("loss", name, shape, loss, (Bar("F.cross_entropy"),))


def _package() -> Iterator[Case]:
    table = {
        "sparsemax": (Bar("entmax.sparsemax", at_least=100), Bar("entmax.sparsemax_bisect", at_least=200)),
        "entmax15": (Bar("entmax.entmax15", at_least=100), Bar("entmax.entmax_bisect", at_least=200)),
        "entmax 1.25": (Bar("entmax.entmax_bisect"),),
        "normmax": (Bar("entmax.normmax_bisect"),),
        "budget": (Bar("entmax.budget_bisect"),),
    }
    for shape in ((64, 32000), (8, 128000), HUGE):
        for name, bars in table.items():
            yield Case("package", name, shape, against_package, bars, needs=("torch", "entmax"), full=shape == HUGE)


def _jax() -> Iterator[Case]:
    for shape in ((1024, 1024), (64, 32000), HUGE):
        for name in (*SPARSE, "softmax"):
            limit = 1.0 if (name, shape) == ("sparsemax", HUGE) else None
            yield Case("jax", name, shape, on_jax, (Bar("jax.nn.softmax", at_most=limit),), needs=("jax",))


def _overhead() -> Iterator[Case]:
    shape = (1, 10)
    for name in (*SPARSE, "softmax"):
        for note, limit in (("", 1.4), ("no_grad", 1.4), ("out=", 2.0), (RECORDED, 2.2)):
            yield Case("overhead", name, shape, one_row, (Bar("torch.softmax", at_most=limit),), note=note)
        bars = (Bar("torch.softmax", at_most=1.4),)
        yield Case("overhead", name, shape, forward_backward, bars, note="forward+backward")


def _others() -> Iterator[Case]:
    for name in ALL_SPARSE:
        yield Case("width", name, (4_000_000,), widths, (Bar(WIDEST, at_most=1.5),))
    figure = (Bar("torch.softmax"),)
    for shape in ((1024, 1024), (64, 32000)):
        for dtype in ("float64", "bfloat16", "float16"):
            for name in (*SPARSE, "softmax"):
                yield Case("dtype", name, shape, into_out, figure, dtype=dtype)
    for shape, axis, full in (
        ((64, 1000, 49), 1, False),
        ((1000, 4096), 0, False),
        ((1, 10_000_000), -1, False),
        ((10_000_000, 4), -1, True),
    ):
        note = "" if axis == -1 else f"axis {axis}"
        for name in (*SPARSE, "softmax"):
            yield Case("layout", name, shape, into_out, figure, axis=axis, note=note, full=full)
    for shape in ((1024, 1024), (64, 32000)):
        for name in (*SPARSE, "softmax"):
            yield Case("layout", name, shape, masked, (Bar("torch.softmax of masked_fill"),), note="half masked")


def map_cases() -> Iterator[Case]:
    """Those of one map, loss or transform; attention and the classifiers have files of their own."""
    for part in (_forward, _softmax, _gradients, _package, _jax, _overhead, _others):
        yield from part()
