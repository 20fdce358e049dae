"""Odd tensors and arguments of modules: one sentence each, in words of ours."""

import pytest
from refusals import each, one_sentence, said
from test_first_guesses import X, Y, same

torch = pytest.importorskip("torch")

import anymax as am

x, y, SPARSE = torch.tensor(X), torch.tensor(Y), torch.tensor(X).to_sparse()
DENSE = "must be a dense tensor, got a sparse one; call its to_dense()"
PADDED = "a dense tensor, got a nested one; pad it, and say mask=, or use a verb on segments such as anymax.segment_log_apply"
OTHER = "mask: got a torch tensor for scores of another framework; convert one of them"


def nested(**options):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], **options)


def jax_array(a):
    return pytest.importorskip("jax").numpy.asarray(a)


def packed():
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("torch has no such dtype")
    return torch.empty(2, dtype=torch.float4_e2m1fn_x2)


ODD = said(
    (TypeError, ValueError),
    (lambda: am.cross_entropy(x, y.to_sparse()), f"target {DENSE}"),
    (lambda: am.softmax(nested()), "apply takes nested tensors of the layout torch.jagged; make it with"),
    (lambda: am.softmax(SPARSE, mask=x > 0), DENSE),
    (lambda: am.sparsemax(nested(layout=torch.jagged), mask=x > 0), PADDED),
    (lambda: am.softmax([x, x]), "got a list of tensors; make one of them: torch.stack(x)"),
    (lambda: am.softmax([[x[0, 0].clone().requires_grad_()]]), "got a list of tensors"),
    (lambda: am.softmax(X, mask=x > 0), OTHER),
    (lambda: am.softmax(jax_array(X), mask=x > 0), "mask: got a torch tensor for scores of another framework"),
    (lambda: am.softmax(x, mask=jax_array(X > 0)), "mask: got a JAX array for scores of torch; convert one of them"),
    (lambda: am.softmax(x, dtype="nonsense"), "dtype: expected a floating-point dtype such as 'float32', got 'nonsense'"),
    (lambda: am.softmax(X, dtype=torch.complex64), "dtype: expected a floating-point dtype such as 'float32', got torch.complex64"),
    (lambda: am.softmax(packed()), "float4_e2m1fn_x2 holds two numbers in each entry; unpack them to float32 first"),
    (lambda: am.nn.Activation("entmax", learn="alpha", bounds=2), "bounds must be a pair (low, high), got 2"),
    (lambda: am.nn.Activation("sparsemax", axis=1), "Activation has no option 'axis' (say dim=)"),
    (lambda: am.nn.MarginHead(3, 0), "MarginHead: num_classes must be at least 1, got 0"),
    (lambda: am.nn.MarginHead(3, "a"), "MarginHead: num_classes must be an integer, got 'a'"),
    (lambda: am.nn.LinearLoss(-3, 4), "LinearLoss: in_features must be at least 1, got -3"),
    (lambda: am.nn.Loss("sparsemax", size_average=True), "Loss has no option 'size_average' (say reduction='mean'"),
    (lambda: am.nn.Loss("sparsemax", weight="a"), "weight: expected an array or a list of numbers, got 'a'"),
    (lambda: am.nn.Loss(), "Loss: the map is missing; write Loss(anymax.Softmax())"),
    (lambda: am.nn.Categorical(logits=x), "the map is missing; write Categorical(anymax.Softmax(), scores)"),
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@each(ODD)
def test_an_odd_tensor_is_one_sentence(call, error, words):
    one_sentence(call, error, words)


VERBS = {
    "log_softmax": am.log_softmax, "logsumexp": am.logsumexp, "entropy": am.entropy, "support": am.support,
    "jacobian": lambda v: am.jacobian("sparsemax", v), "threshold": lambda v: am.threshold("softmax", v),
    "sample": lambda v: am.sample("softmax", v, generator=0), "cross_entropy": lambda v: am.cross_entropy(v, y),
    "sparsemax_loss": lambda v: am.sparsemax_loss(v, y), "temperature": am.temperature(2.0), "explain": lambda v: am.explain("softmax", v),
}  # fmt: skip
LAYOUTS = {
    "sparse": (lambda: SPARSE, DENSE),
    "sparse rows": (x.to_sparse_csr, DENSE),
    "sparse, with a gradient": (lambda: x.to_sparse().requires_grad_(), DENSE),
    "nested": (nested, PADDED),
    "jagged": (lambda: nested(layout=torch.jagged), PADDED),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("verb", VERBS)
def test_a_layout_that_is_not_taken(verb, layout):
    make, words = LAYOUTS[layout]
    ((call, error, words),) = said((TypeError, ValueError), (lambda: VERBS[verb](make()), words)).values()
    one_sentence(call, error, words)


def test_loss_modules_take_weights_as_a_list():
    weight = [1.0, 2.0, 3.0]
    same(am.nn.Loss("softmax", weight=weight)(x, y), am.nn.Loss("softmax", torch.tensor(weight))(x, y))
