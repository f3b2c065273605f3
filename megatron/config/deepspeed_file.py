"""Reading a --deepspeed_config file: strict JSON whose every key has a rule in megatron.config.deepspeed_keys."""

from __future__ import annotations

import difflib
from typing import Any, NoReturn

from megatron.config import ConfigError
from megatron.config.deepspeed_keys import (
    KEYS,
    MAXIMUM,
    ZERO_3,
    Inert,
    Kind,
    Names,
    Off,
    Passes,
    Refused,
    Rule,
    Section,
    Settled,
)
from restart_trace.regular import NotRegularFileError
from restart_trace.strict_json import StrictJsonError, read_json

_MAX_BYTES = 1 << 20  # DeepSpeed's files have some kB
_SHOWN = 60  # characters of a value in a message
_ANYWHERE = "auto"  # what DeepSpeed's users write for a value that the trainer knows


def load_deepspeed_file(path: str) -> dict[str, Any]:
    """The JSON object in `path`, with the keys that have an effect: `null`, what is off and what says only what holds
    anyway are left out, whole numbers are int, stanzas that name an engine are objects.

    Raises: ConfigError naming the file, the key and what to do, where the file is no readable JSON object or holds a
    key that is unknown, given twice, of a wrong type, or without effect in this program.
    """
    raw = _parse(path)
    if "bfloat16" in raw:  # DeepSpeed's older name of the section
        if "bf16" in raw:
            _refuse(path, "bf16 and bfloat16", "are two names of one section; give bf16")
        raw["bf16"] = raw.pop("bfloat16")
    kept = _checked_object(raw, "", path)
    _check_together(kept, path)
    return kept


def get(tree: dict[str, Any], key: str) -> Any:
    """The value under a dotted key, or None."""
    value: Any = tree
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
    return value


def shown(value: Any) -> str:
    """A value for a message: short, on one line, without control characters, however deep it is."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAXIMUM:
        return "a number of more than 19 digits"
    text = repr(value) if not isinstance(value, str) or value.isprintable() else ascii(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def engine_stanzas(tree: dict[str, Any]) -> dict[str, str]:
    """Key of each stanza of a checked file that names a checkpoint engine -> that engine."""
    found = {key: rule.engine for key, rule in KEYS.items() if isinstance(rule, Names) and get(tree, key) is not None}
    if get(tree, "checkpoint.writer.decoupled") is True:
        found["checkpoint.writer"] += "-decoupled"
    return found


def _refuse(path: str, key: str, why: str) -> NoReturn:
    raise ConfigError(f"--deepspeed_config {path}: {key} {why}")


def _parse(path: str) -> dict[str, Any]:
    try:
        raw = read_json(path, _MAX_BYTES)
    except NotRegularFileError as error:
        _refuse(path, f"{error.reason};", "every rank reads it, so give a JSON file")
    except OSError as error:
        raise ConfigError(
            f"--deepspeed_config {path}: {error.strerror}; give a readable JSON file or drop it"
        ) from error
    except StrictJsonError as error:
        raise ConfigError(
            f"--deepspeed_config {path}: not JSON ({error}); correct the file or drop it (comments and the other "
            "liberties of Hjson, which DeepSpeed takes, are not read)"
        ) from error
    except ValueError as error:  # it is too large, or there is a NUL in the path
        why = str(error).removeprefix(f"{path}: ")
        where = path if path.isprintable() else ascii(path)
        raise ConfigError(f"--deepspeed_config {where}: {why}; give DeepSpeed's JSON file") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"--deepspeed_config {path}: holds a JSON {type(raw).__name__}; it must be an object")
    return raw


def _checked_object(tree: dict[str, Any], prefix: str, path: str) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in tree.items():
        key = prefix + name
        rule = KEYS.get(key) if "." not in name else None
        if rule is None:
            _refuse_unknown(prefix, name, path)
        value = _checked(key, value, rule, path)
        if value is not None:
            kept[name] = value
    return kept


def _checked(key: str, value: Any, rule: Rule, path: str) -> Any:
    """The value as DeepSpeed or a flag gets it; None where it changes nothing."""
    if value is None:
        return None
    if isinstance(rule, Refused):
        if value is not False:
            _refuse(path, key, f"is not supported; drop it and {rule.instead}")
        return None
    if isinstance(rule, Off):
        return _check_off(key, value, rule, path)
    if isinstance(rule, Names):
        return _stanza(key, value, rule, path)
    if isinstance(rule, Section):
        if not isinstance(value, dict):
            _refuse(path, key, f"is {shown(value)}; it must be an object")
        return _checked_object(value, key + ".", path)
    if isinstance(rule, Inert):
        return _check_inert(key, value, rule, path)
    if value == _ANYWHERE and isinstance(value, str):
        return _auto(key, rule, path)
    return _typed(key, value, rule.kind, path)


def _auto(key: str, rule: Passes | Settled, path: str) -> Any:
    # Files for other trainers have it at keys of stage 3, for DeepSpeed's own values.
    if isinstance(rule, Passes) and key not in ("steps_per_print", "wall_clock_breakdown") and rule.takers != (ZERO_3,):
        _refuse(path, key, "is auto; no flag sets it, give its value")
    return _ANYWHERE if isinstance(rule, Settled) else None


def _check_off(key: str, value: Any, rule: Off, path: str) -> None:
    name, off = rule.off
    if value is False:
        return
    if not isinstance(value, dict) or not (not value or same(value.get(name), off)):
        _refuse(path, key, f"is not supported; drop it and {rule.instead}")
    for inner in _leaves(value):
        if inner not in rule.keys:
            _refuse_unknown(key + ".", inner, path, tuple(f"{key}.{known}" for known in rule.keys))


def _leaves(tree: dict[str, Any]) -> list[str]:
    """Dotted names of what is in a section that is off: one section deep, and where that goes on its first key."""
    found = []
    for name, value in tree.items():
        if not isinstance(value, dict) or not value:
            found.append(name)
            continue
        for inner, more in value.items():
            found.append(f"{name}.{inner}" + (f".{next(iter(more))}" if isinstance(more, dict) and more else ""))
    return found


def _check_inert(key: str, value: Any, rule: Inert, path: str) -> None:
    text = isinstance(value, str) and isinstance(rule.default, str)
    if value == _ANYWHERE and isinstance(value, str):
        return
    if not (value.lower() == rule.default.lower() if text else same(value, rule.default)):
        default = "null" if rule.default is None else shown(rule.default)
        _refuse(path, key, f"is {shown(value)}; only {default} is supported: {rule.why}")


def same(one: Any, other: Any) -> bool:
    """Equal, and a truth value is no number."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _stanza(key: str, value: Any, rule: Names, path: str) -> dict[str, Any] | None:
    if value is False:
        return None
    if value is True and rule.as_bool:
        return {}
    if not isinstance(value, dict) or not rule.as_object:
        wanted = ["true or false"] * rule.as_bool + ["an object"] * rule.as_object
        _refuse(path, key, f"is {shown(value)}; it must be {' or '.join(wanted)}")
    kept = _checked_object(value, key + ".", path)
    return kept if kept.get("enabled", True) else None


def _typed(key: str, value: Any, kind: Kind, path: str) -> Any:
    if kind.name == "bool" and not isinstance(value, bool):
        _refuse(path, key, f"is {shown(value)}; use true or false")
    if kind.name == "names" and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        _refuse(path, key, f"is {shown(value)}; it must be a list of strings")
    if kind.name in ("bool", "names"):
        return value
    if kind.name == "str":
        if not isinstance(value, str):
            _refuse(path, key, f"is {shown(value)}; it must be a string")
        if kind.choices and value.lower() not in kind.choices:
            _refuse(path, key, f"is {shown(value)}; it must be one of {', '.join(kind.choices)}")
        return value.lower() if kind.choices else value
    return _number(key, value, kind, path)


def _number(key: str, value: Any, kind: Kind, path: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(path, key, f"is {shown(value)}; it must be a number")
    if abs(value) > MAXIMUM:
        _refuse(path, key, f"is {shown(value)}; it must be less than 2^63")
    if kind.name == "int":
        if value != int(value):
            _refuse(path, key, f"is {value!r}; it must be a whole number")
        value = int(value)
    if kind.least is not None and value < kind.least:
        _refuse(path, key, f"is {value!r}; it must be at least {kind.least}")
    if kind.above is not None and value <= kind.above:
        _refuse(path, key, f"is {value!r}; it must be more than {kind.above}")
    if value > kind.most:
        _refuse(path, key, f"is {value!r}; it must be at most {kind.most}")
    if value % kind.multiple and kind.name == "int":
        _refuse(path, key, f"is {value!r}; it must be a multiple of {kind.multiple}")
    return value


def _refuse_unknown(prefix: str, name: str, path: str, known: tuple[str, ...] = ()) -> NoReturn:
    """Suggests the nearest key of the same section, else one of that name in another."""
    if prefix + name in KEYS:
        outer, _, inner = name.rpartition(".")
        _refuse(path, f"unknown key {_name(prefix + name)}:", f"a dot names no section; put {inner} into {outer}")
    beside = [key[len(prefix) :] for key in known or KEYS if key.startswith(prefix)]
    near = difflib.get_close_matches(name, [inner for inner in beside if "." not in inner], n=1, cutoff=0.7)
    near = [prefix + inner for inner in near]
    if not near:
        last = name.rpartition(".")[2]
        near = [key for key in KEYS if key.rpartition(".")[2] == last][:1]
    hint = f"did you mean {near[0]}?" if near else "no such key has an effect here; correct it or drop it"
    _refuse(path, f"unknown key {_name(prefix + name)}:", hint)


def _name(key: str) -> str:
    return key if key.isprintable() and len(key) <= 2 * _SHOWN else shown(key)


def _check_together(tree: dict[str, Any], path: str) -> None:
    """Keys that have an effect only together with others."""
    if get(tree, "wall_clock_breakdown") and get(tree, "steps_per_print") is None:
        _refuse(path, "wall_clock_breakdown", "prints every steps_per_print iterations; give that, too")
    logs = {"dump_state": get(tree, "dump_state"), "comms_logger.enabled": get(tree, "comms_logger.enabled")}
    for key, value in logs.items():
        if value and get(tree, "log_level") not in ("debug", "info"):
            _refuse(path, key, 'writes to DeepSpeed\'s log at level info; give "log_level": "info", too')
    if get(tree, "comms_logger.enabled") and not get(tree, "comms_logger.verbose"):
        _refuse(path, "comms_logger.enabled", 'logs nothing without "verbose": true; give that, too')
    if get(tree, "comms_logger.prof_ops") and get(tree, "comms_logger.prof_all") is not False:
        _refuse(path, "comms_logger.prof_ops", 'has no effect without "prof_all": false; give that, too')
    if get(tree, "checkpoint.writer.io_buffer_size") and get(tree, "checkpoint.writer.type") != "fast":
        _refuse(path, "checkpoint.writer.io_buffer_size", 'is of the fast writer; give "type": "fast", too, or drop it')
    named = engine_stanzas(tree)
    if len(named) > 1:
        both = " and ".join(f"{key} (engine {engine})" for key, engine in named.items())
        _refuse(path, both, "name different checkpoint engines; keep one of them")
