"""The command-line program `anymax` (extra `cli`): tour, compare, inventory, plot, explain, explore, show-config."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code: 2 for wrong arguments, 1 if something is missing, each with a one-line error."""
    try:
        import click  # late: the extra `cli` is optional

        from .commands import program
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("click", "rich"):
            raise
        return _fail(f"the command line needs {error.name}; install it with: pip install 'anymax[cli]'", 1)
    try:
        result = program.main(args if args is None else list(args), prog_name="anymax", standalone_mode=False)
        sys.stdout.flush()  # here, where a full disk can still be reported
    except click.ClickException as error:
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "anymax"
        return _fail(error.format_message(), error.exit_code, command)
    except click.Abort:
        return _fail("interrupted", 130)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # as in `anymax inventory | head -1`
        _say_no_more()
        return 1
    except OSError as error:
        _say_no_more()
        return _fail(f"can't write: {error.strerror or error}{f' ({error.filename})' if error.filename else ''}", 1)
    return result if isinstance(result, int) else 0


def _say_no_more() -> None:
    """Discard the output that is left, which Python would try to write again on exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # standard output may not be a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int, command: str = "anymax") -> int:
    print(f"{command}: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201
    return code
