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

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "gpu.py"
pytestmark = [
    pytest.mark.skipif(not TOOL.exists(), reason="the tools are in the repository only"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks"),
]


def called(folder, *words):
    command = [sys.executable, str(TOOL), str(folder), "--dry", "--cores", "1", *words]
    out = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert out.returncode == 0, out.stdout[-2000:] + out.stderr[-2000:]
    return out.stdout, [json.loads(line) for line in (folder / "cases.jsonl").read_text().splitlines()]


@pytest.mark.whole
def test_a_dry_run_leaves_a_line_for_each_case_and_goes_on_where_it_stopped(tmp_path):
    words = (
        "--stages",
        "smoke,bench,check",
        "--only",
        "gpu (forward|loss)/(softmax|sparsemax_loss) 6x40 normal$",
        "--budget",
        "0.01",
    )
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


@pytest.mark.whole
def test_a_dry_run_of_ragged_rows_and_output_layers(tmp_path):
    names = ["gpu ragged/sparsemax 60x9x2 Poisson both ways", "gpu output layer/softmax 12x90 trained 24 features"]
    only = f"({'|'.join(names)})$"
    _, lines = called(tmp_path, "--stages", "smoke,tune,bench", "--only", only, "--budget", "0.01")
    assert [line["case"] for line in lines[:2]] == names
    assert all(line["ok"] for line in lines), lines
    plans = [line for line in lines if line["stage"] == "tune"]
    assert sum("in force" in line["case"] for line in plans) == 1
    assert len(plans) > 5
    assert all(line["ms"] > 0 for line in plans)
    assert lines[-2]["peers"]["torch.scatter_reduce"]["ours_ms"] > 0


@pytest.mark.whole
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


@pytest.fixture
def gpu_plans(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from tools import gpu_plans

    return gpu_plans


def test_candidates_serve_the_same_rows(gpu_plans):
    from anymax.kernels.triton.plans import Plan

    for plan in (
        Plan(8, 4, 32, True, 1),
        Plan(1, 8, 1024, True, 4),
        Plan(1, 8, 4096, False, 16),
        Plan(1, 4, 2048, False, 8, 32),
    ):
        first, *others = gpu_plans.candidates(plan)
        assert first == plan
        assert len(others) == len({*others} - {plan})
        assert len(others) >= gpu_plans.MOST
        for one in others:
            assert (one.whole, one.parts) == (plan.whole, plan.parts)
            assert one.K * one.L == plan.K * plan.L if plan.whole else one.R == 1
            assert one.warps in {plan.warps // 2, plan.warps, plan.warps * 2, plan.warps // 4, plan.warps * 4}


def test_the_fastest_plans_by_the_model_are_measured(gpu_plans, monkeypatch):
    choice = gpu_plans.Choice("dense", "softmax", (4096, 1024), "bfloat16")
    first, *others = gpu_plans.candidates(choice.in_force())
    said = {plan: gpu_plans.Said(2e-6 + 1e-7 * i, 5, 0) for i, plan in enumerate(others)}
    said[first] = gpu_plans.Said(9e-6, 5, 0)
    said[others[1]] = gpu_plans.Said(2e-6, 4, 0)  # as fast as the one before, with less to issue
    said[others[2]] = gpu_plans.Said(1e-6, 1, 8)  # spills
    del said[others[3]]  # does not compile
    monkeypatch.setattr(gpu_plans, "predicted", lambda choice, plan, target: said[plan])
    found = gpu_plans.preselected(choice, "sm_90", 4)
    assert [plan for plan, _ in found] == [first, others[1], others[0], others[4]]
    assert [time for _, time in found] == pytest.approx([9e-6, 2e-6, 2e-6, 2.4e-6])
    del said[first]
    assert gpu_plans.preselected(choice, "sm_90") == [(first, None)]


@pytest.mark.whole
@pytest.mark.parametrize("kernel", ["dense", "halves", "truncated", "backward"])
def test_plans_are_compiled_by_the_kernel_that_they_are_of(gpu_plans, kernel, compiler):
    from anymax.kernels.triton import plans

    choice = gpu_plans.Choice(kernel, gpu_plans.kernels("bfloat16")[kernel], (4096, 1024), "bfloat16")
    now = choice.in_force()
    by = {warps: gpu_plans.predicted(choice, plans.Plan(1, now.K, now.L, True, warps), "sm_90") for warps in (1, 4)}
    assert by[1].issued != by[4].issued
    assert all(one.seconds > 0 and one.stack == 0 for one in by.values())
    assert not plans.forced


@pytest.mark.whole
def test_what_is_tuned_are_the_plans_that_were_chosen(tmp_path):
    plan = [1, 1, 64, True, 2, 0, 1.5]
    line = {"stage": "plans", "case": "dense 6x40 float32", "ok": True, "plans": [plan]}
    (tmp_path / "cases.jsonl").write_text(json.dumps(line) + "\n")
    only = "gpu forward/softmax 6x40 normal$"
    said, lines = called(tmp_path, "--stages", "plans,tune", "--only", only, "--budget", "0.01")
    assert "# plans: 0 cases" in said  # there is no compiler
    tuned = [one for one in lines if one["stage"] == "tune"]
    assert all(one["ok"] for one in tuned), tuned
    (dense,) = [one["case"] for one in tuned if one["case"].startswith("dense")]
    assert "R=1, K=1, L=64, whole=True, warps=2" in dense
    assert sum(one["case"].startswith("backward") for one in tuned) > 2
