"""Supports, transforms and further losses of output layers whose classes are split over processes: those of one process, in fp64."""

import importlib.util
import inspect
import math
import re

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from processes import all_right, together
from test_distributed import cut, gloo, numbers, same
from test_distributed_jax import right
from test_distributed_tokens import FAST, MAPS, SIZES, N, compare, operands, pull, teacher

import anymax as A
from anymax import distributed as D
from anymax._array import namespace
from anymax.autodiff.torch_group import TorchGroup as TorchGroup
from anymax.distributed.support import SupportPart
from anymax.linear.layer import Layer
from anymax.transforms import compose, softcap, temperature

INF = math.inf
# ids of each row: of one process, of two, of none; with the row's token, without it, and of a row whose token is -1
KEPT = ([30, 5, 2, 21], [1, 36, 0], [9], [3, 22, 35], [], [20, 4, 7, 19, 36])


def support(kept=KEPT):
    return torch.tensor([i for k in kept for i in k]), torch.tensor([0, *(len(k) for k in kept)]).cumsum(0)


@pytest.mark.whole(lambda name: name not in FAST)
@pytest.mark.parametrize("name", [name for name in MAPS if name != "budget"])
def test_of_a_support(name):
    """A token outside its support has -inf, and no gradient is NaN; those over all classes come with `full`."""
    *_, target = operands()
    mapping, t = MAPS[name], numbers(5, 2, 3).abs() + 0.5

    def whole(x, w, b, m, t):
        pairs = A.linear_log_prob_entropy(
            x, w, target, mapping, linear_bias=b, temperature=t, support=support(), full=True
        )
        return sum(pairs, ())

    def split(group, start, chunk, x, w, b, m, t):
        given = {"linear_bias": b, "temperature": t, "chunk": chunk, "group": group, "support": support()}
        pairs = D.linear_log_prob_entropy(x, w, target, mapping, full=True, class_start=start, **given)
        same(D.linear_log_prob(x, w, target, mapping, **given).detach(), pairs[0][0].detach(), rtol=0, atol=0)
        return sum(pairs, ())

    log_p, h, *_ = compare(whole, split, more=[t])
    assert log_p[0, 2] == log_p[1, 1] == -INF  # the token 33 is not in its support; the row of token 12 has no classes
    assert log_p[1, 0] == h[1, 1] == 0
    if name == "softmax":
        assert torch.isfinite(log_p[0, :2]).all()


def test_each_process_reads_the_rows_of_its_classes_only():
    """All other rows of the weight are NaN; one process has no class of the support, and another no class at all."""
    x, weight, _, _, target = operands()
    sizes, (ids, offsets) = (10, 0, 3, 24), support()
    outside = torch.ones(N, dtype=torch.bool).index_fill(0, ids, False)
    weight[outside] = math.nan

    def one(group):
        a, w = x.clone().requires_grad_(), cut(weight.T, sizes, group.rank).T.clone().requires_grad_()
        log_p, h = D.linear_log_prob_entropy(a, w, target, support=(ids, offsets), group=group)
        return log_p.detach(), *torch.autograd.grad(log_p.sum() + h.sum(), [a, w])

    found = together(len(sizes), one)
    for log_p, of_x, _ in found:
        assert not log_p.isnan().any()
        assert torch.isfinite(of_x).all()
    of_weight = torch.cat([w for _, _, w in found])
    assert torch.isfinite(of_weight).all()
    assert not of_weight[outside].any()
    assert of_weight[[3, 22]].any()  # of the row of token -1, by its entropy


def test_a_process_gathers_as_many_columns_as_its_fullest_row_needs():
    x, weight, _, _, target = operands()
    layer = Layer.of("support", x, weight[:20], "softmax", None, None, part=True)
    index = target.reshape(-1, 1)
    part = SupportPart.of("support", layer, index, support(), 0, N, True, namespace(x))
    assert part.classes.shape == (6, 4)  # 20, 4, 7, 19 and 36, of which 4, 7 and 19 are here, and an empty place
    assert part.width == 6
    assert part.there.sum(1).tolist() == [2, 2, 1, 1, 0, 3]
    assert part.here[:, 0].tolist() == [True, True, False, False, True, False]


def test_half_precision_and_no_rows():
    x, weight, bias, _, target = operands()
    x, weight, bias = (a.bfloat16() for a in (x, weight, bias))
    exact = A.linear_log_prob_entropy(x.double(), weight.double(), target, linear_bias=bias.double(), support=support())

    def one(group):
        w = cut(weight.T, SIZES, group.rank).T.clone().requires_grad_()
        given = {"linear_bias": cut(bias, SIZES, group.rank), "group": group, "chunk": 4}
        terms = D.linear_log_prob_entropy(x, w, target, support=support(), **given)
        (gradient,) = torch.autograd.grad(pull(terms), w)
        assert gradient.dtype is torch.bfloat16
        assert torch.isfinite(gradient).all()
        none = torch.zeros(0, dtype=torch.long)
        nothing = D.linear_log_prob_entropy(x[:0], w, target[:0], support=(none, none.new_zeros(1)), group=group)
        assert {tuple(v.shape) for v in nothing} == {(0, 3)}
        torch.autograd.grad(sum(v.sum() for v in nothing), w)
        empty = D.linear_log_prob(x, w, target, support=(none, none.new_zeros(7)), group=group)
        assert torch.equal(empty == -INF, target >= 0)
        return terms

    for terms in together(3, one):
        for got, want in zip(terms, exact, strict=True):
            assert got.dtype is torch.float32
            same(got.detach(), want, rtol=0.03, atol=0.03)


def test_collectives_of_a_support():
    """One in which the processes compare their calls, and one for the values; one that adds up the gradient of x."""
    x, weight, _, _, target = operands()

    def one(group):
        w, counts = cut(weight.T, (20, 17), group.rank).T, []
        for _ in range(2):
            a, group.calls = x.clone().requires_grad_(), 0
            log_p, h = D.linear_log_prob_entropy(a, w, target, support=support(), group=group)
            counts.append(group.calls)
            (torch.where(log_p > -INF, log_p, 0.0) + h).sum().backward()
            counts.append(group.calls - counts[-1])
        return counts[2:]

    assert together(2, one) == [[2, 1]] * 2


# -- transforms and further losses ---------------------------------------------------------------------------------------------------

VERBS = {
    "terms": lambda m, x, w, target, mapping, **given: m.linear_log_prob_entropy(x, w, target, mapping, **given),
    "support": lambda m, x, w, target, mapping, **given: m.linear_log_prob_entropy(x, w, target, mapping, support=support(), **given),
    "kl": lambda m, x, w, target, mapping, **given: m.linear_topk_kl(x, w, *teacher(), mapping, tail="one class", **given),
    "loss": lambda m, x, w, target, mapping, **given: m.linear_loss(x, w, target, mapping, ignore_index=-1, **given),
}  # fmt: skip


@pytest.mark.whole(
    lambda name, verb: (name, verb) not in (("softmax", "support"), ("softmax", "kl"), ("entmax15", "loss"))
)
@pytest.mark.parametrize("name", ["softmax", "entmax15"])
@pytest.mark.parametrize("verb", VERBS)
def test_transforms(verb, name):
    """With a learned cap, whose gradient is the sum over the processes, and a temperature after it."""
    *_, target = operands()
    mapping, f = MAPS[name], VERBS[verb]

    def whole(x, w, b, m, cap):
        t = compose(softcap(cap), temperature(0.7))
        return f(A, x, w, target, mapping, linear_bias=b, mask=m, transform=t)

    def split(group, start, chunk, x, w, b, m, cap):
        t = compose(softcap(cap), temperature(0.7))
        return f(D, x, w, target, mapping, linear_bias=b, mask=m, transform=t, chunk=chunk, group=group)

    keep = None if verb == "support" else torch.arange(N) < N - 1
    compare(whole, split, mask=keep, more=[torch.tensor(1.5, dtype=torch.float64)])


@pytest.mark.parametrize(
    "given", [{}, {"weight": True}, {"weight": True, "label_smoothing": 0.1, "reduction": "none"}], ids=str
)
@pytest.mark.parametrize(("name", "more"), [("softmax", "z_loss"), ("sparsemax", "suppress"), ("topk", "suppress")])
def test_further_losses(name, more, given):
    """With padding classes, a row whose target is -1, and two whose targets are masked."""
    *_, keep, target = operands()
    keep[1, 1] = True
    keep[1, 2, :20] = False
    factors = numbers(7, N).abs()
    given = {**given, "ignore_index": -1, more: 0.3, "transform": softcap(3.0)}
    if name == "topk":
        given.pop("label_smoothing", None)

    def call(module, mapping, x, w, b, m, factors, **rest):
        own = {**given, "weight": factors} if "weight" in given else given
        value = module.linear_loss(x, w, target, mapping, linear_bias=b, mask=m, **own, **rest)
        plain = module.linear_loss(x, w, target, mapping, linear_bias=b, mask=m, **{**own, more: 0.0}, **rest)
        return torch.where(plain.isfinite(), value, 0.0), torch.where(plain.isfinite(), value - plain, 0.0)

    def whole(x, w, b, m):
        return call(A, MAPS[name], x, w, b, m, factors)

    def split(group, start, chunk, x, w, b, m):
        part = cut(factors, SIZES, group.rank)
        return call(D, MAPS[name], x, w, b, m, part, group=group, chunk=chunk)

    _, added = compare(whole, split, mask=keep)
    assert given.get("reduction") != "none" or added.abs().max() > 1e-3


def test_a_row_without_classes_has_no_further_loss():
    """Its other loss is 0 if its target is a distribution without mass, and else infinite."""
    x, weight, _, keep, target = operands()
    y = torch.softmax(numbers(9, 2, 3, N), -1) * keep
    calls = (
        ("softmax", y, {"z_loss": 1.0}),
        ("softmax", target, {"z_loss": 1.0}),
        ("sparsemax", target, {"suppress": 1.0}),
    )
    given = {"reduction": "none", "ignore_index": -1}

    def one(group):
        w = cut(weight.T, SIZES, group.rank).T.clone().requires_grad_()
        out = []
        for name, t, more in calls:
            t = cut(t, SIZES, group.rank) if t is y else t
            value = D.linear_loss(x, w, t, name, mask=cut(keep, SIZES, group.rank), group=group, **given, **more)
            (gradient,) = torch.autograd.grad(pull([value]), w)
            assert torch.isfinite(gradient).all()
            out.append(value.detach())
        return out

    want = [A.linear_loss(x, weight, t, name, mask=keep, **given, **more) for name, t, more in calls]
    assert want[0][1, 1] == 0
    for found in together(3, one):
        for got, value in zip(found, want, strict=True):
            same(got, value)


# -- what is wrong -------------------------------------------------------------------------------------------------------------------

TOKENS, IDS, OFFSETS = torch.tensor([0, 3, 1]), torch.tensor([0, 3, 1, 2]), torch.tensor([0, 2, 3, 4])


def tokens(g, x, ids=IDS, offsets=OFFSETS, **given):
    return D.linear_log_prob_entropy(x, numbers(51, 2, 4), TOKENS, group=g, support=(ids, offsets), **given)


def loss(g, x, **given):
    return D.linear_loss(x, numbers(51, 2, 4), TOKENS, group=g, **given)


ODD = {
    "ids": (lambda g, x, r: tokens(g, x, ids=IDS - r * (IDS == 2)), "ids of the support must be .* entry 3 is 2 on process 0, 1 on"),
    "offsets": (lambda g, x, r: tokens(g, x, offsets=OFFSETS - r * (OFFSETS == 3)), "offsets of the support must be .* entry 2 is 3 on"),
    "sizes": (lambda g, x, r: tokens(g, x, ids=IDS[: 4 - r]), r"support is an array of shape \(4,\) of torch.int64 and .* on"),
    "one has none": (lambda g, x, r: tokens(g, x, **({} if r == 0 else {"full": True})), "full is False on process 0, True on"),
    "cap": (lambda g, x, r: loss(g, x, transform=softcap(3.0 + r)), r"transform is softcap\(cap=3\.0\) on process 0, softcap"),
    "z_loss": (lambda g, x, r: loss(g, x, z_loss=r * 0.1), r"z loss is 0\.0 on process 0, 0\.1 on"),
    "suppress": (lambda g, x, r: loss(g, x, mapping="sparsemax", suppress=r * 0.1), r"suppress is 0\.0 on process 0, 0\.1 on"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_what_differs_is_one_error_on_all_processes(name):
    f, words = ODD[name]
    x = numbers(52, 3, 4)

    def one(group):
        f(group, x, 0)
        with pytest.raises((RuntimeError, ValueError, TypeError, IndexError)) as caught:
            f(group, x, group.rank)
        return caught.type, str(caught.value)

    first, second = together(2, one)
    assert first == second
    assert re.search(words, first[1]), first


class Halved(A.transforms.Transform):
    name = "halved"
    elementwise = True

    def rows(self, x, xp):
        return x / 2


@pytest.mark.parametrize(
    ("f", "change", "words"),
    [
        (tokens, {"ids": IDS + 1}, "support: ids must be from 0 to 3, got 1 to 4"),
        (tokens, {"ids": torch.tensor([0, 0, 1, 2])}, "support: a row has a class twice"),
        (tokens, {"offsets": OFFSETS[1:]}, "support must be ids, one axis of class indices"),
        (tokens, {"offsets": torch.tensor([0, 3, 2, 4])}, "support: offsets must rise from 0 to 4"),
        (tokens, {"mask": torch.ones(2, dtype=torch.bool)}, "with a support a mask has no meaning"),
        (tokens, {"transform": A.topk(2)}, "a support has some scores of a row only.*give the classes that it leaves"),
        (loss, {"transform": A.topp(0.9)}, "the scores of a row are on several processes.*topp.*does not: give mask="),
        (loss, {"transform": temperature(0)}, "a temperature above 0 do; temperature.*does not"),
        (loss, {"transform": A.transforms.scalable()}, "scalable.* does not"),
        (loss, {"transform": softcap(torch.ones(2))}, r"softcap\(cap=float32\[2\]\) does not"),
        (
            loss,
            {"transform": torch.sin},
            "nothing says whether .*sin.* changes each score by itself; write it as a subclass",
        ),
        (loss, {"least": 0.1}, r"linear_loss has no option 'least' \(leave it out: over several processes"),
        (loss, {"axis": 1}, r"linear_loss has no option 'axis' \(leave it out: the features of x are its last axis\)"),
        (loss, {"temperature": 2.0}, "write transform=anymax.temperature"),
        (
            loss,
            {"z_loss": 0.1, "mapping": "taylor"},
            "z_loss= is the factor of tau squared, and taylor has no threshold",
        ),
        (loss, {"suppress": 0.1}, "suppress= applies to maps that give classes probability 0"),
        (tokens, {"tau": 2.0}, "say temperature="),
        (
            tokens,
            {"class_start": 0},
            r"the shards must follow each other; they start at \[0, 0\] and have \[2, 2\] classes",
        ),
    ],
)
def test_what_is_wrong_is_said(f, change, words):
    def one(group):
        with pytest.raises((ValueError, TypeError, IndexError), match=words):
            f(group, numbers(52, 3, 4), **change)
        return True

    assert together(2, one) == [True, True]


def test_full_needs_a_support_and_a_transform_of_ones_own_goes():
    x = numbers(52, 3, 4)

    def one(group):
        with pytest.raises(ValueError, match="full=True applies to a support"):
            D.linear_log_prob_entropy(x, numbers(51, 2, 4), TOKENS, group=group, full=True)
        own = loss(group, x, transform=Halved())
        same(own, loss(group, x / 2))
        return True

    assert together(2, one) == [True, True]


ONLY_HERE = {"group", "axis_name", "class_start", "class_count"}
NOT_HERE = {"linear_loss": {"least"}}


@pytest.mark.parametrize(
    "verb", ["linear_loss", "linear_log_prob", "linear_log_prob_entropy", "linear_topk_kl", "linear_threshold"]
)
def test_keywords_are_those_of_one_process(verb):
    """But for those that say in their docstring why they are not here."""
    here, there = (inspect.signature(getattr(module, verb)).parameters for module in (D, A.linear))
    assert set(here) - set(there) == ONLY_HERE
    assert set(there) - set(here) == NOT_HERE.get(verb, set())
    for name in NOT_HERE.get(verb, ()):
        assert f"`{name}`" in getattr(D, verb).__doc__
    for name in set(here) & set(there):
        if name != "mapping":
            assert here[name].default == there[name].default, name


# -- real processes and JAX ----------------------------------------------------------------------------------------------------------

REAL = """
import test_distributed_support as T
from test_distributed_tokens import cut, derived, operands
import anymax as A
from anymax import distributed as D
from anymax._array import namespace
from anymax.distributed.support import SupportPart
x, weight, bias, _, target = operands()
part = lambda a: cut(a, T.SIZES, rank)
for mapping in (A.Softmax(), A.Entmax(1.5)):
    given = {"support": T.support(), "transform": T.softcap(2.0)}
    whole = lambda x, w, b: A.linear_log_prob_entropy(x, w, target, mapping, linear_bias=b, **given)
    split = lambda x, w, b: D.linear_log_prob_entropy(x, w, target, mapping, linear_bias=b, chunk=4, **given)
    want, gradients = derived(whole, x, weight, bias)
    got, mine = derived(split, x, part(weight.T).T, part(bias))
    for a, b in zip(got, want):
        T.same(a, b)
    for a, b in zip(mine, (gradients[0], part(gradients[1].T).T, part(gradients[2]))):
        T.same(a, b, rtol=1e-8, atol=1e-9)
for name, (f, words) in T.ODD.items():
    f(T.TorchGroup(dist.group.WORLD), T.numbers(52, 3, 4), 0)
    try:
        f(T.TorchGroup(dist.group.WORLD), T.numbers(52, 3, 4), int(rank > 0))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        assert T.re.search(words, str(error)), (name, error)
    else:
        raise AssertionError(name)
print("right")
dist.destroy_process_group()
"""


@gloo
@pytest.mark.whole
def test_processes_of_gloo():
    all_right(3, REAL)


@pytest.mark.whole
def test_devices_of_jax():
    if importlib.util.find_spec("jax") is None:
        pytest.skip("needs JAX")
    right("""
    x, w, b = (jnp.asarray(rng.normal(size=s)) for s in ((2, 3, 6), (40, 6), (40,)))
    t = jnp.asarray([[5, 0, 33], [-1, 12, 35]])
    kept = [30, 5, 2, 21], [1, 36, 0], [9], [3, 22, 35], [], [20, 4, 7, 19, 36]
    ids, offsets = np.array(sum(kept, [])), np.append(0, np.cumsum([len(k) for k in kept]))
    ids_of_teacher = jnp.asarray(np.stack([rng.permutation(40)[:5] for _ in range(6)]).reshape(2, 3, 5))
    log_p = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(2, 3, 5)))) + np.log(0.8)
    factors = jnp.asarray(rng.uniform(size=40))
    def total(values):
        return sum((finite(v) * (i + 1)).sum() for i, v in enumerate(values))
    def terms(module, mapping, x, w, b, f, cap, **given):
        given |= {"linear_bias": b, "transform": A.transforms.softcap(cap)}
        pairs = module.linear_log_prob_entropy(x, w, t, mapping, temperature=1.3, support=(ids, offsets), full=True, **given)
        kl = module.linear_topk_kl(x, w, ids_of_teacher, log_p, mapping, tail="one class", **given)
        further = {"z_loss": 0.2} if mapping == "softmax" else {"suppress": 0.3}
        return *pairs[0], *pairs[1], kl, module.linear_loss(x, w, t, mapping, ignore_index=-1, weight=f, **further, **given)
    cap = jnp.asarray(2.0)
    for mapping, chunk in (("softmax", 4), ("entmax15", None)):
        split = jax.shard_map(lambda *a: terms(D, mapping, *a, axis_name="classes", chunk=chunk), mesh=mesh,
                              in_specs=(P(), P("classes"), P("classes"), P("classes"), P()), out_specs=P())
        both = lambda f: jax.jit(jax.value_and_grad(lambda *a: (lambda v: (total(v), v))(f(*a)), (0, 1, 2, 4), has_aux=True))
        (_, got), got_grads = both(split)(x, w, b, factors, cap)
        (_, want), want_grads = both(lambda *a: terms(A, mapping, *a))(x, w, b, factors, cap)
        for one, other in zip((*got, *got_grads), (*want, *want_grads), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-9)
        assert np.asarray(got[0])[0, 2] == -np.inf
    try:
        jax.jit(jax.shard_map(lambda w, ids: D.linear_log_prob(x, w, t, support=(ids, offsets), axis_name="classes"), mesh=mesh,
                              in_specs=(P("classes"), P()), out_specs=P()))(w, ids)
    except TypeError as error:
        assert "in JAX let the function close over it" in str(error), error
    else:
        raise AssertionError("a traced support")
    """)
