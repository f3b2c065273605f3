"""The tensors in a state: a tree of dicts, lists and tuples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch


def map_tensors(state: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of the tree with every tensor replaced; one that is in it twice is replaced once, and stays one."""
    return _map(state, function, {})


def _map(state: Any, function: Callable[[torch.Tensor], Any], made: dict[int, Any]) -> Any:
    if isinstance(state, torch.Tensor):
        if id(state) not in made:
            made[id(state)] = function(state)
        return made[id(state)]
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*(_map(item, function, made) for item in state))
    if type(state) in (list, tuple):
        return type(state)(_map(item, function, made) for item in state)
    if isinstance(state, dict):
        mapped = copy.copy(state)  # of its own class, whatever that needs to be made
        for key, value in state.items():
            mapped[key] = _map(value, function, made)
        return mapped
    return state


def tensors_of(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """(keys and indices that lead to it, tensor) of every tensor in the tree, in order."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, (dict, list, tuple)):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from tensors_of(value, (*path, key))
