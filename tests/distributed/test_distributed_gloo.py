"""Real processes on gloo: the tables of the other files, devices' meshes, and processes that end."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

from processes import all_right, ended, started
from shard_cases import gloo

pytestmark = [gloo, pytest.mark.whole]

TABLES = """
import shard_cases as S
import anymax as A
from anymax import distributed as D
from anymax.autodiff.torch_group import TorchGroup
from torch.distributed.tensor.debug import CommDebugMode
def agrees(here, case, joined=False):
    f, leaves = case
    with CommDebugMode() as counted:
        S.agrees(here, f, leaves, S.outcome(f, S.Here(), leaves, joined), joined)
    return counted.get_total_counts()
for many, sizes in ((2, (20, 17)), (3, (0, 30, 7)), (4, (9, 9, 9, 10))):
    group = dist.new_group(list(range(many)))
    if rank >= many:
        continue
    here = S.Here(S.Cut(sizes, start=True), TorchGroup(group))
    here.call("apply", "softmax", here.part(S.rows()))  # the first call of a group says what it is going to send
    for verb, name in S.CELLS:
        if name in S.OF_ONE and verb in ("apply", "fenchel_young of indices, mask", "nll of indices, mask"):
            sent = agrees(here, S.scores_case(verb, name), S.VERBS[verb].joined)
            assert verb != "apply" or sent <= (4 if name == "topp" else 3), (name, sent)
    if many == 3:
        here = S.Here(S.Cut((20, 0, 17), chunk=4), here.group)
        for verb in ("log_prob_entropy", "kl, one class, forward", "cap, support"):
            for name in ("softmax", "entmax15"):
                agrees(here, S.layer_case(verb, name))
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "classes"))
x = S.rows()
for group in (mesh["classes"], (mesh, "classes"), mesh.get_group(1)):
    start, size = ((0, 20), (20, 17))[mesh.get_local_rank("classes")]
    S.same(D.apply("entmax15", x.narrow(-1, start, size), group=group), A.entmax15(x).narrow(-1, start, size))
try:
    D.apply("softmax", x, group=mesh)
except ValueError as error:
    assert "give one of them" in str(error)
print("right")
dist.destroy_process_group()
"""

DIFFERENT = """
import re
import test_distributed_agreement as T
from anymax.autodiff.torch_group import TorchGroup
for name, (f, words) in T.ODD.items():
    group = TorchGroup(dist.group.WORLD)
    f(group, T.part(group), 0)
    try:
        f(group, T.part(group), rank)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        assert re.search(words, str(error)), (name, error)
    else:
        raise AssertionError(name)
for name, what in T.DIFFERENCES:
    texts = [None] * size
    dist.all_gather_object(texts, T.disagreement(name, what, TorchGroup(dist.group.WORLD)))
    assert T.is_clear(name, texts), (name, what, texts)
print("right")
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("size", "program"), [(4, TABLES), (2, DIFFERENT)], ids=["the tables", "what differs"])
def test_processes_of_gloo(size, program):
    all_right(size, program)


LOST = """
import time, anymax
if rank == 1:
    sys.exit(3)
try:
    for _ in range(5):
        anymax.distributed.apply("softmax", torch.zeros(2, 3))
except RuntimeError as error:
    assert "waited for the others in vain" in str(error), error
    print("told")
"""


def test_a_process_that_has_ended_ends_the_others():
    first, second = ended(started(2, LOST), seconds=100)
    assert second[0] == 3
    assert first[1] == "told\n", first[2][-2000:]


ENDED = """
import os, anymax, anymax.distributed
def threads():
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0
def derivative(group):
    return anymax.distributed.apply("sparsemax", torch.ones(2, 3, requires_grad=True), group=group).sum()
derivative(None).backward()
before = threads()
group = dist.new_group()
total = derivative(group)
dist.destroy_process_group(group)
del group
print(threads() - before, "threads more")
try:
    total.backward()
except RuntimeError as error:
    assert "has been destroyed; call backward before" in str(error), error
    print("told")
"""


def test_a_graph_does_not_keep_its_group():
    for status, out, err in ended(started(2, ENDED)):
        assert status == 0, err[-2000:]
        assert out == "0 threads more\ntold\n"


LEFT = """
import os, pathlib, runpy, sys
# a line in one write: the lines of the processes don't mix where Python writes without a buffer
sys.stdout.reconfigure(line_buffering=True, write_through=False)
runpy.run_path(sys.argv[1], run_name="__main__")
tasks = pathlib.Path("/proc/self/task")
print(sum("gloo" in (task / "comm").read_text() for task in tasks.iterdir()) if tasks.exists() else 0, "threads of gloo")
"""


def test_the_script_of_the_page_runs_with_torchrun(tmp_path):
    script = pathlib.Path(__file__).parents[2] / "docs" / "many_machines.py"
    if not script.exists():
        pytest.skip("the pages are in the repository only")
    # a thread of gloo that runs when Python ends may abort the process
    (tmp_path / "left.py").write_text(LEFT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(tmp_path / "left.py"), str(script)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    training, sums = (line for line in lines if "threads" not in line)
    assert training.startswith("2 processes, 500 classes each: loss 0.500 -> 0.0")
    assert sums == "the probabilities of a row sum to 1.0000 and 1.0000"
    assert lines.count("0 threads of gloo") == 2
