"""Loads the C++ engine, `anymax._engine`, and chooses its threads: its own pool or torch's."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import sys
import threading
from typing import Any

from .._array import torch_loaded
from .compiled import Compiled

ABI = 13
_NAME = "anymax._engine"


def _named() -> str | None:
    """The file that the environment variable ANYMAX_LIBRARY names."""
    path = os.environ.get("ANYMAX_LIBRARY")
    if path and not os.path.isfile(path):
        raise FileNotFoundError(
            f"ANYMAX_LIBRARY is {path!r}, and there is no such file: give the path of a build of {_NAME}, or unset the variable"
        )
    return path


def path() -> str | None:
    """The engine's file; None in a pure Python install."""
    if named := _named():
        return named
    spec = importlib.util.find_spec(_NAME)
    return None if spec is None else spec.origin


@functools.lru_cache(maxsize=1)
def load() -> Compiled | str:
    """The engine, or a sentence that says why there is none."""
    file = path()
    if file is None:
        return (
            "it was not compiled when anymax was installed, so the reference is used; compiling needs a C++ compiler and Python's headers "
            "(on Debian or Ubuntu: apt install g++ python3-dev); then install anymax again"
        )
    try:
        loader = importlib.machinery.ExtensionFileLoader(_NAME, file)
        spec = importlib.util.spec_from_file_location(_NAME, file, loader=loader)
        assert spec is not None
        engine: Any = importlib.util.module_from_spec(spec)
        loader.exec_module(engine)
    except ImportError as error:
        return f"its library {file} can't be loaded ({error})"
    if engine.ABI != ABI:
        return f"its library {file} speaks version {engine.ABI} of the interface, this package version {ABI}; install anymax again"
    asked = os.environ.get("ANYMAX_ISA")
    if asked and asked != engine.isa():
        return f"ANYMAX_ISA asks for {asked!r}, and this library has {', '.join(engine.isas())} on this machine"
    sys.modules[_NAME] = engine
    _be_seen_by_threadpoolctl(file)
    return engine


def get_num_threads() -> int:
    engine = load()
    return 1 if isinstance(engine, str) else engine.get_num_threads()


def set_num_threads(count: int) -> None:
    """Sets the threads of the engine's own pool, which it uses for all but torch tensors (OMP_NUM_THREADS sets them at the start)."""
    engine = load()
    if not isinstance(engine, str):
        engine.set_num_threads(int(count))


def _be_seen_by_threadpoolctl(file: str) -> None:
    """Lets `threadpoolctl.threadpool_limits` (which scikit-learn and joblib use) limit this pool too."""
    try:
        import threadpoolctl  # late: an optional dependency, needed only with this engine
    except ImportError:
        return
    if not hasattr(threadpoolctl, "register"):  # before 3.2
        return

    class Controller(threadpoolctl.LibController):
        user_api = "anymax"
        internal_api = "anymax"
        filename_prefixes = (os.path.basename(os.path.realpath(file)).split(".")[0].lower(),)
        check_symbols = ("anymax_get_num_threads",)

        def get_num_threads(self) -> int:
            return self.dynlib.anymax_get_num_threads()

        def set_num_threads(self, num_threads: int) -> None:
            self.dynlib.anymax_set_num_threads(num_threads)

        def get_version(self) -> str:
            return str(self.dynlib.anymax_abi())

    threadpoolctl.register(Controller)


# -- threads: torch's own pool for its tensors --------------------------------------------------------------------------------

# 1: the engine has torch's pool; 0: torch has none to lend; None: torch is not loaded yet.
_lent: int | None = None
_forked = False
_lending = threading.Lock()


def pool(tensors: bool = True) -> int:
    """The pool of a call: torch's (1) or the engine's own (0).

    NumPy arrays use the engine's own pool even where torch is loaded: idle threads of torch's pool spin for a while, and a matrix product
    (BLAS has a third pool) can take twenty times as long beside them.
    """
    if _forked:  # torch's pool does not survive a fork, the engine's starts again; a DataLoader's worker has one thread
        torch = torch_loaded()
        if torch is not None:
            set_num_threads(min(torch.get_num_threads(), get_num_threads()))
        return 0
    if not tensors:
        return 0
    if _lent is None and torch_loaded():
        _borrow()
    return _lent or 0


def _borrow() -> None:
    global _lent
    engine, torch = load(), sys.modules["torch"]
    prefix, suffix = {"win32": ("", ".dll"), "darwin": ("lib", ".dylib")}.get(sys.platform, ("lib", ".so"))
    file = os.path.join(os.path.dirname(torch.__file__ or ""), "lib", f"{prefix}torch_cpu{suffix}")
    assert not isinstance(engine, str), engine
    with _lending:
        _lent = int(engine.borrow_pool(file))  # torch_parallel_for, since torch 2.10
        if not _lent:
            engine.set_num_threads(torch.get_num_threads())


def _after_fork() -> None:
    global _forked, _lending
    _forked, _lending = True, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
