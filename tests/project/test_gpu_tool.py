"""tools/gpu.py from beginning to end without a GPU: tiny shapes in Triton's interpreter, a case that crashes among them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "gpu.py"
pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(not TOOL.exists(), reason="the tools are in the repository only"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks"),
]


def called(folder, *words):
    command = [sys.executable, str(TOOL), str(folder), "--dry", "--cores", "1", *words]
    out = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert out.returncode == 0, out.stdout[-2000:] + out.stderr[-2000:]
    return out.stdout, [json.loads(line) for line in (folder / "cases.jsonl").read_text().splitlines()]


def test_a_dry_run_leaves_a_line_for_each_case_and_goes_on_where_it_stopped(tmp_path):
    words = (
        "--stages", "smoke,bench,check", "--only", "gpu (forward|loss)/(softmax|sparsemax_loss) 6x40 normal$",
        "--budget", "0.01",
    )  # fmt: skip
    said, lines = called(tmp_path, *words)
    cases = [f"gpu {case} 6x40 normal" for case in ("forward/softmax", "loss/sparsemax_loss")]
    assert [line["case"] for line in lines] == [*cases, *cases, "crash"]
    assert [line["ok"] for line in lines] == [True] * 4 + [False]
    assert lines[-1]["error"] == "its process ended with -6"
    assert all(line["engine"] == "triton" for line in lines[:4])
    assert lines[2]["peers"]["copy"]["ours_ms"] > 0
    assert "# bench: 2 cases" in said
    again, same = called(tmp_path, *words)
    assert same == lines
    assert "# bench: 0 cases" in again


def test_a_dry_run_of_ragged_rows_and_output_layers(tmp_path):
    names = ["gpu ragged/sparsemax 60x9x2 Poisson both ways", "gpu output layer/softmax 12x90 trained 24 features"]
    only = f"({'|'.join(names)})$"
    _, lines = called(tmp_path, "--stages", "smoke,bench", "--only", only, "--budget", "0.01")
    assert [line["case"] for line in lines] == [*names, *names]
    assert all(line["ok"] for line in lines), lines
    assert lines[-2]["peers"]["torch.scatter_reduce"]["ours_ms"] > 0


def test_every_suite_of_kernels_runs_on_a_device():
    from tools import gpu

    suites = {path.name.removesuffix("_triton.py") for path in (ROOT / "tests" / "kernels").glob("*_triton.py")} - {
        "test"
    }
    assert suites == {name.removesuffix("_triton.py") for name in gpu.SUITES if name != "test_cuda.py"}
    assert suites - {"sinkhorn"} == {suite for tool, suite in gpu.SANITIZED if tool == "memcheck"}  # it has no strides


def test_tests_run_in_pieces(tmp_path):
    _, lines = called(tmp_path, "--stages", "parity", "--only", "test_logsumexp")
    (line,) = lines
    assert line["ok"]
    assert (line["passed"], line["failed"]) == (3, {})


def test_a_case_that_hangs_is_ended(tmp_path):
    program = f"""
import pathlib, time
from tools import gpu
jobs = [gpu.Job("bench", "hangs", lambda: time.sleep(60) or {{}}, 0.5), gpu.Job("bench", "runs", lambda: {{"ok": True}}, 5)]
gpu.run(jobs, pathlib.Path({str(tmp_path)!r}), 1, time.monotonic() + 30)
"""
    # in a process of its own: a worker that has loaded JAX must not fork
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
    first, second = map(json.loads, (tmp_path / "cases.jsonl").read_text().splitlines())
    assert first["error"] == "out of time (0.5 s)"
    assert second["ok"]


# -- plans ------------------------------------------------------------------------------------------------------------------------


def test_plans_around_one_serve_the_same_rows():
    from anymax.kernels.triton.plans import Plan
    from tools import gpu_tune

    for plan in (
        Plan(8, 4, 32, True, 1),
        Plan(1, 8, 1024, True, 4),
        Plan(1, 8, 4096, False, 16),
        Plan(1, 4, 2048, False, 8, 32),
    ):
        others = list(gpu_tune.around_rows(plan))
        assert len(others) == len({*others} - {plan}) >= 4
        for one in others:
            assert (one.whole, one.parts) == (plan.whole, plan.parts)
            assert one.K * one.L == plan.K * plan.L if plan.whole else one.R == 1
            assert one.warps in {plan.warps // 2, plan.warps, plan.warps * 2}


@pytest.mark.weekly
def test_the_plans_around_those_in_force_are_compiled_and_then_tuned(tmp_path):
    only = "rows (dense|truncated) 6x40 float32$"
    _, tuned = called(tmp_path, "--stages", "tune", "--only", only, "--budget", "0.01")
    assert all(one["ok"] for one in tuned), tuned
    assert [one["case"].split()[1] for one in tuned] == ["dense", "truncated"]
    assert all(len(one["ms"]) > 2 and min(one["ms"].values()) > 0 for one in tuned)
    _, lines = called(
        tmp_path / "again", "--stages", "plans,tune", "--only", only.replace("|truncated", ""), "--budget", "0.01"
    )
    plans, (last,) = lines[:-1], lines[-1:]
    assert [f"rows dense 6x40 float32 {plan}" for plan in last["ms"]] == [one["case"] for one in plans]
    # a plan that failed is not timed
    first, *others = plans
    (tmp_path / "once").mkdir()
    kept = [json.dumps({**first, "ok": False}), *map(json.dumps, others)]
    (tmp_path / "once" / "cases.jsonl").write_text("\n".join(kept) + "\n")
    _, lines = called(
        tmp_path / "once", "--stages", "tune", "--only", only.replace("|truncated", ""), "--budget", "0.01"
    )
    assert len(lines[-1]["ms"]) == len(plans) - 1
