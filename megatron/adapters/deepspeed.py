"""Teaches DeepSpeed the checkpoint engine `lazy`: import this module anywhere before `deepspeed.initialize`.

    "checkpoint": {"engine": {"type": "lazy"}}

in DeepSpeed's JSON then chooses it. DeepSpeed has no other way in for an engine of somebody else: it makes one of its
own by the keys that it knows, and ignores this one. Without changes to a script, `python -m megatron.adapters
SCRIPT ...` imports this module and runs the script. DeepSpeed is imported when the script does it.
"""

from __future__ import annotations

import atexit
import functools
import sys
from typing import Any

from restart_trace.hooks.imports import ImportWatcher

_MODULE = "deepspeed.runtime.engine"


def _teach(module: Any) -> None:
    """`module`: that which makes a checkpoint engine in `deepspeed.initialize`, and has DeepSpeedEngine."""
    of = module.DeepSpeedEngine
    make, save, load = module.create_checkpoint_engine, of.save_checkpoint, of.load_checkpoint

    @functools.wraps(make)
    def create_checkpoint_engine(config_params: Any = None, *args: Any, **kwargs: Any) -> Any:
        engine = _engine_of(config_params)
        return make(config_params, *args, **kwargs) if engine is None else engine

    @functools.wraps(save)
    def save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_lazy(self.checkpoint_engine):
            return save(self, *args, **kwargs)
        with self.checkpoint_engine.save_of(self):
            return save(self, *args, **kwargs)

    @functools.wraps(load)
    def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_lazy(self.checkpoint_engine):
            self.checkpoint_engine.wait()  # for `latest`, which DeepSpeed reads itself
        return load(self, *args, **kwargs)

    module.create_checkpoint_engine = create_checkpoint_engine
    of.save_checkpoint, of.load_checkpoint = save_checkpoint, load_checkpoint


def _is_lazy(engine: Any) -> bool:
    return getattr(engine, "name", None) == "lazy"


def _engine_of(config_params: Any) -> Any:
    """The engine that the JSON asks for; None if it leaves the choice to DeepSpeed.

    Raises ValueError naming the key, the value and the fix if the stanza cannot be obeyed.
    """
    given = getattr(config_params, "_param_dict", None) or {}
    checkpoint = given.get("checkpoint") or {}
    if "engine" not in checkpoint:
        return None
    stanza = checkpoint["engine"]
    kind = stanza.get("type") if isinstance(stanza, dict) else None
    if kind != "lazy":
        raise ValueError(
            f'DeepSpeed\'s JSON, "checkpoint": {{"engine": {stanza!r}}}: must be {{"type": "lazy"}}; or leave it out'
        )
    if checkpoint.get("writer") is not None or (given.get("datastates_ckpt") or {}).get("enabled"):
        raise ValueError(
            'DeepSpeed\'s JSON has "checkpoint": {"engine": ...} beside "writer" or "datastates_ckpt": choose one'
        )
    if checkpoint.get("use_node_local_storage"):
        raise ValueError(
            "DeepSpeed's JSON, \"use_node_local_storage\": true: engine lazy commits all ranks' files in one "
            "directory; use a shared one"
        )
    from megatron.adapters.deepspeed_engine import LazyCheckpointEngine, LazySettings

    settings = LazySettings.of({key: value for key, value in stanza.items() if key != "type"})
    return LazyCheckpointEngine(config_params, settings)


@atexit.register  # now: what is registered later, by the script, is called before it
def _at_exit() -> None:
    engines = sys.modules.get("megatron.adapters.deepspeed_engine")
    if engines is not None:
        engines.end_saves()


def _install() -> None:
    module = sys.modules.get(_MODULE)
    if module is not None:
        _teach(module)
    else:
        watcher = ImportWatcher({_MODULE: [_teach]}, frozenset(), lambda: None, lambda *times: None)
        sys.meta_path.insert(0, watcher)  # type: ignore[arg-type]


_install()
