"""Output layers: scores of half precision in fp32, rows that depend on no other, bit for bit, padding, and predicted classes."""

from __future__ import annotations

import numpy as np
import pytest
from kinds import KINDS, back
from laws import close, same
from linear_cases import made, operands, torch_operands

import anymax as A
from anymax.linear import bridge, layer, torch_blocks
from anymax.linear.arguments import INVARIANT_SUPPORT

MAPS = {
    "softmax": A.Softmax(), "entmax15": A.Entmax(1.5), "sparsemax": A.Sparsemax(), "topk": A.SparseSoftmax(k=4),
    "sink": A.Sink("softmax", score=0.3),
}  # fmt: skip
OF_ROWS = {
    "loss": lambda x, w, y, m, **k: A.linear_loss(x, w, y, m, reduction="none", **k),
    "log p": A.linear_log_prob,
    "entropy": lambda *a, **k: A.linear_log_prob_entropy(*a, **k)[1],
    "tau": lambda x, w, y, m, **k: A.linear.linear_threshold(x, w, m, **k).tau,
    "divergence": lambda x, w, y, m, **k: A.linear_kl(x, w, x, 0.5 * w, m, beta=0.4, **k),
}
ALL_KINDS = [kind for kind in KINDS if kind != "strict"]  # which has no half precision
every_kind = pytest.mark.parametrize("kind", ALL_KINDS)
every_verb = pytest.mark.parametrize("verb", OF_ROWS)


def halves(kind, dtype="bfloat16", rows=20, classes=300, features=64):
    """Features, a weight and classes; the first two also in fp64."""
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(rows, features)), rng.normal(size=(classes, features)) / 4
    if kind == "torch":
        torch = pytest.importorskip("torch")
        own = [torch.tensor(a).to(getattr(torch, dtype)) for a in (x, weight)]
        return own, [a.double().numpy() for a in own], torch.tensor(rng.integers(classes, size=rows))
    if kind == "jax":
        jax = pytest.importorskip("jax")
        own = [jax.numpy.asarray(a, dtype) for a in (x, weight)]
    else:
        own = [a.astype(dtype) for a in (x, weight)]
    return own, [np.asarray(a, np.float64) for a in own], KINDS[kind](rng.integers(classes, size=rows))


# -- the dtype of scores ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["cpu", "gpu"])
def device(request, monkeypatch):
    """A CPU, or what a GPU does: operands stay in half precision."""
    if request.param == "gpu":
        monkeypatch.setattr(torch_blocks, "on_gpu", lambda x: True)
        monkeypatch.setattr(layer, "on_cpu", lambda x: False)
    return request.param


@pytest.mark.parametrize("given", [{}, {"chunk": 70}, {"invariant": True}], ids=str)
@pytest.mark.parametrize("kind", [kind for kind in ALL_KINDS if kind != "numpy"])
@every_verb
def test_scores_of_half_precision_are_in_fp32(verb, kind, given, device):
    own, exact, y = halves(kind)
    got = OF_ROWS[verb](*own, y, A.Softmax(), **given)
    close(np.asarray(back(got), np.float64), OF_ROWS[verb](*exact, np.asarray(back(y)), A.Softmax()), 1e-5)


@pytest.mark.parametrize(
    "given", [{}, {"chunk": 70}, {"invariant": True}, {"transform": A.transforms.softcap(30.0)}], ids=str
)
@every_kind
@every_verb
def test_scores_are_rounded_for_who_wants_it(verb, kind, given, device):
    """The values are those of rounded scores, in each framework and on each device."""
    dtype = "float16" if kind == "numpy" else "bfloat16"
    own, (x, weight), y = halves(kind, dtype)
    torch = pytest.importorskip("torch")
    scores = (torch.tensor(x).float() @ torch.tensor(weight).float().T).to(getattr(torch, dtype)).double().numpy()
    eye = np.eye(scores.shape[1])
    want = OF_ROWS[verb](
        scores, eye, np.asarray(back(y)), A.Softmax(), **{k: v for k, v in given.items() if k == "transform"}
    )
    full = OF_ROWS[verb](*own, y, A.Softmax(), **given)
    for named in (dtype, getattr(torch, dtype)):
        got = np.asarray(back(OF_ROWS[verb](*own, y, A.Softmax(), score_dtype=named, **given)), np.float64)
        close(got, want, 2e-2 if kind == "jax" else 2e-3)  # a sum in another order may round to the next number
        assert (got != np.asarray(back(full), np.float64)).any()


@pytest.mark.parametrize("name", ["softmax", "entmax15", "topk"])
def test_gradients_of_rounded_scores(name, device):
    """They are those of the rounded scores, off by their own rounding at most."""
    torch = pytest.importorskip("torch")
    (x, weight), _, y = halves("torch")
    free = [x.requires_grad_(), weight.requires_grad_()]
    for reduction in ("mean", "none"):
        s = (x.float() @ weight.float().T).detach().bfloat16().double().requires_grad_()
        want = A.linear_loss(s, torch.eye(s.shape[1], dtype=s.dtype), y, MAPS[name], reduction=reduction)
        (slope,) = torch.autograd.grad(want.sum(), s)
        got = A.linear_loss(*free, y, MAPS[name], reduction=reduction, score_dtype="bfloat16")
        for a, b in zip(torch.autograd.grad(got.sum(), free), (slope @ weight.double(), slope.T @ x.double())):
            assert (a - b).norm() <= 2.0**-6 * b.norm()


def test_a_device_multiplies_into_fp32_where_torch_can(monkeypatch):
    """As on a GPU, where `torch.mm(out_dtype=)` exists; elsewhere the operands are cast."""
    torch = pytest.importorskip("torch")
    (x, weight), exact, y = halves("torch")
    monkeypatch.setattr(torch_blocks, "on_gpu", lambda x: True)
    monkeypatch.setattr(layer, "on_cpu", lambda x: False)
    monkeypatch.setattr(torch_blocks, "_multiplies_into", lambda *of: True)
    mm, asked = torch.mm, []

    def of_gpu(a, b, *, out=None, out_dtype=None):
        if out_dtype is None:
            return mm(a, b, out=out) if out is not None else mm(a, b)
        assert a.dtype is b.dtype is torch.bfloat16
        assert not torch.is_grad_enabled() or not (a.requires_grad or b.requires_grad)
        asked.append(out_dtype)
        return mm(a.to(out_dtype), b.to(out_dtype), out=out)

    monkeypatch.setattr(torch, "mm", of_gpu)
    free = [x.requires_grad_(), weight.requires_grad_()]
    for given in (
        {},
        {"reduction": "none"},
        {"chunk": 50},
        {"mapping": "entmax15", "chunk": 50},
        {"mapping": "taylor"},
    ):
        asked.clear()
        value = A.linear_loss(*free, y, **given)
        torch.autograd.grad(value.sum(), free)
        assert set(asked) == {torch.float32}, given
        close(value.detach().double(), A.linear_loss(*exact, y.numpy(), **given), 1e-5)


@pytest.mark.parametrize(
    ("dtype", "wanted", "error"),
    [
        ("float32", "bfloat16", "score_dtype must be float32 for scores of a product in float32, got 'bfloat16'"),
        ("float64", "float32", "score_dtype must be float64 for scores of a product in float64, got 'float32'"),
        ("bfloat16", "float16", "score_dtype must be float32, or bfloat16 to round them, for scores of a product in bfloat16"),
        ("bfloat16", "int8", "score_dtype: expected a floating-point dtype"),
    ],
)  # fmt: skip
def test_dtypes_of_scores_that_make_no_sense(dtype, wanted, error):
    (x, weight), _, y = halves("torch", dtype)
    for call in OF_ROWS.values():
        with pytest.raises((ValueError, TypeError), match=error):
            call(x, weight, y, A.Softmax(), score_dtype=wanted)


# -- rows that depend on no other ------------------------------------------------------------------------------------------------------


@pytest.mark.whole(lambda shape, dtype: shape != (64, 300) or dtype != "float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(7, 5), (17, 8), (64, 300), (100, 1001)])
@pytest.mark.parametrize("name", MAPS)
@every_kind
def test_a_row_has_the_same_bits_among_any_others(kind, name, shape, dtype):
    """In NumPy and torch the library of products sums the rows of small and large batches in different orders."""
    (x, weight), _, y = halves(
        kind, "float16" if kind == "numpy" and dtype == "bfloat16" else dtype, 150, shape[1], shape[0]
    )
    threads = (1, 2) if kind == "torch" else (None,)
    for verb in OF_ROWS.values():
        for count in threads:
            if count:
                torch = pytest.importorskip("torch")
                before = torch.get_num_threads()
                torch.set_num_threads(count)
            try:
                of_all = np.asarray(back(verb(x, weight, y, MAPS[name], invariant=True)))
                for rows, chunk in (
                    ([0], None),
                    ([137], 3),
                    ([5, 9, 137], 1),
                    (range(149, 60, -1), 1000),
                    (range(65), None),
                ):
                    at = np.asarray(rows)
                    got = np.asarray(back(verb(x[at], weight, y[at], MAPS[name], invariant=True, chunk=chunk)))
                    assert got.tobytes() == of_all[at].tobytes(), (len(at), chunk, count)
            finally:
                if count:
                    torch.set_num_threads(before)


@pytest.mark.whole(lambda kind: kind == "jax")
@pytest.mark.parametrize("warm", [False, True])
@every_kind
def test_a_row_of_two_layers_has_the_same_bits_among_any_others(kind, warm):
    """The smaller tile counts, and a temperature of a row alone is one of several."""
    (x, weight), _, y = halves(kind, "float32", 150, 300, 64)
    (x_ref, weight_ref), _, _ = halves(kind, "float32", 150, 300, 7)
    warmth = abs(x[:, 1]) + 0.5

    def kl(x, weight, x_ref, weight_ref):
        bias = {"linear_bias": weight[:, 0]} if warm else {}
        return lambda at, **how: A.linear_kl(
            x[at], weight, x_ref[at], weight_ref, where=warmth[at] < 1.5, **bias, **how
        )

    log_p = lambda at, **how: A.linear_log_prob(x[at], weight, y[at], **how)  # noqa: E731
    for verb in (kl(x, weight, x_ref, weight_ref), kl(x_ref, weight_ref, x, weight), log_p):
        whole = None
        for rows in (range(150), [0], [137], [5, 9, 137], range(149, 60, -1), range(65)):
            at = np.asarray(rows)
            given = {"temperature": warmth[at]} if warm else {}
            of_rows = back(verb(at, invariant=True, chunk=len(at), **given))
            whole = of_rows if whole is None else whole
            assert of_rows.tobytes() == whole[at].tobytes(), len(at)


def test_a_mean_of_divergences_of_such_rows():
    """A tile is filled up with rows that do not count."""
    torch, free, _ = torch_operands(rows=70)
    of = *free[:2], 0.5 * free[0], free[1].roll(1, 0)
    there = torch.arange(70) % 9 != 4
    for given in ({}, {"where": there}, {"temperature": torch.linspace(0.5, 2.0, 70, dtype=torch.float64)}):
        got, want = (
            A.linear_kl(*of, "entmax15", beta=0.5, invariant=i, reduction="mean", **given) for i in (True, False)
        )
        close(got.detach(), want.detach(), 1e-10)
        for a, b in zip(*(torch.autograd.grad(v, free[:2], retain_graph=True) for v in (got, want))):
            close(a, b, 1e-10)


def test_without_it_bits_depend_on_the_batch():
    """Else the option would be of no use on this machine."""
    (x, weight), _, y = halves("torch", "float32", 150, 300, 64)
    of_all = A.linear_log_prob(x, weight, y)
    alone = [A.linear_log_prob(x[i : i + 1], weight, y[i : i + 1])[0] for i in range(150)]
    assert any(a != b for a, b in zip(alone, of_all))


@pytest.mark.parametrize("name", ["softmax", "entmax15", "taylor"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradients_of_such_rows(name, reduction):
    torch, free, y = torch_operands(rows=70)
    y[3] = -100
    mask = torch.arange(70)[:, None] % 60 != torch.arange(60)
    for given in ({}, {"mask": mask}, {"transform": A.transforms.softcap(2.0)}):
        given |= {"linear_bias": free[2], "reduction": reduction}
        got, want = (A.linear_loss(*free[:2], y, name, invariant=i, **given) for i in (True, False))
        close(got.detach(), want.detach(), 1e-10)
        finite = torch.isfinite(want)
        for a, b in zip(*(torch.autograd.grad(torch.where(finite, v, 0.0).sum(), free) for v in (got, want))):
            close(a.nan_to_num(), b.nan_to_num(), 1e-10)


def test_such_rows_in_a_program():
    """Under torch.compile and jax.jit, whose programs are of one batch, the values are right, and bits those of the batch's rows."""
    torch = pytest.importorskip("torch")
    (x, weight), _, y = halves("torch", "float32")
    log_p = torch.compile(
        lambda x, y: A.linear_log_prob(x, weight, y, invariant=True), backend="aot_eager", fullgraph=True
    )
    want = A.linear_log_prob(x, weight, y, invariant=True)
    assert torch.equal(log_p(x, y), want)
    assert torch.equal(log_p(x[:3], y[:3]), want[:3])
    jax = pytest.importorskip("jax")
    (x, weight), _, y = halves("jax", "float32", 150)
    program = jax.jit(lambda x, y: A.linear_log_prob(x, weight, y, invariant=True))
    assert (program(x[:3], y[:3]) == program(x, y)[:3]).all()


def test_a_tile_is_as_large_as_bits_allow(monkeypatch):
    monkeypatch.setattr(bridge, "_tried", {})
    x, weight, *_ = operands(rows=3)
    one = layer.Layer.of("f", x, weight, "softmax", None, None)
    last = lambda x, weight: (x @ weight.T) + (np.arange(len(x)) >= 48)[:, None]  # noqa: E731
    assert bridge.rows_of_tile(one, last) == 16
    assert bridge.rows_of_tile(one, None) == 16  # it is known
    assert bridge.rows_of_tile(one, lambda x, weight: x[:, :1] + np.arange(len(x))[:, None], "alike") == 1
    assert bridge.rows_of_tile(one, lambda x, weight: np.zeros((len(x), 5)), "zeros") == bridge.TILE
    assert len(bridge._tried) == 2


def test_what_explains_a_call_knows_the_tile(monkeypatch):
    x, weight, _, y, *_ = operands(rows=20)
    steps, in_turn = [], bridge.in_turn
    monkeypatch.setattr(bridge, "rows_of_tile", lambda *of: 8)
    monkeypatch.setattr(bridge, "in_turn", lambda job, step: steps.append(step) or in_turn(job, step))
    A.linear_loss(x, weight, y, invariant=True)
    assert steps == [8]
    assert A.linear.explain_linear_loss(x, weight, y, invariant=True) == "all 60 scores of 8 rows at a time"


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_no_such_rows_and_weights_whose_rows_lie_apart(kind):
    """The shapes are those of no other test: which tile is right is remembered for each."""
    rng = np.random.default_rng(0)
    weight = made(kind, rng.normal(size=(11, 6)))[0]
    for name, rows in (("loss", 0), ("log p", 0), ("entropy", 0), ("tau", 0), ("loss", 3)):
        x, y = made(kind, np.zeros((rows, 6)), np.full(rows, -100))
        assert not back(OF_ROWS[name](x, weight, y, A.Softmax(), invariant=True)).any() if name != "tau" else True
    wide, x, y = made(kind, rng.normal(size=(64, 9)), rng.normal(size=(130, 64)), rng.integers(0, 9, 130))
    apart = wide.T
    whole = back(A.linear_loss(x, apart, y, invariant=True, reduction="none"))
    for i in (0, 5, 77, 129):
        one = back(A.linear_loss(x[i : i + 1], apart, y[i : i + 1], invariant=True, reduction="none"))
        np.testing.assert_array_equal(one, whole[i : i + 1])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
@pytest.mark.parametrize("support", [None, [[0, 2], [1], [2, 3], [0]]], ids=["all", "a support"])
def test_padding_of_nan_has_no_gradient_in_a_program(support):
    torch = pytest.importorskip("torch")
    x, weight = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    x[1] = torch.nan
    x.requires_grad_()
    y = torch.tensor([2, -100, 2, 0])

    def total(x, weight):
        log_p, h = A.linear_log_prob_entropy(x, weight, y, support=support)
        return log_p.nan_to_num(0, 0, 0).sum() + h.sum()

    f = total if support else torch.compile(total, backend="aot_eager")
    for gradient in torch.autograd.grad(f(x, weight), (x, weight)):
        assert gradient.isfinite().all()
        assert gradient[0].any()


def test_such_rows_have_no_support():
    x, weight, _, y, *_ = operands()
    support = (np.arange(len(x)), np.arange(len(x) + 1))
    for verb in (A.linear_log_prob, A.linear_log_prob_entropy):
        with pytest.raises(ValueError, match=INVARIANT_SUPPORT[:40]):
            verb(x, weight, y, support=support, invariant=True)
    with pytest.raises(ValueError, match=INVARIANT_SUPPORT[:40]):
        A.linear_kl(x, weight, x, weight, support=support, invariant=True)
    with pytest.raises(TypeError, match="invariant must be True or False"):
        A.linear_loss(x, weight, y, invariant=1)


# -- padding ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [{}, {"chunk": 16}, {"invariant": True}, {"temperature": 0.7}, {"support": True}], ids=str
)
@pytest.mark.parametrize("name", ["softmax", "entmax15", "topk", "taylor"])
@every_kind
def test_padding_has_no_statistics(kind, name, given):
    mapping = A.Taylor(2) if name == "taylor" else MAPS[name]
    x, weight, bias, y, *_ = operands()
    y[[2, 5]] = -100
    a, w, b, t = made(kind, x, weight, bias, y)
    if "support" in given:
        given = {"support": tuple(made(kind, np.tile(np.arange(60), 7), np.arange(8) * 60))}
    log_p, h = (np.asarray(back(v)) for v in A.linear_log_prob_entropy(a, w, t, mapping, linear_bias=b, **given))
    alone = np.asarray(back(A.linear_log_prob(a, w, t, mapping, linear_bias=b, **given)))
    for value in (log_p, h, alone):
        same(value[[2, 5]], np.zeros(2))
        assert (value[[0, 1, 3, 4, 6]] != 0).all()


@pytest.mark.parametrize("name", ["softmax", "entmax15", "topk", "taylor"])
def test_padding_has_no_gradient(name):
    """Not even where its features are NaN."""
    mapping = A.Taylor(2) if name == "taylor" else MAPS[name]
    torch, free, y = torch_operands()
    y[[2, 5]] = -100
    with torch.no_grad():
        free[0][2] = torch.nan
    for given in ({}, {"chunk": 16}, {"invariant": True}):
        log_p, h = A.linear_log_prob_entropy(*free[:2], y, mapping, linear_bias=free[2], **given)
        total = torch.where(log_p.isfinite(), log_p, 0.0).sum() + h.sum()
        dx, *others = torch.autograd.grad(total, free)
        same(dx[[2, 5]].numpy(), np.zeros((2, dx.shape[1])))
        assert all(bool(a.isfinite().all()) for a in others)


# -- predicted classes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [{}, {"chunk": 16}, {"invariant": True}, {"mask": True}, {"label_smoothing": 0.1}], ids=str
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ["softmax", "entmax15", "topk", "sink", "taylor"])
@every_kind
def test_predicted_classes(kind, name, reduction, given):
    mapping = A.Taylor(2) if name == "taylor" else MAPS[name]
    if name == "topk" and "label_smoothing" in given:
        pytest.skip("sparse softmax has no smoothed loss with scores outside")
    x, weight, bias, y, _, keep = operands(rows=9)
    y[2] = -100
    if "mask" in given:
        keep[y[y >= 0]] = True
        given = {"mask": np.broadcast_to(keep, (9, 60)).copy()}
        given["mask"][4] = False
        given["mask"][4, y[4]] = True
    s = x @ weight.T + bias
    best = np.where(given.get("mask", True), s, -np.inf)
    if name == "sink":
        best = np.concatenate([best, np.full((9, 1), 0.3)], 1)
    best = best.argmax(1)
    best = np.where((y < 0) | (best == 60), -1, best)
    a, w, b, t = made(kind, x, weight, bias, y)
    given = {k: KINDS[kind](v) if isinstance(v, np.ndarray) else v for k, v in given.items()}
    loss, classes = A.linear_loss(a, w, t, mapping, linear_bias=b, reduction=reduction, return_predicted=True, **given)
    same(np.asarray(back(classes)), best)
    want = A.linear_loss(a, w, t, mapping, linear_bias=b, reduction=reduction, **given)
    close(np.asarray(back(loss), np.float64), np.asarray(back(want), np.float64), 1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["softmax", "entmax15", "sink", "taylor"])
def test_predicted_classes_beside_a_gradient(name, reduction):
    mapping = A.Taylor(2) if name == "taylor" else MAPS[name]
    torch, free, y = torch_operands(rows=80)
    y[7] = -100
    loss, classes = A.linear_loss(
        *free[:2], y, mapping, linear_bias=free[2], reduction=reduction, return_predicted=True
    )
    want = A.linear_loss(*free[:2], y, mapping, linear_bias=free[2], reduction=reduction)
    assert not classes.requires_grad
    assert not classes.is_floating_point()
    for a, b in zip(*(torch.autograd.grad(v.sum(), free) for v in (loss, want))):
        close(a, b, 1e-10)
    soft = torch.softmax(torch.randn(80, 60, generator=torch.Generator().manual_seed(0)).double(), 1)
    loss, again = A.linear_loss(
        *free[:2], soft, mapping, linear_bias=free[2], reduction=reduction, return_predicted=True
    )
    assert torch.equal(again[y >= 0], classes[y >= 0])
    loss.sum().backward()


def test_predicted_classes_of_a_module():
    """Also where rows depend on no other, whose log p has a support in which they do."""
    torch = pytest.importorskip("torch")
    for given in ({}, {"invariant": True, "bias": True, "label_smoothing": 0.1, "reduction": "none"}):
        head = A.nn.LinearLoss(4, 30, "entmax15", return_predicted=True, **given)
        x, y = torch.randn(2, 5, 4), torch.randint(30, (2, 5))
        y[0, 3] = -100
        loss, classes = head(x, y)
        same(classes, torch.where(y < 0, -1, head.scores(x).argmax(-1)))
        other = A.nn.LinearLoss(4, 30, "entmax15", **given)
        other.load_state_dict(head.state_dict())
        close(loss.detach(), other(x, y).detach(), 1e-6)
        loss.sum().backward()
        assert head.weight.grad.any()
        support = torch.arange(30).repeat(10), torch.arange(11) * 30
        close(head.log_prob(x, y, support).detach().exp(), head.log_prob(x, y).detach().exp(), 1e-5)


def test_predicted_classes_of_other_shapes():
    x, weight, _, y, *_ = operands(rows=6)
    loss, classes = A.linear_loss(x.reshape(2, 3, -1), weight, y.reshape(2, 3), return_predicted=True)
    same(classes, (x @ weight.T).argmax(1).reshape(2, 3))
    jax = pytest.importorskip("jax")
    mean = jax.jit(jax.value_and_grad(lambda x: A.linear_loss(x, weight, y, return_predicted=True), has_aux=True))
    (value, of_jax), _ = mean(jax.numpy.asarray(x))
    same(np.asarray(of_jax), classes.reshape(-1))
    close(float(value), float(loss), 1e-5)
    torch = pytest.importorskip("torch")
    given = [torch.tensor(a) for a in (x, weight, y)]
    of_program = torch.compile(lambda *a: A.linear_loss(*a, return_predicted=True), backend="aot_eager", fullgraph=True)
    same(of_program(*given)[1].numpy(), classes.reshape(-1))
    with pytest.raises(TypeError, match="return_predicted must be True or False"):
        A.linear_loss(x, weight, y, return_predicted=1)


# -- scores that are held for the gradient ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 64])
def test_scores_are_computed_once_where_they_take_little_memory(chunk, monkeypatch):
    """In several tiles of rows and blocks of classes; `chunk` turns it off."""
    small = torch_blocks.CPU._replace(small=1, little=1, block_rows=8, block=8 * 64)
    monkeypatch.setattr(torch_blocks, "CPU", small)
    torch, free, y = torch_operands(rows=30, classes=300)
    free = [torch.randn(n, 64, dtype=torch.float64).div(4).requires_grad_() for n in (30, 300)]
    product, calls = torch_blocks.product, []
    monkeypatch.setattr(torch_blocks, "product", lambda *of: calls.append(of[0].shape[0]) or product(*of))
    s = (free[0] @ free[1].T).detach().requires_grad_()
    for verb in (
        lambda *o, **k: sum(A.linear_log_prob_entropy(*o, **k)),
        lambda *o, **k: A.linear_loss(*o, reduction="none", **k),
    ):
        calls.clear()
        got = verb(*free, y, chunk=chunk)
        first = len(calls)
        assert first >= 4 * 5
        found = torch.autograd.grad(got.sum(), free, retain_graph=True)
        assert len(calls) == first * (1 if chunk is None else 2)
        (slope,) = torch.autograd.grad(verb(s, torch.eye(300, dtype=s.dtype), y).sum(), s)
        for again in (found, torch.autograd.grad(got.sum(), free)):
            close(again[0], slope @ free[1].detach(), 1e-10)
            close(again[1], slope.T @ free[0].detach(), 1e-10)
