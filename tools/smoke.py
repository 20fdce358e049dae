"""What an installed anymax does on NumPy arrays: python tools/smoke.py [--library | --pure], with and without compiled kernels."""

import sys

import numpy as np

import anymax
from anymax.kernels import library, native

path = library.path()
if "--library" in sys.argv and path is None:
    raise SystemExit("there is no compiled library")
if "--pure" in sys.argv and path is not None:
    raise SystemExit(f"there is a compiled library, {path}")

row = np.array([0.6, 0.5, 0.4])
engines = ("native", "reference") if path else ("reference",)
for engine in engines:
    with anymax.use(engine):
        for dtype in (np.float64, np.float32):
            x = row.astype(dtype)
            tolerance = 4 * np.finfo(dtype).eps
            np.testing.assert_allclose(anymax.softmax(x), np.exp(row) / np.exp(row).sum(), rtol=tolerance)
            np.testing.assert_allclose(anymax.sparsemax(x), row - 0.5 / 3, rtol=tolerance)
            p = anymax.entmax15(np.stack([x] * 1000))
            assert p.dtype == dtype
            np.testing.assert_allclose(p.sum(-1), 1.0, rtol=8 * tolerance)
isa = native.isa() if path else None
if path:
    from anymax import _engine  # the module itself, by its own name

    if _engine.isa() != isa:
        raise SystemExit(f"anymax._engine runs on {_engine.isa()}, the engine in use on {isa}")
print(f"anymax {anymax.__version__} on Python {sys.version.split()[0]}: {', '.join(engines)}, instruction set {isa}")
