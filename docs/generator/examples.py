"""The same example in three frameworks, run when the page is made: what a page prints is what came out."""

from __future__ import annotations

import contextlib
import io
import textwrap
from collections.abc import Callable

FRAMEWORKS = {
    "NumPy": """
        import numpy as np
        import anymax
        from anymax import {kind}

        mapping = {make}
        x = np.array([[2.0, 1.0, 0.1, -1.0], [0.5, 0.4, 0.3, -np.inf]])  # -inf masks a class
        y = np.array({target})
        print(anymax.apply(mapping, x).round(3))
        print(anymax.{loss}(mapping, x, y, reduction="none").round(3))
        print(anymax.jacobian(mapping, x[0]).round(3))
    """,
    "PyTorch": """
        import torch
        import anymax
        from anymax import {kind}

        mapping = {make}
        x = torch.tensor([[2.0, 1.0, 0.1, -1.0], [0.5, 0.4, 0.3, -torch.inf]], requires_grad=True)
        y = torch.tensor({target})
        loss = anymax.{loss}(mapping, x, y)
        loss.backward()
        print(anymax.apply(mapping, x))
        print(loss)
        print(x.grad)
    """,
    "JAX": """
        import jax
        import jax.numpy as jnp
        import anymax
        from anymax import {kind}

        mapping = {make}
        x = jnp.array([[2.0, 1.0, 0.1, -1.0], [0.5, 0.4, 0.3, -jnp.inf]])
        y = jnp.array({target})
        print(jax.jit(lambda s: anymax.apply(mapping, s))(x))
        print(anymax.{loss}(mapping, x, y))
        print(jax.grad(lambda s: anymax.{loss}(mapping, s, y))(x))
    """,
}


def code(framework: str, **words: str) -> str:
    return textwrap.dedent(FRAMEWORKS[framework]).strip().format(**words)


def run(source: str, name: str) -> str:
    """What the code prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(source, name, "exec"), {"__name__": "example"})
    return out.getvalue().rstrip()


def tabs(examine: Callable[[str, str], str] = run, **words: str) -> str:
    """A tab for each framework: the code, and what it prints."""
    out = ["`````{tab-set}\n:sync-group: framework"]
    for framework in FRAMEWORKS:
        source = code(framework, **words)
        printed = examine(source, f"{words['make']}, {framework}")
        out.append(
            f"````{{tab-item}} {framework}\n:sync: {framework.lower()}\n\n"
            f"```python\n{source}\n```\n\n```text\n{printed}\n```\n````"
        )
    return "\n".join([*out, "`````"])
