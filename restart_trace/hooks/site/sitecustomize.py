"""Installs the hooks. Python imports it at its start, since `restart-trace run` put its directory on PYTHONPATH.

Afterwards it imports the sitecustomize that Python would have imported otherwise.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _install() -> None:
    """Import this copy of restart_trace, which need not be installed in the program's environment."""
    place = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
    sys.path.insert(0, place)
    try:
        import restart_trace.hooks
    finally:
        sys.path.remove(place)
    restart_trace.hooks.install()


def _import_next() -> None:
    """Import the program's own sitecustomize, if there is one."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)  # type: ignore[arg-type]


if os.environ.get("RESTART_TRACE_HOOKS_DIR"):
    try:
        _install()
    except Exception as error:
        sys.stderr.write(f"restart_trace: nothing is traced: {type(error).__name__}: {error}\n")
_import_next()
