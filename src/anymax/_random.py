"""Random numbers for arrays of any kind, always from a generator that the caller gives.

A `numpy.random.Generator` for NumPy and array-API arrays, a `torch.Generator` for torch, a key for JAX; an integer
seed for all.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ._array import Array, is_jax, is_torch, namespace


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


def normal(shape: tuple[int, ...], like: Array, generator: Any) -> Array:
    """Standard normal numbers, in the dtype of `like` (fp32 or fp64) and on its device."""
    return _draw("normal", shape, like, generator)


def _draw(what: str, shape: tuple[int, ...], like: Array, generator: Any) -> Any:
    """Each framework's own uniform [0, 1) and normal numbers."""
    seeded = _is_seed(generator)
    if is_torch(like):
        torch, source = sys.modules["torch"], torch_source(like, generator)
        draw = torch.rand if what == "uniform" else torch.randn
        return draw(shape, generator=source, dtype=like.dtype, device=like.device)
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
    if isinstance(like, np.ndarray):
        return out
    from array_api_compat import device  # late: not at `import anymax`

    return xp.asarray(out, device=device(like))


def _is_seed(generator: Any) -> bool:
    return isinstance(generator, (int, np.integer)) and not isinstance(generator, bool)


def torch_source(like: Array, generator: Any) -> Any:
    """The torch.Generator that is given, or that a seed makes, on the device of `like`."""
    torch = sys.modules["torch"]
    source: Any = torch.Generator(device=like.device).manual_seed(int(generator)) if _is_seed(generator) else generator
    if not isinstance(source, torch.Generator):
        raise TypeError(_wrong("torch tensors", "a torch.Generator", generator))
    if source.device.type != like.device.type:
        raise TypeError(
            f"generator: it is on {source.device} and the scores are on {like.device}; "
            f"use torch.Generator(device={str(like.device)!r})"
        )
    return source


def _wrong(kind: str, allowed: str, given: Any) -> str:
    got = "None" if given is None else type(given).__module__.split(".")[0] + "." + type(given).__qualname__
    return f"generator: {kind} need {allowed}, or an integer seed; got {got}"
