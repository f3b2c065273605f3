"""Wrappers around library functions that cannot change what these functions do.

A hook is a function that is called before each call, and may return a context manager around the call. If either
raises, the hook is switched off, which is logged once, and the call continues. Exceptions of the call itself, and of
signals while it runs, are passed on.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

logger = logging.getLogger(__name__)


class CallError(Exception):
    """The arguments do not fit the function, which will raise an error itself."""


_installed: list[tuple[Any, str, Any, Any]] = []  # owner, name, original, replacement

Around = Callable[["Call"], AbstractContextManager[Any]]
# A hook of each training step returns None where it can: training has evicted it from the processor's caches, so what
# it costs is the memory that it touches, and a context manager touches much.
OnCall = Callable[["Call"], AbstractContextManager[Any] | None]


class Call:
    """One call of a hooked function. A hook may replace `args`; `result` is set once the function has returned."""

    __slots__ = ("_signature", "args", "kwargs", "result")

    def __init__(
        self, signature: Callable[[], inspect.Signature], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.args = args
        self.kwargs = kwargs
        self.result: Any = None
        self._signature = signature

    def arguments(self) -> dict[str, Any]:
        """Name -> value of every argument, including defaults. Raises CallError if the arguments do not fit."""
        try:
            bound = self._signature().bind(*self.args, **self.kwargs)
        except TypeError as exc:
            raise CallError from exc
        bound.apply_defaults()
        return dict(bound.arguments)


class Hook:
    """The hook of one function, active until it raises."""

    def __init__(self, name: str, on_call: OnCall) -> None:
        self.name = name
        self.off = False
        self._on_call = on_call

    def enter(self, call: Call) -> AbstractContextManager[Any] | None:
        """Run the part of the hook before the call; None if there is none after it, or this one failed."""
        args, kwargs = call.args, call.kwargs
        try:
            manager = self._on_call(call)
            if manager is not None:
                manager.__enter__()
            return manager
        except CallError:
            return None
        except Exception as exc:
            self._switch_off(exc)
            call.args, call.kwargs = args, kwargs
            return None

    def leave(self, manager: AbstractContextManager[Any], error: BaseException | None) -> None:
        """Run the part of the hook after the call. `error`: the exception that the call raised, if any."""
        try:
            manager.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        except Exception as exc:
            if exc is not error:
                self._switch_off(exc)

    def _switch_off(self, exc: Exception) -> None:
        if self.off:
            return
        self.off = True
        with suppress(Exception):  # of handlers that the program has added to logging
            logger.error(
                "the hook around %s is switched off, and the program continues without it: %s: %s",
                self.name, type(exc).__name__, exc, exc_info=logger.isEnabledFor(logging.DEBUG),
            )  # fmt: skip


def guarded(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """The function `original` within `hook`."""
    signature = functools.cache(lambda: inspect.signature(original))

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        if hook.off:
            return original(*args, **kwargs)
        call = Call(signature, args, kwargs)
        manager = hook.enter(call)
        if manager is None:
            return original(*call.args, **call.kwargs)
        try:
            call.result = original(*call.args, **call.kwargs)
        except BaseException as exc:
            hook.leave(manager, exc)
            raise
        hook.leave(manager, None)
        return call.result

    return hooked


def wrap(owner: Any, name: str, on_call: OnCall) -> None:
    """Hook the function `name` of a module or class.

    Does nothing if there is no such function, as in some versions of a library, or it is already wrapped.
    """
    found = vars(owner).get(name)
    kind = type(found) if isinstance(found, (classmethod, staticmethod)) else None
    original = found if kind is None else found.__func__
    if not callable(original) or getattr(original, "_restart_trace_hook", None) is not None:
        return
    hook = Hook(f"{getattr(owner, '__module__', '') or ''}.{owner.__name__}.{name}".lstrip("."), on_call)
    hooked = guarded(original, hook)
    hooked._restart_trace_hook = hook  # type: ignore[attr-defined]
    replacement = hooked if kind is None else kind(hooked)
    setattr(owner, name, replacement)
    _installed.append((owner, name, found, replacement))


def put(hooks: bool) -> None:
    """Put the hooks of all hooked functions in place, or the original functions: to measure what hooks cost."""
    for owner, name, original, replacement in _installed:
        setattr(owner, name, replacement if hooks else original)
