"""torch: dtypes, autocast, graphs, strides, empty tensors, and what torch refuses."""

from __future__ import annotations

import numpy as np
import pytest
from torch_cases import MAPS, D, T, every_map, every_row_map, its_own_warnings, leaf, of, scores, square_of

torch = pytest.importorskip("torch")

import anymax as A
from anymax import Budget, Entmax, NormMax, PerturbMax, Sparsemax, SparseSoftmax

pytestmark = its_own_warnings


# -- the manners of a tensor -----------------------------------------------------------------------------------------------------------


@pytest.mark.whole(lambda dtype: dtype == torch.float16)
@every_map
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_halves_are_computed_in_fp32(name, dtype):
    x = scores(19).to(dtype).requires_grad_()
    p = A.apply(MAPS[name], x)
    assert p.dtype == dtype
    (p.float() * torch.arange(6)).sum().backward()
    assert x.grad.dtype == dtype
    wide = x.detach().double().requires_grad_()
    q = A.apply(MAPS[name], wide)
    (q * torch.arange(6)).sum().backward()
    eps = float(torch.finfo(dtype).eps)
    torch.testing.assert_close(p.double(), q, rtol=eps, atol=max(1e-7 if dtype != torch.float32 else 1e-6, 1e-6))
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=0, atol=16 * eps)


@pytest.mark.parametrize(
    "name", ["softmax", "sparsemax", "entmax1.5", "entmax1.25", "normmax", "taylor", "perturb_max"]
)
def test_autocast(name):
    """A map keeps bf16, as torch.softmax does on a CPU; a loss is fp32, as torch's are."""
    mapping, layer = MAPS[name], torch.nn.Linear(6, 6)
    x = scores(20).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = layer(x)
        p = A.apply(mapping, h)
        loss = (A.fenchel_young if mapping.facts.has_potential else A.nll)(mapping, h, T)
    assert h.dtype == p.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    want = (A.fenchel_young if mapping.facts.has_potential else A.nll)(mapping, h.float(), T)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
    loss.backward()
    assert layer.weight.grad.isfinite().all()
    assert layer.weight.grad.any()


@every_map
def test_no_graph_is_kept_without_a_gradient(name):
    x = leaf(21)
    with torch.no_grad():
        p = A.apply(MAPS[name], x)
    assert p.grad_fn is None
    assert not p.requires_grad
    q = A.apply(MAPS[name], x.detach())
    assert q.grad_fn is None
    with torch.inference_mode():
        r = A.apply(MAPS[name], scores(21))
    assert r.is_inference()
    torch.testing.assert_close(p, q)
    torch.testing.assert_close(p, r.clone())


def test_no_graph_is_kept_for_a_parameter_without_a_gradient():
    alpha = torch.tensor(1.5, requires_grad=True)
    with torch.no_grad():
        assert not A.entmax(scores(), alpha).requires_grad
    assert A.entmax(scores(), alpha).requires_grad


@every_map
def test_leaves_and_versions_are_left_alone(name):
    x = leaf(22)
    before, version = x.detach().clone(), x._version
    A.apply(MAPS[name], x).sum().backward()
    assert x._version == version
    assert x.is_leaf
    assert x.requires_grad
    assert torch.equal(x, before)


@every_row_map
def test_strides_and_axes(name):
    x = scores(23, (4, 6, 3))
    want = A.apply(MAPS[name], x.transpose(1, 2).contiguous())
    torch.testing.assert_close(A.apply(MAPS[name], x, 1).transpose(1, 2), want)
    torch.testing.assert_close(A.apply(MAPS[name], x, dim=-2).transpose(1, 2), want)
    torch.testing.assert_close(A.apply(MAPS[name], x.transpose(1, 2)), want)
    wide = scores(24, (4, 12))
    torch.testing.assert_close(A.apply(MAPS[name], wide[:, ::2]), A.apply(MAPS[name], wide[:, ::2].contiguous()))
    row = scores(25, (6,))
    torch.testing.assert_close(A.apply(MAPS[name], row.expand(4, 6)), A.apply(MAPS[name], row).expand(4, 6))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    weights = scores(26, (4, 6, 3))
    (A.apply(MAPS[name], a, 1) * weights).sum().backward()
    (A.apply(MAPS[name], b.transpose(1, 2)) * weights.transpose(1, 2)).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
    assert A.apply(MAPS[name], torch.zeros(0, 6, dtype=D)).shape == (0, 6)


@every_row_map
def test_out(name):
    x = scores(27)
    out = torch.full_like(x, torch.nan)
    assert A.apply(MAPS[name], x, out=out) is out
    torch.testing.assert_close(out, A.apply(MAPS[name], x))
    with pytest.raises(ValueError, match="out= can't be used where a gradient is asked for"):
        A.apply(MAPS[name], leaf(27), out=out)
    with torch.no_grad():
        A.apply(MAPS[name], leaf(27), out=out)


def test_out_must_fit():
    with pytest.raises(ValueError, match=r"expected shape \(3, 6\)"):
        A.softmax(scores(), out=torch.zeros(3, 5, dtype=D))
    with pytest.raises(ValueError, match=r"torch\.float64"):
        A.softmax(scores(), out=torch.zeros(3, 6))
    with pytest.raises(TypeError, match="expected a writable Tensor"):
        A.softmax(scores(), out=np.zeros((3, 6)))


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax1.25", "taylor", "perturb_max"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(name, reentrant):
    from torch.utils.checkpoint import checkpoint

    a, b = leaf(28), leaf(28)
    (checkpoint(of(name), a, use_reentrant=reentrant) ** 2).sum().backward()
    square_of(name)(b).backward()
    torch.testing.assert_close(a.grad, b.grad)


def test_a_gradient_twice_through_one_graph():
    x = leaf(29)
    p = A.sparsemax(x)
    p[0, 0].backward(retain_graph=True)
    first = x.grad.clone()
    p[0, 0].backward()
    torch.testing.assert_close(x.grad, 2 * first)


def test_a_subclass_and_a_parameter():
    w = torch.nn.Parameter(scores(30))
    A.entmax15(w).pow(2).sum().backward()
    assert w.grad is not None
    assert type(A.entmax15(w)) is torch.Tensor


def test_the_dtype_argument():
    assert A.softmax(scores().half(), dtype=torch.float32).dtype == torch.float32
    assert A.sparsemax(torch.tensor([1, 2]), dtype=torch.float64).dtype == D
    assert A.sparsemax(torch.tensor([1, 2])).dtype == torch.get_default_dtype()


def test_meta_tensors_give_shapes():
    x = torch.empty(3, 6, device="meta")
    for name in ("softmax", "taylor"):
        assert A.apply(MAPS[name], x).shape == (3, 6)


@pytest.mark.parametrize("op", ["forward", "vjp", "hold"])
@pytest.mark.parametrize(
    "name", ["sparsemax", "entmax1.25", "entmax_rows", "entmax3", "budget", "normmax", "perturb_max"]
)
def test_opcheck(op, name):
    from anymax.autodiff.torch_operations import spec_of

    mapping = MAPS[name]
    x = scores(31)
    params, spec = list(mapping.params().values()), spec_of(mapping)
    p = A.apply(mapping, x)
    args = {"forward": (x, params, spec), "vjp": (x, p, scores(32), params, spec), "hold": (x, params, spec)}[op]
    torch.library.opcheck(getattr(torch.ops.anymax, op).default, args, raise_exception=True)
    strided = tuple(a.transpose(0, 1).contiguous().transpose(0, 1) if a is x else a for a in args)
    torch.library.opcheck(getattr(torch.ops.anymax, op).default, strided, test_utils="test_faketensor")


# -- what torch refuses, and what it once refused without saying why -----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    "f",
    [
        lambda x: A.entmax(x, 3.0),
        lambda x: A.sparse_softmax(x, p=0.8),
        lambda x: A.topp(0.8)(x),
        lambda x: A.sparse_softmax(x, p=1.0),
    ],
)
def test_jit_trace(f):
    x, y = scores(34), scores(35, (5, 6))
    torch.testing.assert_close(torch.jit.trace(f, x)(y), f(y))


def test_out_of_inference_mode_is_refused_as_torch_refuses_it():
    x = scores(36)
    with torch.inference_mode():
        out = torch.zeros_like(x)
        assert A.softmax(x, out=out) is out
    for options in ({}, {"mask": x > 0}, {"axis": 0}):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
            A.softmax(x, out=out, **options)


def test_a_batch_of_parameters_along_a_later_axis():
    x, alpha = torch.randn(3, 5, 7, dtype=torch.float64), 1.2 + torch.rand(5, 1, 3, dtype=torch.float64)
    y = torch.tensor([0, 3, 6, 2, 2])

    def loss(x, alpha):
        return A.entmax_loss(x, y, alpha=alpha)

    got = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, 2))(x, alpha)
    for i in range(3):
        want = torch.func.grad(loss, argnums=(0, 1))(x[i], alpha[..., i])
        torch.testing.assert_close([got[0][i], got[1][i]], list(want))


def test_the_price_of_a_budget():
    x = torch.tensor([[2.0, 1.9, 1.5, -1.0], [3.0, 2.5, 2.2, 0.1]], dtype=torch.float64)
    k = torch.tensor([[2.0], [2.0]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0]], dtype=torch.float64)
    A.fenchel_young(Budget(k), x, y, reduction="sum").backward()
    # Omega* = max of <p, x> - |p|^2 / 2 + k / 2 over the p of mass k, by differences of p itself
    value = lambda k: (x * (p := A.budget(x, k)) - p * p / 2).sum(-1, keepdim=True) + k / 2  # noqa: E731
    h = 1e-4
    torch.testing.assert_close(k.grad, (value(k.detach() + h) - value(k.detach() - h)) / (2 * h), atol=1e-6, rtol=0)


# -- no rows ---------------------------------------------------------------------------------------------------------------------------


def _no_rows(mapping, x):
    """Every verb on no rows at all."""
    t, y = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 5)
    yield A.apply(mapping, x)
    yield A.apply(mapping, x, mask=torch.ones(0, 5, dtype=torch.bool))
    yield A.log_apply(mapping, x)
    yield A.nll(mapping, x, t)
    yield A.likelihood.kl(mapping, x, "softmax", y)
    yield A.log_prob(mapping, x, t)
    yield A.linear_log_prob(x, torch.ones(7, 5), t, mapping)
    if not isinstance(mapping, Budget):
        targets = (t,) if isinstance(mapping, SparseSoftmax) else (t, y)  # a nucleus has no loss of distributions
        yield from (A.fenchel_young(mapping, x, target, reduction="none") for target in targets)
    if not isinstance(mapping, PerturbMax):
        yield A.threshold(mapping, x).tau
    yield A.sample(mapping, x, return_log_prob=True).log_prob


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Entmax, 1.5),
        (NormMax, 2.0),
        (Budget, 2.0),
        (lambda p: SparseSoftmax(p=p), 0.5),
        (lambda s: PerturbMax(scale=s), 1.0),
    ],
    ids=["entmax", "normmax", "budget", "sparse_softmax", "perturb_max"],
)
def test_no_rows_with_a_tensor_for_a_parameter(kind, value, learns):
    """In evaluation too, where a parameter that learns is a constant."""
    mapping = kind(torch.tensor(value, requires_grad=learns))
    for out in _no_rows(mapping, x := torch.zeros(0, 5, requires_grad=True)):
        assert not out.numel() or out == 0
        if out.requires_grad:
            (gradient,) = torch.autograd.grad(out.sum(), x)
            assert gradient.shape == (0, 5)
    with torch.no_grad():
        assert all(not out.numel() or out == 0 for out in _no_rows(mapping, x))


def test_no_rows_among_the_other_axes():
    for shape in ((4, 0, 6), (0, 3, 6)):
        x = torch.zeros(shape)
        assert A.logsumexp(x).shape == shape[:-1]
        assert A.threshold(Sparsemax(), x).tau.shape == shape[:-1]
    alpha = torch.tensor([[[1.5]], [[1.3]]])  # of each head
    q, k = torch.zeros(0, 2, 5, 4), torch.zeros(0, 2, 6, 4)
    assert A.attention(q, k, k, Entmax(alpha)).shape == (0, 2, 5, 4)


X, META = torch.zeros(3, 5), {"device": "meta"}
CLASSES = torch.zeros(3, dtype=torch.int64)
ELSEWHERE = {
    "mask": lambda: A.sparsemax(X, mask=torch.ones(3, 5, dtype=torch.bool, **META)),
    "target": lambda: A.sparsemax_loss(X, CLASSES.to("meta")),
    "target, a distribution": lambda: A.sparsemax_loss(X, torch.ones(3, 5, **META)),
    "weight": lambda: A.cross_entropy(X, CLASSES, weight=torch.ones(5, **META)),
    "target, of log p": lambda: A.log_prob("softmax", X, CLASSES.to("meta")),
    "target, a margin": lambda: A.margin_loss("softmax", X, CLASSES.to("meta")),
    "target, many labels": lambda: A.multilabel_softmax_loss(X, torch.ones(3, 5, **META)),
    "bias": lambda: A.routing.route(X, 2, bias=torch.ones(5, **META)),
    "index": lambda: A.routing.route(X, 2, index=torch.zeros(3, 2, dtype=torch.int64, **META)),
    "rows": lambda: A.Sinkhorn(5)(X, rows=torch.ones(3, **META)),
    "support: ids": lambda: A.log_prob("softmax", X, CLASSES, support=(CLASSES.to("meta"), torch.arange(4, **META))),
    "b": lambda: A.contrastive_loss(X, X.to("meta")),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_operand_on_another_device(name):
    with pytest.raises(
        ValueError, match=f"^.*{name.split(',')[0]} is on meta, the call's other arrays are on cpu; move one of them"
    ):
        ELSEWHERE[name]()


def test_one_number_in_the_memory_of_the_cpu_goes_where_the_scores_are():
    target = torch.zeros((), dtype=torch.int64)
    assert A.sparsemax_loss(torch.zeros(5, **META), target).device.type == "meta"
