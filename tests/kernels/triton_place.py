"""Where Triton's kernels run in a test: on a GPU, else in Triton's interpreter (TRITON_INTERPRET=1, read when triton is imported)."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
REAL = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if REAL else "cpu"
if not (REAL or INTERPRETED):
    pytest.skip("neither a GPU nor TRITON_INTERPRET=1", allow_module_level=True)

WARNINGS = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),  # of NumPy, for -inf - -inf and the like
    pytest.mark.filterwarnings("ignore:.*TRITON_DEFAULT_FP_FUSION.*"),
]

if INTERPRETED:
    import types

    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder

    def patched_once(patch):
        """`patch` looks through all of triton.language for each function that a kernel calls: within a launch, once is enough."""
        here: set[str] = set()  # the modules that this launch has patched

        def patch_lang(fn):
            names = {value.__name__ for value in fn.__globals__.values() if isinstance(value, types.ModuleType)}
            names &= {triton.language.__name__, triton.language.core.__name__}
            if here and names <= here:
                return interpreter._LangPatchScope()
            scope = patch(fn)
            here.update(names)
            restore = scope.restore
            scope.restore = lambda: (restore(), here.clear())
            return scope

        return patch_lang

    if hasattr(interpreter, "_LangPatchScope"):  # older ones patch by other means
        interpreter._patch_lang = patched_once(interpreter._patch_lang)

    # Triton 3.7's interpreter knows no constant of bfloat16; its compiler does
    if not hasattr(InterpreterBuilder, "get_bf16"):

        def get_bf16(self, value):
            return self.create_fp_trunc(self.get_fp32(value), triton.language.bfloat16)

        InterpreterBuilder.get_bf16 = get_bf16
