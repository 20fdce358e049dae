"""The cases whose kernels are compiled: rows, segments, output layers and attention at their real plans."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from tools.gpu_launches import TARGETS, Launch, recorded

PROCESSORS = 132  # of an H100 SXM
ROWS = ((65536, 128), (4096, 1024), (4096, 8192), (4096, 32768), (4096, 128256), (32, 1_000_000))
ANYWHERE = ((4096, 1001), (4096, 50_257))  # rows that begin anywhere


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    call: Callable[[], Any]  # launches the kernels
    everywhere: bool = True  # for every target and by every Triton; else by the newest for sm_90 alone


def row_cases() -> Iterator[Case]:
    import torch

    import anymax as am
    from anymax.kernels import triton as engine

    maps = {
        "softmax": am.Softmax(), "sparsemax": am.Sparsemax(), "entmax15": am.Entmax(1.5), "entmax 1.7": am.Entmax(1.7),
        "top-k": am.SparseSoftmax(k=50), "top-p": am.SparseSoftmax(p=0.9), "entmax 1.25": am.Entmax(1.25), "entmax 3": am.Entmax(3.0),
        "budget": am.Budget(50), "normmax": am.NormMax(2.0), "taylor": am.Taylor(2), "sigsoftmax": am.Sigsoftmax(),
        "perturb": am.PerturbMax("normal"),
    }  # fmt: skip
    main, both_ways = list(maps)[:6], ("softmax", "sparsemax", "entmax15", "top-k")
    for shape in (*ROWS, *ANYWHERE):
        for dtype in ("bfloat16",) if shape in ANYWHERE else ("bfloat16", "float32"):
            half = dtype == "bfloat16"
            make = functools.partial(torch.empty, shape, dtype=getattr(torch, dtype), device="meta")
            label = f"{'x'.join(map(str, shape))} {dtype}"
            # every kernel at every plan, and every link at a plan of each kind
            names = both_ways if shape in ANYWHERE else main if half else ("softmax", "entmax15")
            for name in maps if half and shape[-1] in (128, 8192, 128_256) else names:
                mapping = maps[name]

                def forward(mapping: Any = mapping, make: Any = make) -> None:
                    engine.ENGINE.forward(mapping, make(), None, make())

                def backward(mapping: Any = mapping, make: Any = make) -> None:
                    _, saved = engine.ENGINE.forward_saving(mapping, make())
                    engine.ENGINE.vjp(mapping, make(), make(), make(), saved)

                def loss(mapping: Any = mapping, make: Any = make, rows: int = shape[0]) -> None:
                    t = torch.empty(rows, dtype=torch.int64, device="meta")
                    x = make()
                    _, state, _ = engine.ENGINE.index_loss(mapping, x, t, save=True)
                    engine.ENGINE.index_loss_grad(mapping, x, t, torch.empty(rows, device="meta"), state)

                everywhere = half and name in both_ways
                yield Case(f"forward/{name} {label}", forward, everywhere)
                if name in both_ways or shape[-1] > 128:
                    yield Case(f"backward/{name} {label}", backward, everywhere)
                if (half and name in both_ways) or (name in main and shape[-1] == 8192):
                    yield Case(f"loss/{name} {label}", loss, name in ("softmax", "entmax15") and half)


def attention_cases() -> Iterator[Case]:
    import torch

    from anymax.kernels.triton import attention

    links = {
        "softmax": ("softmax", 1, 0.0),
        "entmax15": ("power", 2, 0.5),
        "sparsemax": ("power", 1, 1.0),
        "entmax 1.3": ("any", 1, 0.3),
    }
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

            yield Case(f"attention/{name} d{d}", both, everywhere=name in ("softmax", "entmax15"))
            yield Case(f"decoding/{name} d{d}", one, everywhere=name in ("softmax", "entmax15"))


def ragged_cases() -> Iterator[Case]:
    """Segments of the lengths that are launched together; what is beside a tile of scores does not depend on how many there are."""
    import numpy as np
    import torch

    import anymax as am
    from anymax.kernels.triton import ragged

    maps = {
        "softmax": am.Softmax(),
        "sparsemax": am.Sparsemax(),
        "entmax15": am.Entmax(1.5),
        "top-k": am.SparseSoftmax(k=5),
    }
    for longest in (16, 1024, 16_384, 40_000):
        lengths = np.full(80_000 // longest + 1, longest)
        for heads in (1, 8):
            for name, mapping in maps.items():

                def both(mapping: Any = mapping, lengths: Any = lengths, heads: int = heads) -> None:
                    rows = (am.Segments.of(lengths=lengths), 0)
                    x = torch.zeros((int(lengths.sum()), heads), dtype=torch.bfloat16)
                    ragged.RAGGED.forward(mapping, x, rows)
                    ragged.RAGGED.vjp(mapping, x, x, x, rows)

                everywhere = heads > 1 and name in ("softmax", "entmax15")
                yield Case(f"ragged/{name} up to {longest} x {heads} heads", both, everywhere=everywhere)


def layer_cases() -> Iterator[Case]:
    """Output layers of 4,096 rows and features and 128,256 classes."""
    import torch

    import anymax as am
    from anymax.kernels import triton as engine
    from anymax.kernels.triton import layer
    from anymax.linear.layer import Layer

    for dtype in (torch.bfloat16, torch.float32):
        make = functools.partial(torch.empty, dtype=dtype, device="meta")

        def operands(make: Any = make) -> tuple[Any, Any]:
            x, weight = make(4096, 4096), make(128_256, 4096)
            return Layer(x, weight, None, None, am.Softmax(), (4096,), x.dtype), make(4096, dtype=torch.int64)

        def softmax(make: Any = make, operands: Any = operands) -> None:
            of, t = operands()
            level, g = make(4096, dtype=torch.float32), make(4096, 2, dtype=torch.float32)
            layer.two_of(of, t)
            layer.slopes(of, t, level, g, None, None, 0, 2624, make(4096 * 2624))

        def products(make: Any = make, operands: Any = operands) -> None:
            of, _ = operands()
            index, value = make(80_000, dtype=torch.int64), make(80_000, dtype=torch.float32)
            layer.add_products(make(128_256, 4096), make(128_257, dtype=torch.int64), index, value, of.x)

        said = str(dtype)[6:]
        half = dtype == torch.bfloat16
        yield Case(f"layer/softmax {said}", softmax, everywhere=half)
        yield Case(f"layer/support {said}", products, everywhere=half)
        for name, mapping in (
            ("entmax15", am.Entmax(1.5)),
            ("sparsemax", am.Sparsemax()),
            ("entmax 1.7", am.Entmax(1.7)),
        ):

            def listed(mapping: Any = mapping, operands: Any = operands) -> None:
                known: Any = engine.triton_link(mapping)
                found = layer.candidate_form(known)
                assert found is not None
                layer.candidates(operands()[0], found, operands()[1], None)

            yield Case(f"layer/{name} {said}", listed, everywhere=half)


def cases() -> Iterator[Case]:
    yield from row_cases()
    yield from ragged_cases()
    yield from layer_cases()
    yield from attention_cases()


def launched(case: Case, target: str) -> list[Launch]:
    """What a case launches on such a device."""
    from anymax.kernels.triton import attention, layer

    before = attention._processors, layer._processors
    attention._processors = layer._processors = lambda device: PROCESSORS  # of a device that is not there
    try:
        with recorded(TARGETS[target][2]) as launches:
            case.call()
    finally:
        attention._processors, layer._processors = before
    return launches
