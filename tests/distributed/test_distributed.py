"""Classes on several processes: the same numbers as on one, in fp64, whatever the shards; and how much is communicated."""
# ruff: noqa: B023 (functions of a loop's variables are called before it goes on)

import importlib.util
import inspect
import pathlib
import subprocess
import sys

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from processes import all_right, ended, started, together

import anymax as A
from anymax import distributed as D
from anymax.distributed.call import Arguments, ShardKeywords

MAPS = [
    A.Softmax(), A.Sparsemax(), A.Entmax(1.5), A.Entmax(3.0), A.Entmax(0.7), A.Budget(k=7), A.Entmax(1.0), A.NormMax(2.0),
    A.Taylor(2), A.Sigsoftmax(), A.Ratio.relu(), A.SparseSoftmax(k=4), A.SparseSoftmax(p=0.8),
    A.PerturbMax("gumbel", scale=0.7), A.PerturbMax("normal"),
]  # fmt: skip
NAMES = [f"{m.name}{getattr(m, 'alpha', '')}{getattr(m, 'noise', '')}{i}" for i, m in enumerate(MAPS)]
SHARDS = [(20, 17), (0, 15, 0, 15, 7)]
N = 37


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(sigma=1.0):
    """Rows with masked classes, most of those of the first process, with ties, and one without classes."""
    x = sigma * numbers(0, 6, N)
    x[0, 3], x[0, 6:20], x[1], x[5] = -torch.inf, -torch.inf, 2.0, -torch.inf
    return x


def cut(a, sizes, rank):
    start = sum(sizes[:rank])
    return a[..., start : start + sizes[rank]]


def finite(v):
    return torch.where(torch.isfinite(v), v, torch.zeros_like(v))


def same(got, want, rtol=1e-10, atol=1e-12):
    torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=atol, equal_nan=True)


def apart(sizes, x, f, seed=None, before=0):
    """f(shard, group, class_start) on every process: what it gives, the gradient of the scores, collectives forward and backward.

    before: how many calls of it are made first, and not counted.
    """

    def one(group):
        a, start = cut(x, sizes, group.rank).clone().requires_grad_(), sum(sizes[: group.rank])
        for _ in range(before):
            f(a.detach(), group, start)
        group.calls = 0
        out = f(a, group, start)
        forward = group.calls
        parts = [v for v in (out if isinstance(out, tuple) else (out,)) if v.requires_grad]
        weight = lambda v: 1.0 if seed is None else cut(numbers(seed, *v.shape[:-1], N), sizes, group.rank)  # noqa: E731
        if parts:
            sum((finite(v) * weight(v)).sum() for v in parts).backward()
        return out, a.grad, forward, group.calls - forward

    return together(len(sizes), one)


def on_one(x, f, seed=None):
    a = x.clone().requires_grad_()
    out = f(a)
    parts = [v for v in (out if isinstance(out, tuple) else (out,)) if v.requires_grad]
    weight = lambda v: 1.0 if seed is None else numbers(seed, *v.shape[:-1], N)  # noqa: E731
    if parts:
        sum((finite(v) * weight(v)).sum() for v in parts).backward()
    return out, a.grad


@pytest.mark.thin(2)
@pytest.mark.parametrize("sizes", SHARDS, ids=str)
@pytest.mark.parametrize("mapping", MAPS, ids=NAMES)
def test_probabilities_and_their_gradient(mapping, sizes):
    for sigma in (1.0, 0.02):
        x = rows(sigma)
        for verb in ("apply", "log_apply"):
            want, gradient = on_one(x, lambda a: getattr(A, verb)(mapping, a), seed=1)
            found = apart(sizes, x, lambda a, g, start: getattr(D, verb)(mapping, a, group=g), seed=1)
            same(torch.cat([f[0] for f in found], -1), want)
            same(torch.cat([f[1] for f in found], -1), gradient, rtol=1e-8, atol=1e-9)


@pytest.mark.thin(2)
@pytest.mark.parametrize("sizes", SHARDS, ids=str)
@pytest.mark.parametrize("mapping", MAPS, ids=NAMES)
def test_losses_and_their_gradient(mapping, sizes):
    every = rows()
    index = torch.randint(N, (6,), generator=torch.Generator().manual_seed(2))
    index[0], index[4] = 5, -100
    shares = numbers(3, 6, N).abs() * (numbers(4, 6, N) > 0)
    shares[:5] *= every[:5] > -torch.inf
    if isinstance(mapping, A.Budget):
        shares = (shares > 0).double()  # none above 1
    shares /= shares.sum(-1, keepdim=True)
    factors, keep = numbers(5, N).abs(), numbers(6, 6, N) > -1.0
    keep[range(6), index.clamp(0)] = True
    options = [
        {"weight": factors},
        {"label_smoothing": 0.1, "weight": factors, "reduction": "sum"},
        {"mask": keep, "reduction": "none"},
    ]
    compared = 0
    for verb in ("fenchel_young", "nll"):
        mass = 7.0 if isinstance(mapping, A.Budget) else 1.3 if verb == "nll" else 1.0
        for whole in (index, shares * mass):
            if isinstance(mapping, A.Budget) and whole is index:
                continue
            for given in options:
                # the row without classes has +inf, which would hide all others
                last = 6 if given.get("reduction") == "none" else 5
                x, target = every[:last], whole[:last]
                try:
                    want, gradient = on_one(x, lambda a: getattr(A, verb)(mapping, a, target, axis=-1, **given))
                except (TypeError, ValueError):  # no such loss
                    continue

                def part(a, g, start):
                    mine = {k: cut(v, sizes, g.rank) if torch.is_tensor(v) else v for k, v in given.items()}
                    t = target if whole is index else cut(target, sizes, g.rank)
                    return getattr(D, verb)(mapping, a, t, axis=-1, group=g, class_start=start, class_count=N, **mine)

                found, compared = apart(sizes, x, part), compared + bool(want.isfinite().any())
                for value, *_ in found:
                    same(value, want)
                same(torch.cat([f[1] for f in found], -1), gradient, rtol=1e-8, atol=1e-9)
    assert compared


@pytest.mark.thin(2)
@pytest.mark.parametrize("sizes", SHARDS, ids=str)
@pytest.mark.parametrize("mapping", MAPS, ids=NAMES)
def test_thresholds_log_p_and_samples(mapping, sizes):
    x = rows()
    y = torch.randint(N, (2, 6), generator=torch.Generator().manual_seed(7))
    y[0, 2], y[1, 0] = -1, 3
    calls = [lambda x, **o: (A if not o else D).log_prob_entropy(mapping, x, y, **o)]
    calls.append(lambda x, **o: (A if not o else D).sample(mapping, x, generator=3, num_samples=50, **o))
    if mapping.has_threshold:
        calls.append(lambda x, **o: tuple((A if not o else D).threshold(mapping, x, **o)))
    if isinstance(mapping, A.Softmax):
        cold = torch.tensor([0.0, 0.0, 0.3, 0.0, 1.0, 0.0], dtype=torch.float64)[:, None]
        for t in (0.3, 0.0, cold):
            calls.append(lambda x, t=t, **o: (A if not o else D).logsumexp(x, temperature=t, **o))
    for f in calls:
        want, gradient = on_one(x, f)
        found = apart(sizes, x, lambda a, g, start: f(a, group=g, class_start=start))
        for out, *_ in found:
            for got, one in zip(
                out if isinstance(out, tuple) else (out,), want if isinstance(want, tuple) else (want,)
            ):
                same(got, one)
        if gradient is not None:
            same(torch.cat([f[1] for f in found], -1), gradient, rtol=1e-8, atol=1e-9)


def test_what_has_no_probability_has_the_gradient_of_the_loss():
    x, y = torch.tensor([[3.0, 0.0, -1.0, 0.5]], dtype=torch.float64), torch.tensor([2])
    a = x.clone().requires_grad_()
    A.log_prob(A.Sparsemax(), a, y).sum().backward()

    def one(group):
        b = cut(x, (2, 2), group.rank).clone().requires_grad_()
        D.log_prob_entropy(A.Sparsemax(), b, y, group=group)[0].sum().backward()
        return b.grad

    same(torch.cat(together(2, one), -1), a.grad)


@pytest.mark.parametrize(
    "mapping", [A.Budget, A.Entmax, lambda v: A.Sink("sparsemax", v - 9.0)], ids=["k", "alpha", "sink"]
)
def test_a_parameter_does_not_change_log_p_of_a_class_without_probability(mapping):
    """It is -inf around the parameter, too: the gradient is 0 in every layout, also where p is divided by its sum k."""
    x, y, one = (
        torch.tensor([[3.0, 0.0, -9.0, 2.5]], dtype=torch.float64),
        torch.tensor([2]),
        torch.eye(4, dtype=torch.float64),
    )
    calls = {
        "rows": lambda m, y, _: A.log_prob(m, x, y), "with entropy": lambda m, y, _: A.log_prob_entropy(m, x, y)[0],
        "scores that learn": lambda m, y, _: A.log_prob(m, x.clone().requires_grad_(), y),
        "an output layer": lambda m, y, _: A.linear_log_prob(x, one, y, m),
        "shards": lambda m, y, g: D.log_prob_entropy(m, cut(x, (3, 1), g.rank), y, group=g)[0],
        "shards of a layer": lambda m, y, g: D.linear_log_prob(x, one[:3] if g.rank == 0 else one[3:], y, m, group=g),
    }  # fmt: skip

    def gradients(group):
        found = {}
        for name, f in calls.items():
            for index in (y, torch.tensor([0])):
                v = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
                found[name, int(index)] = float(torch.autograd.grad(f(mapping(v), index, group).sum(), v)[0])
        return found

    for found in together(2, gradients):
        for name in calls:
            assert found[name, 2] == 0.0, (name, found)
            assert abs(found[name, 0] - found["rows", 0]) < 1e-12, (name, found)


# forward and backward collectives: p; the loss of class indices (nll where there is no other); log p of classes with the entropy
COLLECTIVES = {
    "softmax": ((1, 1), (1, 0), (1, 0)), "sigsoftmax": ((1, 1), (1, 0), (1, 0)), "sparsemax": ((2, 1), (2, 0), (3, 1)),
    "entmax": ((2, 1), (2, 0), (3, 1)), "budget": ((2, 1), None, (3, 1)), "normmax": ((2, 1), (2, 0), (3, 1)),
    "taylor": ((2, 1), (2, 0), (3, 1)), "ratio": ((2, 1), (2, 0), (3, 1)), "sparse_softmax": ((2, 1), (2, 0), (3, 1)),
    "perturb_max": ((2, 1), (2, 0), (3, 1)),
}  # fmt: skip


@pytest.mark.parametrize("sizes", [(20, 17), (9, 9, 9, 0, 10)], ids=str)
def test_the_number_of_collectives_does_not_depend_on_the_shards(sizes):
    x, t = rows()[:5], torch.tensor([0, 36, 5, 20, 11])
    for mapping in (
        m for m in MAPS if not (m.name == "perturb_max" and m.noise == "gumbel") and m != A.SparseSoftmax(p=0.8)
    ):
        if mapping.name == "entmax" and mapping.alpha == 1.0:
            continue
        verb = D.fenchel_young if mapping.facts.has_potential else D.nll
        calls = [
            lambda a, g, s: D.apply(mapping, a, group=g),
            lambda a, g, s: verb(mapping, a, t, axis=-1, group=g, class_start=s),
            lambda a, g, s: D.log_prob_entropy(mapping, a, t, group=g, class_start=s),
        ]
        for f, want in zip(calls, COLLECTIVES[mapping.name]):
            if want is not None:
                first, again = (apart(sizes, x, f, before=n)[0][2:] for n in (0, 1))
                assert again == want, mapping
                assert first == (want[0] + 1, want[1]), mapping  # all say first what they are going to send


def test_many_candidates_are_searched_for_with_sums():
    """Flat scores: all classes are in the support, and no process gets more than sums of them."""
    x = 1e-4 * numbers(8, 2, 9000)
    for mapping in (A.Sparsemax(), A.Entmax(1.5), A.Entmax(0.5)):
        want, gradient = on_one(x, lambda a: (A.apply(mapping, a) ** 2).sum())
        found = apart((4000, 5000), x, lambda a, g, s: D.apply(mapping, a, group=g).square().sum())
        same(sum(f[0] for f in found), want)
        same(torch.cat([f[1] for f in found], -1), gradient, atol=1e-14)
        assert found[0][2] < 16
        loss, pull = on_one(x, lambda a: A.fenchel_young(mapping, a, torch.tensor([3, 8000])))
        found = apart((4000, 5000), x, lambda a, g, s: D.fenchel_young(mapping, a, torch.tensor([3, 8000]), group=g))
        same(found[1][0], loss)
        same(torch.cat([f[1] for f in found], -1), pull, atol=1e-14)


def test_parameters_that_learn_and_second_derivatives():
    x, t = rows()[2:5], torch.tensor([0, 36, 20])
    alpha = torch.tensor(1.4, dtype=torch.float64, requires_grad=True)
    w = numbers(9, 3, N)
    for f, make in (
        (lambda m, a, g: D.fenchel_young(m, a, t, axis=-1, group=g), lambda m, a: A.fenchel_young(m, a, t, axis=-1)),
        (
            lambda m, a, g: (D.apply(m, a, group=g) * cut(w, (20, 17), g.rank)).sum(),
            lambda m, a: (A.apply(m, a) * w).sum(),
        ),
    ):
        a = x.clone().requires_grad_()
        first = torch.autograd.grad(make(A.Entmax(alpha), a), [a, alpha], create_graph=True)
        second = torch.autograd.grad((first[0] * w).sum(), a)[0]

        def one(group):
            b, own = cut(x, (20, 17), group.rank).clone().requires_grad_(), alpha.detach().clone().requires_grad_()
            got = torch.autograd.grad(f(A.Entmax(own), b, group), [b, own], create_graph=True)
            return *got, torch.autograd.grad((got[0] * cut(w, (20, 17), group.rank)).sum(), b)[0]

        found = together(2, one)
        for i, want in ((0, first[0]), (2, second)):
            same(torch.cat([v[i] for v in found], -1).detach(), want.detach(), rtol=1e-8, atol=1e-10)
        for v in found:
            same(v[1].detach(), first[1].detach(), rtol=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_dtypes_and_axes(dtype):
    x = rows()[:5].to(dtype)
    for mapping in (A.Softmax(), A.Entmax(1.5)):
        want = A.apply(mapping, x.T, axis=0)
        found = together(2, lambda g: D.apply(mapping, cut(x, (20, 17), g.rank).T, axis=0, group=g))
        assert found[0].dtype is dtype
        same(torch.cat(found, 0), want, rtol=1e-2 if dtype is not torch.float32 else 1e-5, atol=1e-6)


def test_the_classes_need_not_be_in_the_order_of_the_ranks():
    x, t = rows()[:3], torch.tensor([30, 5, 36])
    places = [slice(25, 37), slice(0, 10), slice(10, 25)]
    for mapping in (A.Softmax(), A.SparseSoftmax(k=3), A.Entmax(1.5), A.PerturbMax("normal"), A.Taylor(2)):
        verb = "fenchel_young" if mapping.facts.has_potential else "nll"
        draws = A.sample(mapping, x, generator=1, num_samples=40)

        def one(g):
            part, start = x[:, places[g.rank]], places[g.rank].start
            value = getattr(D, verb)(mapping, part, t, axis=-1, group=g, class_start=start)
            drawn = D.sample(mapping, part, generator=1, num_samples=40, group=g, class_start=start)
            return D.apply(mapping, part, group=g, class_start=start), value, drawn

        for (p, value, drawn), place in zip(together(3, one), places):
            same(p, A.apply(mapping, x)[:, place])
            same(value, getattr(A, verb)(mapping, x, t, axis=-1))
            assert torch.equal(drawn, draws)


def test_poison_on_one_process_is_seen_on_all():
    x = rows()[:4]
    x[2, 36], x[3, 0] = torch.nan, torch.inf
    for mapping in MAPS:
        for p in together(2, lambda g: D.apply(mapping, cut(x, (20, 17), g.rank), group=g)):
            assert p[2:].isnan().all()
            assert not p[:2].isnan().any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda g, x: D.apply("sparsemax" if g.rank else "entmax15", x, group=g), "ask for different things"),
        (
            lambda g, x: D.apply("softmax", x if g.rank else x.bool(), group=g),
            "real floating-point|process 0 of the group has failed",
        ),
        (lambda g, x: D.nll("softmax", x, torch.tensor([0, 99]), group=g), "class indices must be from 0 to 3"),
        (lambda g, x: D.apply("softmax", x, group=g, class_count=7), "the shards have 4 classes together"),
        (lambda g, x: D.apply("softmax", x, group=g, class_start=3 * g.rank), "must follow each other"),
        (lambda g, x: D.apply("softmax", x, group=g, class_start=None if g.rank else 0), "on some processes only"),
        (lambda g, x: D.apply("softmax", x[:, :0], group=g), "no classes on any process"),
        (lambda g, x: D.apply(A.Budget(k=5), x, group=g), "can't be chosen of 4"),
        (lambda g, x: D.fenchel_young("taylor", x, torch.tensor([0, 1]), group=g), "no Fenchel-Young loss"),
        (
            lambda g, x: D.fenchel_young("softmax", x, torch.full((2, 2), 0.4), axis=-1, group=g),
            "that sum to 1 over all processes",
        ),
        (lambda g, x: D.fenchel_young("softmax", x, torch.tensor([[0, 1]]), group=g), "for a shard of scores of shape"),
        (lambda g, x: D.threshold("taylor", x, group=g), "has no threshold"),
        (lambda g, x: D.apply("softmax", x, group=g, class_start=-1), "a number from 0 on"),
        (lambda g, x: D.apply("softmax", x, group=g, axis_name="c"), None),
        (lambda g, x: D.logsumexp(x, temperature=-1.0, group=g), "at least 0"),
    ],
)
def test_all_processes_end_with_a_sentence(change, words):
    """Also where one of them alone has failed, and none waits for ever."""
    said = []

    def one(group):
        try:
            change(group, torch.zeros(2, 2))
        except Exception as error:
            said.append(str(error))

    together(2, one)
    if words is None:
        assert not said
    else:
        import re

        assert len(said) == 2
        assert all(re.search(words, s) for s in said), said


def test_the_keywords_of_every_verb():
    """Their defaults are those in effect, and an unknown one is named."""
    shown = {
        p.name: p.default
        for p in inspect.signature(D.apply).parameters.values()
        if p.name in ShardKeywords.__annotations__
    }
    assert list(shown) == list(ShardKeywords.__annotations__)
    assert shown.items() <= Arguments("apply", None, None, None, None, None)._asdict().items()
    with pytest.raises(TypeError, match=r"log_apply has no option 'groups' \(did you mean group=\?\)"):
        D.log_apply("softmax", torch.zeros(3), groups=None)


def test_what_is_no_part_of_scores_is_refused():
    import numpy as np

    with pytest.raises(TypeError, match="torch tensor with group= or a JAX array with axis_name="):
        D.apply("softmax", np.zeros(3))
    if not torch.distributed.is_initialized():
        with pytest.raises(RuntimeError, match="init_process_group"):
            D.apply("softmax", torch.zeros(3))


# -- the margin head, as partial FC has it -----------------------------------------------------------------------------------------


LAYERS = [
    "softmax",
    "sparsemax",
    "entmax15",
    A.SparseSoftmax(k=4),
    A.Taylor(2),
    A.NormMax(2.0),
    A.Entmax(numbers(9, 6, 1).abs() + 1.1),
]


@pytest.mark.thin(3)
@pytest.mark.parametrize("mapping", LAYERS, ids=lambda m: m if isinstance(m, str) else m.name)
@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1, "reduction": "none"}, {"weight": True, "mask": True}, {"soft": True}],
    ids=str,
)
def test_an_output_layer_over_processes(mapping, options):
    """The loss and all gradients are those of one process, with rows made some at a time, and a process without classes."""
    sizes, x, weight, bias = (20, 0, 17), numbers(1, 2, 3, 5), numbers(2, N, 5), numbers(3, N)
    if isinstance(mapping, A.Entmax):
        mapping = A.Entmax(mapping.alpha.reshape(2, 3, 1))
    t = torch.randint(N, (2, 3), generator=torch.Generator().manual_seed(4))
    t[1, 2] = -100
    if "soft" in options:
        t = torch.softmax(numbers(5, 2, 3, N), -1)
    given = {k: v for k, v in options.items() if k in ("label_smoothing", "reduction")}
    if "mask" in options:
        given["mask"], given["weight"] = numbers(6, 2, 3, N) > -1.5, numbers(7, N).abs()
        given["mask"].scatter_(-1, t.clamp(0)[..., None], True)
    if isinstance(mapping, A.SparseSoftmax) and options.keys() & {"label_smoothing", "soft"}:
        pytest.skip("k classes do not reach such a target")

    def run(f, x, weight, bias):
        leaves = [a.clone().requires_grad_() for a in (x, weight, bias)]
        value = f(*leaves)
        (value * (1.0 if not value.ndim else numbers(8, *value.shape))).sum().backward()
        return value, [a.grad for a in leaves]

    want, gradients = run(lambda x, w, b: A.linear_loss(x, w, t, mapping, linear_bias=b, **given), x, weight, bias)

    def one(group, chunk):
        part = lambda a: cut(a, sizes, group.rank)  # noqa: E731
        mine = {k: part(v) if torch.is_tensor(v) else v for k, v in given.items()}
        target = part(t) if "soft" in options else t
        f = lambda x, w, b: D.linear_loss(x, w, target, mapping, linear_bias=b, group=group, chunk=chunk, **mine)  # noqa: E731
        return run(f, x, part(weight.T).T, part(bias))

    for chunk in (None, 4):
        found = together(len(sizes), lambda group: one(group, chunk))
        for value, (of_x, _, _) in found:
            same(value, want)
            same(of_x, gradients[0], rtol=1e-8, atol=1e-9)
        same(torch.cat([g[1] for _, g in found]), gradients[1], rtol=1e-8, atol=1e-9)
        same(torch.cat([g[2] for _, g in found]), gradients[2], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("mapping", ["softmax", "entmax15"])
def test_an_output_layer_of_no_rows(mapping):
    """Everything that learns has zeros as its gradient, with class weights and without."""
    for weighted in (False, True):

        def one(group):
            x, w = torch.zeros(0, 3, 5, requires_grad=True), cut(torch.ones(5, 7), (4, 0, 3), group.rank).T.clone()
            w, b = w.requires_grad_(), torch.zeros(len(w), requires_grad=True)
            given = {"weight": torch.ones(len(w))} if weighted else {}
            t = torch.zeros(0, 3, dtype=torch.long)
            value = D.linear_loss(x, w, t, mapping, linear_bias=b, group=group, reduction="none", **given)
            assert value.shape == (0, 3)
            return torch.autograd.grad(value.sum(), [x, w, b])

        for grads, size in zip(together(3, one), (4, 0, 3), strict=True):
            assert [tuple(g.shape) for g in grads] == [(0, 3, 5), (size, 5), (size,)]
            assert not any(g.any() for g in grads)


def test_an_output_layer_says_what_is_wrong():
    x, weight, t = numbers(1, 4, 5), numbers(2, N, 5), torch.zeros(4, dtype=torch.long)
    for change, words in (
        ({"linear_weight": numbers(1, N, 6)}, r"expected features \[..., features\] and this process's part"),
        ({"target": t[:3]}, r"target of shape \(3,\)"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"class_count": 5}, "class_count=5, and the shards have 37"),
        ({"reduction": "average"}, "reduction"),
    ):
        given = {"x": x, "linear_weight": weight, "target": t, "mapping": "sparsemax", **change}
        with pytest.raises(ValueError, match=words):
            together(1, lambda group: D.linear_loss(**given, group=group))


def heads(group, **options):
    """A head with this process's part of the centres."""
    head = A.nn.MarginHead(6, 11, options.pop("mapping", "softmax"), scale=4.0, group=group, **options).double()
    centres = numbers(10, 11, 6)
    here = centres if group is None else centres[head.class_start : head.class_start + head.weight.shape[0]]
    with torch.no_grad():
        head.weight.copy_(here)
    return head


@pytest.mark.parametrize("mapping", ["softmax", "sparsemax", "taylor"])
@pytest.mark.parametrize("rate", [1.0, 0.999])
def test_a_margin_head_over_processes(mapping, rate):
    """Each process has a batch of its own, of another size; a rate that leaves no class out changes nothing."""
    rows, t = numbers(11, 9, 6), torch.tensor([3, 0, 10, 7, -100, 2, 2, 5, 9])
    cuts = (4, 0, 5)
    e = rows.clone().requires_grad_()
    whole = heads(None, mapping=mapping)
    want = whole(e, t)
    want.backward()

    def one(group):
        head, here = (
            heads(group, mapping=mapping, sample_rate=rate),
            slice(sum(cuts[: group.rank]), sum(cuts[: group.rank + 1])),
        )
        part = rows[here].clone().requires_grad_()
        loss = head(part, t[here])
        loss.backward()
        return loss.detach(), part.grad, head.weight.grad, head.probabilities(rows).detach()

    found = together(3, one)
    for f in found:
        same(f[0], want)
    same(torch.cat([f[1] for f in found]), e.grad)
    same(torch.cat([f[2] for f in found]), whole.weight.grad)
    same(torch.cat([f[3] for f in found], -1), whole.probabilities(rows))


def test_sampled_classes_hold_those_of_the_batch():
    rows, t = numbers(11, 4, 6), torch.tensor([3, 3, 10, 7])
    torch.manual_seed(0)
    alone = heads(None, sample_rate=0.4)
    alone(rows, t).backward()
    touched = alone.weight.grad.abs().sum(-1) > 0
    assert touched.sum() == 5
    assert touched[[3, 7, 10]].all()
    alone.eval()
    same(alone(rows, t), heads(None)(rows, t))
    for touched in together(2, lambda g: _touched(heads(g, sample_rate=0.3), rows, t, g)):
        assert touched.sum() == 2
    with pytest.raises(ValueError, match="sample_rate must be a number above 0 and at most 1"):
        A.nn.MarginHead(6, 11, sample_rate=0.0)


@pytest.mark.parametrize("ignored", [0, 2])
def test_sampled_classes_are_not_taken_for_the_ignored_one(ignored):
    """Those of the batch are numbered 0, 1, 2 in such a step."""
    rows, t = numbers(11, 4, 6), torch.tensor([3, ignored, 10, 7])
    given = {"ignore_index": ignored, "reduction": "none"}
    want = heads(None, **given)(rows, t)
    assert (want > 0).tolist() == [True, False, True, True]
    same(heads(None, sample_rate=0.999, **given)(rows, t), want)
    for found in together(2, lambda g: heads(g, sample_rate=0.999, **given)(rows, t)):
        same(found, want.repeat(2))


class Unfit(A.Entmax):
    """Another map's regulariser."""

    def omega(self, q, xp):
        return 4.0 * super().omega(q, xp)


@pytest.mark.parametrize("n", [3, 5000], ids=["gathered", "searched"])
def test_a_negative_loss_is_an_error_on_every_process(n):
    """As on one; it was shown as 0."""
    x = torch.cat([torch.tensor([[1.0, 0.9, 0.8], [5.0, 0.0, 0.0]]), torch.zeros(2, n - 3)], -1)
    y = torch.cat([torch.tensor([[0.4, 0.3, 0.3], [1.0, 0.0, 0.0]]), torch.zeros(2, n - 3)], -1)
    sizes = (n - 1, 1)

    def said(group):
        with pytest.raises(ValueError, match=r"Unfit\(alpha=2\.0\): its Fenchel-Young loss is -.*check_mapping"):
            D.fenchel_young(Unfit(2.0), cut(x, sizes, group.rank), cut(y, sizes, group.rank), group=group)
        return True

    assert together(2, said) == [True, True]


def test_a_weight_of_0_leaves_out_an_infinite_loss():
    x, y, w = torch.tensor([[-torch.inf, 1.0, 2.0]]), torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([0.0, 1.0, 1.0])
    for target in (y, torch.tensor([0])):
        assert A.sparsemax_loss(x, target, w, reduction="none") == 0

    def one(group):
        part = [cut(a, (2, 1), group.rank) for a in (x, y, w)]
        return D.fenchel_young("sparsemax", *part, group=group, reduction="none")

    assert together(2, one) == [0, 0]


@pytest.mark.parametrize("rate", [1.0, 0.4])
def test_a_margin_head_says_which_targets_are_none_of_its_classes(rate):
    """On every process, since all of them have all targets."""
    rows = numbers(11, 4, 6)

    def said(group, t):
        with pytest.raises(IndexError, match="from 0 to 10, or ignore_index=-100, got values from -1 to 11"):
            heads(group, sample_rate=rate)(rows, t)
        return True

    bad, good = torch.tensor([3, -1, 11, 7]), torch.tensor([3, 0, 10, 7])
    if rate < 1:
        said(None, bad)
    assert together(2, lambda group: said(group, bad if group.rank else good)) == [True, True]
    head = heads(None, sample_rate=0.4)
    with pytest.raises(TypeError, match=r"a tensor of integers, got torch\.float32"):
        head(rows, good.float())
    with pytest.raises(ValueError, match=r"need a target of shape \(4,\), got \(3,\)"):
        head(rows, good[:3])
    same(head.eval()(rows, good.to(torch.uint8)), head(rows, good))


def _touched(head, rows, t, group):
    head(rows[2 * group.rank : 2 * group.rank + 2], t[2 * group.rank : 2 * group.rank + 2]).backward()
    touched = head.weight.grad.abs().sum(-1) > 0
    own = t[(t >= head.class_start) & (t < head.class_start + head.weight.shape[0])] - head.class_start
    assert touched[own].all()
    return touched


# -- real processes ------------------------------------------------------------------------------------------------------------

gloo = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="no gloo"
)

REAL = """
import test_distributed as T
import anymax as A
from anymax import distributed as D
from torch.distributed.tensor.debug import CommDebugMode
x = T.rows()
for many in (2, 3, 4):
    group = dist.new_group(list(range(many)))
    if rank >= many:
        continue
    sizes = {2: (20, 17), 3: (0, 30, 7), 4: (9, 9, 9, 10)}[many]
    start = sum(sizes[:rank])
    D.apply("softmax", T.cut(x, sizes, rank), group=group)  # the first call of a group says what it is going to send
    for mapping in T.MAPS:
        want, gradient = T.on_one(x, lambda a: A.apply(mapping, a), seed=1)
        a = T.cut(x, sizes, rank).clone().requires_grad_()
        with CommDebugMode() as forward:
            p = D.apply(mapping, a, group=group)
        T.same(p, T.cut(want, sizes, rank))
        with CommDebugMode() as backward:
            (T.finite(p) * T.cut(T.numbers(1, 6, T.N), sizes, rank)).sum().backward()
        T.same(a.grad, T.cut(gradient, sizes, rank), rtol=1e-8, atol=1e-9)
        most = 3 if mapping == A.SparseSoftmax(p=0.8) else 2
        assert forward.get_total_counts() <= most and backward.get_total_counts() == 1, mapping
    for mapping in T.MAPS:
        t = torch.tensor([5, 0, 36, 20, -100, 1])
        verb = "fenchel_young" if mapping.facts.has_potential and mapping.name != "budget" else "nll"
        want, gradient = T.on_one(x, lambda a: getattr(A, verb)(mapping, a, t, axis=-1, reduction="none"))
        a = T.cut(x, sizes, rank).clone().requires_grad_()
        value = getattr(D, verb)(mapping, a, t, axis=-1, group=group, class_start=start, reduction="none")
        T.same(value, want)
        T.finite(value).sum().backward()
        T.same(a.grad, T.cut(gradient, sizes, rank), rtol=1e-8, atol=1e-9)
if size == 4:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "classes"))
    for group in (mesh["classes"], (mesh, "classes"), mesh.get_group(1)):
        sizes, at = (20, 17), mesh.get_local_rank("classes")
        p = D.apply("entmax15", T.cut(x, sizes, at), group=group)
        T.same(p, T.cut(A.entmax15(x), sizes, at))
    try:
        D.apply("softmax", x, group=mesh)
    except ValueError as error:
        assert "give one of them" in str(error)
print("right")
dist.destroy_process_group()
"""


@gloo
@pytest.mark.whole
def test_two_three_and_four_processes():
    all_right(4, REAL)


LOST = """
import time, anymax
if rank == 1:
    sys.exit(3)
try:
    for _ in range(5):
        anymax.distributed.apply("softmax", torch.zeros(2, 3))
except RuntimeError as error:
    assert "waited for the others in vain" in str(error), error
    print("told")
"""


@gloo
@pytest.mark.whole
def test_a_process_that_has_ended_ends_the_others():
    first, second = ended(started(2, LOST), seconds=100)
    assert second[0] == 3
    assert first[1] == "told\n", first[2][-2000:]


ENDED = """
import os, anymax, anymax.distributed
def threads():
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0
def derivative(group):
    return anymax.distributed.apply("sparsemax", torch.ones(2, 3, requires_grad=True), group=group).sum()
derivative(None).backward()
before = threads()
group = dist.new_group()
total = derivative(group)
dist.destroy_process_group(group)
del group
print(threads() - before, "threads more")
try:
    total.backward()
except RuntimeError as error:
    assert "has been destroyed; call backward before" in str(error), error
    print("told")
"""


@gloo
@pytest.mark.whole
def test_a_graph_does_not_keep_its_group():
    for status, out, err in ended(started(2, ENDED)):
        assert status == 0, err[-2000:]
        assert out == "0 threads more\ntold\n"


@gloo
@pytest.mark.whole
def test_the_script_of_the_page_runs_with_torchrun():
    script = pathlib.Path(__file__).parents[2] / "docs" / "many_machines.py"
    if not script.exists():
        pytest.skip("the pages are in the repository only")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    for _ in range(2):
        done = subprocess.run(torchrun, capture_output=True, text=True, timeout=120)
        if "terminate called without an active exception" not in done.stderr:
            break  # on a busy machine a thread of gloo may outlive the process, whatever it computed
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = done.stdout.splitlines()
    assert first.startswith("2 processes, 500 classes each: loss 0.500 -> 0.0")
    assert second == "the probabilities of a row sum to 1.0000 and 1.0000"
