"""Random numbers for arrays of any kind, from the caller's generator or, by default, from the framework's global one.

A generator is a `numpy.random.Generator` for NumPy and array-API arrays, a `torch.Generator` for torch, a key for JAX, or an integer seed
from 0 to 2**63 - 1 for all; or one of these for each row, in a list or as an array of keys. NumPy and torch have global generators
(`numpy.random.seed`, `torch.manual_seed`); JAX has none, so that it needs a key.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .._array import Array, decides, dtype_name, is_int, is_jax, is_torch, namespace, number
from .._core.providers import providers


def uniform(shape: tuple[int, ...], like: Array, generator: Any) -> Array:
    """Numbers in the open interval (0, 1), in the dtype of `like` (fp32 or fp64) and on its device.

    On a CPU and in JAX, number i, in C order, depends on the generator and on i, and not on how many follow. With a generator for each
    row (the last axis), a row does not depend on the other rows.
    """
    if _one_a_row(generator):
        return _each(uniform, shape, like, generator)
    xp = namespace(like)
    single = like.dtype == xp.float32
    if single:
        both = _pairs(shape, like, generator)
        u = both[..., 0] + both[..., 1] * (2.0**-23 if is_jax(like) else 2.0**-24)
    else:
        u = _draw("uniform", shape, like, generator)
    low, high = (2.0**-48, 1 - 2.0**-24) if single else (2.0**-54, 1 - 2.0**-53)
    # NumPy's clip takes 10 us
    return np.minimum(np.maximum(u, low), high) if isinstance(u, np.ndarray) else xp.clip(u, low, high)


def _pairs(shape: tuple[int, ...], like: Array, generator: Any) -> Array:
    """Two numbers for each in fp32: 24 bits alone would give ties among the extremes of a large vocabulary."""
    return _draw("uniform", (*shape, 2), like, generator)


def gumbel(shape: tuple[int, ...], like: Array, generator: Any) -> Array | None:
    """-log(-log(1 - u)) of what `uniform` gives, by an engine; None where there is none. Then nothing has been drawn."""
    make = providers.noise_maker(like)
    if make is None:
        return None
    return _each(gumbel, shape, like, generator) if _one_a_row(generator) else make(_pairs(shape, like, generator))


def normal(shape: tuple[int, ...], like: Array, generator: Any) -> Array:
    """Standard normal numbers, in the dtype of `like` (fp32 or fp64) and on its device; generators as for `uniform`."""
    if _one_a_row(generator):
        return _each(normal, shape, like, generator)
    return _draw("normal", shape, like, generator)


def listed(generator: Any) -> Any:
    """The generator as a frozen object can hold it: a list becomes a tuple."""
    return tuple(generator) if isinstance(generator, list) else generator


def _one_a_row(generator: Any) -> bool:
    keys = is_jax(generator) and "key" in dtype_name(generator)
    return isinstance(generator, (list, tuple)) or (keys and generator.ndim > 0)


def _each(draw: Callable[..., Array], shape: tuple[int, ...], like: Array, generators: Any) -> Array:
    """Rows, each from its generator."""
    rows = math.prod(shape[:-1])
    if is_jax(generators):
        generators = generators.reshape(-1)
    _check_count(generators, rows)
    if is_jax(generators) and rows:
        out = sys.modules["jax"].vmap(lambda key: draw(shape[-1:], like, key))(generators)
    else:
        parts = [draw(shape[-1:], like, one) for one in generators]
        out = namespace(like).stack(parts) if parts else draw(shape, like, 0)
    return namespace(like).reshape(out, shape)


def _check_count(generators: Any, rows: int) -> None:
    if len(generators) != rows:
        raise ValueError(f"generator: got {len(generators)} for {rows} rows; give one for each row, or one for all")


def in_parts(generator: Any, like: Array, rows: int) -> Callable[[int], Any]:
    """A function of n that gives what draws the numbers of the next n rows: with NumPy, and torch on a CPU, those of one call."""
    source = going_on(generator, like, of_a_call=True)
    if not _one_a_row(source):
        return lambda n: source
    _check_count(source, rows)
    left = iter(source)
    return lambda n: list(itertools.islice(left, n))


def _draw(what: str, shape: tuple[int, ...], like: Array, generator: Any) -> Any:
    """Uniform numbers in [0, 1), or normal ones, by the framework of `like`."""
    if is_torch(like):
        torch = sys.modules["torch"]
        # torch.compile can't trace a call with symbolic sizes that names a generator, even None
        given = {} if generator is None else {"generator": torch_source(like, generator, of_a_call=True)}
        if like.device.type == "meta":
            given = {}
        if (
            given
            and what == "uniform"
            and like.dtype == torch.float32
            and decides(like)
            and isinstance(given["generator"], _of_a_call())
        ):
            drawn = providers.torch_uniform(shape, given["generator"])
            if drawn is not None:
                return drawn
        draw = torch.rand if what == "uniform" else torch.randn
        return draw(shape, dtype=like.dtype, device=like.device, **given)
    if is_jax(like):
        random = sys.modules["jax"].random
        generator = _key(generator)
        if not is_jax(generator):
            raise TypeError(_wrong("JAX arrays", "a key such as jax.random.key(0)", generator))
        return getattr(random, what)(generator, shape, dtype=like.dtype)
    xp = namespace(like)
    out = _draw_numpy(what, shape, np.float32 if like.dtype == xp.float32 else np.float64, like, generator)
    if isinstance(like, np.ndarray):
        return out
    from array_api_compat import device  # late: not at `import anymax`

    return xp.asarray(out, device=device(like))


def _draw_numpy(what: str, shape: tuple[int, ...], dtype: Any, like: Array, generator: Any) -> np.ndarray:
    if generator is None:  # the global generator, which numpy.random.seed sets
        old = np.random.random_sample if what == "uniform" else np.random.standard_normal
        return np.asarray(old(shape), dtype)
    generator = _numpy_source(generator)
    if not isinstance(generator, np.random.Generator):
        kind = "NumPy arrays" if isinstance(like, np.ndarray) else "these arrays"
        raise TypeError(_wrong(kind, "a numpy.random.Generator such as numpy.random.default_rng(0)", generator))
    draw = generator.random if what == "uniform" else generator.standard_normal
    return draw(shape, dtype=dtype)


def _seed(generator: Any) -> int | None:
    """The seed; None if `generator` is not an integer. Every framework accepts this range of seeds."""
    if not is_int(number(generator)):
        return None
    if not 0 <= int(generator) < 2**63:
        raise ValueError(f"generator: a seed must be an integer from 0 to 2**63 - 1, got {int(generator)}")
    return int(generator)


def _key(generator: Any) -> Any:
    """The key of a seed; anything else is returned unchanged."""
    seed = _seed(generator)
    return generator if seed is None else sys.modules["jax"].random.key(seed)


def _numpy_source(generator: Any) -> Any:
    seed = _seed(generator)
    return generator if seed is None else np.random.default_rng(seed)


def independent(generator: Any, like: Array, n: int) -> list[Any]:
    """A generator for each of n draws, so that no two get the same numbers; a generator with a state is returned n times."""
    if is_torch(like):
        return [generator if generator is None else torch_source(like, generator)] * n
    if is_jax(like):
        key = _key(generator)
        return list(sys.modules["jax"].random.split(key, n)) if n > 1 and is_jax(key) else [key] * n
    return [_numpy_source(generator)] * n


def going_on(generator: Any, like: Array, of_a_call: bool = False) -> Any:
    """`generator` of torch or NumPy with each seed replaced by a generator, whose numbers go on from call to call."""
    if isinstance(generator, (list, tuple)):
        return tuple(going_on(one, like, of_a_call) for one in generator)
    if generator is None:
        return None
    return torch_source(like, generator, of_a_call) if is_torch(like) else _numpy_source(generator)


@functools.lru_cache(maxsize=1)
def _of_a_call() -> type:
    """The class of a generator that one call makes from a seed: no other thread draws from it."""
    return type("GeneratorOfACall", (sys.modules["torch"].Generator,), {})


def torch_source(like: Array, generator: Any, of_a_call: bool = False) -> Any:
    """The given torch.Generator, or one from a seed on the device of `like`; of_a_call: which nobody has after this call."""
    torch = sys.modules["torch"]
    seed = _seed(generator)
    if seed is not None:  # the meta device has no generator
        device: Any = "cpu" if like.device.type == "meta" else like.device
        make = (
            _of_a_call()
            if of_a_call and device == like.device and device.type == "cpu" and decides(like)
            else torch.Generator
        )
        return make(device=device).manual_seed(seed)
    source: Any = generator
    if not isinstance(source, torch.Generator):
        raise TypeError(_wrong("torch tensors", "a torch.Generator", generator))
    if source.device.type != like.device.type:
        raise TypeError(
            f"generator: it is on {source.device} and the scores are on {like.device}; "
            f"use torch.Generator(device={str(like.device)!r})"
        )
    return source


def global_source(device: Any) -> Any:
    """torch's global generator of a device."""
    torch = sys.modules["torch"]
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    module = torch.get_device_module(device)
    return module.default_generators[module.current_device() if device.index is None else device.index]


def _wrong(kind: str, allowed: str, given: Any) -> str:
    got = "None" if given is None else type(given).__module__.split(".")[0] + "." + type(given).__qualname__
    return f"generator: {kind} need {allowed}, or an integer seed; got {got}"
