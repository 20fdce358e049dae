"""Attention by Triton without a GPU: every form of launch compiled ahead of time. test_triton.py runs attention_triton.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from test_triton import ahead, compiled, oldest, recorded

from anymax.kernels.triton import attention_plans as plans

# -- ahead of time ---------------------------------------------------------------------------------------------------------------

KERNELS = ("attention_centres", "attention_forward", "attention_queries", "attention_keys", "attention_bias")


def launches(monkeypatch, job, dtype, d, e, arrays):
    """Every launch of a forward and a backward of this call."""
    from anymax.kernels.triton import attention

    calls = recorded(monkeypatch, attention, KERNELS)
    q, k, v = (torch.zeros(s, dtype=dtype) for s in ((1, 4, 256, d), (1, 2, 512, d), (1, 2, 512, e)))
    wants = {"q", "k", "v"} | {n for n, a in arrays.items() if a.is_floating_point()}
    out, saved = attention.forward(job, q, k, v, arrays, True)
    attention.backward(job, q, k, v, arrays, out, saved, out, wants)
    return calls


def everything(link, rows=256, keys=512):
    arrays = {
        "bias": torch.zeros(1, 4, rows, keys), "additive": torch.zeros(1, 1, 1, keys),
        "keep": torch.ones(1, 1, rows, keys, dtype=torch.bool),
        "ranges": torch.zeros(1, 3, dtype=torch.int32), "heads": torch.zeros(1, 4, 2), "seed": torch.zeros(1, dtype=torch.int64),
    }  # fmt: skip
    return arrays | ({"param": torch.full((1, 4, 1), 1.4)} if link in ("mixed", "budget") else {})


# name -> link, power, alpha - 1, dtype, features, with everything, targets
FORMS = {
    "entmax-1.5 bf16": ("power", 2, 0.5, torch.bfloat16, 64, False, ("sm_90", "sm_80", "gfx942")),
    "sparsemax fp16": ("power", 1, 1.0, torch.float16, 256, False, ("sm_90",)),
    "entmax-1.3 fp32": ("any", 1, 0.3, torch.float32, 80, False, ("sm_90",)),
    "softmax bf16": ("softmax", 1, 0.0, torch.bfloat16, 128, True, ("sm_90",)),
    "alphas bf16": ("mixed", 1, 0.0, torch.bfloat16, 64, True, ("gfx942",)),
    "budget fp16": ("budget", 1, 3.0, torch.float16, 64, False, ("sm_80",)),
    "entmax-1.3 bf16": ("any", 1, 0.3, torch.bfloat16, 128, False, ("sm_90",)),
}
SPILLED = {"sparsemax fp16": 352, "entmax-1.3 fp32": 352, "entmax-1.3 bf16": 160}  # bytes of a thread, at most


@pytest.mark.whole
@pytest.mark.weekly(lambda name: name == "alphas bf16")
@ahead
@pytest.mark.parametrize(("name", "target"), [(name, target) for name, form in FORMS.items() for target in form[-1]])
def test_compiles_ahead_of_time(name, target, monkeypatch, compiler, tmp_path):
    from anymax.kernels.triton import attention

    link, power, param, dtype, d, full, _ = FORMS[name]
    plan = plans.blocks(d, dtype.itemsize, 256, target == "gfx942", full)
    monkeypatch.setattr(plans, "forced_blocks", [plan])
    monkeypatch.setattr(attention, "SKIPPED", 0)
    job = job_of(link, power, param, full)
    calls = launches(monkeypatch, job, dtype, d, d, everything(link) if full else {})
    names = [one.name for one in calls]
    assert {"attention_forward", "attention_queries", "attention_keys"} <= set(names)
    assert names.count("attention_bias") == (2 if full else 0)
    assert ("attention_centres" in names) == (not full and link != "budget")
    for one in calls:
        made = check(target, one, 1_200_000 if full or link == "any" or dtype.itemsize == 4 else 750_000)
        if name in SPILLED and not oldest():
            assert spilled(made, tmp_path) <= SPILLED[name], one.name


# name -> link, power, alpha - 1, dtype, features, queries, with everything, targets
SPLIT_KERNELS = ("attention_parts", "attention_solve", "attention_values", "attention_merge")
SPLIT_FORMS = {
    "entmax-1.5 bf16": ("power", 2, 0.5, torch.bfloat16, 128, 1, False, ("sm_90", "sm_80", "gfx942")),
    "softmax fp16": ("softmax", 1, 0.0, torch.float16, 64, 1, False, ("sm_90",)),
    "softmax fp32": ("softmax", 1, 0.0, torch.float32, 80, 3, True, ("sm_80",)),
    "alphas bf16": ("mixed", 1, 0.0, torch.bfloat16, 256, 20, True, ("gfx942",)),
    "budget fp32": ("budget", 1, 3.0, torch.float32, 64, 1, True, ("sm_90",)),
}


@pytest.mark.whole
@ahead
@pytest.mark.parametrize(
    ("name", "target"), [(name, target) for name, form in SPLIT_FORMS.items() for target in form[-1]]
)
def test_keys_in_parts_compile_ahead_of_time(name, target, monkeypatch, compiler, tmp_path):
    from anymax.kernels.triton import attention

    link, power, param, dtype, d, rows, full, _ = SPLIT_FORMS[name]
    plan = plans.split(d, dtype.itemsize, 2, 2, rows, 4096, 132, target == "gfx942", link == "softmax")
    monkeypatch.setattr(plans, "forced_split", [plan])
    calls = recorded(monkeypatch, attention, SPLIT_KERNELS)
    heads, shared = (4, 2) if full or link != "softmax" else (1, 1)  # sizes of 1 are constants to the compiler
    q, k, v = (torch.zeros(s, dtype=dtype) for s in ((1, heads, rows, d), (1, shared, 4096, d), (1, shared, 4096, d)))
    attention.forward(job_of(link, power, param, full), q, k, v, everything(link, rows, 4096) if full else {}, False)
    names = [one.name for one in calls]
    assert names == [n for n in SPLIT_KERNELS if link != "softmax" or n in ("attention_parts", "attention_merge")]
    for one in calls:
        made = check(target, one, 400_000)
        if target != "gfx942" and not oldest():
            assert spilled(made, tmp_path) <= 64, one.name


def test_what_is_measured_on_a_gpu_has_a_title():
    """Each group of cases; and no two cases share a name, under which their results are kept."""
    root = str(Path(__file__).parents[2])
    if root not in sys.path:
        sys.path.append(root)  # benchmarks are no part of the package
    pytest.importorskip("benchmarks", reason="the benchmarks are in the repository only")
    from benchmarks import cases, gpu

    table = gpu.table()
    assert {"gpu attention", "gpu decoding"} <= {case.group for case in table} <= set(cases.GROUPS)
    assert len({case.key for case in table}) == len(table)


def test_when_keys_are_cut():
    """Where there are fewer programs than processors, and keys enough for each; scores that are kept have their limit."""

    def split(shared, groups, rows, keys, width=64, size=2, processors=132, dense=False):
        return plans.split(width, size, shared, groups, rows, keys, processors, False, dense)

    one = split(8, 1, 1, 131072)
    assert (one.M, one.N, one.parts) == (16, 64, 66)
    assert split(8, 1, 1, 1024).parts == 8
    assert split(8, 1, 1, 1023) is None
    assert split(1, 1, 1, 131072).parts == plans.MOST_PARTS
    assert split(131, 1, 1, 4096).parts == 5
    assert split(132, 1, 1, 4096) is None
    assert split(100, 1, 1, 4096, processors=80) is None
    assert split(4, 8, 2, 4096).M == 16
    assert split(4, 8, 4, 4096).M == 32
    assert split(1, 71, 1, 4096).M == 64
    assert split(66, 71, 1, 4096) is None  # two tiles each
    assert split(1, 1, 64, 4096).M == 64
    assert split(1, 1, 65, 4096) is None
    assert split(16, 8, 1, 2**20) is None
    assert split(16, 8, 1, 2**20, dense=True).parts == 33
    assert split(1, 1, 1, 4096, width=256, size=4).N == 16
    for shared, keys in ((1, 1024), (8, 4096), (31, 9999), (131, 131072)):
        cut = split(shared, 1, 1, keys)
        assert 2 <= cut.parts <= -(-keys // cut.N)


def job_of(link, power, param, full):
    from anymax.kernels.triton import attention

    with_everything = {"softcap": 30.0, "left": 9, "right": 5, "dropout_p": 0.1, "alibi": True, "sink": True}
    without = {"softcap": 0.0, "left": -1, "right": -1, "dropout_p": 0.0, "alibi": False, "sink": False}
    return attention.Job(link, power, param, scale=0.1, causal=True, offset=0, **(with_everything if full else without))


def spilled(made, folder):
    """Bytes of memory that a thread takes in the place of registers."""
    from triton import knobs

    tool = knobs.nvidia.cuobjdump.path
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])
    said = subprocess.run([tool, "-res-usage", str(cubin)], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", said)[1])


def check(target, one, longest):
    """It compiles, is no monster, and fits the memory that the device has for a program."""
    made = compiled(target, one)
    assert len(made.asm["hsaco" if target == "gfx942" else "cubin"]) > 1000
    assert len(made.asm.get("ptx", "")) < longest, one.options
    assert made.metadata.shared <= {"sm_80": 163, "sm_90": 227, "gfx942": 64}[target] * 1024, one.options
    return made
