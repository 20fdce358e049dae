"""`Link`: the codes and numbers by which an engine knows a map. `linked` finds those of a map; nothing here knows maps or arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

# The codes of csrc/anymax.h and csrc/maps.hpp, which a test compares. Engines need them where nothing was compiled, too.
CODES = {
    "forward": 0, "log_forward": 1, "vjp": 2, "log_vjp": 3, "index_loss": 4, "index_loss_grad": 5, "threshold": 6, "largest": 7,
    "slope": 8,
}  # fmt: skip


class Kind(NamedTuple):
    """What engines know of a kind of map. A test compares it with csrc/maps.hpp, whose ranges are as wide or wider."""

    family: str  # what its gradient needs, and whether it has zeros and a loss
    parameter: str | None = None  # the field of the map that gives its number
    range: tuple[float, float] = (0.0, 0.0)  # the numbers that the library takes; the reference computes the others
    log: bool = False  # the library has its log p


KINDS = {  # in the order of their codes
    "softmax": Kind("exponentials", log=True),
    "sparsemax": Kind("thresholds"),
    "entmax": Kind("thresholds", "alpha", (1e-300, 1e300)),
    # thresholds are found to the rounding of 1, which is too coarse for a budget below 1e-6
    "budget": Kind("thresholds", "k", (1e-6, 1e300)),
    "normmax": Kind("thresholds", "alpha", (1.0, 9e299)),
    "topk": Kind("truncations", "k", (1, 9e15), log=True),
    "topp": Kind("truncations", "p", (1e-300, 1.0), log=True),
    "taylor": Kind("ratios", "order", (2, 64)),
    "sigsoftmax": Kind("ratios", log=True),
    "perturb_max": Kind("noises", "scale", (1e-300, 1e300)),
    "relu": Kind("ratios"),
    "bounded": Kind("ceilings", "alpha", (1.0, 2.0)),
    "softpick": Kind("ratios", "epsilon", (0.0, 1e300)),
}
MAPS = {name: code for code, name in enumerate(KINDS)}


def _of(*families: str) -> tuple[str, ...]:
    return tuple(name for name, kind in KINDS.items() if kind.family in families)


SPARSE = _of("thresholds", "truncations")  # the gradient needs nothing but the non-zeros
NEED_SCORES = _of("ratios", "noises", "ceilings")  # the gradient needs the scores beside p
WITHOUT_LOSS = _of("ratios", "ceilings")  # the library has no loss or threshold
WITH_SLOPE = ("entmax", "normmax", "budget", "bounded")  # the library has the derivative by their parameter
WITHOUT_LOG = tuple(name for name, kind in KINDS.items() if not kind.log)
RANGES = {name: kind.range for name, kind in KINDS.items() if kind.parameter}
NOISES = {"normal": 0, "logistic": 1, "uniform": 2, "laplace": 3, "gumbel": 4}
LEFT_OUT = -2  # the index of a segment that is left out; -1 is the class that a map hides
MOST_NODES = 4096
MOST_CLASSES = 2**31 - 1025  # the longest row: ANYMAX_MOST_CLASSES of csrc/core/unit.h, which a test compares


class Link(NamedTuple):
    """A map for an engine. csrc/doors/python/calls.cpp reads it item by item."""

    kind: str
    code: int
    param: float
    params: Any  # an array with one number per row, or None
    noise: int
    nodes: int  # 0: the default of the dtype
    upper: Any = None  # the bounds of the classes, a float or an array that broadcasts to the rows, or None


SOFTMAX = Link("softmax", MAPS["softmax"], 0.0, None, 0, 0)


def refuse_link(op: str, link: Link | str) -> str | None:
    """Why a compiled engine can't compute an operation of a map, given its link; None if it can, as far as all of these engines go."""
    if isinstance(link, str):
        return link
    if op in ("log_forward", "log_vjp") and link.kind in WITHOUT_LOG:
        return f"it has no log p of {link.kind}; log of p is used"
    if op in ("index_loss", "threshold") and link.kind in WITHOUT_LOSS:
        return f"{link.kind} has no such operation"
    if op == "slope" and link.kind not in WITH_SLOPE:
        return f"it has no derivative of {link.kind} by a parameter"
    return None


def noise_of(link: Link) -> str:
    """The name of the noise of `PerturbMax`."""
    return tuple(NOISES)[link.noise]


def out_of_range(kind: str, value: float) -> str | None:
    _, attribute, (low, high), _ = KINDS[kind]
    return None if low <= value <= high else f"it takes {attribute} of {kind} from {low:g} to {high:g}, not {value:g}"
