"""The laws of derivatives on torch and JAX, which hold if these are loaded: parameters, second derivatives, programs."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from .._array import is_array
from .._core.mapping import Mapping
from ..functional import apply
from ..inspection import jacobian
from ..losses.verbs import fenchel_young
from .case import BrokenLaw, Case, near


def parameters(case: Case) -> None:
    """If torch is loaded: the derivatives of p and of the loss in each parameter that may be a tensor."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    m = case.mapping
    named = {f.name: getattr(m, f.name) for f in dataclasses.fields(m)}  # type: ignore[arg-type]
    named = {k: v for k, v in named.items() if is_array(v) or isinstance(v, float)}
    x = torch.as_tensor(np.stack(case.smooth()[:3] or [case.rows(1)[0]]))
    w = torch.as_tensor(case.rows(len(x), 0.7))
    with torch.no_grad():
        y = apply(_with_arrays(m, torch.as_tensor), x.flip(-1))
    for name, start in named.items():
        others = {k: torch.as_tensor(v) for k, v in m.params().items() if k != name}
        value = torch.as_tensor(np.asarray(start, np.float64)).clone().requires_grad_()
        try:
            m.replace(**others, **{name: value})
        except (TypeError, ValueError):
            continue  # the parameter takes numbers only

        def verbs(v: Any, others: Any = others, name: str = name) -> dict[str, Any]:
            own = m.replace(**others, **{name: v})
            out = {"p": (apply(own, x) * w).sum()}
            if case.facts.has_potential:
                with contextlib.suppress(TypeError):
                    out["the loss"] = fenchel_young(own, x, y, reduction="sum")
            return out

        allowed = m.ranges.get(name)
        at_end = allowed is not None and bool(np.any((start == allowed.low) | (start == allowed.high)))
        bent = at_end or _parameter(verbs, value, name)
        for step in (1e-3, -1e-3) if bent else ():  # beside a kink, or an end, there is one derivative
            beside = (value.detach() + step * (1.0 + value.detach().abs())).requires_grad_()
            with contextlib.suppress(TypeError, ValueError):  # the value may be out of range
                _parameter(verbs, beside, name)


def _parameter(verbs: Callable[[Any], dict[str, Any]], value: Any, name: str) -> bool:
    """Checks the derivatives in a parameter at one value, by differences. At a kink the gradient must be between both sides; then True."""
    torch, h, bent = sys.modules["torch"], 1e-6, False
    for verb, out in verbs(value).items():
        got = torch.autograd.grad(out, value, allow_unused=True)[0] if out.requires_grad else None
        got = 0.0 if got is None else float(got.sum())
        with torch.no_grad():
            up, here, down = (float(verbs(value + s * h)[verb]) for s in (1, 0, -1))
        left, right, want = (here - down) / h, (up - here) / h, (up - down) / (2 * h)
        atol = 1e-4 * max(1.0, abs(left), abs(right))
        if abs(right - left) > 10 * atol:
            bent, want = True, min(max(got, min(left, right)), max(left, right))
        hint = "; a parameter that changes the feasible set needs a loss of its own" if verb != "p" else ""
        near(got, want, atol, f"the gradient of {verb} in {name} is its derivative{hint}")
    return bent


def _with_arrays(mapping: Mapping, asarray: Callable[[Any], Any]) -> Mapping:
    """The map with its arrays as those of a framework."""
    return mapping.replace(**{k: asarray(np.asarray(a)) for k, a in mapping.params().items()})


def frameworks(case: Case) -> None:
    """If torch or JAX is loaded: p and its gradient agree with NumPy, and on torch the second derivative is right."""
    m, rows = case.mapping, np.stack(case.smooth()[:4] or [case.rows(1)[0]])
    v, w = case.rows(len(rows), 0.7), case.rows(len(rows), 0.9)
    p = case.p(rows)
    back = np.stack([np.asarray(jacobian(m, x)).T @ g for x, g in zip(rows, v)])
    size = max(1.0, float(np.abs(back).max()))
    torch = sys.modules.get("torch")
    if torch is not None:
        own = _with_arrays(m, torch.as_tensor)
        x, vt, wt = torch.as_tensor(rows).requires_grad_(), torch.as_tensor(v), torch.as_tensor(w)
        out = apply(own, x)
        near(out.detach(), p, 1e-8, "torch gives the p of NumPy")
        (first,) = torch.autograd.grad((out * vt).sum(), x, create_graph=True)
        near(first.detach(), back, 1e-6 * size, "the gradient of torch is vjp")
        second = torch.autograd.grad((first * wt).sum(), x)[0] if first.requires_grad else torch.zeros_like(x)

        def slope(x: np.ndarray) -> float:
            return sum(float((np.asarray(jacobian(m, r)).T @ a) @ b) for r, a, b in zip(x, v, w))

        h, move = 1e-5, case.rows(len(rows), 0.5)
        want = (slope(rows + h * move) - slope(rows - h * move)) / (2 * h)
        got = float((second * torch.as_tensor(move)).sum())
        near(got, want, 1e-3 * max(1.0, abs(want)), "torch's second derivative is that of p")
    jax = sys.modules.get("jax")
    if jax is not None and hasattr(jax, "numpy"):
        own = _with_arrays(m, jax.numpy.asarray)
        x = jax.numpy.asarray(rows)
        wide = x.dtype == np.float64

        def value(x: Any) -> Any:
            out = apply(own, x)
            return (out * v).sum(), out

        got, out = jax.jit(jax.grad(value, has_aux=True))(x)
        near(out, p, 1e-8 if wide else 1e-4, "JAX gives the p of NumPy")
        near(got, back, (1e-6 if wide else 1e-2) * size, "the gradient of JAX is vjp")


def traced(case: Case) -> None:
    """If torch or JAX is loaded: p and its gradient are the same under vmap, torch.func and torch.compile, where values can't be read,
    also with masked classes."""
    rows = np.stack([*case.smooth(3)[:3], *case.smooth(3, masked=2)[:3]] or [case.rows(1)[0]])
    weight, p = case.rows(len(rows), 0.7), case.p(rows)
    back = np.stack([np.asarray(jacobian(case.mapping, x)).T @ g for x, g in zip(rows, weight)])
    size = max(1.0, float(np.abs(back).max()))

    def same(how: str, both: Callable[[], tuple[Any, Any]], loose: float = 1e-8) -> None:
        try:
            out, got = both()
        except Exception as error:
            raise BrokenLaw(f"under {how}: {type(error).__name__}: {error}") from None
        near(out, p, loose, f"the same p under {how}")
        near(got, back, 100 * loose * size, f"the same gradient under {how}, 0 at masked classes")

    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None:
        own = _with_arrays(case.mapping, torch.as_tensor)
        x, g = torch.as_tensor(rows), torch.as_tensor(weight)

        def product(x: Any, g: Any) -> Any:
            out, pull = torch.func.vjp(lambda v: apply(own, v), x)
            return out, pull(g)[0]

        same("torch.func.vjp", lambda: product(x, g))
        same("torch.vmap", lambda: torch.vmap(product)(x, g))
        if torch._dynamo.is_dynamo_supported():
            same("torch.compile", lambda: _compiled(torch, own, x, g))
    if jax is not None and hasattr(jax, "numpy"):
        it = _with_arrays(case.mapping, jax.numpy.asarray)
        y, h = jax.numpy.asarray(rows), jax.numpy.asarray(weight)

        def pulled(x: Any, g: Any) -> Any:
            out, pull = jax.vjp(lambda v: apply(it, v), x)
            return out, pull(g)[0]

        same("jax.vmap", lambda: jax.jit(jax.vmap(pulled))(y, h), 1e-8 if y.dtype == np.float64 else 1e-4)


def _compiled(torch: Any, mapping: Mapping, x: Any, g: Any) -> tuple[Any, Any]:
    """p and the gradient of <g, p> by torch.compile, without graph breaks."""
    torch.compiler.reset()  # programs of other maps are cached under the same name
    x = x.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own code
        out = torch.compile(lambda v: apply(mapping, v), fullgraph=True, backend="eager")(x)
        got = torch.autograd.grad((out * g).sum(), x)[0] if out.requires_grad else torch.zeros_like(x)
    return out.detach(), got
