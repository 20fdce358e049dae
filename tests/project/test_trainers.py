"""The lines of docs/trainers.md, held to formulas of what the trainers compute, and to their functions where these are installed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
if not PAGE.is_file():
    pytest.skip("the pages are in the repository only", allow_module_level=True)
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from laws import close

pytestmark = [
    pytest.mark.whole,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def page():
    """The names of the page, after its examples."""
    scope = {"__name__": "trainers"}
    for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S):
        exec(code, scope)
    return scope


def terms(logits, y, T=1.0):
    """log p and entropy as they are written."""
    log_p = torch.log_softmax(logits / T, -1)
    return log_p.gather(-1, y[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def formulas(p):
    """What each of them computes, from the names of the page."""
    h, hidden, weight, y = p["h"], p["hidden"], p["weight"], p["y"]
    logits = h @ weight.T
    log_p, entropy = terms(logits, y, p["temperatures"][..., None])
    target = p["target"]
    here = target != -100
    nll, of_rows = terms(p["x"] @ weight.T, target.clamp(min=0), 0.7)
    cosines = [torch.nn.functional.normalize(v) for v in (p["queries"], p["documents"], p["negatives"])]
    similar = 20.0 * cosines[0] @ torch.cat(cosines[1:]).T
    return {
        "trl": terms(logits, y, 0.7),
        "trl_capped": terms(30.0 * torch.tanh(0.25 * logits / 30.0), y, 0.7),
        "verl": terms(hidden @ weight.T, p["ids"].roll(-1, 1), 1.5),
        "prime_rl": (log_p, entropy.detach()),
        "nemo_rl": (terms(hidden @ weight.T, p["ids"].roll(-1, 1))[0][:, :-1],),
        "liger": (torch.where(here, -nll, 0.0), torch.where(here, of_rows, 0.0)),
        "mnrl": (torch.nn.functional.cross_entropy(similar, torch.arange(8)),),
    }


def same(p, name, want, tolerance=1e-5):
    """Values, and the gradients of a sum of them."""
    got = p[name] if isinstance(p[name], tuple) else (p[name],)
    free = [p[n] for n in ("queries", "documents", "negatives")] if name == "mnrl" else [p["hidden"], p["weight"]]
    assert [a.requires_grad for a in got] == [a.requires_grad for a in want]
    g = torch.Generator().manual_seed(0)
    factors = [torch.randn(a.shape, generator=g) for a in want]
    sums = []
    for one in (got, want):
        for a, b in zip(one, want, strict=True):
            close(a.detach(), b.detach(), tolerance)
        sums.append(sum((f * a).sum() for f, a in zip(factors, one) if a.requires_grad))
    for one, other in zip(*(torch.autograd.grad(s, free, retain_graph=True) for s in sums), strict=True):
        close(one, other, 10 * tolerance)


@pytest.mark.parametrize("name", ["trl", "trl_capped", "verl", "prime_rl", "nemo_rl", "liger", "mnrl"])
def test_a_line_is_what_the_trainer_computes(name, page):
    same(page, name, formulas(page)[name])


# -- the functions themselves ----------------------------------------------------------------------------------------------------------


def from_file(package, path):
    """A module by its file, without the rest of its package."""
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"{package} is not installed")
    spec = importlib.util.spec_from_file_location(f"{package}_{Path(path).stem}", Path(found.origin).parent / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["trl", "trl_capped"])
def test_trl(name, page):
    kernels = pytest.importorskip("trl.kernels")
    apply = kernels.ChunkedLogProbFunction.apply
    h, y, weight = page["h"].flatten(0, 1), page["y"].flatten(), page["weight"]
    scale = {"trl": (None, 1.0), "trl_capped": (30.0, 0.25)}[name]
    found = apply(h, weight, None, y, 0.7, 128, *scale, ("entropy",))[:2]
    same(page, name, tuple(a.reshape(page["y"].shape) for a in found))


def test_verl(page):
    own = from_file("verl", "utils/experimental/torch_functional.py").FusedLinearForPPO(chunk_size=8)
    found = own(page["hidden"], page["weight"], page["shifted"], temperature=1.5)
    assert page["hidden"].requires_grad
    same(page, "verl", found)


def test_liger(page):
    ops = pytest.importorskip("liger_kernel.ops")
    found = ops.LigerFusedLinearScaledCrossEntropyFunction.apply(
        page["x"], page["weight"], page["target"], 0.7, -100, 1, True
    )
    same(page, "liger", found)


def test_sentence_transformers(page):
    st = pytest.importorskip("sentence_transformers")
    losses = st.losses if hasattr(st, "losses") else pytest.importorskip("sentence_transformers.losses")
    own = losses.MultipleNegativesRankingLoss(None, scale=20.0)
    found = own.compute_loss_from_embeddings([page[n] for n in ("queries", "documents", "negatives")], None)
    same(page, "mnrl", (found,))
