"""The two batteries, and fixtures that several files share.

`pytest` runs the short battery, `pytest --all` the whole one, `pytest --rest` what the short one leaves out. What is left to the whole
battery is marked where it is written:

- `@pytest.mark.whole`: all of a test, or with a condition on its parameters, by their names, those for which it is true;
- `@pytest.mark.weekly`: the same, left to `--all` alone, which a workflow runs once a week: kernels compiled for one more target.

JAX compiles a program for each case: of a test that goes over kinds of arrays, the short battery leaves out JAX, but for the laws (`laws/`)
and what has the mark `@pytest.mark.soon`, with a condition or without.

`@pytest.mark.long` goes first: half a minute and more in one process, for which no worker is to wait at the end.

A test that is named on the command line (`file::test`) runs in any case.
"""

import contextlib
import ctypes
import gc
import importlib.metadata
import inspect
import os
import pathlib
import re
import sys

# Threads of OpenMP that have nothing to do wait asleep. Awake, as is the default, those of one worker of `-n auto` keep the processors from
# the others: tests of small tensors took ten times the time. It is read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Inductor would begin a pool of processes, each with a torch of its own, for the few kernels that tests compile.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# What XLA has compiled for one worker serves the others, the processes that tests start, and the next battery.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[2] / ".pytest_cache" / "d" / "jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import pytest

import anymax as am
from anymax.kernels import native


def pytest_addoption(parser):
    group = parser.getgroup("anymax")
    group.addoption("--all", action="store_true", dest="whole", help="the whole battery, and not the short one")
    group.addoption("--rest", action="store_true", help="what the short battery leaves out, but for weekly tests")


def pytest_configure(config):
    config.addinivalue_line("markers", "whole(condition): left to the whole battery, `--all` or `--rest`")
    config.addinivalue_line("markers", "weekly(condition): left to `--all`")
    config.addinivalue_line(
        "markers", "soon(condition): of a test that goes over kinds of arrays, JAX's cases in the short battery, too"
    )
    config.addinivalue_line("markers", "long: half a minute or more, begun first")
    if not config.option.whole:
        compile_briefly()
    if config.getoption("dist", "no") == "load":
        # What `-n` means by itself gives a worker up to a quarter of all tests at once, for which others wait at the end. So each begins
        # with an equal share, and one that is done takes half of what another has left.
        config.option.dist = "worksteal"


def compile_briefly():
    """XLA compiles with fewer passes, since a program of a test runs once; with `--all` it has all of them, as it has for users."""
    try:
        version = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return
    if (0, 6) <= version <= (0, 10):  # a flag that XLA does not know ends the process
        flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false"
        os.environ.setdefault("XLA_FLAGS", flags)


def marked(item, name):
    """Whether a test has this mark, without a condition or with one that is true of its parameters."""
    for mark in item.iter_markers(name):
        if not mark.args:
            return True
        (condition,) = mark.args
        if condition(**{name: item.callspec.params[name] for name in inspect.signature(condition).parameters}):
            return True
    return False


def left_to_the_whole_battery(item):
    """True for a test that the short battery leaves out."""
    if marked(item, "whole") or marked(item, "weekly"):
        return True
    kind = item.callspec.params.get("kind") if hasattr(item, "callspec") else None
    return kind == "jax" and item.path.parent.name != "laws" and not marked(item, "soon")


def pytest_ignore_collect(collection_path, config):
    """A file all of whose tests are left out is not imported, unless it is named."""
    if config.option.whole or config.option.rest or collection_path.suffix != ".py":
        return None
    if any(collection_path.name in argument for argument in config.args):
        return None
    left = re.search(r"^pytestmark = pytest\.mark\.whole$", collection_path.read_text(encoding="utf-8"), re.M)
    return True if left else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if config.option.whole:
        return
    named = {argument.rsplit("::", 1)[-1].split("[")[0] for argument in config.args if "::" in argument}
    taken, left = [], []
    for item in items:
        out = left_to_the_whole_battery(item) and getattr(item, "originalname", item.name) not in named
        weekly = out and marked(item, "weekly")
        (left if weekly or out != config.option.rest else taken).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = taken


# -- memory: a worker of `-n auto` does not grow with all of its tests --------------------------------------------------------------

ROOM = 64 << 20  # how much more than after the last clearing may be held before the next


def held():
    """Bytes of memory that this process has; 0 where the system does not say."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def glibc(name, *numbers):
    """A function of the allocator, where there is one: it keeps what is freed, unless it is asked."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            getattr(ctypes.CDLL("libc.so.6"), name)(*numbers)


def clear():
    """What compilers and the allocator keep of tests that are over."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"]._dynamo.reset()
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()
    glibc("malloc_trim", 0)


def pytest_collection_finish(session):
    glibc("mallopt", -8, 2)  # M_ARENA_MAX: the threads of a compiler would have a heap each
    glibc("mallopt", -3, 4 << 20)  # M_MMAP_THRESHOLD: what is larger goes back at once
    gc.collect()
    gc.freeze()  # the tests themselves stay to the end: no collection looks through them again
    session.config.stash[AFTER] = held()


def pytest_unconfigure():
    gc.unfreeze()  # else some libraries speak of leaks at the end of the process


AFTER = pytest.StashKey[int]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    done = yield
    if nextitem is None or nextitem.path != item.path or held() > item.config.stash[AFTER] + ROOM:
        clear()
        item.config.stash[AFTER] = held()
    return done


@pytest.fixture
def environment(monkeypatch):
    """`environment(name)`: as if ANYMAX_ENGINE had asked for an engine of this name when anymax was imported."""

    def ask(name):
        monkeypatch.setattr(am.kernels.choice, "environment", name)
        if native.isa() is not None:
            native.load().bind({"forced": am.kernels.choice.quickest()})

    yield ask
    monkeypatch.undo()
    ask(am.kernels.choice.environment)


@pytest.fixture(params=["chosen", "reference"])
def engine(request):
    """Each test twice: by the engine that serves, and by the reference that every engine is held to."""
    if request.param == "chosen" and native.isa() is None:
        pytest.skip("no compiled engine: the reference serves")
    with am.use("reference") if request.param == "reference" else contextlib.nullcontext():
        yield request.param


@pytest.fixture
def one_thread():
    """torch on one thread: the networks of these tests are so small that its threads would only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_process():
    """A default group of torch that has this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def call(capsys, monkeypatch):
    """Runs the program `anymax`: (exit code, stdout, stderr)."""
    from anymax.cli import main

    def run(*args, width=100, **environment):
        monkeypatch.setenv("COLUMNS", str(width))
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        code = main([str(a) for a in args])
        return code, *capsys.readouterr()

    return run


# -- of the explorer --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Requests to the explorer's modules in one run of Node, and their answers."""
    from explorer_at_work import asker

    return asker(tmp_path_factory.mktemp("explorer"))


@pytest.fixture(scope="module")
def maps(ask):
    """The maps that the explorer has."""
    return ask({"ask": "maps"})[0]["answer"]


@pytest.fixture(scope="module")
def browser_page():
    import chromium

    one = chromium.Chromium()
    yield one
    one.close()


@pytest.fixture
def opened(browser_page):
    """The explorer in a browser."""
    from explorer_at_work import opened_page

    yield from opened_page(browser_page)


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Triton's compiler, which keeps what it makes for this test alone."""
    from triton import knobs

    if knobs.runtime.interpret:
        pytest.skip("the interpreter has replaced the compiler")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
