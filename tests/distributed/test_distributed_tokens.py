"""Token statistics over a vocabulary that is split over processes: values and gradients are those of one process, in fp64."""

import functools
import importlib.util
import math
import re

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from processes import all_right, together
from test_distributed import cut, gloo, numbers, same
from test_distributed_jax import right

import anymax as A
from anymax import distributed as D
from anymax.autodiff.torch_group import TorchGroup as TorchGroup

INF = math.inf
N, ROWS = 37, 6
SIZES = (20, 0, 17)
MAPS = {
    "softmax": A.Softmax(), "entmax15": A.Entmax(1.5), "sparsemax": A.Sparsemax(), "sigsoftmax": A.Sigsoftmax(), "taylor": A.Taylor(2),
    "normmax": A.NormMax(2.0), "topk": A.SparseSoftmax(k=4), "topp": A.SparseSoftmax(p=0.8), "budget": A.Budget(k=7),
    "normal": A.PerturbMax("normal"), "alpha by row": A.Entmax(numbers(9, 2, 3, 1).abs() + 1.1),
}  # fmt: skip
FAST = ("softmax", "entmax15")
KL_CALLS = [(tail, direction) for tail in ("ignore", "one class") for direction in ("forward", "reverse")]


def operands():
    """Features, weight, bias; a mask with padding classes and a row that has no class; a token for each row, one ignored, one masked."""
    x, weight, bias = numbers(1, 2, 3, 5), numbers(2, N, 5), numbers(3, N)
    keep = torch.ones(2, 3, N, dtype=torch.bool)
    keep[..., -3:] = False
    keep[1, 1] = False
    target = torch.tensor([[5, 0, 33], [-1, 12, 35]])
    return x, weight, bias, keep, target


def teacher(k=4):
    """k classes of each row on all processes, and log-probabilities that sum to .8; one row has a class fewer."""
    ids = torch.stack([torch.randperm(N - 3, generator=torch.Generator().manual_seed(i))[:k] for i in range(ROWS)])
    log_p = torch.log_softmax(numbers(4, ROWS, k), -1) + math.log(0.8)
    ids[2, -1] = -1
    return ids.reshape(2, 3, k), log_p.reshape(2, 3, k)


def pull(values, seed=8):
    """One number that all finite entries move."""
    each = [
        (torch.where(torch.isfinite(v), v, 0.0) * numbers(seed + i, v.numel()).reshape(v.shape)).sum()
        for i, v in enumerate(values)
    ]
    return sum(each)


def derived(f, *leaves):
    """f of new leaves: its values and their gradients."""
    leaves = [a.detach().clone().requires_grad_() for a in leaves]
    values = f(*leaves)
    values = values if isinstance(values, tuple) else (values,)
    return [v.detach() for v in values], torch.autograd.grad(pull(values), leaves)


def compare(whole, split, sizes=SIZES, mask=None, more=(), chunks=(None, 4)):
    """`whole(x, weight, bias, mask, *more)` on one process and `split(group, start, chunk, *the same)` on each."""
    x, weight, bias, *_ = operands()
    want, gradients = derived(lambda x, w, b, *m: whole(x, w, b, mask, *m), x, weight, bias, *more)
    assert all(torch.isfinite(g).all() for g in gradients)

    def one(group, chunk):
        part = None if mask is None else cut(mask, sizes, group.rank)
        start = sum(sizes[: group.rank])
        leaves = (x, cut(weight.T, sizes, group.rank).T, cut(bias, sizes, group.rank), *more)
        return derived(lambda x, w, b, *m: split(group, start, chunk, x, w, b, part, *m), *leaves)

    for chunk in chunks:
        found = together(len(sizes), functools.partial(one, chunk=chunk))
        for values, (of_x, _, _, *of_more) in found:
            for got, value in zip(values, want, strict=True):
                same(got, value)
            for got, gradient in zip([of_x, *of_more], [gradients[0], *gradients[3:]], strict=True):
                same(got, gradient, rtol=1e-8, atol=1e-9)
        for i in (1, 2):
            same(torch.cat([g[i] for _, g in found]), gradients[i], rtol=1e-8, atol=1e-9)
    return want


@pytest.mark.whole(lambda name: name not in FAST)
@pytest.mark.parametrize("name", MAPS)
def test_log_p_and_entropy(name):
    """With padding classes, a row without classes, a token of each process, an ignored one, and a process without classes."""
    *_, keep, target = operands()
    mapping, temperature = MAPS[name], numbers(5, 2, 3).abs() + 0.5

    def whole(x, w, b, m, t):
        return A.linear_log_prob_entropy(x, w, target, mapping, linear_bias=b, mask=m, temperature=t)

    def split(group, start, chunk, x, w, b, m, t):
        given = {"linear_bias": b, "mask": m, "temperature": t, "chunk": chunk, "group": group}
        log_p, h = D.linear_log_prob_entropy(x, w, target, mapping, class_count=N, **given)
        same(
            D.linear_log_prob(x, w, target, mapping, class_start=start, **given).detach(),
            log_p.detach(),
            rtol=0,
            atol=0,
        )
        return log_p, h

    keep = None if name == "budget" else keep  # the row without classes would be an error
    log_p, h = compare(whole, split, mask=keep, more=[temperature])
    assert log_p[1, 0] == 0
    assert keep is None or (log_p[1, 1] == log_p[1, 2] == -INF and h[1, 1] == 0)


@pytest.mark.whole(lambda name, call: name not in FAST or (name != "softmax" and call != ("one class", "reverse")))
@pytest.mark.parametrize("name", ["softmax", "sigsoftmax", "entmax15", "taylor", "alpha by row"])
@pytest.mark.parametrize("call", KL_CALLS, ids=str)
def test_the_divergence_from_a_teacher(name, call):
    """The teacher's log-probabilities have a gradient too, the same on every process."""
    ids, log_p = teacher()
    mapping, options = MAPS[name], dict(zip(("tail", "direction"), call))
    keep = torch.arange(N) < N - 3

    def whole(x, w, b, m, log_p):
        return A.linear_topk_kl(x, w, ids, log_p, mapping, linear_bias=b, mask=m, temperature=2.0, **options)

    def split(group, start, chunk, x, w, b, m, log_p):
        given = {"linear_bias": b, "mask": m, "temperature": 2.0, "chunk": chunk, "group": group}
        return D.linear_topk_kl(x, w, ids, log_p, mapping, class_start=start, **given, **options)

    compare(whole, split, mask=keep, more=[log_p])


def test_the_mass_of_the_other_classes_is_a_sum_of_its_own():
    """1 minus the mass of the given classes would be 0 here, and so would exp of the distance from the maximum."""
    for gap in (30.0, 200.0):
        weight = torch.tensor([[gap], [gap - 1.0], [1.0], [0.5], [0.0]])
        x, ids = torch.ones(1, 1), torch.tensor([[0, 1]])
        log_p = torch.tensor([[0.6, 0.3]]).log()
        call = {"tail": "one class"}

        def one(group, weight=weight, x=x, ids=ids, log_p=log_p, call=call):
            w = cut(weight.T, (2, 3), group.rank).T.clone().requires_grad_()
            value = D.linear_topk_kl(x, w, ids, log_p, group=group, **call)
            return value.detach(), *torch.autograd.grad(value.sum(), w)

        w = weight.double().requires_grad_()
        want = A.linear_topk_kl(x.double(), w, ids, log_p.double(), **call)
        (gradient,) = torch.autograd.grad(want.sum(), w)
        found = together(2, one)
        for value, _ in found:
            same(value, want.detach(), rtol=2e-6)
        same(torch.cat([g for _, g in found]), gradient, rtol=1e-5, atol=1e-6)


def test_half_precision():
    x, weight, bias, keep, target = operands()
    ids, log_p = teacher()
    x, weight, bias = (a.bfloat16() for a in (x, weight, bias))
    exact = [a.double() for a in (x, weight)]
    want = A.linear_log_prob_entropy(*exact, target, linear_bias=bias.double(), mask=keep)
    divergence = A.linear_topk_kl(*exact, ids, log_p, linear_bias=bias.double(), tail="one class")

    def one(group):
        w = cut(weight.T, SIZES, group.rank).T.clone().requires_grad_()
        given = {"linear_bias": cut(bias, SIZES, group.rank), "group": group, "chunk": 4}
        terms = D.linear_log_prob_entropy(x, w, target, mask=cut(keep, SIZES, group.rank), **given)
        kl = D.linear_topk_kl(x, w, ids, log_p.bfloat16(), tail="one class", **given)
        (gradient,) = torch.autograd.grad(pull((*terms, kl)), w)
        return *terms, kl, gradient

    for log_p_of_one, h, kl, gradient in together(3, one):
        assert {log_p_of_one.dtype, h.dtype, kl.dtype} == {torch.float32}
        assert gradient.dtype is torch.bfloat16
        assert torch.isfinite(gradient).all()
        for got, value in ((log_p_of_one, want[0]), (h, want[1]), (kl, divergence)):
            same(got.detach(), value, rtol=0.03, atol=0.03)


def test_a_layer_of_no_rows():
    def one(group):
        x, w = torch.zeros(0, 3, 5, requires_grad=True), cut(torch.ones(5, 7), (4, 0, 3), group.rank).T.clone()
        w.requires_grad_()
        log_p, h = D.linear_log_prob_entropy(x, w, torch.zeros(0, 3, dtype=torch.long), group=group)
        ids = torch.zeros(0, 3, 2, dtype=torch.long)
        kl = D.linear_topk_kl(x, w, ids, torch.zeros(0, 3, 2), tail="one class", group=group)
        assert log_p.shape == h.shape == kl.shape == (0, 3)
        return torch.autograd.grad(log_p.sum() + h.sum() + kl.sum(), [x, w])

    for grads in together(3, one):
        assert not any(g.any() for g in grads)


# -- collectives -----------------------------------------------------------------------------------------------------------------

# of a group of rows: forward, and those of the gradient beside the one that adds up x's
COLLECTIVES = {"softmax": (1, 0), "sigsoftmax": (1, 0), "entmax15": (3, 1), "taylor": (3, 1), "topk": (3, 1)}


@pytest.mark.whole(lambda name: name not in FAST)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(name):
    """One at first, in which the processes compare their calls; then for each group of rows those of `log_prob_entropy`, as many again
    where a gradient computes the scores anew; and one that adds up the gradient of x."""
    x, weight, _, _, target = operands()
    ids, log_p = teacher()
    weight = 0.05 * weight
    forward, backward = COLLECTIVES[name]

    def one(group, verb, chunk):
        w, counts = cut(weight.T, (20, 17), group.rank).T.clone().requires_grad_(), []
        for _ in range(2):
            a = x.clone().requires_grad_()
            group.calls = 0
            if verb == "kl":
                value = D.linear_topk_kl(a, w, ids, log_p, MAPS[name], tail="one class", group=group, chunk=chunk)
            else:
                log_p_of_one, h = D.linear_log_prob_entropy(a, w, target, MAPS[name], group=group, chunk=chunk)
                value = torch.where(log_p_of_one > -INF, log_p_of_one, 0.0) + h
            value = torch.where(torch.isfinite(value), value, 0.0)
            counts.append(group.calls)
            value.sum().backward()
            counts.append(group.calls - counts[-1])
        return counts[2:]

    for verb in ("log_p", "kl"):
        for chunk, groups in ((None, 1), (4, 2)):
            again = groups * forward if groups > 1 else 0
            want = [1 + groups * forward, groups * backward + again + 1]
            found = together(2, functools.partial(one, verb=verb, chunk=chunk))
            assert found == [want, want], (verb, chunk)


# -- what is wrong ---------------------------------------------------------------------------------------------------------------

TOKENS, IDS, LOG_P = (
    torch.tensor([0, 3, 1]),
    torch.tensor([[0, 3], [1, 2], [2, 0]]),
    torch.full((3, 2), 0.4).log().double(),
)


def tokens(g, x, t=TOKENS, **given):
    return D.linear_log_prob_entropy(x, numbers(51, 2, 4), t, group=g, **given)


def kl(g, x, ids=IDS, log_p=LOG_P, **given):
    return D.linear_topk_kl(x, numbers(51, 2, 4), ids, log_p, group=g, **given)


# (what a process of rank r does with features [3, 4]; what all of them say)
ODD = {
    "targets": (lambda g, x, r: tokens(g, x, TOKENS + r * (TOKENS == 1)), "target must be the same on every process; its entry 2 is 1 on"),
    "target's shape": (lambda g, x, r: tokens(g, x, TOKENS[r:]), r"process 1: linear_log_prob_entropy: target of shape \(2,\)"),
    "kind of target": (lambda g, x, r: tokens(g, x, TOKENS.double() if r else TOKENS), "target must be class indices .* torch.float64"),
    "temperature": (lambda g, x, r: tokens(g, x, temperature=1.0 + r), r"temperature is 1\.0 on process 0, 2\.0 on process 1"),
    "a temperature of 0": (lambda g, x, r: tokens(g, x, temperature=1.0 - r), "process 1: .*: temperature must be above 0"),
    "ids": (lambda g, x, r: kl(g, x, IDS + r * (IDS == 3) * -3 + r), "ids must be the same on every process; its entry 0 is 0 on"),
    "log p": (lambda g, x, r: kl(g, x, log_p=LOG_P - 0.01 * r), r"teacher_log_p must .* entry 0 is -0\.916291 on process 0, -0\.926291 on"),
    "log p's dtype": (lambda g, x, r: kl(g, x, log_p=LOG_P.float() if r else LOG_P), "teacher log p is an array .* of torch.float64 on"),
    "direction": (lambda g, x, r: kl(g, x, direction="reverse" if r else "forward"), "direction is forward on process 0, reverse on"),
    "verb": (lambda g, x, r: tokens(g, x) if r else kl(g, x), "verb is linear_topk_kl on process 0, linear_log_prob_entropy on"),
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ids": IDS + 9}, "ids: class indices must be from 0 to 3"),
        ({"ids": IDS * 0}, "a row names a class twice"),
        ({"ids": IDS.double()}, "ids must be integers"),
        ({"ids": IDS[:, :1]}, "ids and teacher_log_p must have one shape"),
        ({"log_p": LOG_P + 1.0}, "exponentials sum to at most 1"),
        ({"tail": "all"}, "tail must be 'ignore' or 'one class'"),
        (
            {"t": TOKENS + torch.tensor([0, 1, 0]), "chunk": 1},
            "target: class indices must be from 0 to 3",
        ),  # in the second group
        ({"temperature": torch.ones(2)}, r"temperature of shape \(2,\): expected a number, or one value for each row"),
        ({"class_count": 5}, "class_count=5, and the shards have 4 classes together"),
    ],
)
def test_what_is_wrong_everywhere_is_said_everywhere(change, words):
    def one(group):
        with pytest.raises((ValueError, TypeError, IndexError), match=words):
            (tokens if "t" in change else kl)(group, numbers(52, 3, 4), **change)
        return True

    assert together(2, one) == [True, True]


# -- real processes ----------------------------------------------------------------------------------------------------------------

REAL = """
import test_distributed_tokens as T
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
import anymax as A
from anymax import distributed as D
x, weight, bias, keep, target = T.operands()
ids, log_p = T.teacher()
sizes = (20, 0, 17)
part = lambda a: T.cut(a, sizes, rank)
for mapping in (A.Softmax(), A.Entmax(1.5)):
    terms = lambda x, w, b: A.linear_log_prob_entropy(x, w, target, mapping, linear_bias=b, mask=keep)
    kl = lambda x, w, b: A.linear_topk_kl(x, w, ids, log_p, mapping, linear_bias=b, tail="one class")
    own = lambda x, w, b: D.linear_log_prob_entropy(x, w, target, mapping, linear_bias=b, mask=part(keep), chunk=4)
    own_kl = lambda x, w, b: D.linear_topk_kl(x, w, ids, log_p, mapping, linear_bias=b, tail="one class", chunk=4)
    for whole, split in ((terms, own), (kl, own_kl)):
        want, gradients = T.derived(whole, x, weight, bias)
        got, mine = T.derived(split, x, part(weight.T).T, part(bias))
        for a, b in zip(got, want):
            T.same(a, b)
        for a, b in zip(mine, (gradients[0], part(gradients[1].T).T, part(gradients[2]))):
            T.same(a, b, rtol=1e-8, atol=1e-9)
for name, (f, words) in T.ODD.items():
    f(T.TorchGroup(dist.group.WORLD), T.numbers(52, 3, 4), 0)
    try:
        f(T.TorchGroup(dist.group.WORLD), T.numbers(52, 3, 4), int(rank > 0))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        assert T.re.search(words.replace("process 1", "process(es)? 1( and 2)?"), str(error)), (name, error)
    else:
        raise AssertionError(name)
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (size,))
apart = distribute_tensor(weight, mesh, [Shard(0)])  # other parts than those above
for f, given in ((A.linear_log_prob, [target]), (A.linear_log_prob_entropy, [target]), (A.linear_topk_kl, [ids, log_p])):
    got, want = (r if isinstance(r, tuple) else (r,) for r in (f(x, apart, *given), f(x, weight, *given)))
    for one, other in zip(got, want):
        T.same(one.full_tensor(), other)
T.same(D.linear_log_prob(x, apart.to_local(), target, group=(mesh, 0)), A.linear_log_prob(x, weight, target))
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
    w = 0.3 * w
    t = jnp.asarray(rng.integers(0, 40, (2, 3))).at[0, 1].set(-1)
    ids = jnp.asarray(np.stack([rng.permutation(40)[:5] for _ in range(6)]).reshape(2, 3, 5)).at[1, 2, 4].set(-1)
    log_p = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(2, 3, 5)))) + np.log(0.8)
    keep = jnp.arange(40) < 38
    def total(values):
        return sum((finite(v) * (i + 1)).sum() for i, v in enumerate(values))
    def terms(module, mapping, tail, direction, x, w, b, keep, **given):
        given |= {"linear_bias": b}
        log_prob, h = module.linear_log_prob_entropy(x, w, t, mapping, temperature=1.3, mask=keep, **given)
        return log_prob, h, module.linear_topk_kl(x, w, ids, log_p, mapping, tail=tail, direction=direction, **given)
    for mapping, chunk, *kl in (("softmax", 4, "one class", "reverse"), ("entmax15", None, "ignore", "forward")):
        split = jax.shard_map(lambda *a: terms(D, mapping, *kl, *a, axis_name="classes", chunk=chunk), mesh=mesh,
                              in_specs=(P(), P("classes"), P("classes"), P("classes")), out_specs=P())
        both = lambda f: jax.jit(jax.value_and_grad(lambda *a: (lambda v: (total(v), v))(f(*a)), (0, 1, 2), has_aux=True))
        (_, got), got_grads = both(split)(x, w, b, keep)
        (_, want), want_grads = both(lambda *a: terms(A, mapping, *kl, *a))(x, w, b, keep)
        for one, other in zip((*got, *got_grads), (*want, *want_grads), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-9)
    """)
