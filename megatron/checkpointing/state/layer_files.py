"""Which weights of a stage are in which files, and which data-parallel ranks have them.

A pipeline layer has a file, and each of its experts another where experts are divided over data-parallel ranks. All
arguments called `module` are DeepSpeed PipelineModules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.naming import RankPlace


@dataclass(frozen=True)
class LayerFile:
    """Weights of `layer` that are in one file: live tensors by their names in the layer.

    `replicas`: the DP ranks that hold the same, in ascending order; the first one writes the file.
    """

    name: str
    layer: torch.nn.Module
    state: dict[str, torch.Tensor]
    replicas: range

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Put the content of the file into the live layer. Raises RuntimeError if it is another than `state`."""
        if saved.keys() != self.state.keys():
            wrong = ", ".join(sorted(saved.keys() ^ self.state.keys()))
            raise RuntimeError(f"{self.name}: in the file or in the model, but not in both: {wrong}")
        self.layer.load_state_dict(saved, strict=False)


def layers_of(module: Any) -> list[tuple[int, torch.nn.Module]]:
    """(number, module) of the pipeline layers of this stage that have files of their own."""
    first = module._local_start
    funcs = enumerate(module.forward_funcs)
    return [(first + i, layer) for i, layer in funcs if isinstance(layer, torch.nn.Module)]


def layer_files(module: Any, place: RankPlace) -> list[LayerFile]:
    """The files with the weights that the rank at `place` holds, in the order of layers, then experts.

    None with --zero-stage 3: state/zero3.py.
    """
    if place.layout.zero == 3:
        return []
    return [file for number, layer in layers_of(module) for file in files_of_layer(number, layer, place)]


def files_of_layer(number: int, layer: torch.nn.Module, place: RankPlace) -> list[LayerFile]:
    """As `layer_files`, of one layer."""
    dp, params = place.layout.dp, dict(layer.named_parameters(remove_duplicate=False))
    shared = layer.state_dict()
    of_experts: dict[Any, dict[str, torch.Tensor]] = {}
    for key in list(shared):
        mark = getattr(params.get(key), "divided_expert", None)
        if mark is not None:
            of_experts.setdefault(mark, {})[key] = shared.pop(key)
    files = [LayerFile(names.layer_file(number, place.at.tp), layer, shared, range(dp))]
    for mark, state in of_experts.items():
        name = names.expert_file(number, mark.index, place.at.tp)
        files.append(LayerFile(name, layer, state, range(place.at.dp % mark.ranks, dp, mark.ranks)))
    return files
