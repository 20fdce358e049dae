"""The cases of `Sink` and `Elementwise`, beside a few lines of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anymax

from .cases import OURS, Bar, Case, Workload, differs

CAT, PLAIN, CROSS_ENTROPY = "torch.cat and torch.softmax", "torch's own function", "torch.cat and F.cross_entropy"
MAPS: dict[str, anymax.Mapping] = {
    "sink softmax": anymax.Sink(),
    "sink entmax15": anymax.Sink("entmax15"),
    "sink loss": anymax.Sink(),
    "sigmoid": anymax.Elementwise("sigmoid"),
    "relu": anymax.Elementwise("relu"),
}


def run(case: Case) -> Workload:
    import torch

    both = case.note == "both ways"
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(case.shape, generator=generator).requires_grad_(both)
    g = torch.randn(case.shape, generator=generator)
    y = torch.randint(-1, case.n, case.shape[:1], generator=generator)
    wide = lambda a: torch.cat([a, a.new_zeros(a.shape[0], 1)], -1)  # noqa: E731
    mapping = MAPS[case.map]
    peers: dict[str, Callable[[Any], Any]] = {
        "sigmoid": torch.sigmoid,
        "relu": torch.relu,
        "sink loss": lambda a: torch.nn.functional.cross_entropy(wide(a), torch.where(y < 0, case.n, y)),
    }
    peer = peers.get(case.map, lambda a: wide(a).softmax(-1)[:, :-1])
    ours = (lambda a: anymax.fenchel_young(mapping, a, y)) if case.map == "sink loss" else mapping

    def way(function: Callable[[Any], Any]) -> Callable[[], Any]:
        if not both:
            return lambda: function(x)
        return lambda: torch.autograd.grad(out := function(x), x, g if out.ndim else None)[0]

    contenders = {OURS: way(ours), _peer(case.map): way(peer)}

    def check() -> str | None:
        """Beside the plain formulas, in float64, for the first rows."""
        few, got = x.detach()[:32].double(), contenders[OURS]()
        if case.map == "sink loss":
            return differs(got, contenders[_peer(case.map)](), case.dtype)
        few.requires_grad_(both)
        with anymax.use("reference"):
            want = mapping(few)
            want = torch.autograd.grad(want, few, g[:32].double())[0] if both else want
        return differs(got[:32], want.float(), case.dtype)

    return Workload(contenders, check, "native", 2 * x.numel() * x.element_size())


def _peer(function: str) -> str:
    return CROSS_ENTROPY if function == "sink loss" else CAT if function.startswith("sink") else PLAIN


def sink_cases() -> Iterator[Case]:
    for function in MAPS:
        for shape in ((4096, 256), (64, 32_000)):
            for note in ("", "both ways"):
                yield Case("sinks", function, shape, run, (Bar(_peer(function)),), note=note)
