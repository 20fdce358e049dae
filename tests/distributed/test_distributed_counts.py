"""How much is communicated: collectives of a call that is like the last one, of its values and of its gradients, whatever the shards."""

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from processes import together
from shard_cases import (
    MAPS,
    OPERANDS,
    SUPPORT,
    TARGET,
    TEACHER,
    TEACHER_LOG_P,
    TWO,
    Cut,
    Here,
    N,
    numbers,
    rows,
    sent,
)  # fmt: skip

import anymax as A
from anymax import distributed as D

X, INDEX, Y = rows()[:5], torch.tensor([0, 36, 5, 20, 11]), torch.softmax(numbers(3, 5, N), -1)


def loss(here, m, x, t=INDEX):
    return here.call("fenchel_young" if A.facts(m).has_potential else "nll", m, x, t, axis=-1)


VERBS = {
    "apply": lambda here, m, x: here.call("apply", m, x),
    "loss": loss,
    "loss of shares": lambda here, m, x: loss(here, m, x, here.part(Y)),
    "log_prob_entropy": lambda here, m, x: here.call("log_prob_entropy", m, x, INDEX),
}
SUMS, SEARCH = [(1, 1), (1, 0), (1, 0)], [(2, 1), (2, 0), (3, 1)]
SENT = {  # (values, gradients) of p, of the loss of class indices, and of log p with the entropy
    "softmax": SUMS, "sigsoftmax": SUMS, "sparsemax": SEARCH, "entmax15": SEARCH, "entmax3": SEARCH, "entmax07": SEARCH,
    "normmax": SEARCH, "taylor": SEARCH, "relu": SEARCH, "topk": SEARCH, "normal": SEARCH, "budget": [(2, 1), None, (3, 1)],
}  # fmt: skip


@pytest.mark.whole(lambda name, cut: cut != (20, 17) or name not in ("softmax", "entmax15", "taylor", "topk"))
@pytest.mark.parametrize("cut", [(20, 17), (9, 9, 9, 0, 10)], ids=str)
@pytest.mark.parametrize("name", SENT)
def test_the_number_does_not_depend_on_the_shards(name, cut):
    """In the first call all say first what they are going to send."""
    for verb, want in zip(("apply", "loss", "log_prob_entropy"), SENT[name], strict=True):
        if want is not None:
            f = lambda here, x: VERBS[verb](here, MAPS[name].make(), x)  # noqa: B023, E731
            assert sent(f, [(X, -1)], Cut(cut, start=True)) == want, verb
            assert sent(f, [(X, -1)], Cut(cut, start=True), calls=1) == (want[0] + 1, want[1]), verb


@pytest.mark.parametrize("inner", ["softmax", "sparsemax", "taylor", "perturb_max"])
def test_a_sink_sends_what_its_inner_map_does(inner):
    """Where the last class is known; else one collective finds it. A distribution takes no collective more."""
    for verb, f in VERBS.items():
        said = Cut((20, 17), start=True, count=True) if verb in ("loss", "log_prob_entropy") else TWO
        want, got = (sent(lambda here, x: f(here, m, x), [(X, -1)], said) for m in (inner, A.Sink(inner)))  # noqa: B023
        assert got == want, verb
    values, gradients = sent(lambda here, x: here.call("apply", inner, x), [(X, -1)], TWO)
    more = sent(lambda here, x: here.call("apply", A.Sink(inner), x), [(X, -1)], Cut((20, 17), start=True))
    assert more == (values + 1, gradients)


def test_a_map_of_each_class_sends_nothing():
    """But the check of the calls, and a loss its sum."""
    m, y = A.Elementwise(), torch.full((5, N), 0.3, dtype=torch.float64)
    assert sent(lambda here, x: here.call("apply", m, x), [(X, -1)], TWO) == (1, 0)
    assert sent(lambda here, x: loss(here, m, x, here.part(y)), [(X, -1)], TWO) == (3, 0)
    assert sent(lambda here, x: loss(here, m, x), [(X, -1)], Cut((20, 17), start=True)) == (2, 0)


def test_a_collective_more_only_where_a_call_is_another_than_before():
    x, t = numbers(53, 3, 4), torch.tensor([0, 3, 1])
    calls = [
        lambda g, a: D.apply("softmax", a, group=g),
        lambda g, a: D.apply("softmax", a, group=g),
        lambda g, a: D.nll("softmax", a, t, axis=-1, group=g, class_start=2 * g.rank),
        lambda g, a: D.logsumexp(a[:2], group=g),
    ]

    def one(group):
        counts = []
        for _ in range(3):
            group.calls = 0
            for f in calls:
                f(group, Here(Cut((2, 2)), group).part(x))
            counts.append(group.calls)
        assert counts[-1] == len(calls)
        assert counts[0] <= 2 * len(calls)

    together(2, one)


# -- how many numbers ------------------------------------------------------------------------------------------------------------------

FLAT = numbers(5, 8, 32768)
PEAKED = 4.0 * FLAT.to(torch.float32)
TARGETS = torch.arange(0, 32768, 4096)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("p", [0.5, 0.9, torch.linspace(0.3, 0.95, 8)[:, None]], ids=["half", "most", "each row"])
def test_a_small_nucleus_is_a_small_part_of_the_scores(p, processes):
    """p, log p, the loss and their gradients send less than a tenth of the scores of a process, and are those of one process."""
    m = A.SparseSoftmax(p=p)
    n = 32768 // processes
    cut = Cut((n,) * processes, start=True)

    def one(group):
        here = Here(cut, group)
        said = {}
        for verb, f in {
            "p": lambda x: here.call("apply", m, x),
            "log p": lambda x: here.call("log_apply", m, x),
            "loss": lambda x: here.call("fenchel_young", m, x, TARGETS, axis=-1),
        }.items():
            x = here.part(PEAKED).clone().requires_grad_()
            f(x)  # the first call compares more
            group.numbers = 0
            out = f(x)
            weight = torch.linspace(-1, 1, out.numel()).reshape(out.shape) if verb != "loss" else torch.ones(())
            torch.where(out > -torch.inf, out * weight, torch.zeros(())).sum().backward()
            said[verb] = group.numbers, out.detach(), x.grad
        return said

    shards = together(processes, one)
    x = PEAKED.clone().requires_grad_()
    whole = {"p": A.apply(m, x), "log p": A.log_apply(m, x), "loss": A.fenchel_young(m, x, TARGETS)}
    for verb, want in whole.items():
        weight = torch.linspace(-1, 1, want.numel() // processes)
        for rank, said in enumerate(shards):
            sent, out, grad = said[verb]
            assert sent <= 0.1 * PEAKED.numel() / processes, (verb, sent / (PEAKED.numel() / processes))
            of_process = slice(rank * n, (rank + 1) * n)
            torch.testing.assert_close(out, want.detach() if verb == "loss" else want.detach()[:, of_process])
            if verb == "loss":
                (g,) = torch.autograd.grad(want, x, retain_graph=True)
            else:
                full = torch.zeros_like(want)
                for r in range(processes):
                    full[:, r * n : (r + 1) * n] = weight.reshape(8, n)
                (g,) = torch.autograd.grad(
                    torch.where(want > -torch.inf, want * full, torch.zeros(())).sum(), x, retain_graph=True
                )
            torch.testing.assert_close(grad, g[:, of_process])


def test_a_large_nucleus_is_that_of_one_process():
    m, cut = (
        A.SparseSoftmax(p=torch.tensor([[0.999], [1.0], [0.5], [1e-6], [0.9], [0.99], [0.2], [1.0]])),
        Cut((3000, 0, 5192), start=True),
    )
    x = FLAT[:, :8192].to(torch.float32)
    x[2], x[3, 5:], x[4, ::2], x[5] = 1.5, -torch.inf, -torch.inf, torch.round(x[5])
    got = together(3, lambda group: Here(cut, group).call("apply", m, Here(cut, group).part(x)))
    torch.testing.assert_close(torch.cat(got, -1), A.apply(m, x))


# -- output layers ---------------------------------------------------------------------------------------------------------------------

LAYER = {  # of a group of rows: those of the values, and those of the gradient beside the one that adds up x's
    "softmax": (1, 0), "sigsoftmax": (1, 0), "entmax15": (3, 1), "taylor": (3, 1), "topk": (3, 1),
}  # fmt: skip
LAYER_VERBS = {
    "log_prob_entropy": lambda here, m, x, w: here.call("linear_log_prob_entropy", x, w, TARGET, m),
    "kl": lambda here, m, x, w: here.call("linear_topk_kl", x, w, TEACHER, TEACHER_LOG_P, m, tail="one class"),
}


@pytest.mark.whole(lambda name: name not in ("softmax", "entmax15"))
@pytest.mark.parametrize("verb", LAYER_VERBS)
@pytest.mark.parametrize(("chunk", "groups"), [(None, 1), (14, 2)])
@pytest.mark.parametrize("name", LAYER)
def test_an_output_layer(name, chunk, groups, verb):
    """One at first, in which the processes compare their calls; then for each group of rows those of `log_prob_entropy`, as many again
    where a gradient computes the scores anew; and one that adds up the gradient of x.

    14 classes of 6 rows are the scores of 4 rows of 20."""
    values, gradients = LAYER[name]
    leaves = [OPERANDS[0], (0.05 * OPERANDS[1][0], 0)]
    again = groups * values if groups > 1 else 0
    got = sent(lambda here, x, w: LAYER_VERBS[verb](here, MAPS[name].make(), x, w), leaves, Cut((20, 17), chunk=chunk))
    assert got == (1 + groups * values, groups * gradients + again + 1)


@pytest.mark.parametrize(("name", "values", "gradients"), [("softmax", 3, 2), ("entmax15", 5, 2)])
def test_two_layers(name, values, gradients):
    """One at first, in which the processes compare their calls; then those of both layers, and one that adds up the divergence. Backward
    each layer has one, and one that adds up the gradient of its features."""
    f = lambda here, x, w: here.call("linear_kl", x, w, 0.5 * x, w, MAPS[name].make(), beta=0.5)  # noqa: E731
    assert sent(f, OPERANDS[:2], TWO) == (1 + values, gradients + 2)


def test_a_support():
    """One in which the processes compare their calls, and one for the values; one that adds up the gradient of x."""
    f = lambda here, x, w: here.call("linear_log_prob_entropy", x, w, TARGET, "softmax", support=SUPPORT)  # noqa: E731
    assert sent(f, OPERANDS[:2], TWO) == (2, 1)
