"""The cases whose kernels are compiled: rows, segments, sparse products and attention at their real plans."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from tools.gpu_launches import TARGETS, Launch, recorded

PROCESSORS = 132  # of an H100 SXM
MOST = (4096, 8192)  # the rows of which every map is compiled
ROWS = ((65536, 128), (4096, 1024), MOST, (4096, 128256), (32, 1_000_000))


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    call: Callable[[], Any]  # launches the kernels
    everywhere: bool = True  # by every Triton; else by the newest alone


MAIN = ("softmax", "entmax15", "top-k", "top-p")  # the maps of which every plan is compiled


def row_cases() -> Iterator[Case]:
    """Every kernel at every plan in bf16, and every link at a plan of each kind."""
    import torch

    import anymax as am
    from anymax.kernels import triton as engine

    maps = {
        "softmax": am.Softmax(), "entmax15": am.Entmax(1.5), "top-k": am.SparseSoftmax(k=50), "sparsemax": am.Sparsemax(),
        "entmax 1.7": am.Entmax(1.7), "top-p": am.SparseSoftmax(p=0.9), "entmax 1.25": am.Entmax(1.25), "entmax 3": am.Entmax(3.0),
        "budget": am.Budget(50), "normmax": am.NormMax(2.0), "taylor": am.Taylor(2), "sigsoftmax": am.Sigsoftmax(),
        "perturb": am.PerturbMax("normal"),
    }  # fmt: skip
    for shape in ROWS:
        names = maps if shape == MOST else MAIN
        make = functools.partial(torch.empty, shape, dtype=torch.bfloat16, device="meta")
        label = f"{'x'.join(map(str, shape))} bfloat16"
        for name in names:

            def forward(mapping: Any = maps[name], make: Any = make) -> None:
                engine.ENGINE.forward(mapping, make(), None, make())

            def backward(mapping: Any = maps[name], make: Any = make) -> None:
                _, saved = engine.ENGINE.forward_saving(mapping, make())
                engine.ENGINE.vjp(mapping, make(), make(), make(), saved)

            def loss(mapping: Any = maps[name], make: Any = make, rows: int = shape[0]) -> None:
                t = torch.empty(rows, dtype=torch.int64, device="meta")
                x = make()
                state = engine.ENGINE.index_loss(mapping, x, t, save=True).saved
                engine.ENGINE.index_loss_grad(mapping, x, t, torch.empty(rows, device="meta"), state)

            def slope(mapping: Any = maps[name], make: Any = make) -> None:
                engine.ENGINE.slope(mapping, "alpha", make(), make(), make())

            yield Case(f"forward/{name} {label}", forward, name in MAIN and shape[-1] in (1024, 128_256))
            if shape == MOST and engine.refuse_map("slope", maps[name]) is None:
                yield Case(f"slope/{name} {label}", slope, False)
            if shape == ROWS[-1] and name == "top-p":  # of parts in fp32, and of a decoding model
                for other in ((32, 1_000_000, torch.float32), (16, 128_256, torch.bfloat16)):
                    few = functools.partial(torch.empty, other[:2], dtype=other[2], device="meta")
                    label_ = f"{other[0]}x{other[1]} {str(other[2])[6:]}"
                    yield Case(f"forward/top-p {label_}", functools.partial(forward, maps[name], few), False)
            if name in MAIN[:2] and shape[-1] >= MOST[-1]:
                yield Case(f"backward/{name} {label}", backward, False)
                if shape[-1] <= 128_256:
                    yield Case(f"loss/{name} {label}", loss, shape == MOST)
                if name == "entmax15":
                    each = am.Entmax(torch.empty(shape[0], 1, device="meta"))
                    yield Case(f"slope/entmax one a row {label}", functools.partial(slope, each), False)


def attention_cases() -> Iterator[Case]:
    import torch

    from anymax.kernels.triton import attention

    links = {"softmax": ("softmax", 1, 0.0), "entmax15": ("power", 2, 0.5), "sparsemax": ("power", 1, 1.0)}
    for d in (64, 128):
        for name, (link, power, param) in links.items():
            job = attention.Job(link, power, param, d**-0.5, 0.0, True, -1, -1, 0, 0.0, False, False)
            make = functools.partial(torch.empty, dtype=torch.bfloat16, device="meta")

            def both(job: Any = job, make: Any = make, d: int = d) -> None:
                q, k, v = (make(1, 8, 8192, d) for _ in range(3))
                out, saved = attention.forward(job, q, k, v, {}, True)
                attention.backward(job, q, k, v, {}, out, saved, out, {"q", "k", "v"})

            def one(job: Any = job, make: Any = make, d: int = d) -> None:
                free = job._replace(causal=False)
                attention.forward(free, make(1, 32, 1, d), make(1, 8, 32768, d), make(1, 8, 32768, d), {}, False)

            if d == 64 or name == "entmax15":
                yield Case(f"attention/{name} d{d}", both, name == "entmax15" and d == 64)
            if d == 64 and name == "entmax15":
                yield Case(f"decoding/{name} d{d}", one, False)


def ragged_cases() -> Iterator[Case]:
    """Segments of the lengths that are launched together; what is beside a tile of scores does not depend on how many there are."""
    import numpy as np
    import torch

    import anymax as am
    from anymax.kernels.engine import SegmentsAlong
    from anymax.kernels.triton import ragged

    for longest in (16, 40_000):
        lengths = np.full(80_000 // longest + 1, longest)
        for name, mapping in (
            ("softmax", am.Softmax()),
            ("entmax15", am.Entmax(1.5)),
            ("top-k", am.SparseSoftmax(k=5)),
        ):

            def both(mapping: Any = mapping, lengths: Any = lengths) -> None:
                engine = ragged.TritonSegments(SegmentsAlong(am.Segments.of(lengths=lengths), 0))
                x = torch.zeros((int(lengths.sum()), 8), dtype=torch.bfloat16)
                engine.forward(mapping, x)
                engine.vjp(mapping, x, x, x)

            yield Case(f"ragged/{name} up to {longest} x 8 heads", both, False)


def transport_cases() -> Iterator[Case]:
    """A million 4 x 4 matrices, both ways."""
    import torch

    from anymax.kernels.triton import sinkhorn_kernels

    make = functools.partial(torch.empty, (1_000_000, 4, 4), dtype=torch.float32, device="meta")
    yield Case("transport/sinkhorn 4x4 forward", lambda: sinkhorn_kernels.run(make(), None, 20, 1.0), False)
    yield Case("transport/sinkhorn 4x4 backward", lambda: sinkhorn_kernels.run(make(), make(), 20, 1.0), False)


def layer_cases() -> Iterator[Case]:
    """The gradients of an output layer of 4,096 features and 128,256 classes, and its scores."""
    import torch

    import anymax as am
    from anymax.kernels import triton as engine
    from anymax.kernels.tasks import ScoreBlock
    from anymax.kernels.triton import layer

    make = functools.partial(torch.empty, dtype=torch.bfloat16, device="meta")

    def products() -> None:
        index, value = make(80_000, dtype=torch.int64), make(80_000, dtype=torch.float32)
        layer.add_products(make(128_256, 4096), make(128_257, dtype=torch.int64), index, value, make(4096, 4096))

    def scaled() -> None:
        layer.scale(make(128_256, 4096), make((), dtype=torch.float32))

    yield Case("layer/support bfloat16", products, False)
    yield Case("layer/factor bfloat16", scaled, False)

    def block(classes: int, numbers: torch.dtype, said: str) -> None:
        rows, index = make(4096, classes, dtype=numbers), make(4096, dtype=torch.int64)
        each, classwise = make(4096, 1, dtype=torch.float32), make(classes, dtype=torch.float32)
        terms, every = said == "log p and entropy", said == "every option"
        more = (make(classes), make(1, classes, dtype=torch.bool)) if every else (None, None)
        factor, cap, weights = each if terms or every else None, 30.0 if every else 0.0, classwise if every else None
        scores = ScoreBlock(rows, *more, factor, index, 0, cap)
        layer.terms(scores, weights, entropy=terms, best=every)
        layer.slopes(scores, rows.view(torch.bfloat16)[:, :classes], each, weights, mixed=terms)

    def over_scores() -> (
        None
    ):  # memory, which nobody touches: a tensor without any does not say that two of them share it
        s, t = torch.empty(4096, 128_256), torch.empty(4096, dtype=torch.int64)
        loss = engine.ENGINE.index_loss(am.Entmax(1.5), s, t, save=True)
        out = s.view(torch.bfloat16)[:, : s.shape[1]]
        engine.ENGINE.score_loss_grad(am.Entmax(1.5), s, t, torch.empty(4096), loss.saved, out)

    yield Case("layer/entmax15 4096x128256 float32", over_scores, False)
    for numbers in (torch.float32, torch.bfloat16):
        for said in ("loss", "log p and entropy", "every option"):
            call = functools.partial(block, 128_256, numbers, said)
            yield Case(f"layer/{said} 4096x128256 {str(numbers)[6:]}", call, said == "loss")


def cases() -> Iterator[Case]:
    yield from row_cases()
    yield from ragged_cases()
    yield from layer_cases()
    yield from transport_cases()
    yield from attention_cases()


def launched(case: Case, target: str) -> list[Launch]:
    """What a case launches on such a device."""
    from anymax.kernels.triton import attention

    before = attention._processors
    attention._processors = lambda device: PROCESSORS  # of a device that is not there
    try:
        with recorded(TARGETS[target][2]) as launches:
            case.call()
    finally:
        attention._processors = before
    return launches
