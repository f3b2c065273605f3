"""An unpickler that uses classes of an allow-list and alters nothing but the objects that it makes of them.

find_class alone is not enough: the opcode BUILD sets attributes of whatever lies on the stack, a class of the
allow-list, a function or a member of an enumeration as well, which would stay so after the file was refused.
(Opcodes: Lib/pickletools.py. torch's weights_only unpickler has the same rule, by type(instance).)
"""

from __future__ import annotations

import enum
import io
import pickle
from typing import Any, ClassVar


class PlainUnpickler(pickle._Unpickler):
    """`find_class` of a subclass says what is on the allow-list. In Python, since C's BUILD cannot be replaced."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def __init__(self, pickled: bytes) -> None:
        super().__init__(io.BytesIO(pickled))
        self._classes: set[type] = set()

    def allowed(self, found: Any) -> Any:
        """`found`, and its instances may be built from now on if it is a class; enumerations have their members."""
        if isinstance(found, type) and not issubclass(found, enum.Enum):
            self._classes.add(found)
        return found

    def _build(self) -> None:
        instance = self.stack[-2]
        if not isinstance(instance, tuple(self._classes)):  # of a class of its own each: NumPy's types
            raise pickle.UnpicklingError(
                f"it sets attributes of {ascii(instance)[:80]}, which is no instance of a class on the allow-list"
            )
        build: Any = pickle._Unpickler.dispatch[pickle.BUILD[0]]
        build(self)

    dispatch[pickle.BUILD[0]] = _build
