"""What the compiler makes of the GPU kernels at their real plans: nothing spilled, wide loads, several programs at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from anymax.kernels import triton as engine

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.skipif(isinstance(engine.load(), str), reason="triton can't be loaded"),
    pytest.mark.skipif(not (ROOT / "tools").exists(), reason="the tools are in the repository only"),
    pytest.mark.filterwarnings("ignore"),  # of the compiler
]
CASES = {  # case -> programs that a multiprocessor holds, at least
    "forward/entmax15 65536x128 bfloat16": 8,
    "forward/softmax 4096x8192 bfloat16": 2,
    "forward/softmax 65536x128 bfloat16": 8,
    "forward/sparsemax 4096x1024 bfloat16": 8,
    "forward/entmax15 4096x8192 bfloat16": 2,
    "forward/sparsemax 4096x8192 float32": 2,
    "backward/entmax15 4096x1024 bfloat16": 8,
    "loss/entmax15 4096x8192 bfloat16": 2,
}
QUICK = list(CASES)[:2]


@pytest.fixture
def static(monkeypatch, compiler):
    monkeypatch.syspath_prepend(str(ROOT))
    from tools import gpu_static

    return gpu_static


@pytest.mark.whole(lambda name: name not in QUICK)
@pytest.mark.parametrize("name", CASES)
def test_the_compilers_figures(static, name):
    case = next(c for c in static.row_cases() if c.name == name)
    found = static.read(case, "sm_90")
    assert found
    for launch, figures in found:
        assert figures.stack == 0, launch.name
        assert figures.per_processor >= CASES[name], (launch.name, figures)
        assert figures.wide_loads > 0
        if "loss" not in name:
            assert figures.fp64_in_loops == 0, launch.name
    predicted, copied = static.seconds(case, found)
    assert copied <= predicted < 1.0


MORE = {  # case -> bytes of a thread that do not fit its registers, at most; programs of a multiprocessor, at least
    "ragged/entmax15 up to 16 x 8 heads": (0, 8),
    "ragged/entmax15 up to 40000 x 1 heads": (0, 1),
    "layer/entmax15 bfloat16": (0, 1),
    "layer/softmax bfloat16": (0, 1),
    "layer/support bfloat16": (0, 4),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", MORE)
def test_ragged_rows_and_output_layers_fit_their_registers(static, name):
    case = next(c for c in (*static.ragged_cases(), *static.layer_cases()) if c.name == name)
    found = static.read(case, "sm_90")
    assert len(found) > (1 if "ragged" in name else 0)
    stack, programs = MORE[name]
    for launch, figures in found:
        assert figures.stack <= stack, (launch.name, figures)
        assert figures.per_processor >= programs, (launch.name, figures)


def test_a_loop_is_told_from_its_branch_back(static):
    loop = static.Loop(2, 9, 1, 7, 0, 1, False)
    figures = static.Figures("k", 4, 64, 0, 0, 0, 20, 0, 1, 1, (loop,), "sm_90")
    assert figures.issued(10) == 13 + 7 * 10
    assert figures.per_processor == 8
    assert not static.Loop(2, 9, 1, 7, 0, 0, False).tiles
