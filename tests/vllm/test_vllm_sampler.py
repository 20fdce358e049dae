"""vLLM's top-k and top-p in our hands: `apply_top_k_top_p`, `sample`, and `install`, which puts them into its place."""

import inspect
import math

import numpy as np
import pytest

import anymax

torch = pytest.importorskip("torch")

import vllm_stand_in as stand_in

from anymax import vllm
from anymax.vllm import installing, sampler


def held(row, k, p):
    """Which classes are kept, one row, by sorting: an oracle that shares no code."""
    row = row.double().numpy()
    if not np.isfinite(row[row > -math.inf]).all():
        return row > -math.inf
    order = np.argsort(-row, kind="stable")
    order = order[row[order] > -math.inf]
    if k is not None and 1 <= k < len(row):
        order = order[:k]
    if p is not None and p < 1.0 and len(order):
        mass = np.exp(row[order] - row[order[0]])
        before = np.cumsum(mass) - mass
        order = order[: max(int((before < p * mass.sum()).sum()), 1)]
    keep = np.zeros(len(row), bool)
    keep[order] = True
    return keep


def scores(rows, n, dtype=torch.float32, seed=0):
    return (torch.randn(rows, n, generator=torch.Generator().manual_seed(seed)) * 2.5).to(dtype)


K, P = torch.tensor([5, 0, -1, 1, 7, 10**6], dtype=torch.int32), torch.tensor([1.0, 0.8, 0.5, 1.5, 0.9, 0.0])
GIVEN = {"k": (K, None), "p": (None, P), "both": (K, P), "int64": (K.long(), P.double())}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 37, 1000])
@pytest.mark.parametrize("given", GIVEN)
def test_what_is_kept(engine, dtype, n, given):
    k, p = GIVEN[given]
    x = scores(6, n, dtype)
    if n > 1:
        x[2, 0], x[3, 1:] = -math.inf, -math.inf
    before = x.clone()
    y = vllm.apply_top_k_top_p(x, k, p)
    assert y.dtype == dtype
    for r in range(6):
        keep = held(before[r], None if k is None else int(k[r]), None if p is None else float(p[r]))
        wrong = (y[r] > -math.inf).numpy() != keep
        # in fp32 a class at the very edge may fall to either side
        assert wrong.sum() <= (0 if dtype == torch.float64 or p is None else 1)
        kept = y[r] > -math.inf
        assert torch.equal(y[r][kept], before[r][kept])


def test_scores_are_written_over_as_by_vllm_but_not_with_a_gradient():
    x = scores(6, 50)
    assert vllm.apply_top_k_top_p(x, K, P).data_ptr() == x.data_ptr()

    learned = scores(2, 9).requires_grad_()
    vllm.apply_top_k_top_p(learned, torch.tensor([2, 3]), None).exp().sum().backward()
    assert (learned.grad > 0).sum(-1).tolist() == [2, 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_other_layouts_in_blocks_of_rows(dtype, monkeypatch):
    monkeypatch.setattr(sampler, "_BLOCK", 100)  # two rows
    wide = scores(7, 100, dtype)
    x, k, p = wide[:, ::2], torch.tensor([1, 2, 3, 4, 50, 6, 7]), torch.tensor([1.0, 1, 1, 1, 0.5, 1, 1])
    want = torch.stack([torch.from_numpy(held(r, int(k[i]), float(p[i]))) for i, r in enumerate(x)])
    before, beside = x.clone(), wide[:, 1::2].clone()
    got = vllm.apply_top_k_top_p(x, k, p)
    assert torch.equal(got > -math.inf, want)
    assert torch.equal(got[want], before[want])
    assert torch.equal(wide[:, 1::2], beside)
    one = vllm.apply_top_k_top_p(before, torch.tensor([2]), None)
    assert (one > -math.inf).sum(-1).tolist() == [2] * 7


def test_nothing_to_do():
    x = scores(3, 5)
    assert vllm.apply_top_k_top_p(x, None, None) is x
    assert vllm.apply_top_k_top_p(x[:0], K[:0], P[:0]).shape == (0, 5)
    assert vllm.sample(x[:0], K[:0], P[:0]).shape == (0,)


def test_one_value_for_all_rows():
    x = scores(4, 20)
    want = vllm.apply_top_k_top_p(x.clone(), torch.full((4,), 3), torch.full((4,), 0.7))
    assert torch.equal(vllm.apply_top_k_top_p(x, torch.tensor([3]), torch.tensor([0.7])), want)


def test_a_row_with_nan_stays_and_touches_no_other():
    x = scores(3, 20)
    x[1, 4] = math.nan
    y = vllm.apply_top_k_top_p(x.clone(), torch.full((3,), 2), torch.full((3,), 0.9))
    assert torch.equal(y[1], x[1]) or y[1].isnan().any()
    assert (y[[0, 2]] > -math.inf).sum(-1).max() <= 2


@pytest.mark.parametrize(
    ("k", "p"), [(torch.tensor([[1], [2]]), None), (None, torch.tensor(0.5)), (torch.ones(3), None)]
)
def test_other_shapes_are_refused(k, p):
    with pytest.raises(ValueError, match=r"must have one value for each row of logits \[rows, classes\], got"):
        vllm.apply_top_k_top_p(scores(2, 5), k, p)


def test_draws_are_those_of_anymax(engine):
    """The same numbers as `anymax.sample` after the same transforms."""
    x = scores(4, 300)
    k, p = torch.tensor([300, 5, 20, 1]), torch.tensor([0.9, 1.0, 0.5, 0.3])
    cut = anymax.compose(anymax.topk(k[:, None]), anymax.topp(p[:, None]))
    seeds = dict(enumerate([3, 1, 4, 1]))
    for turn in range(20):
        generators = {row: torch.Generator().manual_seed(seed + turn) for row, seed in seeds.items()}
        want = anymax.sample("softmax", x, transform=cut, generator=[seed + turn for seed in seeds.values()])
        assert torch.equal(vllm.sample(x, k, p, generators), want)


def test_a_seeded_request_gets_its_tokens_in_every_batch():
    row, rest = scores(1, 500), scores(7, 500, seed=1)

    def tokens(batch, place, turns=5):
        generator = torch.Generator().manual_seed(7)
        return [int(vllm.sample(batch, generators={place: generator})[place]) for _ in range(turns)]

    alone = tokens(row, 0)
    assert len(set(alone)) > 1
    assert tokens(torch.cat([rest, row]), 7) == alone
    assert tokens(torch.cat([row, rest]), 0) == alone


def test_frequencies():
    p = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04])
    torch.manual_seed(0)
    drawn = vllm.sample(p.log().expand(20000, 5), torch.full((20000,), 4), torch.full((20000,), 0.85))
    share = torch.bincount(drawn, minlength=5) / 20000
    # of the four, 0.96, the first three hold 0.85
    torch.testing.assert_close(share, torch.tensor([5 / 9, 3 / 9, 1 / 9, 0, 0]), atol=0.012, rtol=0)


def test_a_token_comes_of_every_row(engine):
    x = scores(5, 6)
    x[0], x[1, 2], x[2, 3], x[3] = -math.inf, math.nan, math.inf, math.nan
    assert vllm.sample(x, torch.full((5,), 6))[:4].tolist() == [0, 2, 3, 0]


def test_in_inference_mode():
    x = scores(3, 50)
    with torch.inference_mode():
        y = scores(3, 50)
        vllm.apply_top_k_top_p(y, torch.full((3,), 4), None)
        assert (y > -math.inf).sum(-1).tolist() == [4, 4, 4]
        assert vllm.sample(y, None, torch.full((3,), 0.5)).shape == (3,)
    assert torch.equal(y[y > -math.inf], x[y > -math.inf])


# -- in vLLM's place -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def module(monkeypatch):
    yield stand_in.put(monkeypatch)
    vllm.uninstall()


def test_install_and_uninstall(module):
    x, k, p = scores(2, 20), torch.tensor([3, 4]), torch.tensor([1.0, 1.0])
    theirs = module.apply_top_k_top_p_pytorch, dict(vars(module.TopKTopPSampler))
    vllm.install()
    vllm.install()  # nothing more
    kept = module.apply_top_k_top_p_pytorch(x.clone(), k, p, allow_cpu_sync=True) > -math.inf
    assert kept.sum(-1).tolist() == [3, 4]
    assert module.apply_top_k_top_p_pytorch.__name__ == "apply_top_k_top_p_pytorch"
    drawn, scores_back = module.TopKTopPSampler()(x, {}, k, p)
    assert drawn.shape == (2,)
    assert scores_back is None
    assert module.apply_top_k_top_p_pytorch(x.to("meta"), k, p) == "vllm's own"
    assert module.TopKTopPSampler(use_fp64_gumbel=True)(x, {}, k, p)[0] == "vllm's own draw"
    vllm.uninstall()
    vllm.uninstall()
    assert module.apply_top_k_top_p_pytorch is theirs[0]
    assert module.TopKTopPSampler.forward_cpu is theirs[1]["forward_cpu"]
    assert module.TopKTopPSampler.forward_native is theirs[1]["forward_native"]


@pytest.mark.parametrize("mode", ["processed_logits", "processed_logprobs"])
def test_processed_scores_are_those_of_the_draw(module, mode):
    vllm.install()
    x, k = scores(3, 20), torch.tensor([1, 2, 20])
    want = vllm.apply_top_k_top_p(x.clone(), k, None)
    drawn, back = module.TopKTopPSampler(mode)(x, {}, k, None)
    torch.testing.assert_close(back, want if mode == "processed_logits" else want.log_softmax(-1))
    assert (back.gather(-1, drawn[:, None]) > -math.inf).all()


def test_the_draw_of_a_seed_is_the_same_with_and_without_processed_scores(module):
    vllm.install()
    x, p = scores(3, 200), torch.full((3,), 0.7)
    draws = [
        module.TopKTopPSampler(mode)(x.clone(), {1: torch.Generator().manual_seed(5)}, None, p)[0][1]
        for mode in ("raw_logprobs", "processed_logprobs")
    ]
    assert draws[0] == draws[1]


def test_triton_for_cpus_is_replaced_too(module):
    def apply_top_k_top_p_triton(logits, k, p, mask_value=-math.inf, has_topp_only_rows=True):
        return "vllm's own"

    module.apply_top_k_top_p_triton = apply_top_k_top_p_triton
    vllm.install()
    x, k = scores(2, 9), torch.tensor([2, 3])
    assert (module.apply_top_k_top_p_triton(x.clone(), k, None, has_topp_only_rows=False) > -math.inf).sum() == 5
    assert module.apply_top_k_top_p_triton(x, k, None, -1e9) == "vllm's own"


def test_another_version_is_refused_and_nothing_is_replaced(module):
    own = module.apply_top_k_top_p_pytorch
    del module.TopKTopPSampler.forward_native
    with pytest.raises(
        RuntimeError, match=r"TopKTopPSampler.forward_native of vLLM 0.33.0 is not there; .* vLLM 0.33.0, where"
    ):
        vllm.install()
    assert module.apply_top_k_top_p_pytorch is own
    module.TopKTopPSampler.forward_native = module.TopKTopPSampler.forward_cpu
    module.apply_top_k_top_p_pytorch = lambda logits, k, p: logits
    with pytest.raises(RuntimeError, match=r"apply_top_k_top_p_pytorch of vLLM 0.33.0 takes \(logits, k, p\)"):
        vllm.install()


def test_the_stand_in_has_what_was_read(module):
    assert vllm.READ_AT == stand_in.VERSION
    for name, takes in installing.FUNCTIONS.items():
        if name not in installing.OPTIONAL:
            assert tuple(inspect.signature(getattr(module, name)).parameters) == takes
    for name, takes in installing.METHODS.items():
        assert tuple(inspect.signature(getattr(module.TopKTopPSampler, name)).parameters) == takes


def test_the_installed_vllm():
    """Where vLLM is installed: its own functions and ours keep the same classes."""
    pytest.importorskip("vllm", reason="vLLM is not installed; tests use a stand-in of version 0.33.0")
    from vllm.v1.sample.ops import topk_topp_sampler as theirs

    x, k, p = (
        scores(6, 1000).double(),
        torch.tensor([5, 1000, 20, 1, 1000, 300]),
        torch.tensor([0.5, 0.9, 1.0, 1.0, 1.0, 0.95]),
    )
    want = theirs.apply_top_k_top_p_pytorch(x.clone(), k.clone(), p.double())
    vllm.install()
    try:
        torch.testing.assert_close(theirs.apply_top_k_top_p_pytorch(x.clone(), k, p), want)
    finally:
        vllm.uninstall()
