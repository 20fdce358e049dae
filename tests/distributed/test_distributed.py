"""Rows of scores whose classes are on several processes: the values and gradients of one process, in fp64, however the classes are cut."""

import importlib.util
import itertools

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from processes import together
from shard_cases import (
    CELLS,
    CUTS,
    EMPTY,
    INF,
    MAPS,
    OF_ONE,
    TWO,
    VERBS,
    Cut,
    Here,
    Map,
    N,
    exact,
    held,
    indices,
    is_empty,
    numbers,
    rows,
    same,
    scores_case,
    sent,
)  # fmt: skip

import anymax as A
from anymax import distributed as D
from anymax.distributed import methods

# -- each verb of each map ------------------------------------------------------------------------------------------------------------

SHORT = {  # the maps of the short battery, and how their classes are cut in it
    "softmax": "20-17-0", "entmax15": "0-15-1-21", "budget": "0-15-1-21", "budget by row": "20-17-0",
    "topp": "20-17-0", "sigsoftmax": "0-15-1-21", "taylor": "20-17-0",
    "entmax by row": "20-17-0", "gumbel by row": "20-17-0", "normmax, learned": "0-15-1-21", "softplus": "20-17-0",
    "of no family": "20-17-0", "sigmoid": "20-17-0", "relu of each": "20-17-0", "softpick": "0-15-1-21", "fusedmax": "20-17-0",
    "bounded": "0-15-1-21", "bounds of classes": "0-15-1-21", "sink of softmax": "20-17-0",
    "sink of entmax15 by row": "0-15-1-21", "sink of perturb_max": "20-17-0",
}  # fmt: skip


LEFT = ("apply, flat", "nll of indices, smoothing", "nll of shares, smoothing")  # of softmax alone


@pytest.mark.whole(lambda verb, name, cut: SHORT.get(name) != cut or (verb in LEFT and name != "softmax"))
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("verb", "name"), CELLS)
def test_each_verb(verb, name, cut):
    held(*scores_case(verb, name), CUTS[cut], VERBS[verb].joined)


@pytest.mark.whole(lambda name, cut: SHORT.get(name) != cut)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", [name for verb, name in CELLS if verb == "threshold"])
def test_thresholds_that_are_searched_for_with_sums(name, cut, monkeypatch):
    monkeypatch.setattr(methods, "MANY", 8)
    held(*scores_case("threshold", name), CUTS[cut])


@pytest.mark.parametrize(("verb", "names", "words"), EMPTY)
def test_a_cell_that_is_empty_is_refused(verb, names, words):
    """On one process and on many, by the same words."""
    for full in (v for v in VERBS if v.startswith(verb)):
        for name in names:
            f, leaves = scores_case(full, name)
            with pytest.raises((TypeError, ValueError), match=words):
                f(Here(), *[a for a, _ in leaves])
            with pytest.raises((TypeError, ValueError), match=words):
                together(1, lambda group: f(Here(Cut((37,)), group), *[a for a, _ in leaves]))  # noqa: B023


TEMPERATURES = {
    "0.3": (0.3, []), "0": (0.0, []), "0 in some rows": (torch.tensor([0.0, 0, 0.3, 0, 1, 0], dtype=torch.float64)[:, None], []),
    "learned": (None, [(numbers(34, 6, 1).abs() + 0.3, None)]),
}  # fmt: skip


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_logsumexp(temperature, cut):
    given, more = TEMPERATURES[temperature]
    f = lambda here, x, *t: here.call("logsumexp", x, temperature=t[0] if t else given)  # noqa: E731
    held(f, [(rows(), -1), *more], CUTS[cut])


def test_ignored_rows_of_a_sink_may_have_the_index_minus_one():
    x, t = rows()[1:4], torch.tensor([-1, 5, -1])
    f = lambda here, x: here.call("fenchel_young", A.Sink("entmax15"), x, t, axis=-1, ignore_index=-1, reduction="none")  # noqa: E731
    (want,) = held(f, [(x, -1)], TWO)
    assert want[0] == want[2] == 0


FLAT = {
    "sparsemax": Map(A.Sparsemax), "entmax15": Map(lambda: A.Entmax(1.5)), "entmax05": Map(lambda: A.Entmax(0.5)),
    "entmax, learned": Map(A.Entmax, exact(1.4)), "sink": Map(lambda v: A.Sink("sparsemax", v), exact(1e-4)),
}  # fmt: skip


@pytest.mark.parametrize("verb", ["apply", "fenchel_young"])
@pytest.mark.parametrize("name", FLAT)
def test_many_candidates_are_searched_for_with_sums(name, verb):
    """All classes are in the support, and no process gets more than sums of them."""
    more = [torch.tensor([3, 8000])] if verb == "fenchel_young" else []
    f = lambda here, x, *v: here.call(verb, FLAT[name].make(*v), x, *more)  # noqa: E731
    leaves, cut = [(1e-4 * numbers(8, 2, 9000), -1), *FLAT[name].leaves()], Cut((4000, 5000))
    held(f, leaves, cut, verb == "apply", rtol=1e-6, atol=1e-14)
    assert sent(f, leaves, cut)[0] < (16 if "learned" not in name else 24)


def entmax_loss(here, x, alpha):
    return here.call("fenchel_young", A.Entmax(alpha), x, torch.tensor([0, 36, 20]), axis=-1)


def entmax_p(here, x, alpha):
    return (here.call("apply", A.Entmax(alpha), x) * here.part(numbers(9, 3, 37))).sum()


def sink_loss(here, x, alpha, score, y, **given):
    return here.call("fenchel_young", A.Sink(A.Entmax(alpha), score), x, y, axis=-1, **given)


LEAVES = [(rows()[2:5], -1), (exact(1.4), None), (exact(0.3), None), (0.8 * torch.softmax(numbers(3, 3, 37), -1), -1)]
SECOND = {
    "a loss": (entmax_loss, LEAVES[:2]), "p": (entmax_p, LEAVES[:2]), "a sink and a target that learns": (sink_loss, LEAVES),
    "smoothing": (lambda *a: sink_loss(*a, label_smoothing=0.2), LEAVES),
}  # fmt: skip


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives(name):
    """The first derivatives are the values here."""
    f, leaves = SECOND[name]

    def first(here, *mine):
        return torch.autograd.grad(f(here, *mine), mine, create_graph=True)

    held(first, leaves, Cut((20, 0, 17)), tuple(axis is not None for _, axis in leaves), rtol=1e-7)


# -- further cases -----------------------------------------------------------------------------------------------------------------------


def test_what_has_no_probability_has_the_gradient_of_the_loss():
    """On one process `log_prob` and here `log_prob_entropy`."""
    x, y = torch.tensor([[3.0, 0.0, -1.0, 0.5]], dtype=torch.float64), torch.tensor([2])
    a = x.clone().requires_grad_()
    A.log_prob(A.Sparsemax(), a, y).sum().backward()

    def one(group):
        b = Here(Cut((2, 2)), group).part(x).clone().requires_grad_()
        D.log_prob_entropy(A.Sparsemax(), b, y, group=group)[0].sum().backward()
        return b.grad

    same(torch.cat(together(2, one), -1), a.grad)


ONE_ROW, EYE = torch.tensor([[3.0, 0.0, -9.0, 2.5]], dtype=torch.float64), torch.eye(4, dtype=torch.float64)
LOG_P = {  # log p of a class y in each layout
    "rows": lambda here, m, y: A.log_prob(m, ONE_ROW, y),
    "with entropy": lambda here, m, y: A.log_prob_entropy(m, ONE_ROW, y)[0],
    "scores that learn": lambda here, m, y: A.log_prob(m, ONE_ROW.clone().requires_grad_(), y),
    "an output layer": lambda here, m, y: A.linear_log_prob(ONE_ROW, EYE, y, m),
    "shards": lambda here, m, y: here.call("log_prob_entropy", m, here.part(ONE_ROW), y)[0],
    "shards of a layer": lambda here, m, y: here.call("linear_log_prob", ONE_ROW, here.part(EYE, 0), y, m),
}


@pytest.mark.parametrize("layout", LOG_P)
@pytest.mark.parametrize(
    "make", [A.Budget, A.Entmax, lambda v: A.Sink("sparsemax", v - 9.0)], ids=["k", "alpha", "sink"]
)
def test_a_parameter_does_not_change_log_p_of_a_class_without_probability(make, layout):
    """It is -inf around the parameter, too: the gradient is 0 in every layout, also where p is divided by its sum k."""

    def gradient(layout, y, group=None):
        v = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        value = LOG_P[layout](Here(Cut((3, 1)), group), make(v), torch.tensor([y])).sum()
        return float(torch.autograd.grad(value, v)[0])

    def one(group):
        assert gradient(layout, 2, group) == 0.0
        assert abs(gradient(layout, 0, group) - gradient("rows", 0)) < 1e-12

    together(2, one)


@pytest.mark.parametrize("name", ["softmax", "entmax15"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_dtypes_and_axes(dtype, name):
    x, mapping = rows()[:5].to(dtype), OF_ONE[name]
    want = A.apply(mapping, x.T, axis=0)
    found = together(2, lambda g: D.apply(mapping, Here(TWO, g).part(x).T, axis=0, group=g))
    assert found[0].dtype is dtype
    same(torch.cat(found, 0), want, rtol=1e-2 if dtype is not torch.float32 else 1e-5, atol=1e-6)


PLACES = [slice(25, 37), slice(0, 10), slice(10, 25), slice(10, 10)]


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(
    "name",
    ["softmax", "topk", "entmax15", "normal", "taylor", "sink of softmax", "sink of sparse_softmax:k=4", "sink of entmax15",
     "sink of perturb_max", "sink of taylor"],
)  # fmt: skip
def test_the_classes_need_not_be_in_the_order_of_the_ranks(name, counted):
    """A sink is behind the last class, on whichever process that is."""
    x, t = rows()[:3], indices(name)[:3].where(torch.tensor([True, True, False]), torch.tensor(36))
    mapping = MAPS[name].make(*[v for v, _ in MAPS[name].leaves(3)])
    verb = "fenchel_young" if mapping.facts.has_potential else "nll"

    def values(module, x, **more):
        drawn = module.sample(mapping, x, generator=1, num_samples=40, **more)
        return module.apply(mapping, x, **more), getattr(module, verb)(mapping, x, t, axis=-1, **more), drawn

    want = values(A, x)

    def one(group):
        more = {"class_start": PLACES[group.rank].start} | ({"class_count": 37} if counted else {})
        return values(D, x[:, PLACES[group.rank]], group=group, **more)

    for (p, value, drawn), place in zip(together(4, one), PLACES, strict=True):
        same(p, want[0][:, place])
        same(value, want[1])
        assert torch.equal(drawn, want[2])


@pytest.mark.parametrize("one", [A.Elementwise(A.Entmax(1.5)), A.Fusedmax(0.2)], ids=["of each", "fusedmax"])
def test_a_class_derived_from_a_map_without_a_kernel_has_its_loss(one):
    mapping = type("Derived", (type(one),), {"name": "derived"})(*vars(one).values())
    x, y = numbers(0, 3, N), A.apply(mapping, numbers(1, 3, N))
    held(lambda here, x: here.call("fenchel_young", mapping, x, here.part(y), axis=-1), [(x, -1)], TWO)


@pytest.mark.parametrize("name", OF_ONE)
def test_poison_on_one_process_is_seen_on_all(name):
    x = rows()[:4]
    x[2, 36], x[3, 0] = torch.nan, INF
    for p in together(2, lambda g: D.apply(OF_ONE[name], Here(TWO, g).part(x), group=g)):
        assert p[2:].isnan().all()
        assert not p[:2].isnan().any()


# (classes of each process, the shape of the bounds of all classes): a process with one class can't tell whether a bound is its own
ALONE = [
    ((2, 1), (3,)), ((1, 1), (2,)), ((1, 1), (5, 2)), ((1, 2, 0), (5, 3)), ((2, 1), (1,)), ((1, 2), (5, 1)), ((1, 1), ()),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "shape"), ALONE, ids=str)
def test_bounds_where_a_process_has_one_class(sizes, shape):
    bounds = 0.4 + 0.5 * torch.sigmoid(numbers(65, *shape))
    f = lambda here, x, u: here.call("apply", A.Bounded(u), x)  # noqa: E731
    held(f, [(numbers(64, 5, sum(sizes)), -1), (bounds, -1 if shape[-1:] == (sum(sizes),) else None)], Cut(sizes), True)


@pytest.mark.parametrize("target", [torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([0])], ids=["shares", "indices"])
def test_a_weight_of_0_leaves_out_an_infinite_loss(target):
    x, w = torch.tensor([[-INF, 1.0, 2.0]]), torch.tensor([0.0, 1.0, 1.0])
    assert A.sparsemax_loss(x, target, w, reduction="none") == 0

    def one(group):
        here = Here(Cut((2, 1)), group)
        t = here.part(target) if target.is_floating_point() else target
        return D.fenchel_young("sparsemax", here.part(x), t, here.part(w), axis=-1, group=group, reduction="none")

    assert together(2, one) == [0, 0]


def test_every_cell_is_empty_or_tested():
    assert all(is_empty(verb, name) or (verb, name) in CELLS for verb in VERBS for name in MAPS)
    assert SHORT.keys() <= MAPS.keys()


@pytest.mark.parametrize("verb", ["apply", "log_apply", "threshold", "log_prob_entropy"])
def test_a_budget_of_more_classes_than_are_left(verb):
    """Where others are masked each class gets 1; and a call without rows gathers no candidates."""
    x = numbers(4, 3, 8)
    x[:, 3:] = -INF
    for k, count in itertools.product((0, 5, 6.5, 8, torch.tensor(7.0)), (0, 1, 3)):
        target = [torch.arange(count)] if verb == "log_prob_entropy" else []
        want = getattr(A, verb)(A.Budget(k), x[:count], *target)

        def part(group, k=k, count=count, target=target):
            mine = x[:count, :5] if group.rank == 0 else x[:count, 5:]
            return getattr(D, verb)(A.Budget(k), mine, *target, group=group)

        first, second = together(2, part)
        got = first if isinstance(first, tuple) else (torch.cat([first, second], -1),)
        for a, b in zip(got, want if isinstance(want, tuple) else (want,)):
            assert torch.allclose(a, b.to(a.dtype), rtol=1e-12, atol=0), (k, count)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_no_class_of_a_budget_is_rounded_up_to_its_bound(dtype):
    m = A.Budget(60)
    x = torch.randn(50, 500, generator=torch.Generator().manual_seed(0)).to(dtype)
    cut = Cut((300, 200), start=True)
    got = torch.cat(together(2, lambda group: Here(cut, group).call("apply", m, Here(cut, group).part(x))), -1)
    exact = A.apply(m, x.double())
    assert ((exact < 1) & (exact.to(dtype) == 1)).any()
    assert torch.equal(got == 1, exact == 1)
