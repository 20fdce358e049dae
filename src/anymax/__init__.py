"""From scores to probabilities, by softmax and its alternatives, on NumPy, PyTorch and JAX arrays.

    p = anymax.sparsemax(x)                                # exact zeros; also softmax, entmax15, entmax(x, alpha), ...
    p = anymax.apply("entmax:alpha=1.3", x, axis=1)        # any map, by its name or as anymax.Entmax(1.3)
    loss = anymax.sparsemax_loss(scores, target)           # called like torch's cross_entropy
    loss = anymax.fenchel_young("entmax15", scores, target)  # the loss that belongs to a map
    loss = anymax.linear_loss(h, W, target, "entmax15")    # an output layer and its loss, without holding all scores
    out = anymax.attention(q, k, v, "sparsemax", is_causal=True)
    y = anymax.sample("softmax", anymax.topp(0.9)(x), generator=0)
    p = anymax.segment_apply("softmax", x, index=index)    # rows of unequal length, as in graphs
    tau, size = anymax.threshold("sparsemax", x)           # p = max(x - tau, 0), and the number of classes above 0
    print(anymax.explain("sparsemax", x))                  # which engine computes it

Maps are classes: Softmax, Sparsemax, Entmax, Bounded, Budget, NormMax, Ranks, Fusedmax, Taylor, Sigsoftmax, Ratio, SparseSoftmax,
PerturbMax, Sink, Elementwise, Softpick. More is in the modules `nn` (torch), `transforms` (top-k, temperature, ...), `sampling`, `routing`,
`transport`, `margins`, `likelihood`, `inspection`, `sklearn`, `hf` (transformers), `vllm`, `numpyro`, `distributed` and `plot`.
`help(anymax.entmax)` explains one name, and `dir(anymax)` lists them all. On the command line, `anymax explore` opens a page where you
drag scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import functional, kernels, likelihood, mappings, margins, transforms
from ._config import show_config
from ._core import elsewhere
from ._core.facts import Facts
from ._core.mapping import Mapping
from ._core.providers import providers
from ._core.ratio_map import RatioMap
from ._core.separable import Separable
from ._version import __version__
from .functional import (
    apply,
    budget,
    entmax,
    entmax15,
    log_apply,
    log_softmax,
    normmax,
    perturb_max,
    sigsoftmax,
    softmax,
    sparse_softmax,
    sparsemax,
    taylor_softmax,
)
from .inspection import entropy, facts, jacobian, logit_gap, support
from .kernels import choose, explain, use
from .likelihood import log_prob, log_prob_entropy, topk_kl
from .losses import (
    accuracy_loss,
    cross_entropy,
    entmax15_loss,
    entmax_loss,
    fenchel_young,
    margin_loss,
    multilabel_softmax_loss,
    nll,
    normmax_loss,
    perturb_max_loss,
    smoothed_nll,
    sparse_softmax_loss,
    sparsemax_loss,
    stop_gradient_loss,
    taylor_softmax_loss,
)
from .mappings import *  # noqa: F403 (the maps are public by being in its `__all__`)
from .thresholds import logsumexp, threshold
from .transforms import (
    compose,
    cosine,
    mask,
    minp,
    mix,
    normalize,
    prior,
    temperature,
    topk,
    topp,
)

if TYPE_CHECKING:
    from . import distributed as distributed
    from . import hf as hf
    from . import nn as nn
    from . import numpyro as numpyro
    from . import plot as plot
    from . import routing as routing
    from . import segments as segments
    from . import sklearn as sklearn
    from . import transport as transport
    from . import vllm as vllm
    from ._attention import LinearState, attention, explain_attention, linear_attention
    from ._attention.packed import attention_varlen
    from .contract import check_mapping
    from .functional.ordering import soft_permutation, soft_rank, soft_sort
    from .linear import linear_kl, linear_log_prob, linear_log_prob_entropy, linear_loss, linear_topk_kl
    from .linear.contrastive import contrastive_loss
    from .sampling import gumbel_max, gumbel_softmax, sample
    from .segments import (
        Segments,
        segment_apply,
        segment_entropy,
        segment_log_apply,
        segment_logsumexp,
        segment_loss,
        segment_sample,
        segment_support,
        segment_threshold,
    )
    from .transport import Sinkhorn


def _notebook_page(mapping: Mapping) -> str:
    from .plot import notebook  # late: plots are loaded on first use

    return notebook.page(mapping)


def _public_names() -> dict[str, list[str]]:
    """The public names of each module, read from the text of those that are not loaded, since they may need a package."""
    modules = (
        "nn", "transforms", "margins", "sampling", "likelihood", "segments", "sklearn", "hf", "plot", "linear", "distributed",
        "routing", "transport", "vllm",
    )  # fmt: skip
    return {__name__: __all__, **{f"{__name__}.{name}": elsewhere.listed(f"{__name__}.{name}") for name in modules}}


def _over_devices() -> Any:
    from .distributed import torch_dtensor  # late: there is a DTensor, so torch is loaded

    return torch_dtensor


def _layers_over_devices() -> Any:
    from .distributed import torch_dtensor_layers  # late: as above

    return torch_dtensor_layers


def _apply_to_ragged(*given: Any, **options: Any) -> Any:
    from .segments.verbs import apply_tensor  # late: most calls have rows of one length

    return apply_tensor(*given, **options)


def _segments_unpadded(framework: str) -> Any:
    from . import segments  # late: as above

    return segments.unpadded(framework)


def _layer_bridge(framework: str) -> Any:
    from . import linear  # late: output layers are loaded when they are first used

    return linear.layer_bridge(framework)


providers.catalogue = mappings.CATALOGUE
providers.call = functional.call
providers.notebook_page = _notebook_page
providers.public_names = _public_names
providers.apply_to_ragged = _apply_to_ragged
providers.over_devices = _over_devices
providers.layers_over_devices = _layers_over_devices
providers.segments_unpadded = _segments_unpadded
providers.layer_bridge = _layer_bridge
providers.softmax_terms = likelihood.softmax_terms
providers.softmax_divergence = likelihood.softmax_divergence
providers.noise_maker = kernels.noise_maker
providers.torch_uniform = kernels.torch_uniform
providers.check()

# these need a framework, matplotlib or scikit-learn
_LATE = (
    "distributed",
    "hf",
    "linear",
    "nn",
    "numpyro",
    "plot",
    "routing",
    "sampling",
    "segments",
    "sklearn",
    "transport",
    "vllm",
)
_LATE_NAMES = {  # functions whose modules are slow to load, and those modules
    **dict.fromkeys(("gumbel_max", "gumbel_softmax", "sample"), "sampling"),
    **dict.fromkeys(("LinearState", "attention", "explain_attention", "linear_attention"), "_attention"),
    "attention_varlen": "_attention.packed",
    "Sinkhorn": "transport",
    "check_mapping": "contract",
    "contrastive_loss": "linear.contrastive",
    **dict.fromkeys(("soft_permutation", "soft_rank", "soft_sort"), "functional.ordering"),
    "linear_kl": "linear",
    "linear_log_prob": "linear",
    "linear_log_prob_entropy": "linear",
    "linear_loss": "linear",
    "linear_topk_kl": "linear",
    **dict.fromkeys(
        (
            "Segments",
            "segment_apply",
            "segment_entropy",
            "segment_log_apply",
            "segment_logsumexp",
            "segment_loss",
            "segment_sample",
            "segment_support",
            "segment_threshold",
        ),
        "segments",
    ),
}

_MOVED = {  # names that have moved, and where they are now
    **dict.fromkeys(
        ("epsilon_cutoff", "eta", "logit_bias", "repetition_penalty", "scalable", "topnsigma", "typical", "xtc"),
        "transforms",
    ),
    **dict.fromkeys(("gumbel_topk", "perturb_argmax", "speculative_accept", "topk_log_prob"), "sampling"),
    "Threshold": "thresholds",
    "jacobian_norm": "inspection",
    "kl": "likelihood",
    "linear_threshold": "linear",
    "warm_up": "kernels",
}

__all__ = [
    "Facts", "LinearState", "Mapping", "RatioMap", "Segments", "Separable", "Sinkhorn", "__version__",
    "accuracy_loss", "apply", "attention", "attention_varlen", "budget", "check_mapping", "choose", "compose",
    "contrastive_loss", "cosine", "cross_entropy", "entmax", "entmax15", "entmax15_loss", "entmax_loss", "entropy",
    "explain", "explain_attention", "facts", "fenchel_young", "gumbel_max",
    "gumbel_softmax", "jacobian", "linear_attention", "linear_kl", "linear_log_prob",
    "linear_log_prob_entropy", "linear_loss", "linear_topk_kl", "log_apply", "log_prob", "log_prob_entropy", "log_softmax",
    "logit_gap", "logsumexp", "margin_loss", "margins", "mask", "minp", "mix",
    "multilabel_softmax_loss", "nll", "normalize", "normmax", "normmax_loss", "perturb_max",
    "perturb_max_loss", "prior", "sample", "segment_apply",
    "segment_entropy", "segment_log_apply", "segment_logsumexp", "segment_loss", "segment_sample",
    "segment_support", "segment_threshold", "show_config", "sigsoftmax", "smoothed_nll",
    "soft_permutation", "soft_rank", "soft_sort", "softmax", "sparse_softmax", "sparse_softmax_loss", "sparsemax", "sparsemax_loss",
    "stop_gradient_loss", "support", "taylor_softmax", "taylor_softmax_loss", "temperature", "threshold",
    "topk", "topk_kl", "topp", "transforms", "use",
]  # fmt: skip
__all__ += mappings.__all__


if not TYPE_CHECKING:  # type checkers see only the names that are imported above

    def __getattr__(name: str) -> Any:
        if name in _LATE:
            import importlib

            try:
                return importlib.import_module(f".{name}", __name__)
            except ImportError as error:  # of an extra; `hasattr`, `help` and `inspect` go on after this error alone
                raise AttributeError(str(error), name=name) from error
        if name in _LATE_NAMES:
            import importlib

            value = getattr(importlib.import_module(f".{_LATE_NAMES[name]}", __name__), name)
            globals()[name] = value
            return value
        if name in _MOVED:
            raise AttributeError(f"anymax.{name} is now anymax.{_MOVED[name]}.{name}")
        raise elsewhere.UnknownName(__name__, name, __dir__())


def __dir__() -> list[str]:
    return sorted([*__all__, *_LATE])
