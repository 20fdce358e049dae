"""Transforms change the scores before a map: temperature, top-k, top-p, penalties and others.

Each function returns a transform. Call it with scores, pass it as `transform=`, or join several with `compose`. A transform leaves
masked scores (-inf) masked, confines a NaN to its row, and has a gradient in the scores that it keeps. Array parameters broadcast to
the scores as in NumPy; a parameter with one axis runs along `axis`.

>>> import numpy as np
>>> compose(temperature(0.5), topk(2))(np.array([1.0, 3.0, 2.0]))
array([-inf,   6.,   4.])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .._core.elsewhere import answering
from .._core.mapping import Mapping
from .._core.options import takes_transforms
from .adaptive import mink, pless, toph
from .base import Composed, Transform, is_function, not_transform
from .configs import Configured, from_config
from .dry import dry
from .dynamic_temperature import dynamic_temperature
from .mixing import mix
from .scaling import cosine, mask, noise, normalize, prior, scalable, temperature
from .softcap import softcap
from .tokens import logit_bias, repetition_penalty, sequence_bias
from .truncation import epsilon_cutoff, eta, minp, topk, topnsigma, topp, typical, xtc

__all__ = [
    "Composed", "Configured", "Transform", "compose", "cosine", "dry", "dynamic_temperature", "epsilon_cutoff", "eta", "from_config",
    "logit_bias", "mask", "mink", "minp", "mix", "noise", "normalize", "pless", "prior", "repetition_penalty", "scalable", "sequence_bias",
    "softcap", "temperature", "toph", "topk", "topnsigma", "topp", "typical", "xtc",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__ = answering(__name__, __all__)


@takes_transforms(__all__)
def compose(*transforms: Callable[[Any], Any]) -> Composed:
    """Apply transforms from left to right; `compose()` changes nothing.

    Use it to write down what a sampler does to its scores. The order matters; the page "Decoding" shows the order of other libraries.

    Parameters
    ----------
    transforms
        Transforms of this module, compositions of them, or your own functions scores -> scores.

    Returns
    -------
    Composed
        A function scores -> scores. Its `transforms` are the parts, as a tuple.

    Examples
    --------
    >>> compose(temperature(2.0), compose(topk(3), minp(0.1)))
    compose(temperature(T=2.0), topk(k=3), minp(p=0.1))
    """
    flat: list[Callable[[Any], Any]] = []
    for t in transforms:
        if not is_function(t):
            hint = "; a map comes after the transforms, and gives probabilities" if isinstance(t, Mapping) else ""
            hint = "; give them one by one, as in compose(*transforms)" if isinstance(t, (list, tuple)) else hint
            raise TypeError(
                f"compose: expected functions scores -> scores such as temperature(2.0), got {not_transform(t)}{hint}"
            )
        flat.extend(t.transforms if isinstance(t, Composed) else (t,))
    return Composed(tuple(flat))
