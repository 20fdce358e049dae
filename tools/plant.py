"""Plants faults, one at a time, and tells which battery of tests sees them: `python tools/plant.py [words of names]`.

Each line of `FAULTS` is a file, a piece of it, what stands there instead, and the files of tests that could tell. A copy of the checkout
gets the fault; the short battery of those files runs in a child process, and where it stays green, what only the whole battery has.
Without a fault the same files must be green: that comes first. `--out FILE` keeps a line of JSON for each.
"""

# ruff: noqa: E501 (what is planted is quoted whole)

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Fault(NamedTuple):
    file: str  # below src/anymax
    old: str
    new: str
    tests: str  # of tests/, without test_ and .py


LAWS = "law_kkt law_symmetry law_simplex law_jacobian law_accuracy"
RATIO = "law_symmetry law_simplex law_jacobian law_accuracy"

FAULTS = (
    # -- the formula of each map
    Fault("mappings/softmax.py", "return p * (g - total(p * g, xp))", "return p * (g - total(g * p, xp) * 1.001)", LAWS),
    Fault("mappings/softmax.py", "finish(y - xp.log(z), keep, poisoned, xp, masked=-math.inf)", "finish(y - xp.log(z), keep, poisoned, xp)",
          "law_poison law_simplex law_arrays losses"),
    Fault("mappings/softmax.py", "others = total(counts(tied, xp), xp) - 1", "others = total(counts(tied, xp), xp)", "law_loss losses"),
    Fault("mappings/sparsemax.py", "return 0.5 * q * (q - 1.0)", "return 0.25 * q * (q - 1.0)", "law_loss losses law_kkt"),
    Fault("mappings/sparsemax.py", "xp.where(positive(p), xp.ones_like(p)", "xp.where(p >= 0, xp.ones_like(p)", LAWS),
    Fault("mappings/entmax.py", "return q ** (self._c(q, xp) - 1.0)", "return q ** self._c(q, xp)", LAWS + " torch"),
    Fault("mappings/entmax.py", "** (1.0 - c), xp.zeros_like(p))\n\n    def omega_terms", "** (1.0 + c), xp.zeros_like(p))\n\n    def omega_terms", LAWS),
    Fault("mappings/entmax.py", "xp.log(s), xp) / alpha", "xp.log(s), xp)", "law_loss law_kkt losses"),
    Fault("mappings/entmax.py", "margin = 1.0 / (alpha - 1.0)", "margin = 1.0 / alpha", "facts law_loss margins"),
    Fault("mappings/entmax.py", "return -(1.0 + sorted_power_threshold(z, r, xp)) / c", "return -sorted_power_threshold(z, r, xp) / c", "solver " + LAWS),
    Fault("mappings/entmax.py", "return pivot(x, keep, c, xp) if c > 1.0", "return pivot(x, keep, c, xp) if c > 3.0", LAWS),
    Fault("mappings/entmax.py", "return tau - 1.0 / c", "return tau + 1.0 / c", "law_kkt inspection"),
    Fault("mappings/entmax.py", "sharp = power(ratio, c - 1.0, xp)", "sharp = power(ratio, c, xp)", "torch law_jacobian transforms"),
    Fault("mappings/budget.py", "xp.where(t < 1, t, xp.ones_like(t))", "t", LAWS),
    Fault("mappings/budget.py", "(p <= 0) | (p >= 1), xp", "(p <= 0), xp", LAWS),
    Fault("mappings/budget.py", "price = tau + 0.5", "price = tau", "losses torch law_loss"),
    Fault("mappings/normmax.py", "beta, r = alpha / (alpha - 1.0), 1.0 / (alpha - 1.0)", "beta, r = alpha / (alpha - 1.0), 1.0 / alpha", LAWS),
    Fault("mappings/normmax.py", "** ((alpha - 1.0) / alpha)\n", "** (1.0 / alpha)\n", LAWS),
    Fault("mappings/normmax.py", "for _ in range(2):\n            base", "for _ in range(1):\n            base", "torch law_jacobian jax transforms"),
    Fault("mappings/taylor.py", "_horner(v, s, self.order - 1, xp) * s", "_horner(v, s, self.order - 1, xp)", RATIO),
    Fault("mappings/taylor.py", "out = out * v + scale / math.factorial(j)", "out = out * v + scale / math.factorial(max(j, 1) + 0 * j) * (1 + 1e-6 * j)", RATIO),
    Fault("mappings/sigsoftmax.py", "u * (1.0 + 0.5 * (1.0 - xp.tanh(0.5 * x)))", "u * (1.0 + 0.5 * (1.0 + xp.tanh(0.5 * x)))", RATIO),
    Fault("mappings/sigsoftmax.py", "return x - xp.logaddexp(xp.zeros_like(x), -x)", "return x - xp.logaddexp(xp.zeros_like(x), x)", RATIO),
    Fault("mappings/ratio.py", "return 2.0 * (x / size) / size", "return 2.0 * (x / size)", RATIO),
    Fault("mappings/ratio.py", "return e / ((1.0 + e) * (1.0 + e))", "return e / (1.0 + e)", RATIO),
    Fault("mappings/sparse_softmax.py", "return p * (g - dot(p, g, xp))", "return p * g", LAWS),
    Fault("mappings/sparse_softmax.py", "xp.where(size <= self.k, value", "xp.where(size < self.k, value", "law_loss losses inspection law_kkt"),
    Fault("_truncate.py", "return above | (equal & (place <= room))", "return above | (equal & (place < room))", "transforms law_simplex law_accuracy"),
    Fault("_truncate.py", "inside = before < level * upto[..., -1:]", "inside = before <= level * upto[..., -1:]", "transforms law_accuracy"),
    Fault("mappings/perturb_max.py", "w[0] = w[-1] = 0.5 * w[0]", "w[0] = w[-1] = w[0]", "perturb_max law_accuracy"),
    Fault("mappings/perturb_max.py", "return first + 0.5 * (d * d * total(c.h1, xp)", "return first + (d * d * total(c.h1, xp)", "perturb_max torch"),
    Fault("mappings/perturb_max.py", "slope = g * sum_h - total(c.h * g, xp)", "slope = g * sum_h", "perturb_max law_jacobian"),
    Fault("_noises.py", "return -h * (v + h)", "return -h * (v - h)", "perturb_max"),
    Fault("_noises.py", "return -depth - xp.log(-xp.expm1(-depth))", "return -depth", "perturb_max samplers law_accuracy"),
    # -- the solvers
    Fault("_solve.py", "inside = counts(mass < 1.0, xp)", "inside = counts(mass < 1.2, xp)", "solver " + LAWS),
    Fault("_solve.py", "third = cube - 3.0 * mean * square", "third = cube - 2.0 * mean * square", "solver law_kkt law_accuracy"),
    Fault("_solve.py", "return eps * xp.where(size > 1.0", "return 1e4 * eps * xp.where(size > 1.0", "solver law_kkt law_accuracy"),
    Fault("_solve.py", "support = keep & (gap >= 0)\n    size", "support = keep & (gap > 0)\n    size", "law_kkt law_accuracy"),
    Fault("_solve.py", "whole = base > xp.finfo(gap.dtype).smallest_normal", "whole = base > 1e-5", "law_kkt law_accuracy"),
    # -- arrays: masks, poison, axes, dtypes
    Fault("_array.py", "poisoned = xp.isnan(high) | (high == math.inf)\n    return xp.where(keep & ~poisoned", "poisoned = xp.isnan(high)\n    return xp.where(keep & ~poisoned",
          "law_poison"),
    Fault("_array.py", "keep = x != -math.inf\n    high = top(x, xp)", "keep = x > -1e30\n    high = top(x, xp)", "law_poison law_limits law_arrays"),
    Fault("_array.py", "axes.insert(axis, axes.pop())", "axes.insert(0, axes.pop())", "law_arrays"),
    Fault("_array.py", 'if dtype_name(x) in _HALVES else x\n\n\ndef adopt', 'if dtype_name(x) == "float16" else x\n\n\ndef adopt', "law_arrays losses attention"),
    Fault("_array.py", "all(s >= 0 for s in value.strides)", "True", "law_arrays losses transforms"),
    Fault("_array.py", "lost = (a == 0) & ~xp.isfinite(b)", "lost = (a == 0) & xp.isnan(b)", "law_loss losses law_poison"),
    Fault("_array.py", "_LOG1P = tuple((-1.0) ** k / (k + 1)", "_LOG1P = tuple((-1.0) ** k / (k + 2 - (k < 3))", "torch law_accuracy law_kkt"),
    Fault("_axes.py", "order = (*(i for i in range(x.ndim) if i not in joined), *joined)", "order = (*(i for i in range(x.ndim) if i not in joined), *sorted(joined))",
          "law_arrays losses inspection"),
    Fault("_array.py", "return value if value.dtype == x.dtype else xp.astype(value, x.dtype)", "return value", "law_arrays torch law_accuracy transforms"),
    # -- dispatch
    Fault("kernels/__init__.py", "if reason is not None:\n            raise RuntimeError", "if False:\n            raise RuntimeError", "engines native triton"),
    Fault("kernels/__init__.py", "return next(engine for engine in ENGINES if", "return next(engine for engine in ENGINES[1:] if", "engines native"),
    Fault("kernels/__init__.py", "return _forced.get() or _environment", "return _environment or _forced.get()", "engines"),
    Fault("kernels/library.py", "    if not tensors:\n        return 0\n", "    if tensors:\n        return 0\n", "native"),
    Fault("attention.py", "if s.mapping.name != \"softmax\":\n        return f\"torch has", "if s.mapping.name == \"sparsemax\":\n        return f\"torch has", "attention attention_options attention_edges"),
    # -- losses
    Fault("losses.py", "sample = counted if class_weight is None else counted * dot(y, class_weight, xp)", "sample = counted", "losses"),
    Fault("losses.py", "y = (1.0 - smoothing) * y + smoothing * total(y, xp) * uniform", "y = (1.0 - smoothing) * y + smoothing * uniform", "losses"),
    Fault("losses.py", "uniform = free / xp.where(count > 0, count, xp.ones_like(count))", "uniform = free / n", "losses"),
    Fault("losses.py", "stray = (index < 0) | (index >= n)", "stray = (index < 0) | (index > n)", "losses native torch"),
    Fault("losses.py", "ignored = index == options.get(\"ignore_index\", -100)", "ignored = index == -100", "losses native"),
    Fault("losses.py", "value = value + xp.where(masked, math.inf", "value = value + xp.where(masked, 0.0", "losses law_loss"),
    Fault("losses.py", "return anchor + xp.log(xp.exp(-anchor) + total(e, xp))", "return anchor + xp.log(1.0 + total(e, xp))", "losses"),
    Fault("margins.py", "math.cos((k0 + 1) * math.pi - m2)", "math.cos((k0 + 1) * math.pi + m2)", "margins"),
    Fault("margins.py", "return 1.0, self.m, 0.0", "return 1.0, -self.m, 0.0", "margins docstrings"),
    # -- samplers and transforms
    Fault("samplers.py", "dead = xp.isnan(upto[..., -1:]) | (rank[..., -1:] == 0)", "dead = xp.isnan(upto[..., -1:])", "samplers"),
    Fault("samplers.py", "low = xp.where(above | (middle >= high), low, middle + 1)", "low = xp.where(above | (middle >= high), low, middle)", "samplers"),
    Fault("samplers.py", "index = xp.argmax(xp.where(keep, z, -math.inf * xp.ones_like(z)), axis=-1)", "index = xp.argmax(z, axis=-1)", "samplers"),
    Fault("transforms.py", "return _on_kept(x, lambda y: y / T, xp)", "return x * (1 / T)", "transforms"),
    Fault("transforms.py", "n = total(xp.astype(x != -math.inf, x.dtype), xp)", "n = x.shape[-1]", "transforms"),
    Fault("transforms.py", "deviation = xp.sqrt(total(weight * (z - mean) ** 2, xp) / count)", "deviation = xp.sqrt(total((z - mean) ** 2, xp) / count)", "transforms"),
    Fault("transforms.py", "~(y - top(y, xp) < log_p)", "y - top(y, xp) > log_p", "transforms"),
    # -- attention
    Fault("_scores.py", "conditions.append(j <= i)", "conditions.append(j < i)", "attention attention_options"),
    Fault("_scores.py", "conditions.append(j >= i - self.left)", "conditions.append(j > i - self.left)", "attention_options attention_random"),
    Fault("_scores.py", 's = s - self.arrays["slopes"] * xp.astype(xp.abs(i - j), s.dtype)', 's = s - self.arrays["slopes"] * xp.astype(i - j, s.dtype)',
          "attention_options attention_random"),
    Fault("_scores.py", "s = self.softcap * xp.tanh(s / self.softcap)", "s = xp.tanh(s / self.softcap)", "attention_options attention_random"),
    Fault("_scores.py", "return 0 if self.right is None else min(0, self.right)", "return 1 if self.right is None else min(0, self.right)", "attention_options attention_random"),
    Fault("_scores.py", "high = self.shape[-1] if self.reach is None else stop + self.offset + self.reach", "high = self.shape[-1] if self.reach is None else stop + self.reach",
          "attention_options attention_random attention_edges"),
    Fault("attention.py", "kept = uniform(tuple(p.shape), p, _source(call)) >= call.dropout_p", "kept = uniform(tuple(p.shape), p, _source(call)) <= call.dropout_p", "attention_options"),
    Fault("attention.py", "causal = s.causal and not _window_of(s)", "causal = s.causal", "attention attention_options attention_random"),
    Fault("autodiff/blockwise.py", "at.append(index % n)", "at.append(index // n)", "attention_options attention_random"),
    Fault("autodiff/blockwise.py", "scaled = q * s.scale if plain else q", "scaled = q", "attention attention_options attention_random"),
    Fault("linear_attention.py", "pairs = [(x * math.sqrt(0.5), x)]", "pairs = [(x, x)]", "linear_attention"),
    Fault("linear_attention.py", "if d % 2 == 0:  #", "if d % 2 == 1:  #", "linear_attention"),
    # -- the bridges to torch and JAX
    Fault("autodiff/torch.py", "return grads[0] * (p - y), None, None", "return p - y, None, None", "torch losses nn law_loss"),
    Fault("autodiff/torch.py", "g = (g / index.numel() if ctx.reduction", "g = (g if ctx.reduction", "losses native torch"),
    Fault("autodiff/torch.py", "return x.new_empty((*x.shape[:-1], 2), dtype=dtype)", "return x.new_empty((*x.shape[:-1], 1), dtype=dtype)", "torch_compile torch_modes transforms"),
    Fault("autodiff/torch.py", "value = value.movedim(dim, 0)\n", "value = value.movedim(dim, -1)\n", "torch transforms torch_modes"),
    Fault("autodiff/torch.py", "x = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)", "x = x if x_dim is None else x.movedim(x_dim, 0)", "torch torch_modes"),
    Fault("autodiff/jax.py", "if transposed or mapping.facts.has_potential:", "if mapping.facts.has_potential:", "jax"),
    Fault("autodiff/jax.py", "gradient = jnp.where(x == -jnp.inf, 0.0, p - y)", "gradient = p - y * 0.5", "jax losses"),
    Fault("autodiff/jax.py", "total = dv if _zero(dv) else _product.bind(x, p, dv, *params, **facts)", "total = dv", "jax"),
    Fault("autodiff/jax.py", "transposed=not transposed, **facts)\n    return [None, None, cotangent", "transposed=transposed, **facts)\n    return [None, None, cotangent", "jax"),
    # -- Triton's links, in the interpreter
    Fault("kernels/triton/links.py", "value = rate * u\n        else:", "value = rate\n        else:", "triton"),
    Fault("kernels/triton/links.py", "value = tl.minimum(tl.maximum(u, 0.0), 1.0)", "value = tl.maximum(u, 0.0)", "triton"),
    Fault("kernels/triton/links.py", "rate = value / (d * (1.0 + w))", "rate = value / (1.0 + w)", "triton"),
    Fault("kernels/triton/links.py", "off = off | (p >= 1.0)", "off = off", "triton"),
    Fault("kernels/triton/links.py", "factor = factor * (ORDER - i)", "factor = factor * ORDER", "triton"),
    Fault("kernels/triton/search.py", "go = room < equal", "go = room > equal", "triton"),
)  # fmt: skip


def copied(folder: Path) -> None:
    """The checkout as it is, without what git ignores."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def library() -> str:
    out = subprocess.run(
        [sys.executable, "-c", "from anymax.kernels import library; print(library.path() or '')"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return out.stdout.strip()


def tested(folder: Path, files: str, *options: str) -> tuple[int, str, float]:
    """pytest's code, the test that failed first, seconds of the processor; in a child that has all frameworks loaded already."""
    log = folder / "pytest.log"
    before = os.times()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.chdir(folder)
            # an editable install finds its own files first
            sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__.lower()]
            sys.path.insert(0, str(folder / "src"))
            import pytest

            names = [f"tests/test_{name}.py" for name in files.split()]
            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *names, *options]))
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    after = os.times()
    said = log.read_text(errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.M)
    seconds = sum(after[2:4]) - sum(before[2:4])
    return os.waitstatus_to_exitcode(status), failed[1] if failed else said[-300:], round(seconds, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only faults in whose file and text one of these is")
    parser.add_argument("--out", type=Path, help="a file for a line of JSON a fault")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th fault from the i-th on")
    parser.add_argument(
        "--unchecked", action="store_true", help="do not ask whether the tests are green without a fault"
    )
    asked = parser.parse_args()
    first, step = map(int, asked.part.split("/"))
    chosen = [f for f in FAULTS if not asked.words or any(w in f.file + f.old for w in asked.words)][first::step]
    for fault in chosen:
        count = (ROOT / "src" / "anymax" / fault.file).read_text().count(fault.old)
        if count != 1:
            raise SystemExit(f"{fault.file} has {count} times, and not once: {fault.old!r}")
    with tempfile.TemporaryDirectory(prefix="plant-") as place:
        folder = Path(place) / "checkout"
        copied(folder)
        (folder / "src" / "_editable_skbc_anymax.py").write_text("")  # in the way of an editable install's finder
        os.environ |= {
            "PYTHONPATH": str(folder / "src"),
            "ANYMAX_LIBRARY": os.environ.get("ANYMAX_LIBRARY") or library(),
        }
        os.environ |= {"OMP_NUM_THREADS": "1"}
        import jax  # loaded once, for all children
        import mpmath  # noqa: F401
        import numpy as np  # noqa: F401
        import scipy.special  # noqa: F401
        import torch  # noqa: F401

        del jax
        if not asked.unchecked:
            for name in sorted({name for fault in chosen for name in fault.tests.split()}):
                code, failed, _ = tested(folder, name)
                if code:
                    raise SystemExit(f"without a fault: test_{name}.py fails: {failed}")
        seen = {"short": 0, "whole": 0, "neither": 0}
        for fault in chosen:
            path = folder / "src" / "anymax" / fault.file
            sound, stamp = path.read_text(), path.stat()
            path.write_text(sound.replace(fault.old, fault.new))
            os.utime(path, (time.time(), time.time()))
            spent = 0.0
            battery, failed = "neither", ""
            for name, options in (("short", ()), ("whole", ("--rest",))):
                code, by, seconds = tested(folder, fault.tests, *options)
                spent += seconds
                if code not in (0, 5):  # 5: this battery has no test here
                    battery, failed = name, by
                    break
            path.write_text(sound)
            os.utime(path, (stamp.st_atime, stamp.st_mtime))
            seen[battery] += 1
            line = {"file": fault.file, "old": fault.old, "new": fault.new, "seen": battery, "by": failed, "s": spent}
            print(f"{battery:8s} {spent:6.1f} s  {fault.file}: {fault.old.strip()[:70]!r}  {failed[:120]}", flush=True)
            if asked.out:
                with asked.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    told = (
        f"{seen['short']} seen by the short battery, {seen['whole']} by the whole one alone, {seen['neither']} by none"
    )
    print(f"{len(chosen)} faults: {told}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
