"""Ranks, layout and hosts stated in a log, each with its line, so that a contradiction names both lines."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from ..common.errors import CouldNotRunError
from ..model.imported_run import Launched

_NAMES = {"world_size": "the number of ranks", "tp": "tensor", "pp": "pipeline", "dp": "data", "sp": "sequence"}


@dataclass
class LayoutDraft:
    """Statements about the launch: name -> (value, line number)."""

    stated: dict[str, tuple[int, int]] = field(default_factory=dict)
    hosts: list[str] = field(default_factory=list)

    def state(self, name: str, value: int, line: int) -> None:
        """Note that `name` is `value`. Raises CouldNotRunError if an earlier line states another value."""
        before, where = self.stated.setdefault(name, (value, line))
        if before != value:
            raise CouldNotRunError(
                f"contradictory layout: line {where} gives {_NAMES[name]} as {before}, line {line} as {value}. "
                "Give the log of one run"
            )

    def world_info(self, text: str, line: int) -> None:
        """The launcher's dictionary of hosts and their local ranks; ignored if it is damaged."""
        try:
            hosts = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return
        if isinstance(hosts, dict) and all(isinstance(ranks, list) for ranks in hosts.values()):
            self.hosts = sorted(str(host) for host in hosts)
            self.state("world_size", sum(len(ranks) for ranks in hosts.values()), line)

    def finish(self, given: int | None) -> Launched:
        """The launch. `given` is --world-size.

        Raises CouldNotRunError if the sizes do not multiply to the number of ranks, or that number is not stated.
        """
        sizes = {name: self.stated[name][0] for name in ("tp", "pp", "dp", "sp") if name in self.stated}
        world_size = self.stated["world_size"][0] if "world_size" in self.stated else None
        if given is not None and world_size is not None and given != world_size:
            line = self.stated["world_size"][1]
            raise CouldNotRunError(
                f"--world-size {given}: line {line} of the log says {world_size}. Leave the flag out"
            )
        world_size = world_size or given
        if {"tp", "pp", "dp"} <= sizes.keys():
            product = sizes["tp"] * sizes["pp"] * sizes["dp"] * sizes.get("sp", 1)
            world_size = world_size or product
            if product != world_size:
                line = self.stated["tp"][1]
                raise CouldNotRunError(
                    f"contradictory layout: line {line} gives tensor {sizes['tp']} x pipeline {sizes['pp']} x data "
                    f"{sizes['dp']} x sequence {sizes.get('sp', 1)} = {product} ranks, but there are {world_size}. "
                    "Give the log of one run"
                )
        if world_size is None:
            raise CouldNotRunError(
                "no line of the log tells how many ranks ran (such as `using world size: ...`): give --world-size N"
            )
        layout = {name: sizes[name] for name in ("tp", "pp", "dp") if name in sizes}
        return Launched(world_size, layout, self.hosts)
