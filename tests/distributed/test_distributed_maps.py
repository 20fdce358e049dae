"""Maps whose rows have other sums, neighbours or bounds, with classes on several processes: the numbers of one process, in fp64."""
# ruff: noqa: B023 (functions of a loop's variables are called before it goes on)

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from processes import together
from test_distributed import apart, cut, numbers, on_one, rows, same
from test_distributed_jax import right
from test_distributed_sink import held

import anymax as A
from anymax import distributed as D

N = 37
SIZES = [(20, 0, 17), (15, 22, 0)]
ROW = numbers(60, 6, 1)
# each with one parameter that learns: a map of it, and its value
MAPS = {
    "sigmoid": (lambda v: A.Elementwise(tau=v), torch.tensor(0.3, dtype=torch.float64)),
    "relu": (lambda v: A.Elementwise("relu", v), 0.5 * ROW),
    "entmax of each": (lambda v: A.Elementwise(A.Entmax(v), 0.2), torch.tensor(1.6, dtype=torch.float64)),
    "softpick": (lambda v: A.Softpick(), torch.tensor(0.0, dtype=torch.float64)),
    "fusedmax": (A.Fusedmax, torch.tensor(0.2, dtype=torch.float64)),
    "ranks": (A.Ranks, ROW.abs() + 0.5),
    "ranks, kl": (lambda v: A.Ranks(v, "kl"), torch.tensor(2.0, dtype=torch.float64)),
    "bounded": (lambda v: A.Bounded(v), 0.1 + 0.2 * torch.sigmoid(ROW)),
    "bounded entmax": (lambda v: A.Bounded(0.2, v), torch.tensor(1.4, dtype=torch.float64)),
    "bounded softmax": (lambda v: A.Bounded(v, 1.0), torch.tensor(0.15, dtype=torch.float64)),
    "few bounds": (lambda v: A.Bounded(v), torch.tensor(0.01, dtype=torch.float64)),
    "relaxed top-k": (lambda v: A.Budget(v, shape="sigmoid"), torch.tensor(4.3, dtype=torch.float64)),
    "LapSum": (lambda v: A.Budget(v, shape="laplace"), 4.0 + 2.0 * torch.sigmoid(ROW)),
}
WITHOUT_DRAW = ("sigmoid", "relu", "entmax of each", "ranks", "ranks, kl")
FAST = ("sigmoid", "relu", "softpick", "fusedmax", "ranks", "bounded")


def learned(sizes, name, x, whole, split, seed=None):
    make, value = MAPS[name]
    if name == "softpick":
        want, gradient = on_one(x, lambda a: whole(make(None), a), seed)
        found = apart(sizes, x, lambda a, g, start: split(make(None), a, g, start), seed)
        for out, *_ in found:
            if seed is None:
                for got, one in zip(*(v if isinstance(v, tuple) else (v,) for v in (out, want)), strict=True):
                    same(got, one)
        if seed is not None:
            same(torch.cat([f[0] for f in found], -1), want)
        if gradient is not None:
            same(torch.cat([f[1] for f in found], -1), gradient, rtol=1e-8, atol=1e-9)
        return want
    return held(make, whole, split, x, sizes, value, seed)


@pytest.mark.whole(lambda name: name not in FAST)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_p_and_log_p(name, sizes):
    for verb in ("apply", "log_apply"):
        learned(sizes, name, rows(), getattr(A, verb), lambda m, a, g, start: getattr(D, verb)(m, a, group=g), seed=1)


def targets(name, mapping, x):
    """Class indices, if the map may be trained with them, and distributions with the sums and the bounds of p."""
    shares = numbers(3, *x.shape).abs() * (numbers(4, *x.shape) > 0) * (x > -torch.inf)
    shares = shares / shares.sum(-1, keepdim=True).clamp(min=1e-9)
    if name in ("sigmoid", "relu", "entmax of each"):
        shares = shares * 3.0 / shares.amax(-1, keepdim=True).clamp(min=3.0)
    elif name not in ("softpick", "fusedmax"):  # of other scores, a point that the map reaches
        shares = A.apply(mapping, torch.where(x > -torch.inf, numbers(61, *x.shape), x)).detach()
    of_one = name in ("sigmoid", "softpick", "fusedmax")
    return torch.tensor([5, 17, 36, 20, -100, 1])[: len(x)] if of_one else None, shares


@pytest.mark.whole(lambda name: name not in FAST)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_losses(name, sizes):
    x = rows()[:5]
    make, value = MAPS[name]
    index, shares = targets(name, make(value if not value.ndim else value[:5]), x)
    mine = dict(MAPS)
    keep = numbers(6, 5, N) > -1.0
    keep |= shares > 0
    keep[range(5), torch.tensor([5, 17, 36, 20, 0])] = True
    factors = numbers(5, N).abs()
    options = [{"weight": factors}, {"label_smoothing": 0.1, "reduction": "sum"}, {"reduction": "none"}]
    if name in ("sigmoid", "softpick", "fusedmax"):
        options += [{"mask": keep, "reduction": "none"}]
    try:
        MAPS[name] = make, value if not value.ndim else value[:5]
        for verb in ("fenchel_young", "nll"):
            if (name in WITHOUT_DRAW) if verb == "nll" else not make(value).facts.has_potential:
                continue
            for target in (index, shares):
                for given in options:
                    if target is None or (target is index and name.startswith("bounded")):
                        continue
                    if "label_smoothing" in given and name not in ("sigmoid", "softpick", "fusedmax"):
                        continue

                    def split(mapping, a, group, start):
                        mine = {k: cut(v, sizes, group.rank) if torch.is_tensor(v) else v for k, v in given.items()}
                        t = target if target is index else cut(target, sizes, group.rank)
                        return getattr(D, verb)(mapping, a, t, axis=-1, group=group, **mine)

                    want = learned(sizes, name, x, lambda m, a: getattr(A, verb)(m, a, target, axis=-1, **given), split)
                    assert verb == "nll" or want.isfinite().all()
    finally:
        MAPS.update(mine)


@pytest.mark.whole(lambda name: name not in FAST)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_log_p_entropy_thresholds_and_samples(name, sizes):
    y = torch.randint(N, (2, 6), generator=torch.Generator().manual_seed(7))
    y[0, 2], y[1, 0] = -1, 3
    make, value = MAPS[name]
    calls = [
        lambda module, m, a, **more: A.log_prob(m, a, y) if module is A else D.log_prob_entropy(m, a, y, **more)[0]
    ]
    if make(value).has_threshold:
        calls.append(lambda module, m, a, **more: tuple(module.threshold(m, a, **more)))
    drawn = lambda module, m, a, **more: module.sample(m, a, generator=3, num_samples=50, **more)  # noqa: E731
    calls = calls[1:] if name in WITHOUT_DRAW else [*calls, drawn]
    for call in calls:
        learned(
            sizes, name, rows(), lambda m, a: call(A, m, a), lambda m, a, g, start: call(D, m, a, group=g, class_start=start)
        )  # fmt: skip
    if name == "softpick":  # a draw of none of the classes
        assert (drawn(A, A.Softpick(), rows()) == -1).any()


@pytest.mark.parametrize("alpha", [2.0, 1.3, 1.0])
def test_bounds_of_each_class(alpha):
    """They are split like the scores, and so is their gradient."""
    x, upper, sizes = rows()[:5], 0.3 * torch.sigmoid(numbers(62, N)), (20, 0, 1, 16)
    each = (torch.linspace(0.5, 1.0, 5, dtype=torch.float64)[:, None] * upper).clone()
    calls = [
        lambda module, m, a, part, more: (module.apply(m, a, **more) * part(numbers(63, 5, N))).sum(),
        lambda module, m, a, part, more: module.fenchel_young(m, a, part(y), axis=-1, **more),
        lambda module, m, a, part, more: module.nll(m, a, part(y), axis=-1, **more),
    ]
    for bounds in (upper, each):
        y = A.apply(A.Bounded(bounds, alpha), torch.where(x > -torch.inf, numbers(61, 5, N), x))
        for f in calls:
            a, u = x.clone().requires_grad_(), bounds.clone().requires_grad_()
            want = f(A, A.Bounded(u, alpha), a, lambda w: w, {})
            want.backward()

            def one(group):
                part = lambda w: cut(w, sizes, group.rank)  # noqa: E731
                b, v = part(x).clone().requires_grad_(), part(bounds).clone().requires_grad_()
                value = f(D, A.Bounded(v, alpha), b, part, {"group": group})
                value.backward()
                return value.detach(), b.grad, v.grad

            found = together(len(sizes), one)
            if f is not calls[0]:
                for value, *_ in found:
                    same(value, want)
            same(torch.cat([g for _, g, _ in found], -1), a.grad, rtol=1e-8, atol=1e-9)
            same(torch.cat([g for *_, g in found], -1), u.grad, rtol=1e-8, atol=1e-9)

    def another(group):
        D.apply(A.Bounded(torch.full((2 - group.rank,), 0.5)), torch.zeros(2, 2), group=group)

    with pytest.raises(
        ValueError, match="upper of bounded has one value for each class on some processes, and one for all"
    ):
        together(2, another)


# (classes of each process, the shape of the bounds of all classes): a process with one class can't tell whether a bound is its own
ALONE = [
    ((2, 1), (3,)),
    ((1, 1), (2,)),
    ((1, 1), (5, 2)),
    ((1, 2, 0), (5, 3)),
    ((2, 1), (1,)),
    ((1, 2), (5, 1)),
    ((1, 1), ()),
]


@pytest.mark.parametrize(("sizes", "shape"), ALONE, ids=str)
def test_bounds_where_a_process_has_one_class(sizes, shape):
    x, bounds = numbers(64, 5, sum(sizes)), 0.4 + 0.5 * torch.sigmoid(numbers(65, *shape, 1)[..., 0])
    split = shape[-1:] == (sum(sizes),)
    weight = numbers(66, 5, sum(sizes))

    def loss(module, a, u, part=lambda w: w, **more):
        return (module.apply(A.Bounded(u), a, **more) * part(weight)).sum()

    free = [v.clone().requires_grad_() for v in (x, bounds)]
    want = torch.autograd.grad(loss(A, *free), free)

    def one(group):
        part = lambda w: cut(w, sizes, group.rank)  # noqa: E731
        own = [part(x).clone().requires_grad_(), (part(bounds) if split else bounds).clone().requires_grad_()]
        return torch.autograd.grad(loss(D, *own, part, group=group), own)

    found = together(len(sizes), one)
    same(torch.cat([g for g, _ in found], -1), want[0])
    for g in [torch.cat([g for _, g in found], -1)] if split else [g for _, g in found]:
        same(g, want[1])


def test_what_a_target_may_be():
    x, sizes = rows()[2:4], (20, 17)
    share = torch.full_like(x, 1.0 / N)
    for mapping, y, error, words in (
        (A.Ranks(), share, ValueError, "sum to what the probabilities of their row sum to"),
        (A.Bounded(0.2), torch.eye(N, dtype=torch.float64)[:2], ValueError, "gives no class more than its upper bound"),
        (A.Bounded(0.2), torch.tensor([36, 0]), ValueError, "gives no class more than its upper bound"),
        (
            A.Elementwise(),
            2.0 * torch.eye(N, dtype=torch.float64)[:2],
            ValueError,
            "no class more than its upper bound",
        ),
        (A.Ranks(), torch.tensor([36, 0]), ValueError, "a class index to 1"),
        (A.Budget(2, shape="sigmoid"), share, ValueError, "the sums go from 1 to 1"),
    ):
        with pytest.raises(error, match=words):
            A.fenchel_young(mapping, x, y, axis=-1)

        def one(group):
            t = y if not y.is_floating_point() else cut(y, sizes, group.rank)
            with pytest.raises(error, match=words):
                D.fenchel_young(mapping, cut(x, sizes, group.rank), t, axis=-1, group=group)

        together(2, one)


def test_what_a_map_of_each_class_sends():
    """Nothing but the check of the calls, and a loss its sum."""
    x, y = rows()[2:4], torch.full((2, N), 0.3, dtype=torch.float64)
    m = A.Elementwise()
    calls = [
        (lambda a, g, s: D.apply(m, a, group=g), (1, 0)),
        (lambda a, g, s: D.fenchel_young(m, a, cut(y, (20, 17), g.rank), axis=-1, group=g), (3, 0)),
        (lambda a, g, s: D.fenchel_young(m, a, torch.tensor([5, 36]), axis=-1, group=g, class_start=s), (2, 0)),
    ]
    for f, want in calls:
        assert apart((20, 17), x, f, before=1)[0][2:] == want


@pytest.mark.parametrize("name", ["sigmoid", "softpick", "fusedmax", "ranks, kl", "relaxed top-k"])
def test_an_output_layer(name):
    x, w, b, sizes = numbers(1, 4, 5), numbers(2, N, 5), numbers(3, N), (20, 0, 17)
    make, value = MAPS[name]
    mapping = make(value)
    y = 0.4 * torch.sigmoid(numbers(4, 4, N)) if name == "sigmoid" else A.apply(mapping, numbers(4, 4, N))

    def run(f, leaves):
        mine = [a.detach().clone().requires_grad_() for a in leaves]
        loss = f(*mine)
        return loss.detach(), *torch.autograd.grad(loss, mine)

    want = run(lambda x, w, b: A.linear_loss(x, w, y, mapping, linear_bias=b), (x, w, b))

    def one(group):
        part = lambda a: cut(a, sizes, group.rank)  # noqa: E731
        return run(
            lambda x, w, b: D.linear_loss(x, w, part(y), mapping, linear_bias=b, group=group, chunk=3),
            (x, part(w.T).T, part(b)),
        )

    found = together(3, one)
    for loss, of_x, *_ in found:
        same(loss, want[0])
        same(of_x, want[1], rtol=1e-8, atol=1e-9)
    for i in (2, 3):
        same(torch.cat([f[i] for f in found]), want[i], rtol=1e-8, atol=1e-9)


def test_a_matrix_map_says_how_to_call_it():
    def one(group):
        with pytest.raises(TypeError, match=r"Sinkhorn.*matri"):
            D.apply(A.Sinkhorn(), torch.zeros(2, 2), group=group)

    together(2, one)


@pytest.mark.whole
def test_on_four_devices_of_jax():
    right("""
    x, w = jnp.asarray(rng.normal(size=(3, 36))), jnp.asarray(rng.normal(size=(3, 36)))
    t, here, own = jnp.asarray([0, 12, 35]), dict(axis_name="classes"), P(None, "classes")
    for m in (A.Elementwise("sigmoid", 0.2), A.Softpick(), A.Fusedmax(0.2), A.Ranks(), A.Bounded(0.2), A.Budget(4, shape="sigmoid")):
        held(x, lambda x: D.apply(m, x, **here), lambda x: A.apply(m, x), own, w)
        y = A.apply(m, w)
        loss = "fenchel_young" if m.facts.has_potential else "nll"
        f = jax.jit(jax.shard_map(lambda x, y: getattr(D, loss)(m, x, y, **here), mesh=mesh, in_specs=own, out_specs=P()))
        np.testing.assert_allclose(f(x, y), getattr(A, loss)(m, x, y), rtol=1e-10)
        np.testing.assert_allclose(
            jax.grad(f)(x, y), jax.grad(lambda x: getattr(A, loss)(m, x, y))(x), rtol=1e-8, atol=1e-10)
    """)
