"""Output layers whose weight or features are DTensors: the numbers and gradients of one tensor."""

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from processes import all_right

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="no gloo"
)

PLACED = """
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
import anymax as A
mesh = init_device_mesh("cpu", (2, 2) if size == 4 else (2,))
g = torch.Generator().manual_seed(0)
x, W, b = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((3, 4, 5), (11, 5), (11,)))
t = torch.randint(0, 11, (3, 4), generator=g)
t[1, 1] = -1
ids = torch.stack([(t.clamp(min=0) + k) % 11 for k in (0, 3, 5)], -1)
log_q = torch.log(torch.tensor([0.5, 0.2, 0.1], dtype=torch.float64)).expand(3, 4, 3)
y, V, c = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((3, 4, 6), (11, 6), (11,)))
filled = torch.arange(22).repeat(6) % 11, torch.arange(13) * 11
w, keep = torch.rand(11, generator=g, dtype=torch.float64), torch.ones(3, 4, 11, dtype=torch.bool)
keep[..., 2] = False
t[t == 2] = 3
T = torch.linspace(0.5, 2.0, 12, dtype=torch.float64).reshape(3, 4)
held = [torch.randperm(11, generator=g)[: i % 5] for i in range(12)]  # and every third row has its token
held = [h if i % 3 else torch.unique(torch.cat([h, t.flatten()[i : i + 1].clamp(min=0)])) for i, h in enumerate(held)]
kept = torch.cat(held), torch.tensor([0, *map(len, held)]).cumsum(0)
wide = torch.nn.utils.rnn.pad_sequence(held, batch_first=True, padding_value=-1).reshape(3, 4, -1)  # the same
cap = A.transforms.softcap(torch.tensor(1.7, dtype=torch.float64))
shares = torch.softmax(torch.randn(3, 4, 11, generator=g, dtype=torch.float64), -1)
def whole(v):
    return v.full_tensor() if isinstance(v, DTensor) else v
def parts(v):
    return v if isinstance(v, tuple) else (v,)
calls = [
    lambda x, W, b: A.linear_log_prob_entropy(x, W, t, linear_bias=b, temperature=0.7),
    lambda x, W, b: A.linear_log_prob_entropy(x, W, t, linear_bias=b, temperature=T, mask=keep),
    lambda x, W, b: A.linear_log_prob(x, W, t, "sparsemax"),
    lambda x, W, b: A.linear_topk_kl(x, W, ids, log_q, linear_bias=b, tail="one class", direction="reverse"),
    lambda x, W, b: A.linear_loss(x, W, t, linear_bias=b, ignore_index=-1),
    lambda x, W, b: A.linear_loss(x, W, t, "entmax15", linear_bias=b, ignore_index=-1, weight=w, reduction="sum"),
    lambda x, W, b: A.linear_loss(x, W, t, ignore_index=-1, weight=w, mask=keep),
    lambda x, W, b: A.linear_loss(x, W, shares, "sparsemax", reduction="none"),
    lambda x, W, b: A.linear_log_prob_entropy(x, W, t, "entmax15", linear_bias=b, support=kept, temperature=T),
    lambda x, W, b: sum(A.linear_log_prob_entropy(x, W, t, linear_bias=b, support=wide, full=True, transform=cap), ()),
    lambda x, W, b: A.linear_log_prob(x, W, t, linear_bias=b, support=[h.tolist() for h in held]),
    lambda x, W, b: A.linear_topk_kl(x, W, ids, log_q, linear_bias=b, transform=A.compose(cap, A.temperature(1.3))),
    lambda x, W, b: A.linear_loss(x, W, t, linear_bias=b, ignore_index=-1, weight=w, z_loss=0.3, transform=cap),
    lambda x, W, b: A.linear_loss(x, W, t, "sparsemax", linear_bias=b, ignore_index=-1, suppress=0.4, reduction="sum"),
    lambda x, W, b: A.linear_loss(x, W, t, A.Sink("entmax15", 0.3), linear_bias=b),  # -1 is the sink
    lambda x, W, b: A.linear_loss(x, W, 0.7 * shares, A.Sink(), linear_bias=b, reduction="none"),
    lambda x, W, b: A.linear_log_prob_entropy(x, W, t, A.Sink("sparsemax", 0.3), linear_bias=b),
    lambda x, W, b: A.linear_kl(x, W, 2 * x, W, linear_bias=b, linear_bias_ref=0.5 * b, temperature=T, where=t > 4, transform=cap),
    lambda x, W, b: A.linear_kl(y, V, x, W, "entmax15", beta=0.3, linear_bias=c, linear_bias_ref=b, mask=keep),
    lambda x, W, b: A.linear_kl(x, W, y, V, beta=1, linear_bias=b, linear_bias_ref=c, where=t > 4, reduction="mean"),
    lambda x, W, b: A.linear_kl(x, W, y, V, linear_bias=b, reduction="sum", support=filled),
    lambda x, W, b: A.linear_loss(x, W, t, linear_bias=b, ignore_index=-1, least=0, invariant=False, return_predicted=False),
    lambda x, W, b: A.linear_kl(x, W, y, V, linear_bias=b, beta=0.3, invariant=False),
]
R, S = (Replicate(),), (Shard(0),)
places = [(R, S), (S, R), ((Shard(1),), S), (None, S), (S, None)]
if size == 4:
    places = [((Shard(0), Replicate()), (Replicate(), Shard(0))), ((Replicate(), Shard(1)), (Shard(0), Shard(0)))]
for of_x, of_w in places:
    for i, f in enumerate(calls):
        free = [v.clone().requires_grad_() for v in (x, W, b)]
        spread = [v.clone() if p is None else distribute_tensor(v.clone(), mesh, p) for v, p in ((x, of_x), (W, of_w), (b, of_w))]
        spread = [v.requires_grad_() for v in spread]
        want, got = f(*free), f(*spread)
        used = [True, True, i not in (2, 6, 7)]
        for one, other in zip(parts(got), parts(want)):
            assert isinstance(one, DTensor), (i, of_x, of_w)
            one = whole(one.detach())
            assert torch.allclose(one.exp(), other.detach().exp(), rtol=1e-9, atol=1e-11), (i, of_x, of_w, one, other)
        sums = [sum(torch.where(torch.isfinite(whole(v)), whole(v), 0.0).square().sum() for v in parts(r)) for r in (got, want)]
        grads = [torch.autograd.grad(s, [v for v, u in zip(given, used) if u]) for s, given in zip(sums, (spread, free))]
        for k, (one, other) in enumerate(zip(*grads)):
            assert torch.allclose(whole(one), other, rtol=1e-8, atol=1e-9), (i, of_x, of_w, k, whole(one), other)
half = DTensor.from_local(W / 2, mesh, [Partial()] * mesh.ndim)
apart = distribute_tensor(W, mesh, [Shard(0)] * mesh.ndim)
for call, words in (
    (lambda: A.linear_loss(x, half, t, ignore_index=-1), "linear_weight is Partial"),
    (lambda: A.linear_log_prob_entropy(x, apart, t, support=(ids, t)), "support must be ids, one axis of class indices"),
    (lambda: A.contrastive_loss(half, half), "a is Partial"),
    (lambda: A.contrastive_loss(apart, W, group=mesh), "leave group= out"),
    (lambda: A.linear_loss(x, apart, t, least=0.1), "over several processes the gradient is always exact"),
    (lambda: A.linear_log_prob(x, apart, t.clamp(min=0), transform=A.topk(3)), "the scores of a row are on several processes"),
    (lambda: A.linear.linear_threshold(x, apart), "linear_threshold takes no DTensor as linear_weight"),
):
    try:
        call()
    except (TypeError, ValueError) as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)
few = [torch.randn(n, 5, generator=g, dtype=torch.float64) for n in (8, 11)]
left = torch.rand(8, 11, generator=g) < 0.7
for of_a, of_b in ((S, S), (S, R), (R, None), (None, S)):
    for kind, pairs, more in (
        ("softmax", 8, {}), ("entmax15", 8, {"bidirectional": False, "reduction": "sum"}), ("softmax", 8, {"reduction": "none"}),
        ("softmax", 11, {"mask": left}), ("entmax15", 11, {"mask": left[0]}), ("sparsemax", 8, {"mask": left[:, :8]}),
    ):
        free = [v.clone().requires_grad_() for v in (few[0], few[1][:pairs], torch.tensor(0.4, dtype=torch.float64))]
        spread = [v.detach() if p is None else distribute_tensor(v.detach(), mesh, list(p) + [Replicate()] * (mesh.ndim - 1))
                  for v, p in zip(free, (of_a, of_b, None))]
        spread = [v.clone().detach().requires_grad_() for v in spread]
        want, got = (A.contrastive_loss(a, b, temperature=T, mapping=kind, **more) for a, b, T in (free, spread))
        assert isinstance(got, DTensor)
        assert torch.allclose(whole(got.detach()), want.detach(), rtol=1e-9), (kind, of_a, of_b)
        weights = torch.arange(1.0, 1.0 + want.numel(), dtype=torch.float64).reshape(want.shape)
        grads = [torch.autograd.grad((whole(v) * weights).sum(), leaves) for v, leaves in ((got, spread), (want, free))]
        for k, (one, other) in enumerate(zip(*grads)):
            assert torch.allclose(whole(one), other, rtol=1e-8, atol=1e-10), (kind, of_a, of_b, k, whole(one), other)
learned = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
for of_x, of_w in places[:3]:  # the gradient of a parameter of a transform
    spread = [v if p is None else distribute_tensor(v.clone(), mesh, p) for v, p in ((x, of_x), (W, of_w))]
    call = lambda x, W: A.linear_loss(x, W, t, ignore_index=-1, transform=A.compose(A.transforms.softcap(learned)))
    want, got = (torch.autograd.grad(whole(call(*given)), learned)[0] for given in ((x, W), spread))
    assert torch.allclose(want, got, rtol=1e-8), (of_x, of_w, want, got)
print("right")
dist.destroy_process_group()
"""


@pytest.mark.whole
@pytest.mark.parametrize("size", [2, 4])
def test_every_placement(size):
    all_right(size, PLACED)
