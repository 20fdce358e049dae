"""tau over a vocabulary that is split over processes, and its square as a loss: values and gradients are those of one process, in fp64."""

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from processes import together
from test_distributed import cut, numbers, same
from test_distributed_jax import right
from test_distributed_tokens import MAPS, SIZES, N, compare, derived, operands

import anymax as A
from anymax import distributed as D
from anymax.distributed import candidates

THRESHOLDS = {name: mapping for name, mapping in MAPS.items() if mapping.has_threshold} | {"entmax08": A.Entmax(0.8)}


@pytest.fixture(params=[False, True], ids=["gathered", "searched"])
def many(request, monkeypatch):
    """True: the level is searched by sums over the processes, where that can be done."""
    if request.param:
        monkeypatch.setattr(candidates, "MANY", 8)


@pytest.mark.thin(4)
@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("name", THRESHOLDS)
def test_tau_of_a_split_layer(name):
    mapping, (*_, keep, _) = THRESHOLDS[name], operands()
    for mask in (None, keep):
        compare(
            lambda x, w, b, m: A.linear.linear_threshold(x, w, mapping, linear_bias=b, mask=m).tau,
            lambda group, start, chunk, x, w, b, m: (
                D.linear_threshold(
                    x, w, mapping, linear_bias=b, mask=m, group=group, class_start=start, chunk=chunk
                ).tau
            ),
            mask=mask,
        )


@pytest.mark.thin(4)
@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("name", [name for name in THRESHOLDS if name not in ("budget", "topp")])
def test_the_loss_of_tau_squared(name):
    mapping, (*_, target) = THRESHOLDS[name], operands()
    given = {"ignore_index": -1, "z_loss": 0.3}
    for more in ({}, {"transform": A.transforms.softcap(2.0), "reduction": "none"}):
        compare(
            lambda x, w, b, m: A.linear_loss(x, w, target, mapping, linear_bias=b, **given, **more),  # noqa: B023
            lambda group, start, chunk, x, w, b, m: D.linear_loss(
                x, w, target, mapping, linear_bias=b, group=group, class_start=start, chunk=chunk, **given, **more  # noqa: B023
            ),
        )  # fmt: skip


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("verb", ["threshold", "linear_threshold"])
def test_a_learned_alpha(verb):
    alpha, x, w = numbers(9, 2, 3, 1).abs() % 0.8 + 1.1, numbers(1, 2, 3, 5), numbers(2, N, 5)
    if verb == "threshold":
        whole = lambda a, s: A.threshold(A.Entmax(a), s).tau  # noqa: E731
        split = lambda g, a, s: D.threshold(A.Entmax(a), s, group=g).tau  # noqa: E731
        leaves, part = (alpha, x @ w.T), lambda rank: cut(x @ w.T, SIZES, rank)
    else:
        whole = lambda a, w: A.linear.linear_threshold(x, w, A.Entmax(a)).tau  # noqa: E731
        split = lambda g, a, w: D.linear_threshold(x, w, A.Entmax(a), group=g).tau  # noqa: E731
        leaves, part = (alpha, w), lambda rank: cut(w.T, SIZES, rank).T
    (want,), gradients = derived(whole, *leaves)
    found = together(3, lambda g: derived(lambda a, o: split(g, a, o), alpha, part(g.rank)))
    for (value,), (of_alpha, _) in found:
        same(value, want)
        same(of_alpha, gradients[0], rtol=1e-8, atol=1e-9)
    same(torch.cat([g[1] for _, g in found], -1 if verb == "threshold" else 0), gradients[1], rtol=1e-8, atol=1e-9)


@pytest.mark.usefixtures("many")
def test_the_support_is_that_of_all_classes():
    x, weight, bias, keep, _ = operands()
    want = A.linear.linear_threshold(x, weight, "entmax15", linear_bias=bias, mask=keep)
    assert want.support[1, 1] == 0

    def one(group):
        w, b, m = cut(weight.T, SIZES, group.rank).T, cut(bias, SIZES, group.rank), cut(keep, SIZES, group.rank)
        return D.linear_threshold(x.bfloat16(), w.bfloat16(), "entmax15", group=group).tau.dtype, D.linear_threshold(
            x, w, "entmax15", linear_bias=b, mask=m, group=group
        )

    for dtype, got in together(3, one):
        assert dtype is torch.float32
        same(got.tau, want.tau)
        assert (got.support == want.support).all()
    with pytest.raises(TypeError, match="taylor has no threshold"):
        together(2, lambda g: D.linear_threshold(x, numbers(2, 4, 5), "taylor", group=g))


@pytest.mark.whole
def test_devices_of_jax():
    if importlib.util.find_spec("jax") is None:
        pytest.skip("needs JAX")
    right("""
    x, w, b = (jnp.asarray(rng.normal(size=s)) for s in ((2, 3, 6), (40, 6), (40,)))
    t = jnp.asarray(rng.integers(0, 40, (2, 3)))
    def values(module, mapping, x, w, b, **given):
        tau = (D if given else A.linear).linear_threshold(x, w, mapping, linear_bias=b, **given).tau
        return tau.sum() + module.linear_loss(x, w, t, mapping, linear_bias=b, z_loss=0.3, **given)
    for mapping in ("softmax", "entmax15", "normmax"):
        split = jax.shard_map(lambda *a: values(D, mapping, *a, axis_name="classes"), mesh=mesh,
                              in_specs=(P(), P("classes"), P("classes")), out_specs=P())
        both = lambda f: jax.jit(jax.value_and_grad(f, (0, 1, 2)))
        got, got_grads = both(split)(x, w, b)
        want, want_grads = both(lambda *a: values(A, mapping, *a))(x, w, b)
        for one, other in zip((got, *got_grads), (want, *want_grads), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-9)
    """)
