"""Random numbers for arrays of any kind, always from a generator that the caller gives.

A `numpy.random.Generator` for NumPy and array-API arrays, a `torch.Generator` for torch, a key for JAX; an integer
seed for all.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from array_api_compat import device

from ._array import Array, Namespace, is_jax, is_torch, namespace


def _normal(u: Array, xp: Namespace) -> Array:
    raise NotImplementedError  # drawn by each framework's own method


# The noise at which u of the mass lies above. u is fine near 0, so the upper tail, which decides a maximum, is fine
# too.
_SURVIVAL = {
    "gumbel": lambda u, xp: -xp.log(-xp.log1p(-u)),
    "normal": _normal,
    "logistic": lambda u, xp: xp.log1p(-u) - xp.log(u),
    "laplace": lambda u, xp: xp.where(u < 0.5, -xp.log(2.0 * u), xp.log(2.0 - 2.0 * u)),
    "uniform": lambda u, xp: 1.0 - 2.0 * u,  # on (-1, 1)
}
KINDS = tuple(_SURVIVAL)


def check_kind(kind: Any) -> str:
    if kind not in KINDS:
        raise ValueError(f"noise {kind!r} is not known; use one of {', '.join(map(repr, KINDS))}")
    return kind


def uniform(shape: tuple[int, ...], like: Array, generator: Any) -> Array:
    """Numbers in the open interval (0, 1), in the dtype of `like` (fp32 or fp64) and on its device."""
    xp = namespace(like)
    single = like.dtype == xp.float32
    if single:
        # two draws: 24 bits alone would give ties among the extremes of a large vocabulary
        both = _draw("uniform", (2, *shape), like, generator)
        u = both[0, ...] + both[1, ...] * (2.0**-23 if is_jax(like) else 2.0**-24)
    else:
        u = _draw("uniform", shape, like, generator)
    low, high = (2.0**-48, 1 - 2.0**-24) if single else (2.0**-54, 1 - 2.0**-53)
    u = xp.where(u > low, u, low * xp.ones_like(u))
    return xp.where(u < high, u, high * xp.ones_like(u))


def noise(kind: str, shape: tuple[int, ...], like: Array, generator: Any) -> Array:
    """Independent noise of a standard kind, in the dtype of `like` (fp32 or fp64) and on its device."""
    if check_kind(kind) == "normal":
        return _draw("normal", shape, like, generator)
    return _SURVIVAL[kind](uniform(shape, like, generator), namespace(like))


def _draw(what: str, shape: tuple[int, ...], like: Array, generator: Any) -> Array:
    """Each framework's own uniform [0, 1) and normal numbers."""
    seeded = isinstance(generator, (int, np.integer)) and not isinstance(generator, bool)
    if is_torch(like):
        torch = sys.modules["torch"]
        if seeded:
            generator = torch.Generator(device=like.device).manual_seed(int(generator))
        if not isinstance(generator, torch.Generator):
            raise TypeError(_wrong("torch tensors", "a torch.Generator", generator))
        if generator.device.type != like.device.type:
            raise TypeError(
                f"generator: it is on {generator.device} and the scores are on {like.device}; "
                f"use torch.Generator(device={str(like.device)!r})"
            )
        draw = torch.rand if what == "uniform" else torch.randn
        return draw(shape, generator=generator, dtype=like.dtype, device=like.device)
    if is_jax(like):
        random = sys.modules["jax"].random
        if seeded:
            generator = random.key(int(generator))
        if not is_jax(generator):
            raise TypeError(_wrong("JAX arrays", "a key such as jax.random.key(0)", generator))
        return getattr(random, what)(generator, shape, dtype=like.dtype)
    if seeded:
        generator = np.random.default_rng(int(generator))
    if not isinstance(generator, np.random.Generator):
        kind = "NumPy arrays" if isinstance(like, np.ndarray) else "these arrays"
        raise TypeError(_wrong(kind, "a numpy.random.Generator such as numpy.random.default_rng(0)", generator))
    xp = namespace(like)
    draw = generator.random if what == "uniform" else generator.standard_normal
    out = draw(shape, dtype=np.float32 if like.dtype == xp.float32 else np.float64)
    return out if isinstance(like, np.ndarray) else xp.asarray(out, device=device(like))


def _wrong(kind: str, allowed: str, given: Any) -> str:
    got = "None" if given is None else type(given).__module__.split(".")[0] + "." + type(given).__qualname__
    return f"generator: {kind} need {allowed}, or an integer seed; got {got}"
