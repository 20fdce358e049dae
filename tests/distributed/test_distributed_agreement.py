"""Processes that are asked for different things, or of which one fails: one error, with the same words, on all of them, and no waiting."""

import importlib
import importlib.util
import inspect
import pkgutil
import re

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from processes import together
from shard_cases import Cut, Here, numbers

import anymax as A
from anymax import distributed as D
from anymax.transforms import softcap

INDEX, SHARES = torch.tensor([0, 3, 1]), torch.full((3, 2), 0.25, dtype=torch.float64)
FEATURES, CENTRES = numbers(50, 3, 5), numbers(51, 2, 5)
SCORES, LOGS, MASK = (
    numbers(54, 3, 2),
    torch.full((3, 1), -0.5, dtype=torch.float64),
    torch.ones(3, 6, dtype=torch.bool),
)
IDS, LOG_P = torch.tensor([[0, 3], [1, 2], [2, 0]]), torch.full((3, 2), 0.4).log().double()
KEPT, OFFSETS = torch.tensor([0, 3, 1, 2]), torch.tensor([0, 2, 3, 4])


def loss(g, x, t=INDEX, verb="nll", mapping="softmax", start=True, **given):
    start = 2 * g.rank if start else None
    return getattr(D, verb)(mapping, x, t, axis=-1, group=g, class_start=start, **given)


def layer(g, x=FEATURES, t=INDEX, mapping="sparsemax", **given):
    return D.linear_loss(x, CENTRES, t, mapping, group=g, **given)


def tokens(g, t=INDEX, **given):
    return D.linear_log_prob_entropy(FEATURES, CENTRES, t, group=g, **given)


def kept(g, ids=KEPT, offsets=OFFSETS, **given):
    return tokens(g, support=(ids, offsets), **given)


def kl(g, ids=IDS, log_p=LOG_P, **given):
    return D.linear_topk_kl(FEATURES, CENTRES, ids, log_p, group=g, **given)


def pair(g, y=None, **given):
    return D.linear_kl(FEATURES, CENTRES, FEATURES[:, :4] if y is None else y, CENTRES[:, :4], group=g, **given)


def learned(value=1.5):
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


# (what a process of rank r does with its scores [3, 2]; what all of them say)
ODD = {
    "reduction": (lambda g, x, r: loss(g, x, reduction="mean" if r else "sum"), "reduction is 'sum' on process 0, 'mean' on process 1"),
    "ignore_index": (lambda g, x, r: loss(g, x, ignore_index=-1 - r), "ignore index is -1 on process 0, -2 on process 1"),
    "weight": (lambda g, x, r: loss(g, x, weight=torch.ones(2) if r else None), "weight is not given on process 0, given on process 1"),
    "smoothing": (lambda g, x, r: loss(g, x, label_smoothing=0.1 * r), "label smoothing is 0.0 on process 0, 0.1 on process 1"),
    "a word that is none": (lambda g, x, r: loss(g, x, reduction="average" if r else "mean"), "process 1: .*: reduction must be"),
    "target's shape": (lambda g, x, r: loss(g, x, INDEX[: 3 - r]), r"process 1: target of shape \(2,\)"),
    "without class_start": (lambda g, x, r: loss(g, x, INDEX[: 3 - r], start=False), r"shape \(3,\) on process 0, .*\(2,\) on process 1"),
    "weight's size": (lambda g, x, r: loss(g, x, weight=torch.ones(2 + r)), r"process 1: weight of shape \(3,\)"),
    "weight's size, without class_start": (
        lambda g, x, r: loss(g, x, weight=torch.ones(2 + r), start=False), r"process 1: weight of shape \(3,\)",
    ),
    "rows": (lambda g, x, r: D.apply("softmax", x[r:], group=g), r"rows is of shape \(3,\) on process 0, of shape \(2,\) on process 1"),
    "dtype": (lambda g, x, r: D.apply("softmax", x.float() if r else x, group=g), "dtype is torch.float64 on process 0, torch.float32"),
    "kind of target": (lambda g, x, r: loss(g, x, SHARES if r else INDEX), "target is class indices .* a part of distributions"),
    "verb": (
        lambda g, x, r: D.apply("softmax", x, group=g) if r else D.logsumexp(x, group=g), "verb is logsumexp on process 0, apply on",
    ),
    "num_samples": (lambda g, x, r: D.sample("softmax", x, num_samples=r + 1, group=g), "num samples is 1 on process 0, 2 on process 1"),
    "targets": (lambda g, x, r: loss(g, x, INDEX + r * (INDEX == 1)), "target must be the same on every process; its entry 2 is 1"),
    "y out of range": (
        lambda g, x, r: D.log_prob_entropy("softmax", x, INDEX + 90 * r, group=g), "target must be the same on .* its entry 0 is",
    ),
    "who learns": (lambda g, x, r: D.apply(A.Entmax(learned() if r else learned().detach()), x, group=g), "alpha is an array .* a learned"),
    "a layer's chunk": (lambda g, x, r: layer(g, chunk=1 + r), "chunk is 1 on process 0, 2 on process 1"),
    "a layer's reduction": (lambda g, x, r: layer(g, reduction="sum" if r else "mean"), "reduction is 'mean' on process 0"),
    "a layer's rows": (lambda g, x, r: layer(g, FEATURES[r:], INDEX[r:]), r"rows is of shape \(3,\) on process 0"),
    "a layer's target": (lambda g, x, r: layer(g, t=INDEX[r:]), r"process 1: linear_loss: target of shape \(2,\)"),
    "a layer's weight": (lambda g, x, r: layer(g, weight=torch.ones(2 + r), chunk=2), r"linear_loss: process 1: weight of shape \(3,\)"),
    "a layer's features": (
        lambda g, x, r: layer(g, FEATURES.clone().requires_grad_() if r else FEATURES), "x is 5 features, an array .* 5 features, a le",
    ),
    "a layer's z_loss": (lambda g, x, r: layer(g, mapping="softmax", z_loss=r * 0.1), r"z loss is 0\.0 on process 0, 0\.1 on"),
    "a layer's suppress": (lambda g, x, r: layer(g, suppress=r * 0.1), r"suppress is 0\.0 on process 0, 0\.1 on"),
    "a layer's cap": (
        lambda g, x, r: layer(g, mapping="softmax", transform=softcap(3.0 + r)), r"transform is softcap\(cap=3\.0\) on process 0, softcap",
    ),
    "tokens": (lambda g, x, r: tokens(g, INDEX + r * (INDEX == 1)), "target must be the same on every process; its entry 2 is 1 on"),
    "tokens' shape": (lambda g, x, r: tokens(g, INDEX[r:]), r"process 1: linear_log_prob_entropy: target of shape \(2,\)"),
    "tokens' kind": (lambda g, x, r: tokens(g, INDEX.double() if r else INDEX), "target must be class indices .* torch.float64"),
    "tokens' temperature": (lambda g, x, r: tokens(g, temperature=1.0 + r), r"temperature is 1\.0 on process 0, 2\.0 on process 1"),
    "a temperature of 0": (lambda g, x, r: tokens(g, temperature=1.0 - r), "process 1: .*: temperature must be above 0"),
    "a teacher's ids": (lambda g, x, r: kl(g, IDS + r * (IDS == 3) * -3 + r), "ids must be the same on every process; its entry 0 is 0 on"),
    "a teacher's log p": (
        lambda g, x, r: kl(g, log_p=LOG_P - 0.01 * r), r"teacher_log_p must .* entry 0 is -0\.916291 on process 0, -0\.926291 on",
    ),
    "a teacher's dtype": (lambda g, x, r: kl(g, log_p=LOG_P.float() if r else LOG_P), "teacher log p is an array .* of torch.float64 on"),
    "direction": (lambda g, x, r: kl(g, direction="reverse" if r else "forward"), "direction is forward on process 0, reverse on"),
    "beta": (lambda g, x, r: pair(g, beta=0.5 * r), r"beta is 0\.0 on process 0, 0\.5 on"),
    "a divergence's reduction": (lambda g, x, r: pair(g, reduction="sum" if r else "mean"), "reduction is mean on process 0, sum on"),
    "a reference's features": (
        lambda g, x, r: pair(g, FEATURES[:, :4].requires_grad_() if r else None), "x ref is 4 features, an array .* 4 features, a le",
    ),
    "a reference's rows": (lambda g, x, r: pair(g, FEATURES[r:, :4]), r"process 1: .* x has rows of shape \(3,\) and x_ref \(2,\)"),
    "rows that count": (
        lambda g, x, r: pair(g, where=torch.tensor([True, not r, True])), "where must be the same on every process; its entry 1 is",
    ),
    "rows that count, on one process": (
        lambda g, x, r: pair(g, where=torch.ones(3, dtype=torch.bool) if r else None), "where is not given on process 0, given on",
    ),
    "a layer's verb": (
        lambda g, x, r: tokens(g) if r else kl(g), "verb is linear_topk_kl on process 0, linear_log_prob_entropy on",
    ),
    "a support's ids": (lambda g, x, r: kept(g, KEPT - r * (KEPT == 2)), "ids of the support must be .* entry 3 is 2 on process 0, 1 on"),
    "a support's offsets": (
        lambda g, x, r: kept(g, offsets=OFFSETS - r * (OFFSETS == 3)), "offsets of the support must be .* entry 2 is 3 on",
    ),
    "a support's size": (lambda g, x, r: kept(g, KEPT[: 4 - r]), r"support is an array of shape \(4,\) of torch.int64 and .* on"),
    "full": (lambda g, x, r: kept(g, **({"full": True} if r else {})), "full is False on process 0, True on"),
}  # fmt: skip


def said(f, ranks=2):
    """What each process says, by (kind, words)."""

    def one(group):
        with pytest.raises((RuntimeError, ValueError, TypeError, IndexError)) as caught:
            f(group)
        return caught.type, str(caught.value)

    return together(ranks, one)


def part(group):
    return Here(Cut((2, 2)), group).part(numbers(52, 3, 4))


@pytest.mark.parametrize("name", ODD)
def test_what_differs_is_one_error_on_all_processes(name):
    """Also after calls of which all are the same."""
    f, words = ODD[name]

    def both(group):
        for _ in range(2):
            f(group, part(group), 0)
        f(group, part(group), group.rank)

    first, second = said(both)
    assert first == second
    assert re.search(words, first[1]), first
    assert first == said(lambda g: f(g, part(g), g.rank))[0]


def test_an_error_of_all_is_each_ones_own():
    for kind, words in said(lambda g: D.apply("softmax", torch.zeros(3, 2).bool(), group=g)):
        assert kind is TypeError
        assert words.startswith("scores: expected real floating-point")


def test_many_processes_are_named_by_what_they_say():
    def f(g):
        D.nll("softmax", torch.zeros(2, 3), torch.tensor([0, 1]), group=g, reduction="sum" if g.rank == 1 else "mean")

    words = {words for _, words in said(f, 7)}
    assert len(words) == 1
    assert "reduction is 'mean' on processes 0, 2, 3, 4 and 2 more, 'sum' on process 1" in words.pop()


# -- every public function with a group ---------------------------------------------------------------------------------------------


def functions_with_a_group():
    """The public functions and classes of anymax and its rooms that take processes, by their signatures."""
    rooms = [m.name for m in pkgutil.iter_modules(A.__path__, "anymax.") if not m.name.startswith("anymax._")]
    for room in ("anymax", *rooms):
        if importlib.util.find_spec("numpyro") is None and room == "anymax.numpyro":
            continue
        module = importlib.import_module(room)
        for name in getattr(module, "__all__", ()):
            public = getattr(module, name)
            methods = inspect.getmembers(public, inspect.isfunction) if inspect.isclass(public) else ()
            for called, f in ((name, public), *((f"{name}.{n}", m) for n, m in methods if not n.startswith("_"))):
                if callable(f) and {"group", "axis_name", "process_group"} & signature_of(f):
                    yield f"{room}.{called}"


def signature_of(f):
    try:
        return set(inspect.signature(f).parameters)
    except ValueError:  # of a type of C
        return set()


def head(g, mapping, x, **options):
    torch.manual_seed(0)
    out = A.nn.MarginHead(
        options.pop("in_features", 5), options.pop("num_classes", 4), mapping, group=g, **options
    ).double()
    return out(x, INDEX[: len(x)])


def probabilities(g, mapping, x, **options):
    return A.nn.MarginHead(5, 4, mapping, group=g, **options).double().probabilities(x)


def balanced(g, scoring, x, k=2, num_experts=4, **options):
    torch.manual_seed(0)
    A.nn.Router(5, num_experts, k, scoring, correction=True).to(x).balance(x, group=g, **options)


ROWS_MAY_DIFFER = ("anymax.nn.MarginHead", "anymax.routing.balance", "anymax.nn.Router.balance")
BY_OPTIONS = (
    "anymax.nn.MarginHead.probabilities",
    "anymax.nn.Router.balance",
)  # the group is the module's, or one of `options`
# (the call, an argument that one process says otherwise: its values on both); besides map, dtype, rows, and who learns
EVERY = {
    "anymax.contrastive_loss": (
        lambda g, m, x, b=FEATURES, **o: A.contrastive_loss(x, b[: len(b) - 3 + len(x)].to(x), mapping=m, group=g, **o),
        {"bidirectional": (True, False), "reduction": ("sum", "mean"), "temperature": (1.0, 0.5), "mask": (None, MASK[:, :6]),
         "b": (FEATURES, torch.cat([FEATURES] * 2)), "bidirectional ": (True, "no"), "temperature ": (learned(0.5), learned(0.7))},
    ),
    "anymax.distributed.apply": (lambda g, m, x, **o: D.apply(m, x, group=g, **o), {"class_count": (4, 5), "axis": (-1, 3)}),
    "anymax.distributed.log_apply": (lambda g, m, x, **o: D.log_apply(m, x, group=g, **o), {"axis": (-1, 3)}),
    "anymax.distributed.threshold": (lambda g, m, x, **o: D.threshold(m, x, group=g, **o), {"class_count": (4, 5)}),
    "anymax.distributed.logsumexp": (lambda g, _, x, **o: D.logsumexp(x, group=g, **o), {"temperature": (1.0, 2.0)}),
    "anymax.distributed.fenchel_young": (
        lambda g, m, x, **o: D.fenchel_young(m, x, INDEX[: len(x)], group=g, **o), {"label_smoothing": (0.0, 0.1)}
    ),
    "anymax.distributed.nll": (lambda g, m, x, **o: D.nll(m, x, INDEX[: len(x)], group=g, **o), {"ignore_index": (-1, -2)}),
    "anymax.distributed.log_prob_entropy": (
        lambda g, m, x, target=INDEX: D.log_prob_entropy(m, x, target[: len(x)], group=g), {"target": (INDEX, 0 * INDEX)}
    ),
    "anymax.distributed.sample": (lambda g, m, x, **o: D.sample(m, x, group=g, **o), {"num_samples": (None, 2)}),
    "anymax.distributed.linear_loss": (
        lambda g, m, x, **o: D.linear_loss(x, CENTRES.to(x), INDEX[: len(x)], m, group=g, **o), {"z_loss": (0.0, 0.1), "chunk": (None, 2)}
    ),
    "anymax.distributed.linear_threshold": (lambda g, m, x, **o: D.linear_threshold(x, CENTRES.to(x), m, group=g, **o), {"chunk": (1, 2)}),
    "anymax.distributed.linear_log_prob": (
        lambda g, m, x, **o: D.linear_log_prob(x, CENTRES.to(x), INDEX[: len(x)], m, group=g, **o), {"temperature": (1.0, 2.0)}
    ),
    "anymax.distributed.linear_log_prob_entropy": (
        lambda g, m, x, **o: D.linear_log_prob_entropy(x, CENTRES.to(x), INDEX[: len(x)], m, group=g, **o), {"temperature": (1.0, 2.0)}
    ),
    "anymax.distributed.linear_kl": (
        lambda g, m, x, **o: D.linear_kl(x, CENTRES.to(x), x, 2 * CENTRES.to(x), m, group=g, **o),
        {"beta": (0.5, 1.0), "direction": ("forward", "reverse"), "reduction": ("none", "sum")},
    ),
    "anymax.distributed.linear_topk_kl": (
        lambda g, m, x, **o: D.linear_topk_kl(x, CENTRES.to(x), INDEX[: len(x), None], LOGS[: len(x)], m, group=g, **o),
        {"direction": ("forward", "reverse"), "tail": ("ignore", "one class")},
    ),
    "anymax.nn.MarginHead": (
        head, {"num_classes": (4, 5), "in_features": (5, 4), "margin": (0.1, 0.2), "scale": (8.0, 9.0), "reduction": ("sum", "mean"),
               "ignore_index": (-1, -2), "sub_centers": (1, 2), "sample_rate": (1.0, 0.5)},
    ),
    "anymax.routing.balance": (
        lambda g, m, x, k=2, **o: A.routing.balance(x, k, scoring=m, group=g, **o),
        {"k": (2, 3), "method": ("quantile", "sign"), "iterations": (1, 2), "bias": (None, torch.arange(5.0, dtype=torch.float64))},
    ),
    "anymax.nn.Router.balance": (balanced, {"k": (2, 3), "num_experts": (4, 5), "method": ("quantile", "sign")}),
    "anymax.nn.MarginHead.probabilities": (probabilities, {"sub_centers": (1, 2)}),
}  # fmt: skip


def test_every_function_with_a_group_has_a_row():
    assert set(functions_with_a_group()) == set(EVERY) - set(BY_OPTIONS)


def ways_to_differ(name):
    """(what differs, the call of process r) of a function, besides its own options: its map, the dtype, the rows, who learns."""
    call, options = EVERY[name]
    x = FEATURES if "linear" in name or not name.startswith("anymax.distributed") else SCORES
    if "logsumexp" not in name:
        yield "the map", lambda g, r: call(g, "entmax15" if r else "softmax", x)
    yield "the dtype", lambda g, r: call(g, "softmax", x.float() if r else x)
    if name not in ROWS_MAY_DIFFER:
        yield "the rows", lambda g, r: call(g, "softmax", x[r:])
    if "linear" in name or name.startswith(("anymax.contrastive", "anymax.nn.MarginHead")):
        yield "who learns", lambda g, r: call(g, "softmax", x.clone().requires_grad_() if r else x)
    for option, values in options.items():
        yield option, lambda g, r, o=option, v=values: call(g, "softmax", x, **{o.strip(): v[r]})


DIFFERENCES = [(name, what) for name in EVERY for what, _ in ways_to_differ(name)]


def disagreement(name, what, group):
    """What this process is told where one of two calls the function otherwise, after both have called it alike."""
    call, words = dict(ways_to_differ(name))[what], "nothing"
    call(group, 0)
    try:
        call(group, group.rank)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        words = f"{type(error).__name__}: {error}"
    return words


def is_clear(name, texts):
    """All processes are told the same, by the function's name, and which of them differ."""
    who = name.removeprefix("anymax.").removesuffix(".probabilities").replace("nn.Router", "routing")
    return (
        len(set(texts)) == 1
        and who in texts[0]
        and re.search("process 0.*process 1|process 1: |class_count=5", texts[0])
    )


@pytest.mark.parametrize(("name", "what"), DIFFERENCES)
def test_each_function_says_what_differs(name, what):
    texts = together(2, lambda group: disagreement(name, what, group))
    assert is_clear(name, texts), texts
