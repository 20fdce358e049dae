"""The kinds of arrays that one test runs on: name -> maker from NumPy. What is not installed is left out."""

from __future__ import annotations

import numpy as np
import pytest


def _makers():
    makers = {"numpy": np.asarray}
    try:
        import torch

        makers["torch"] = lambda a: torch.tensor(np.asarray(a))
    except ImportError:
        pass
    try:
        import jax.numpy as jnp

        makers["jax"] = jnp.asarray
    except ImportError:
        pass
    try:
        import array_api_strict

        makers["strict"] = array_api_strict.asarray
    except ImportError:
        pass
    return makers


KINDS = _makers()
every_kind = pytest.mark.parametrize("kind", KINDS)


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
