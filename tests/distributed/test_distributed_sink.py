"""`Sink` with classes on several processes: the numbers and gradients of one process, in fp64, whatever the shards and the inner map."""
# ruff: noqa: B023 (functions of a loop's variables are called before it goes on)

import functools
import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from processes import together
from test_distributed import apart, cut, finite, numbers, on_one, rows, same
from test_distributed_jax import right

import anymax as A
from anymax import distributed as D
from anymax._core.names import as_mapping
from anymax.linear.per_row import loss_of
from anymax.losses.verbs import loss_of_kind
from anymax.transforms import softcap

N = 37
SIZES = [(20, 0, 17), (15, 22, 0)]
INNER = (
    "softmax", "sparsemax", "entmax15", "entmax:alpha=3", "entmax:alpha=0.7", "budget:k=7", "normmax:alpha=2", "taylor", "sigsoftmax",
    "sparse_softmax:k=4", "sparse_softmax:p=0.8", "perturb_max", "fusedmax:strength=0.2",
)  # fmt: skip
FAST = ("softmax", "entmax15", "perturb_max")
SCORES = {"one": torch.tensor(0.4, dtype=torch.float64), "of each row": 0.4 * numbers(50, 6, 1)}


def held(make, whole, split, x, sizes, score, seed=None):
    """`whole(map, scores)` on one process and `split(map, shard, group, start)` on each: values, and gradients of scores and sink."""
    own = score.clone().requires_grad_()
    want, gradient = on_one(x, lambda a: whole(make(own), a), seed)
    learned = {}

    def part(a, group, start):
        learned[group.rank] = score.clone().requires_grad_()
        return split(make(learned[group.rank]), a, group, start)

    found = apart(sizes, x, part, seed)
    if seed is None:
        for out, *_ in found:
            pairs = zip(*(v if isinstance(v, tuple) else (v,) for v in (out, want)), strict=True)
            for got, one in pairs:
                same(got, one)
    else:
        same(torch.cat([f[0] for f in found], -1), want)
    if gradient is not None:
        same(torch.cat([f[1] for f in found], -1), gradient, rtol=1e-8, atol=1e-9)
        for s in learned.values():
            same(s.grad, own.grad, rtol=1e-8, atol=1e-9)
    return want


@pytest.mark.whole(lambda inner: inner not in FAST)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("inner", INNER)
def test_p_and_log_p(inner, sizes):
    for score in SCORES.values():
        for verb in ("apply", "log_apply"):
            held(
                lambda s: A.Sink(inner, s), getattr(A, verb), lambda m, a, g, start: getattr(D, verb)(m, a, group=g), rows(), sizes,
                score, seed=1,
            )  # fmt: skip


def target_of(inner, every):
    """Class indices of which two are the sink and one is left out, and shares that leave the sink something in most rows."""
    index = torch.tensor([5, -1, 36, 20, -100, -1])
    shares = numbers(3, 6, N).abs() * (numbers(4, 6, N) > 0)
    shares = shares * (every > -torch.inf)
    if inner.startswith("budget"):  # of the 7, the sink has 0 or 1
        order = torch.where(every > -torch.inf, numbers(4, 6, N), -torch.inf).argsort(-1, descending=True).argsort(-1)
        return None, (order < torch.tensor([6, 7, 6, 7, 7, 6])[:, None]).double()
    shares = shares / shares.sum(-1, keepdim=True).clamp(min=1e-9)
    shares[1] *= 0.3
    shares[2] *= 0.9
    return index, shares


@pytest.mark.whole(lambda inner: inner not in FAST)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("inner", INNER)
def test_losses(inner, sizes):
    every = rows()
    index, shares = target_of(inner, every)
    keep = (numbers(6, 6, N) > -1.0) | (shares > 0)
    keep[range(6), torch.tensor([5, 0, 36, 20, 0, 0])] = True
    last = 5 if inner.startswith("budget") else 6  # it has no 7 classes
    every, index, shares, keep = every[:last], None if index is None else index[:last], shares[:last], keep[:last]
    options = [
        {"weight": numbers(5, N).abs()},
        {"label_smoothing": 0.1, "weight": numbers(5, N).abs(), "reduction": "sum"},
        {"mask": keep, "reduction": "none"},
    ]
    verbs = ("fenchel_young", "nll") if A.facts(inner).has_potential else ("nll",)
    compared = 0
    for verb in verbs:
        for target in (index, shares):
            for given in options:
                soft = target is shares or "label_smoothing" in given
                if target is None or (inner.startswith("sparse_softmax") and soft):
                    continue
                # the map has no Omega of such a target

                def whole(mapping, a):
                    return getattr(A, verb)(mapping, a, target, axis=-1, **given)

                def split(mapping, a, group, start):
                    mine = {k: cut(v, sizes, group.rank) if torch.is_tensor(v) else v for k, v in given.items()}
                    t = target if target is index else cut(target, sizes, group.rank)
                    count = {"class_count": N} if verb == "nll" else {}
                    return getattr(D, verb)(mapping, a, t, axis=-1, group=group, class_start=start, **mine, **count)

                for score in SCORES.values():
                    score = score[:last] if score.ndim else score
                    want = held(lambda s: A.Sink(inner, s), whole, split, every, sizes, score)
                    compared += bool(want.isfinite().any())
    assert compared


@pytest.mark.whole(lambda inner: inner not in FAST)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("inner", INNER)
def test_log_p_entropy_thresholds_and_samples(inner, sizes):
    y = torch.randint(-1, N, (2, 6), generator=torch.Generator().manual_seed(7))
    y[0, 2], y[1, 0], y[1, 3] = -1, 3, -1
    calls = [lambda module, m, a, **more: module.log_prob_entropy(m, a, y, **more)]
    if not inner.startswith("budget"):
        calls.append(lambda module, m, a, **more: module.sample(m, a, generator=3, num_samples=50, **more))
        assert (A.sample(A.Sink(inner, 0.4), rows(), generator=3, num_samples=50) == -1).any()
    if A.Sink(inner).has_threshold:
        calls.append(lambda module, m, a, **more: tuple(module.threshold(m, a, **more)))
    for call in calls:
        for score in SCORES.values():
            held(
                lambda s: A.Sink(inner, s), lambda m, a: call(A, m, a), lambda m, a, g, start: call(D, m, a, group=g, class_start=start),
                rows(), sizes, score,
            )  # fmt: skip


@pytest.mark.parametrize("counted", [False, True])
def test_the_classes_need_not_be_in_the_order_of_the_ranks(counted):
    """The sink is behind the last class, on whichever process that is."""
    x, t = rows()[:3], torch.tensor([30, -1, 36])
    places = [slice(25, 37), slice(0, 10), slice(10, 25), slice(10, 10)]
    for inner in ("softmax", "sparse_softmax:k=3", "entmax15", "perturb_max", "taylor"):
        mapping = A.Sink(inner, 0.3)
        verb = "fenchel_young" if mapping.facts.has_potential else "nll"
        draws = A.sample(mapping, x, generator=1, num_samples=40)

        def one(g):
            part, more = x[:, places[g.rank]], {"group": g, "class_start": places[g.rank].start}
            more |= {"class_count": N} if counted else {}
            value = getattr(D, verb)(mapping, part, t, axis=-1, **more)
            drawn = D.sample(mapping, part, generator=1, num_samples=40, **more)
            return D.apply(mapping, part, **more), value, drawn

        for (p, value, drawn), place in zip(together(4, one), places, strict=True):
            same(p, A.apply(mapping, x)[:, place])
            same(value, getattr(A, verb)(mapping, x, t, axis=-1))
            assert torch.equal(drawn, draws)


def test_what_is_sent_is_that_of_the_inner_map():
    """Where the last class is known; else one collective finds it. A distribution takes no collective more."""
    x, t = rows()[:5], torch.tensor([0, 36, 5, 20, 11])
    y, sizes = torch.softmax(numbers(3, 5, N), -1), (20, 17)
    for inner in ("softmax", "sparsemax", "taylor", "perturb_max"):
        verb = "fenchel_young" if A.facts(inner).has_potential else "nll"
        calls = [
            lambda m, a, g, s: D.apply(m, a, group=g),
            lambda m, a, g, s: getattr(D, verb)(m, a, t, axis=-1, group=g, class_start=s, class_count=N),
            lambda m, a, g, s: getattr(D, verb)(m, a, cut(y, sizes, g.rank), axis=-1, group=g),
            lambda m, a, g, s: D.log_prob_entropy(m, a, t, group=g, class_start=s, class_count=N),
        ]
        for f in calls:
            want, got = (
                apart(sizes, x, lambda a, g, s: f(m, a, g, s), before=1)[0][2:] for m in (inner, A.Sink(inner))
            )
            assert got == want, inner
        more = apart(sizes, x, lambda a, g, s: D.apply(A.Sink(inner), a, group=g, class_start=s), before=1)[0][2]
        assert more == apart(sizes, x, lambda a, g, s: D.apply(inner, a, group=g), before=1)[0][2] + 1


def test_flat_scores_are_searched_with_sums():
    x, t, sizes = 1e-4 * numbers(8, 2, 9000), torch.tensor([3, -1]), (4000, 5000)
    make = lambda s: A.Sink("sparsemax", s)  # noqa: E731
    weigh = lambda p, part: (p * part(numbers(9, 2, 9000))).sum()  # noqa: E731
    score = torch.tensor(1e-4, dtype=torch.float64)
    held(
        make, lambda m, a: A.fenchel_young(m, a, t), lambda m, a, g, s: D.fenchel_young(m, a, t, group=g), x, sizes, score
    )  # fmt: skip
    own = score.clone().requires_grad_()
    weigh(A.apply(make(own), x), lambda w: w).backward()

    def one(group):
        mine = score.clone().requires_grad_()
        p = D.apply(make(mine), cut(x, sizes, group.rank), group=group)
        weigh(p, lambda w: cut(w, sizes, group.rank)).backward()
        return mine.grad

    for got in together(2, one):
        same(got, own.grad)


def test_a_learned_inner_map_and_a_target_with_a_gradient():
    x, sizes = rows()[2:5], (20, 0, 17)
    leaves = [torch.tensor(v, dtype=torch.float64) for v in (1.4, 0.3)]
    y = 0.8 * torch.softmax(numbers(3, 3, N), -1)

    def gradients(f, y):
        mine = [v.clone().requires_grad_() for v in (*leaves, y)]
        value = f(A.Sink(A.Entmax(mine[0]), mine[1]), mine[2])
        first = torch.autograd.grad(value, mine, create_graph=True)
        return *(g.detach() for g in first), *torch.autograd.grad(first[1].sum(), mine[:2])

    for given in ({}, {"label_smoothing": 0.2}):
        want = gradients(lambda m, y: A.fenchel_young(m, x, y, axis=-1, **given), y)

        def one(group):
            part = lambda a: cut(a, sizes, group.rank)  # noqa: E731
            return gradients(lambda m, y: D.fenchel_young(m, part(x), y, axis=-1, group=group, **given), part(y))

        found = together(len(sizes), one)
        for got in found:
            for i in (0, 1, 3, 4):
                same(got[i], want[i], rtol=1e-7, atol=1e-9)
        same(torch.cat([f[2] for f in found], -1), want[2], rtol=1e-7, atol=1e-9)


# -- output layers -----------------------------------------------------------------------------------------------------------------------

ROWS = (2, 3)
TOKENS = torch.tensor([[5, -1, 33], [-1, 12, 36]])


def layers(whole, split, score, sizes=(20, 0, 17)):
    """`whole(map, scores)` and `split(map, group, x, weight, bias)`: values, and the gradients of operands and sink."""
    leaves = [numbers(1, *ROWS, 5), numbers(2, N, 5), numbers(3, N), score]

    def run(f, leaves):
        mine = [a.detach().clone().requires_grad_() for a in leaves]
        values = f(*mine)
        values = values if isinstance(values, tuple) else (values,)
        moved = sum((finite(v) * numbers(8 + i, v.numel()).reshape(v.shape)).sum() for i, v in enumerate(values))
        return [v.detach() for v in values], torch.autograd.grad(moved, mine)

    want, gradients = run(lambda x, w, b, s: whole(s, x @ w.T + b), leaves)

    def one(group):
        part = lambda a: cut(a, sizes, group.rank)  # noqa: E731
        mine = [leaves[0], part(leaves[1].T).T, part(leaves[2]), score]
        return run(lambda x, w, b, s: split(s, group, x, w, b), mine)

    found = together(len(sizes), one)
    for values, grads in found:
        for got, value in zip(values, want, strict=True):
            same(got, value)
        for i in (0, 3):
            same(grads[i], gradients[i], rtol=1e-8, atol=1e-9)
    for i in (1, 2):
        same(torch.cat([g[i] for _, g in found]), gradients[i], rtol=1e-8, atol=1e-9)


@pytest.mark.whole(lambda inner: inner not in FAST)
@pytest.mark.parametrize("inner", [i for i in INNER if not i.startswith("budget")])
def test_an_output_layer(inner):
    """Transforms, a temperature and class weights don't act on the sink, whose score may be that of each row."""
    verb, cap = functools.partial(loss_of_kind, loss_of(as_mapping(inner, "test"))), softcap(3.0)
    factors, sizes = numbers(7, N).abs(), (20, 0, 17)
    soft = 0.7 * torch.softmax(numbers(5, *ROWS, N), -1)
    capped = lambda a: 3.0 * torch.tanh(a / 3.0)  # noqa: E731
    for score in (SCORES["one"], SCORES["of each row"].reshape(*ROWS, 1)):
        for t, given in ((TOKENS, {}), (TOKENS, {"weight": factors}), (TOKENS, {"label_smoothing": 0.1}), (soft, {})):
            if inner.startswith("sparse_softmax") and (t is soft or "label_smoothing" in given):
                continue

            def split(s, group, x, w, b):
                mine = {k: cut(v, sizes, group.rank) if torch.is_tensor(v) else v for k, v in given.items()}
                target = t if t is TOKENS else cut(t, sizes, group.rank)
                more = {"transform": cap, "group": group, "chunk": 4}
                return D.linear_loss(x, w, target, A.Sink(inner, s), linear_bias=b, **mine, **more)

            layers(lambda s, a: verb(A.Sink(inner, s), capped(a), t, axis=-1, **given), split, score)

        def terms(s, group, x, w, b):
            more = {"temperature": 0.7, "transform": cap, "linear_bias": b, "group": group, "chunk": 4}
            return D.linear_log_prob_entropy(x, w, TOKENS, A.Sink(inner, s), **more)

        layers(lambda s, a: A.log_prob_entropy(A.Sink(inner, s), capped(a / 0.7), TOKENS), terms, score)


def test_a_layer_with_a_support_a_teacher_and_further_losses():
    score = SCORES["one"]
    kept = ([30, 5, 2, 21], [1, 36, 0], [9], [3, 22, 35], [], [20, 4, 7, 19, 36])
    support = torch.tensor([i for k in kept for i in k]), torch.tensor([0, *(len(k) for k in kept)]).cumsum(0)
    for inner in ("softmax", "entmax15"):

        def over(s, group, x, w, b):
            more = {"linear_bias": b, "group": group, "support": support, "full": True}
            return sum(D.linear_log_prob_entropy(x, w, TOKENS, A.Sink(inner, s), **more), ())

        def whole(s, a):
            m = A.Sink(inner, s)
            return *A.log_prob_entropy(m, a, TOKENS, support=support), *A.log_prob_entropy(m, a, TOKENS)

        layers(whole, over, score)
    ids = torch.stack([torch.randperm(N, generator=torch.Generator().manual_seed(i))[:4] for i in range(6)])
    ids, log_p = ids.reshape(*ROWS, 4), torch.log_softmax(numbers(4, *ROWS, 4), -1) - 0.2
    ids[1, 0, 3] = -1  # no class, as everywhere, and not the sink
    for more in ({}, {"tail": "one class"}, {"tail": "one class", "direction": "reverse"}):

        def teach(s, group, x, w, b):
            return D.linear_topk_kl(x, w, ids, log_p, A.Sink(score=s), linear_bias=b, group=group, **more)

        def taught(s, a):
            wide = torch.cat([a, s.expand(*ROWS, 1)], -1)
            return A.topk_kl(wide, ids, log_p, **more)

        layers(taught, teach, score)
    x, w, b = numbers(1, *ROWS, 5), numbers(2, N, 5), numbers(3, N)

    def further(group, mapping=A.Sink(), **more):  # noqa: B008
        part = lambda a: cut(a, (20, 17), group.rank)  # noqa: E731
        return D.linear_loss(x, part(w.T).T, TOKENS, mapping, linear_bias=part(b), group=group, **more)

    for value in together(2, lambda group: further(group, z_loss=0.1)):
        same(value, A.linear_loss(x, w, TOKENS, A.Sink(), linear_bias=b, z_loss=0.1))
    with pytest.raises(ValueError, match="the sink is none of them"):
        together(2, lambda group: further(group, A.Sink("sparsemax", 0.5), suppress=0.3))


def test_a_margin_head_with_a_sink():
    """A target of -1 is the sink, without a margin."""
    rows, t, cuts = numbers(11, 9, 6), torch.tensor([3, 0, -1, 7, -100, 2, -1, 5, 9]), (4, 0, 5)
    centres = numbers(10, 11, 6)

    def head(group, rate):
        score = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        out = A.nn.MarginHead(6, 11, A.Sink("entmax15", score), scale=4.0, group=group, sample_rate=rate).double()
        with torch.no_grad():
            out.weight.copy_(centres[out.class_start : out.class_start + out.weight.shape[0]])
        return out

    whole, e = head(None, 1.0), rows.clone().requires_grad_()
    want = whole(e, t)
    want.backward()
    scores = 4.0 * A.margins.AM(0.35)(A.transforms.cosine(centres)(rows), t.clamp(min=-1), -1)
    same(want, A.fenchel_young(A.Sink("entmax15", 0.5), scores, t, axis=-1))
    names = [name for name, _ in whole.named_parameters() if name != "weight"]
    for rate in (1.0, 0.999):
        alone = head(None, rate)
        same(alone(rows, t), want)

        def one(group):
            mine, here = head(group, rate), slice(sum(cuts[: group.rank]), sum(cuts[: group.rank + 1]))
            part = rows[here].clone().requires_grad_()
            loss = mine(part, t[here])
            loss.backward()
            return (
                loss.detach(),
                part.grad,
                mine.weight.grad,
                dict(mine.named_parameters())[names[0]].grad,
                mine.probabilities(rows),
            )

        found = together(3, one)
        for value, _, _, of_score, _ in found:
            same(value, want)
            same(of_score, dict(whole.named_parameters())[names[0]].grad)
        same(torch.cat([f[1] for f in found]), e.grad)
        same(torch.cat([f[2] for f in found]), whole.weight.grad)
        same(torch.cat([f[4] for f in found], -1), whole.probabilities(rows))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda g, x: D.apply(A.Sink("sparsemax" if g.rank else "softmax"), x, group=g), RuntimeError, "different things"),
        (lambda g, x: D.apply(A.Sink(score=0.1 * g.rank), x, group=g), RuntimeError, "score=0.1"),
        (lambda g, x: D.nll(A.Sink(), x, torch.tensor([0, 4]), group=g), IndexError, "from 0 to 3, -1 for none of them, or"),
        (lambda g, x: D.nll(A.Sink(), x, torch.tensor([-2, -1]), group=g), IndexError, "from 0 to 3, -1 for none of them, or"),
        (lambda g, x: D.nll(A.Sink(), x, torch.full((2, 2), 0.4), axis=-1, group=g), ValueError, "sum to 0 to 1 over all processes"),
        (lambda g, x: D.apply(A.Sink(score=torch.zeros(2, 2)), x, group=g), ValueError, "varies along the classes"),
        (lambda g, x: D.apply(A.Sink("budget:k=6"), x, group=g), ValueError, "can't be chosen of 5"),
        (lambda g, x: D.apply(A.Sink(), x[:, :0], group=g), ValueError, "no classes on any process"),
        (lambda g, x: D.sample(A.Elementwise(), x, group=g), ValueError, "a number of its own"),
        (lambda g, x: D.apply(A.Sink(), x, group=g, class_start=2 * g.rank, class_count=7), ValueError, "have 4 classes together"),
        (lambda g, x: D.fenchel_young(A.Sink("taylor"), x, torch.tensor([0, 1]), group=g), TypeError, "anymax.nll"),
    ],
)  # fmt: skip
def test_all_processes_end_with_a_sentence(change, error, words):
    def one(group):
        with pytest.raises(error, match=words):
            change(group, torch.zeros(2, 2))
        return True

    assert together(2, one) == [True, True]


def test_ignored_rows_may_have_the_index_minus_one():
    x, t = rows()[1:4], torch.tensor([-1, 5, -1])
    want = A.fenchel_young(A.Sink("entmax15"), x, t, axis=-1, ignore_index=-1, reduction="none")
    assert want[0] == want[2] == 0
    for value in together(
        2,
        lambda g: D.fenchel_young(
            A.Sink("entmax15"), cut(x, (20, 17), g.rank), t, axis=-1, ignore_index=-1, reduction="none", group=g
        ),
    ):
        same(value, want)


@pytest.mark.whole
def test_on_four_devices_of_jax():
    right("""
    x, w = jnp.asarray(rng.normal(size=(3, 36))), jnp.asarray(rng.normal(size=(3, 36)))
    t, here, own = jnp.asarray([0, -1, 35]), dict(axis_name="classes"), P(None, "classes")
    y = 0.7 * jax.nn.softmax(w)
    key = jax.random.key(0)
    for inner in ("softmax", "entmax15", "sparse_softmax:p=0.8", "taylor", "perturb_max"):
        m, check = A.Sink(inner, 0.3), inner != "perturb_max"
        held(x, lambda x: D.apply(m, x, **here), lambda x: A.apply(m, x), own, w, check=check)
        loss = "fenchel_young" if m.facts.has_potential else "nll"
        held(x, lambda x: getattr(D, loss)(m, x, t, **here), lambda x: getattr(A, loss)(m, x, t), P(), check=check)
        held(x, lambda x: D.log_prob_entropy(m, x, t, **here)[1], lambda x: A.log_prob_entropy(m, x, t)[1], P(), check=check)
        if not inner.startswith("sparse_softmax"):
            f = jax.jit(jax.shard_map(lambda x, y: getattr(D, loss)(m, x, y, **here), mesh=mesh,
                in_specs=own, out_specs=P(), check_vma=check))
            np.testing.assert_allclose(f(x, y), getattr(A, loss)(m, x, y), rtol=1e-10)
        if inner in ("softmax", "perturb_max"):
            drawn = split(lambda x: D.sample(m, x, generator=key, num_samples=9, **here), P(), check)(x)
            assert (drawn == A.sample(m, x, generator=key, num_samples=9)).all(), inner
        if inner not in ("softmax", "entmax15"):
            continue
        def of_score(s):
            f = lambda x, s: D.nll(A.Sink(inner, s), x, t, **here)
            return jax.shard_map(f, mesh=mesh, in_specs=(own, P()), out_specs=P(), check_vma=check)(x, s)
        want = jax.grad(lambda s: A.nll(A.Sink(inner, s), x, t))(0.3)
        np.testing.assert_allclose(jax.jit(jax.grad(of_score))(0.3), want, rtol=1e-8)
    """)


@pytest.mark.whole
def test_an_output_layer_on_four_devices_of_jax():
    right("""
    a, b, c = (jnp.asarray(rng.normal(size=s)) for s in ((2, 3, 6), (40, 6), (40,)))
    t = jnp.asarray([[0, -1, 39], [5, -1, 7]])
    for inner in ("softmax", "entmax15"):
        f = lambda x, w, b, s: D.linear_loss(x, w, t, A.Sink(inner, s), linear_bias=b, chunk=4, axis_name="classes")
        g = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P(), P("classes"), P("classes"), P()), out_specs=P()))
        ref = lambda x, w, b, s: A.linear_loss(x, w, t, A.Sink(inner, s), linear_bias=b)
        np.testing.assert_allclose(g(a, b, c, 0.3), ref(a, b, c, 0.3), rtol=1e-10)
        for got, want in zip(jax.grad(g, (0, 1, 2, 3))(a, b, c, 0.3), jax.grad(ref, (0, 1, 2, 3))(a, b, c, 0.3)):
            np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-10)
    """)
