"""Output layers whose classes are on several processes: the values and gradients of one process from all scores, in fp64."""

import importlib.util
import inspect
import math

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from processes import together
from shard_cases import (
    INF,
    KEEP,
    KEPT,
    LAYER_CELLS,
    LAYER_CUTS,
    OPERANDS,
    SUPPORT,
    TARGET,
    TEACHER,
    TEACHER_LOG_P,
    TWO,
    Cut,
    Here,
    N,
    exact,
    finite,
    held,
    layer_case,
    numbers,
    same,
)  # fmt: skip

import anymax as A
from anymax import distributed as D
from anymax._array import namespace
from anymax.distributed import methods
from anymax.distributed.per_row import SupportPart
from anymax.linear.layer import Layer

CUT = LAYER_CUTS["20-0-17"]
X, WEIGHT, BIAS = (a for a, _ in OPERANDS)

# -- each verb of several maps -------------------------------------------------------------------------------------------------------

SHORT = {  # the cells of the short battery, in groups of rows
    ("loss", "softmax"), ("loss", "entmax by row"), ("loss, none", "sink of entmax15"), ("loss, weights", "softmax"),
    ("loss, weights", "sink of softmax by row"), ("loss, weights and mask", "taylor"), ("loss, soft", "entmax15"),
    ("loss, soft", "sink of softmax by row"), ("log_prob_entropy", "softmax"), ("log_prob_entropy", "sink of entmax15"),
    ("log_prob", "entmax15"), ("support", "softmax"), ("support", "entmax15"), ("kl, one class, forward", "softmax"),
    ("kl, ignore, reverse", "entmax15"), ("kl, one class, reverse", "taylor"), ("cap, loss", "entmax15"), ("cap, kl", "softmax"),
    ("cap, support", "softmax"), ("z_loss, weights", "softmax"), ("suppress, none", "sparsemax"), ("tau", "entmax by row"),
    ("tau, masked", "softmax"), ("tau squared, none", "entmax15"),
}  # fmt: skip


@pytest.mark.whole(lambda verb, name, cut: (verb, name) not in SHORT or cut == "20-0-17")
@pytest.mark.parametrize("cut", LAYER_CUTS)
@pytest.mark.parametrize(("verb", "name"), LAYER_CELLS)
def test_each_verb(verb, name, cut):
    f, leaves = layer_case(verb, name)
    held(f, leaves, LAYER_CUTS[cut])


@pytest.mark.whole(lambda verb, name, cut: (verb, name) not in SHORT or cut == "20-0-17")
@pytest.mark.parametrize("cut", LAYER_CUTS)
@pytest.mark.parametrize(("verb", "name"), [(verb, name) for verb, name in LAYER_CELLS if verb.startswith("tau")])
def test_levels_that_are_searched_for_with_sums(verb, name, cut, monkeypatch):
    monkeypatch.setattr(methods, "MANY", 8)
    held(*layer_case(verb, name), LAYER_CUTS[cut])


def test_what_the_rows_of_the_tables_have():
    """-inf outside of a support and where no class is, 0 where nothing was drawn, and further losses that are not 0."""

    def one_process(verb, name):
        f, leaves = layer_case(verb, name)
        return f(Here(), *[a for a, _ in leaves])

    log_p, h, *_ = one_process("support", "softmax")
    assert log_p[0, 2] == log_p[1, 1] == -INF
    assert log_p[1, 0] == h[1, 1] == 0
    assert torch.isfinite(log_p[0, :2]).all()
    log_p, h = one_process("log_prob_entropy", "softmax")
    assert log_p[1, 1] == log_p[1, 2] == -INF
    assert log_p[1, 0] == h[1, 1] == 0
    for verb, name in (("z_loss, none", "softmax"), ("suppress, none", "sparsemax")):
        assert one_process(verb, name)[1].abs().max() > 1e-3


# -- of a support ----------------------------------------------------------------------------------------------------------------------


def test_each_process_reads_the_rows_of_its_classes_only():
    """All other rows of the weight are NaN; one process has no class of the support, and another no class at all."""
    outside = torch.ones(N, dtype=torch.bool).index_fill(0, SUPPORT[0], False)
    weight = WEIGHT.clone()
    weight[outside] = math.nan

    def one(group):
        a, w = X.clone().requires_grad_(), Here(Cut((10, 0, 3, 24)), group).part(weight, 0).clone().requires_grad_()
        log_p, h = D.linear_log_prob_entropy(a, w, TARGET, support=SUPPORT, group=group)
        return log_p.detach(), *torch.autograd.grad(log_p.sum() + h.sum(), [a, w])

    found = together(4, one)
    for log_p, of_x, _ in found:
        assert not log_p.isnan().any()
        assert torch.isfinite(of_x).all()
    of_weight = torch.cat([w for _, _, w in found])
    assert torch.isfinite(of_weight).all()
    assert not of_weight[outside].any()
    assert of_weight[[3, 22]].any()  # of the row of token -1, by its entropy


def test_a_process_gathers_as_many_columns_as_its_fullest_row_needs():
    layer = Layer.of("support", X, WEIGHT[:20], "softmax", None, None, of_shard=True)
    part = SupportPart.of("support", layer, TARGET.reshape(-1, 1), SUPPORT, 0, N, True, namespace(X))
    assert part.classes.shape == (6, 4)  # 20, 4, 7, 19 and 36, of which 4, 7 and 19 are here, and an empty place
    assert part.width == 6
    assert part.there.sum(1).tolist() == [2, 2, 1, 1, 0, 3]
    assert part.here[:, 0].tolist() == [True, True, False, False, True, False]


# -- dtypes, rows and masses ------------------------------------------------------------------------------------------------------------

HALF = {  # of operands in half precision
    "log_prob_entropy": lambda here, x, w, b: here.call(
        "linear_log_prob_entropy", x, w, TARGET, "softmax", linear_bias=b, mask=here.part(KEEP)
    ),
    "support": lambda here, x, w, b: here.call("linear_log_prob_entropy", x, w, TARGET, "softmax", linear_bias=b, support=SUPPORT),
    "kl": lambda here, x, w, b: here.call(
        "linear_topk_kl", x, w, TEACHER, TEACHER_LOG_P.to(x.dtype), "softmax", linear_bias=b, tail="one class"
    ),
    "tau": lambda here, x, w, b: here.call("linear_threshold", x, w, "entmax15", linear_bias=b).tau,
}  # fmt: skip


@pytest.mark.parametrize("verb", HALF)
def test_half_precision(verb):
    """Values in fp32, gradients in the dtype of the weight."""
    want = HALF[verb](Here(), *[a.bfloat16().double() for a in (X, WEIGHT, BIAS)])

    def one(group):
        here = Here(LAYER_CUTS["20-0-17 by 4 classes"], group)
        x, w, b = (here.part(a, axis).bfloat16().requires_grad_() for a, axis in OPERANDS)
        values = HALF[verb](here, x, w, b)
        values = values if isinstance(values, tuple) else (values,)
        (gradient,) = torch.autograd.grad(sum(finite(v).sum() for v in values), w)
        assert gradient.dtype is torch.bfloat16
        assert torch.isfinite(gradient).all()
        for got, value in zip(values, want if isinstance(want, tuple) else (want,), strict=True):
            assert got.dtype is torch.float32
            same(got.detach(), value, rtol=0.03, atol=0.03)

    together(3, one)


NONE = torch.zeros(0, dtype=torch.long)
NO_ROWS = {  # a layer of 7 classes and no rows
    "loss": lambda here, x, w, b: here.call("linear_loss", x, w, NONE.reshape(0, 3), "softmax", linear_bias=b, reduction="none"),
    "loss of entmax": lambda here, x, w, b: here.call("linear_loss", x, w, NONE.reshape(0, 3), "entmax15", linear_bias=b, reduction="none"),
    "loss, weights": lambda here, x, w, b: here.call(
        "linear_loss", x, w, NONE.reshape(0, 3), "softmax", linear_bias=b, reduction="none", weight=here.part(torch.ones(7))
    ),
    "loss of entmax, weights": lambda here, x, w, b: here.call(
        "linear_loss", x, w, NONE.reshape(0, 3), "entmax15", linear_bias=b, reduction="none", weight=here.part(torch.ones(7))
    ),
    "log_prob_entropy": lambda here, x, w, b: here.call("linear_log_prob_entropy", x, w, NONE.reshape(0, 3), "softmax", linear_bias=b),
    "kl": lambda here, x, w, b: here.call(
        "linear_topk_kl", x, w, NONE.reshape(0, 3, 2), torch.zeros(0, 3, 2), "softmax", linear_bias=b, tail="one class"
    ),
    "support": lambda here, x, w, b: here.call(
        "linear_log_prob_entropy", x, w, NONE.reshape(0, 3), "softmax", linear_bias=b, support=(NONE, torch.zeros(1, dtype=torch.long))
    ),
}  # fmt: skip


@pytest.mark.parametrize("verb", NO_ROWS)
def test_a_layer_of_no_rows(verb):
    """Everything that learns has zeros as its gradient."""

    def one(group):
        here = Here(Cut((4, 0, 3)), group)
        x, w, b = (
            a.requires_grad_()
            for a in (torch.zeros(0, 3, 5), here.part(torch.ones(7, 5), 0).clone(), here.part(torch.zeros(7)).clone())
        )
        values = NO_ROWS[verb](here, x, w, b)
        values = values if isinstance(values, tuple) else (values,)
        assert {v.shape for v in values} == {(0, 3)}
        for a, g in zip((x, w, b), torch.autograd.grad(sum(v.sum() for v in values), [x, w, b]), strict=True):
            assert g.shape == a.shape
            assert not g.any()

    together(3, one)


def test_forms_of_a_support():
    rows = torch.tensor([[*kept, *[-1] * (5 - len(kept))] for kept in KEPT])

    def one(group):
        here, given = Here(CUT, group).part(WEIGHT, 0), []
        for support in (SUPPORT, [*KEPT], [*map(list, KEPT)], rows, rows.reshape(2, 3, 5)):
            given.append(D.linear_log_prob(X, here, TARGET, support=support, group=group))
        assert all(torch.equal(given[0], one) for one in given)
        assert torch.isfinite(given[0]).any()

    together(3, one)


def test_a_support_without_classes():
    empty = NONE, torch.zeros(7, dtype=torch.long)

    def one(group):
        log_p = D.linear_log_prob(X, Here(CUT, group).part(WEIGHT, 0), TARGET, support=empty, group=group)
        assert torch.equal(log_p == -INF, TARGET >= 0)

    together(3, one)


@pytest.mark.parametrize("gap", [30.0, 200.0])
def test_the_mass_of_the_other_classes_is_a_sum_of_its_own(gap):
    """1 minus the mass of the given classes would be 0 here, and so would exp of the distance from the maximum."""
    weight, ids, log_p = (
        torch.tensor([[gap], [gap - 1.0], [1.0], [0.5], [0.0]]),
        torch.tensor([[0, 1]]),
        torch.tensor([[0.6, 0.3]]).log(),
    )
    w = weight.double().requires_grad_()
    want = A.linear_topk_kl(torch.ones(1, 1).double(), w, ids, log_p.double(), tail="one class")
    (gradient,) = torch.autograd.grad(want.sum(), w)

    def one(group):
        here = Here(Cut((2, 3)), group)
        w = here.part(weight, 0).clone().requires_grad_()
        value = D.linear_topk_kl(torch.ones(1, 1), w, ids, log_p, group=group, tail="one class")
        same(value.detach(), want.detach(), rtol=2e-6)
        same(torch.autograd.grad(value.sum(), w)[0], here.part(gradient, 0), rtol=1e-5, atol=1e-6)

    together(2, one)


SOFT = torch.softmax(numbers(9, 2, 3, N), -1) * KEEP
LOST_ROWS = {
    "z_loss, soft": ("softmax", SOFT, {"z_loss": 1.0}),
    "z_loss": ("softmax", TARGET, {"z_loss": 1.0}),
    "suppress": ("sparsemax", TARGET, {"suppress": 1.0}),
}


@pytest.mark.parametrize("name", LOST_ROWS)
def test_a_row_without_classes_has_no_further_loss(name):
    """Its other loss is 0 if its target is a distribution without mass, and else infinite."""
    mapping, target, more = LOST_ROWS[name]

    def f(here, w):
        t = here.part(target) if target is SOFT else target
        return here.call(
            "linear_loss", X, w, t, mapping, mask=here.part(KEEP), reduction="none", ignore_index=-1, **more
        )

    (value,) = held(f, [(WEIGHT, 0)], CUT)
    assert value[1, 1] == (0 if target is SOFT else INF)


@pytest.mark.parametrize("many", [False, True], ids=["gathered", "searched"])
def test_the_support_is_that_of_all_classes(many, monkeypatch):
    if many:
        monkeypatch.setattr(methods, "MANY", 8)

    def f(here, x, w, b):
        return tuple(here.call("linear_threshold", x, w, "entmax15", linear_bias=b, mask=here.part(KEEP)))

    assert held(f, OPERANDS, CUT)[1][1, 1] == 0


# -- of a sink -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"tail": "one class"}, {"tail": "one class", "direction": "reverse"}], ids=str)
def test_a_teacher_of_a_layer_with_a_sink(more):
    """No class, as everywhere, is not the sink."""

    def f(here, x, w, b, score):
        if here.group is None:
            wide = torch.cat([x @ w.T + b, score.expand(2, 3, 1)], -1)
            return A.topk_kl(wide, TEACHER, TEACHER_LOG_P, **more)
        return here.call("linear_topk_kl", x, w, TEACHER, TEACHER_LOG_P, A.Sink(score=score), linear_bias=b, **more)

    held(f, [*OPERANDS, (exact(0.4), None)], CUT)


def test_a_further_loss_of_a_layer_with_a_sink():
    held(
        lambda here, x, w, b: here.call("linear_loss", x, w, TARGET, A.Sink(), linear_bias=b, z_loss=0.1), OPERANDS, TWO
    )


# -- keywords --------------------------------------------------------------------------------------------------------------------------


class Halved(A.transforms.Transform):
    name = "halved"
    elementwise = True

    def rows(self, x, xp):
        return x / 2


def test_a_transform_of_ones_own():
    f = lambda here, x, w: here.call("linear_loss", x, w, TARGET.clamp(0), "softmax", transform=Halved())  # noqa: E731
    held(f, OPERANDS[:2], TWO)


ONLY_HERE = {"group", "axis_name", "class_start", "class_count"}
OF_ONE_PROCESS = {"score_dtype", "invariant"}
NOT_HERE = {
    "linear_loss": {"least", "return_predicted"} | OF_ONE_PROCESS, "linear_log_prob": OF_ONE_PROCESS,
    "linear_log_prob_entropy": OF_ONE_PROCESS, "linear_threshold": OF_ONE_PROCESS, "linear_kl": OF_ONE_PROCESS,
}  # fmt: skip


@pytest.mark.parametrize("verb", [verb for verb in D.__all__ if verb.startswith("linear_")])
def test_keywords_are_those_of_one_process(verb):
    """But for those that say in their docstring why they are not here."""
    here, there = (inspect.signature(getattr(module, verb)).parameters for module in (D, A.linear))
    assert set(here) - set(there) == ONLY_HERE
    assert set(there) - set(here) == NOT_HERE.get(verb, set())
    for name in NOT_HERE.get(verb, ()):
        assert f"`{name}`" in getattr(D, verb).__doc__
    for name in set(here) & set(there) - {"mapping"}:
        assert here[name].default == there[name].default, name
