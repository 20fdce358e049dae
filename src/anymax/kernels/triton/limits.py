"""Which links the kernels take, for which operations; each refusal is a sentence. Triton is not needed to ask."""

from __future__ import annotations

from ..link import Link, noise_of, refuse_link

MAPS = (
    "softmax",
    "sparsemax",
    "entmax",
    "budget",
    "normmax",
    "topk",
    "topp",
    "taylor",
    "sigsoftmax",
    "perturb_max",
)  # the links of rows
ATTENTION = ("softmax", "sparsemax", "entmax", "budget")  # the links of the attention kernels
DTYPES = ("float32", "bfloat16", "float16")
NOISES = ("normal", "logistic")
MOST_ORDER = 16  # of Taylor softmax


def taken(link: Link, name: str) -> Link | str:
    """The link as these kernels take it, or a sentence that says why they don't. name: what people call the map."""
    if link.kind not in MAPS:
        return f"it has no kernel for {name}"
    if link.kind == "perturb_max":
        noise = noise_of(link)
        one = link.params is None
        if noise == "gumbel" and one and link.param == 1.0:
            return link._replace(kind="softmax", param=0.0)
        if noise not in NOISES:
            scale = f"at scale {link.param:g}" if one else "with a scale for each row"
            return f"it has no kernel for the noise {noise!r} {scale}; it knows {', '.join(NOISES)}"
    if link.kind == "topk" and link.params is not None:
        return "it takes one k for all rows"
    if link.kind == "taylor" and link.param > MOST_ORDER:
        return f"it goes to order {MOST_ORDER}, not {link.param:g}"
    return link


def refuse(op: str, link: Link | str) -> str | None:
    """Why the kernels can't compute an operation of a link that they take; None if they can, for the tensors that they take."""
    if reason := refuse_link(op, link):
        return reason
    assert not isinstance(link, str), link
    if op != "slope" and link.kind == "normmax" and link.params is not None:
        return "it takes one alpha of normmax for all rows"
    if op == "log_vjp" and link.kind == "sigsoftmax":
        return "it has no backward of log p for sigsoftmax"
    if op in ("index_loss", "threshold") and link.kind == "perturb_max":
        return "perturb_max has no such operation in one pass"
    if op == "threshold" and link.kind == "entmax" and link.params is not None:
        return "it gives thresholds of entmax for one alpha only"
    return None
