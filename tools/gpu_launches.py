"""What the engine for GPUs launches, recorded in the place of its kernels, and compiled ahead of time: no GPU is needed."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
POINTERS = {
    "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64", "int64": "i64", "int32": "i32", "int16": "i16",
    "int8": "i8", "uint8": "u8", "bool": "i1",
}  # fmt: skip
KERNELS = {
    "launch": (
        "separable_rows", "truncated_rows", "dense_rows", "perturb_rows", "backward_rows", "backward_parts", "slope_rows", "survey_parts",
        "dense_parts", "weigh_parts",
    ),
    "attention": (
        "attention_forward", "attention_queries", "attention_keys", "attention_bias", "attention_centres", "attention_parts",
        "attention_solve", "attention_values", "attention_merge",
    ),
    "layer": ("layer_products", "layer_scaled", "layer_terms", "layer_slopes"),
    "router": ("router_rows",),
    "sinkhorn": ("sinkhorn_forward", "sinkhorn_backward"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Launch:
    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


class Recorder:
    """In the place of a kernel: remembers with what it was launched."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel: Any = kernel.kernel if isinstance(kernel, Recorder) else kernel
        self.launches, self.fn = launches, kernel.fn

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(isinstance(side, int) and side > 0 for side in grid)
        return lambda *args, **options: self.launches.append(Launch(self.kernel, grid, args, options))


@contextlib.contextmanager
def recorded(wave: int = 32) -> Iterator[list[Launch]]:
    """The list that all launches of the engine go to meanwhile; `wave`: threads of a warp."""
    from anymax.kernels.triton import attention, launch, layer, sinkhorn_kernels

    launches: list[Launch] = []
    before: list[tuple[Any, str, Any]] = [(launch, "_wave", launch._wave)]
    launch._wave = wave
    modules = {"launch": launch, "attention": attention, "layer": layer, "sinkhorn": sinkhorn_kernels}
    for subject, module in modules.items():
        for name in KERNELS[subject]:
            if (kernel := getattr(module, name, None)) is not None:
                before.append((module, name, kernel))
                setattr(module, name, Recorder(kernel, launches))
    try:
        yield launches
    finally:
        for module, name, kernel in before:
            setattr(module, name, kernel)


def described(
    launch: Launch,
) -> tuple[dict[str, Any], dict[tuple[int, ...], Any], dict[tuple[int, ...], list], dict[str, Any]]:
    """What the runtime would tell the compiler of this launch: types, constants, by what numbers can be divided, options."""
    import torch

    options = dict(launch.options)
    compiler = {name: options.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in options}
    names = list(inspect.signature(launch.kernel.fn).parameters)
    assert set(names) == {*names[: len(launch.args)], *options}
    constants: dict[tuple[int, ...], Any] = {}
    hints: dict[tuple[int, ...], list] = {}

    def type_of(value: Any, *at: int) -> Any:
        if isinstance(value, tuple):
            of = [type_of(part, *at, i) for i, part in enumerate(value)]
            return type(value)(*of) if hasattr(value, "_fields") else tuple(of)
        if isinstance(value, torch.Tensor):
            hints[at] = [["tt.divisibility", 16]]
            return "*" + POINTERS[str(value.dtype)[6:]]
        if isinstance(value, float):
            return "fp32"
        assert isinstance(value, int), (names[at[0]], value)
        if value == 1:
            constants[at] = value
            return "constexpr"
        if value % 16 == 0:
            hints[at] = [["tt.divisibility", 16]]
        return "i32" if abs(value) < 2**31 else "i64"

    signature = {name: type_of(value, i) for i, (name, value) in enumerate(zip(names, launch.args))}
    for i, name in enumerate(names[len(launch.args) :], len(launch.args)):
        signature[name], constants[(i,)] = "constexpr", options[name]
    return signature, constants, hints, compiler


def compiled(target: str, launch: Launch) -> Any:
    """What the runtime would compile for this launch on that device."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, hints, options = described(launch)
    source = ASTSource(launch.kernel, signature=signature, constexprs=constants, attrs=hints)
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
