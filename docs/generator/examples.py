"""The same example in three frameworks, run when the page is made: what a page prints is what came out.

A page of a map, of a transform and of a margin has the templates of its name.
"""

from __future__ import annotations

import contextlib
import io
import textwrap
from collections.abc import Mapping

MAP = {
    "NumPy": """
        import numpy as np
        import anymax
        from anymax import {kind}

        mapping = {make}
        # -inf masks a class
        x = np.array([[2.0, 1.0, 0.1, -1.0], [0.5, 0.4, 0.3, -np.inf]])
        y = np.array({target})
        print(anymax.apply(mapping, x).round(3))
        print(anymax.{loss}(mapping, x, y, reduction="none").round(3))
        print(anymax.jacobian(mapping, x[0]).round(3) + 0.0)
    """,
    "PyTorch": """
        import torch
        import anymax
        from anymax import {kind}

        mapping = {make}
        x = torch.tensor([[2.0, 1.0, 0.1, -1.0], [0.5, 0.4, 0.3, -torch.inf]])
        x.requires_grad_()
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
TRANSFORM = {
    "NumPy": """
        import numpy as np
        import anymax
        from anymax import transforms

        transform = {make}
        x = np.array([[2.0, 1.0, 0.1, -1.0]])
        print(transform(x).round(3))
        print(anymax.sparsemax(transform(x)).round(3))
    """,
    "PyTorch": """
        import torch
        import anymax
        from anymax import transforms

        transform = {make}
        x = torch.tensor([[2.0, 1.0, 0.1, -1.0]], requires_grad=True)
        p = anymax.softmax(transform(x))
        print(p)
        print(torch.autograd.grad(p[0, 0], x))
    """,
    "JAX": """
        import jax
        import jax.numpy as jnp
        import anymax
        from anymax import transforms

        transform = {make}
        x = jnp.array([[2.0, 1.0, 0.1, -1.0]])
        print(jax.jit(lambda s: anymax.softmax(transform(s)))(x))
        print(jax.grad(lambda s: anymax.softmax(transform(s))[0, 0])(x))
    """,
}
MARGIN = {
    "NumPy": """
        import numpy as np
        import anymax
        from anymax import Entmax, margins

        margin = {make}
        cosines = np.array([[0.9, 0.1, -0.3], [0.2, 0.5, 0.4]])
        y = np.array([0, 1])
        print(margin(cosines, y).round(3))
        loss = anymax.margin_loss(Entmax(1.5), cosines, y, margin=margin, scale=8.0)
        print(loss.round(3))
    """,
    "PyTorch": """
        import torch
        import anymax
        from anymax import Softmax, margins

        torch.manual_seed(0)
        head = anymax.nn.MarginHead(16, 3, Softmax(), margin={make}, scale=8.0)
        embeddings = torch.randn(4, 16, requires_grad=True)
        loss = head(embeddings, torch.tensor([0, 1, 2, 0]))
        loss.backward()
        print(loss)
        print(head.weight.grad.shape)
    """,
    "JAX": """
        import jax
        import jax.numpy as jnp
        import anymax
        from anymax import Softmax, margins

        margin = {make}
        cosines = jnp.array([[0.9, 0.1, -0.3], [0.2, 0.5, 0.4]])
        y = jnp.array([0, 1])
        loss = lambda c: anymax.margin_loss(Softmax(), c, y, margin=margin, scale=8.0)
        print(loss(cosines))
        print(jax.jit(jax.grad(loss))(cosines))
    """,
}


def code(template: str, **words: str) -> str:
    return textwrap.dedent(template).strip().format(**words)


def run(source: str, name: str) -> str:
    """What the code prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(source, name, "exec"), {"__name__": "example"})
    return out.getvalue().rstrip()


def tabs(templates: Mapping[str, str], **words: str) -> str:
    """A tab for each framework: the code, and what it prints."""
    out = ["`````{tab-set}\n:sync-group: framework"]
    for framework, template in templates.items():
        source = code(template, **words)
        printed = run(source, f"{words['make']}, {framework}")
        out.append(
            f"````{{tab-item}} {framework}\n:sync: {framework.lower()}\n\n"
            f"```python\n{source}\n```\n\n```text\n{printed}\n```\n````"
        )
    return "\n".join([*out, "`````"])
