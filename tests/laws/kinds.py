"""The kinds of arrays that one test runs on: name -> maker from NumPy. What is not installed is left out.

A framework is imported at its first array, so that tests of NumPy alone need not wait for it.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest


def _torch(a):
    import torch

    return torch.as_tensor(np.array(a))  # `torch.tensor` warns under torch.compile


def _jax(a):
    import jax.numpy as jnp

    return jnp.asarray(a)


def _strict(a):
    import array_api_strict

    return array_api_strict.asarray(a)


_PACKAGES = {"numpy": "numpy", "torch": "torch", "jax": "jax", "strict": "array_api_strict"}
MAKERS = {"numpy": np.asarray, "torch": _torch, "jax": _jax, "strict": _strict}
KINDS = {name: MAKERS[name] for name, package in _PACKAGES.items() if importlib.util.find_spec(package)}
every_kind = pytest.mark.parametrize("kind", KINDS)
# JAX compiles for seconds what the other kinds do in milliseconds by the same lines
jax_in_the_whole_battery = pytest.mark.whole(lambda kind: kind == "jax")


def readonly(a):
    a = np.array(a)
    a.setflags(write=False)
    return a


def back(a):
    """As NumPy, from any kind."""
    return np.asarray(a.detach() if hasattr(a, "detach") else a)


def generator(kind, seed=0):
    """What each kind of array takes as its source of random numbers."""
    if kind == "torch":
        import torch

        return torch.Generator().manual_seed(seed)
    if kind == "jax":
        import jax

        return jax.random.key(seed)
    return np.random.default_rng(seed)
