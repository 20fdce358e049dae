"""Words of the engines: of errors, and of the reasons for which an engine leaves a call to another."""

from __future__ import annotations

import types

import numpy as np
import pytest
from native_cases import ENGINE
from own_maps import Exps
from refusals import each, refuses
from row_cases import torch

import anymax as am
from anymax.kernels import engine_of, link, native, tabled, triton
from anymax.kernels.decode import Step
from anymax.kernels.tasks import DECODE

X = np.random.default_rng(0).normal(size=(4, 20)).astype(np.float32)
T = torch.from_numpy(X)
MANY = np.zeros((90, 60), np.float32)
NO_ROW_OF_ITS_OWN = np.broadcast_to(np.float32(0), (1, link.MOST_CLASSES + 1))
with pytest.warns(PendingDeprecationWarning):
    MATRIX = np.matrix([[1.0, 2.0]])
MATRIX_WORDS = (TypeError, r"numpy\.matrix is not read.*numpy\.asarray")


def by(engine, call, *args, **options):
    with am.use(engine):
        return call(*args, **options)


MISTAKES = {
    "no such engine": (
        lambda: by("cuda", am.softmax, X), ValueError, r"anymax\.use: there is no engine 'cuda'; the engines are .*reference"
    ),
    "triton on a CPU": (lambda: by("triton", am.sparsemax, T), RuntimeError, "engine 'triton' was asked for"),
    "framework of numpy": (lambda: by("framework", am.softmax, X), RuntimeError, "was asked for"),
    "an axis of -1.0": (lambda: am.sparsemax(T, dim=-1.0), TypeError, "expected an integer"),
    "an axis of True": (lambda: am.sparsemax(T, dim=True), TypeError, "expected an integer"),
    "an axis of '2'": (lambda: am.sparsemax(T, dim="2"), TypeError, "expected an integer"),
    "axis and dim": (lambda: am.sparsemax(T, 1, dim=0), TypeError, "two names of one argument"),
    "a matrix": (lambda: am.softmax(MATRIX), *MATRIX_WORDS),
    "a loss of a matrix": (lambda: am.cross_entropy(MATRIX, np.array([0])), *MATRIX_WORDS),
    "attention of matrices": (lambda: am.attention(MATRIX, MATRIX, MATRIX), *MATRIX_WORDS),
    "linear attention of matrices": (lambda: am.linear_attention(MATRIX, MATRIX, MATRIX), *MATRIX_WORDS),
    "a sparse result": (lambda: am.sparsemax(T.to_sparse(), out=torch.empty(4, 20)), TypeError, "sparse"),
    "a polynomial beyond doubles": (lambda: am.Taylor(172), ValueError, "at most 170"),
    "warm up a class": (lambda: am.kernels.warm_up(am.Softmax, [(2, 3)]), TypeError, "expected a mapping"),
    "warm up half a float": (
        lambda: am.kernels.warm_up(am.Softmax(), [(2, 3)], "half a float", device="cpu"), ValueError, "expected dtypes"
    ),
    "warm up a CPU": (lambda: am.kernels.warm_up(am.Softmax(), (2, 3), device="cpu"), RuntimeError, r"can't (run|compute)"),
    "a mass above 1": (lambda: ENGINE.decode(am.Softmax(), X, (Step("topp", 1.5),), keep=True), RuntimeError, "parameter is out of range"),
    "a draw of scores that are written over": (
        lambda: ENGINE.decode(am.Softmax(), X, (Step("topk", 3),), in_place=True, u=np.full((4, 1), 0.5)),
        RuntimeError, "refused a draw of softmax: an operand",
    ),
    "the slope of softmax": (
        lambda: ENGINE.slope(am.Softmax(), "alpha", X, X, X),
        ValueError, "alpha of entmax, alpha of normmax, k of budget, alpha of bounded, not by alpha",
    ),
    "the slope by another name": (lambda: ENGINE.slope(am.Entmax(1.5), "k", X, X, X), ValueError, "not by k of entmax"),
    "the slope of two shapes": (lambda: ENGINE.slope(am.Entmax(1.5), "alpha", X, X, X[:2]), ValueError, "of one shape"),
}  # fmt: skip


@each(MISTAKES)
def test_errors(call, error, words):
    refuses(call, error, words)


def on_gpu(op, mapping):
    """What the GPU's engine says of this call, of what looks to it as a tensor on a GPU."""
    device = types.SimpleNamespace(type="cuda", __str__=lambda: "cuda:0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "is_torch", lambda x: True)
        return triton.ENGINE.refuse(op, mapping, types.SimpleNamespace(device=device, dtype=torch.float32))


SPARSEMAX, LONG = am.Sparsemax(), np.broadcast_to(np.float32(0), (1, tabled.LONGEST + 1))
WITHOUT_SLOPE = am.Ratio(lambda x: 1.0 + x * x)
REASONS = {  # name -> (what the engine says, words of it)
    "native: loss": (lambda: ENGINE.refuse("loss", SPARSEMAX, X), "it has no loss (soft targets), only p,"),
    "native: a function": (lambda: ENGINE.refuse("forward", am.Ratio.square(), X), "no kernel for ratio"),
    "native: exponential noise": (lambda: ENGINE.refuse("forward", am.PerturbMax("exponential"), X), "no kernel"),
    "native: log p": (lambda: ENGINE.refuse("log_forward", SPARSEMAX, X), "log of p is used"),
    "native: Taylor's loss": (lambda: ENGINE.refuse("index_loss", am.Taylor(2), X), "no such operation"),
    "native: long doubles": (lambda: ENGINE.refuse("forward", SPARSEMAX, X.astype(np.longdouble)), "it takes float32"),
    "native: byte order": (lambda: ENGINE.refuse("forward", SPARSEMAX, X.astype(">f4")), "byte order"),
    "native: sparse": (lambda: ENGINE.refuse("forward", SPARSEMAX, T.to_sparse()), "dense tensors"),
    "native: meta": (lambda: ENGINE.refuse("forward", SPARSEMAX, T.to("meta")), "on the CPU"),
    "tabled: doubles": (lambda: tabled.ENGINE.refuse("forward", Exps(), MANY.astype(float)), "not float64"),
    "tabled: few scores": (lambda: tabled.ENGINE.refuse("forward", Exps(), MANY[:2]), "at least 4096 scores"),
    "tabled: loss": (lambda: tabled.ENGINE.refuse("loss", Exps(), MANY), "it has no loss (soft targets), only p,"),
    "tabled: log p": (lambda: tabled.ENGINE.refuse("log_forward", Exps(), MANY), "it has no log p, only p,"),
    "tabled: no threshold": (lambda: tabled.ENGINE.refuse("threshold", am.Ratio.square(), MANY), "has no threshold"),
    "tabled: no classes": (lambda: tabled.ENGINE.refuse("forward", Exps(), MANY[:, :0]), "classes"),
    "tabled: a long row": (lambda: tabled.ENGINE.refuse("forward", Exps(), LONG), "classes"),
    "tabled: no derivative": (lambda: by("tabled", tabled.ENGINE.refuse, "vjp", WITHOUT_SLOPE, MANY), "no derivative of u"),
    "decode: taylor": (lambda: ENGINE.refuse_task(DECODE, am.Taylor(), X), "taylor"),
    "decode: parameters": (lambda: ENGINE.refuse_task(DECODE, am.Budget(np.ones((4, 1))), X), "one parameter"),
    "decode: another engine": (lambda: str(by("reference", engine_of, DECODE, am.Softmax(), X)), "None"),
    "decode: classes": (lambda: ENGINE.refuse_task(DECODE, am.Softmax(), NO_ROW_OF_ITS_OWN), "up to 2147482623 classes, not 2147482624"),
    "triton: a CPU": (lambda: triton.ENGINE.refuse("forward", SPARSEMAX, T), "on a GPU (CUDA, ROCm), these are on cpu"),
    "triton: numpy": (lambda: triton.ENGINE.refuse("forward", SPARSEMAX, X), "of numpy"),
    "triton: no tensor": (lambda: on_gpu("forward", SPARSEMAX), "plain tensors"),
    "triton: loss": (lambda: on_gpu("loss", SPARSEMAX), "it has no loss (soft targets), only p,"),
    "triton: a function": (lambda: on_gpu("forward", am.Ratio.square()), "no kernel for ratio"),
    "triton: uniform noise": (lambda: on_gpu("forward", am.PerturbMax("uniform")), "no kernel for the noise 'uniform'"),
    "triton: a scale": (lambda: on_gpu("forward", am.PerturbMax("gumbel", scale=2.0)), "at scale 2"),
    "triton: an alpha of normmax": (lambda: on_gpu("forward", am.NormMax(torch.tensor([2.0]))), "one alpha of normmax"),
    "triton: a long polynomial": (lambda: on_gpu("forward", am.Taylor(30)), "order 16"),
    "triton: log p": (lambda: on_gpu("log_forward", SPARSEMAX), "log of p is used"),
    "triton: the gradient of log p": (lambda: on_gpu("log_vjp", am.Sigsoftmax()), "no backward of log p"),
    "triton: Taylor's loss": (lambda: on_gpu("index_loss", am.Taylor(2)), "no such operation"),
    "triton: thresholds of alphas": (lambda: on_gpu("threshold", am.Entmax(torch.tensor([1.5]))), "one alpha only"),
}  # fmt: skip


@pytest.mark.parametrize(("said", "words"), list(REASONS.values()), ids=list(REASONS))
def test_reasons(said, words):
    assert words in said()


def test_what_is_not_refused():
    assert ENGINE.refuse("forward", SPARSEMAX, X) is None
    assert engine_of(DECODE, am.Softmax(), X) is ENGINE
    assert tabled.ENGINE.refuse("forward", Exps(), MANY) is tabled.ENGINE.refuse("vjp", Exps(), MANY) is None
    with am.use("tabled"):
        assert tabled.ENGINE.refuse("forward", WITHOUT_SLOPE, MANY) is None


TAKEN = (am.Sparsemax(), T, -1, None, torch.full((4, 20), 7.0))
MEMORY = torch.full((4 * (3 * 2 + 1),), 9, dtype=torch.int32)  # of classes that are none
LIBRARY = {
    "an operand": (lambda: native.load().vjp(am.Taylor(2), None, T, T, -1, None), RuntimeError, "an operand is missing"),
    "a parameter": (
        lambda: native.load().forward(native.found_link(am.SparseSoftmax(k=3))._replace(param=0.0), T, -1, None, None),
        RuntimeError, "parameter is out of range",
    ),
    "memory": (lambda: native.load().vjp(am.Sparsemax(), None, T, T, -1, MEMORY), RuntimeError, "has changed since"),
    **{
        f"{len(wrong)} arguments of {name}": (lambda name=name, wrong=wrong: getattr(native.load(), name)(*wrong), TypeError, "arguments")
        for name in ("forward", "forward_saving", "vjp", "loss", "loss_grad", "threshold", "largest", "linear")
        for wrong in ((), TAKEN[:2], (0,) * 11)
    },
}  # fmt: skip


@each(LIBRARY)
def test_errors_of_the_library(call, error, words):
    refuses(call, error, words)
