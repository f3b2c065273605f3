"""An engine is taken back to what it was: attributes, collections in place, gradients, methods that were replaced."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch

from megatron.training.as_built import AsBuilt


class _Part:
    """As one of DeepSpeed's objects."""

    __module__ = "deepspeed.runtime.fake"

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def step(self) -> str:
        return "own"


Part: Any = _Part  # its attributes are those that it is made with


def test_what_steps_have_changed_is_as_it_was_built() -> None:
    model = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    shared: dict[int, Any] = {}
    timer = Part(started=False)
    sums = torch.zeros(2)
    optimizer = Part(optimizer=adam, averaged=shared, fp32_groups_gradients_flat=[sums], has=[False, False])
    engine = Part(
        optimizer=optimizer, module=model, timers=OrderedDict(batch=timer), buffers=defaultdict(list), steps=0
    )
    linked = Part(averaged=shared)
    engine.linked = linked
    before = AsBuilt(engine)

    model(torch.ones(1, 2)).sum().backward()
    adam.step()
    model.register_forward_hook(lambda *_: None)
    model.eval()
    optimizer.step = lambda: "wrapped"
    shared[0], sums[0], optimizer.has[0] = "gradient", 1.0, True
    adam.load_state_dict(adam.state_dict())  # puts other objects in the place of its state and groups
    adam.param_groups[0]["lr"] = 0.2
    timer.started, engine.steps, engine.left_behind = True, 3, torch.ones(2)
    engine.buffers["inputs"].append(torch.ones(2))
    before.restore()

    assert (timer.started, engine.steps, engine.buffers, hasattr(engine, "left_behind")) == (False, 0, {}, False)
    assert optimizer.step() == "own" and optimizer.has == [False, False] and sums.tolist() == [0.0, 0.0]
    assert shared == {} and linked.averaged is shared is optimizer.averaged, "the same object for all who hold it"
    assert model.training and not model._forward_hooks and all(p.grad is None for p in model.parameters())
    assert adam.state == {} and adam.param_groups[0]["lr"] == 0.1


def test_it_can_be_taken_back_again() -> None:
    engine = Part(optimizer=Part(), buffers={"inputs": []})
    before = AsBuilt(engine)
    for _ in range(2):
        engine.buffers["inputs"].append(1)
        engine.buffers["labels"] = []
        before.restore()
        assert engine.buffers == {"inputs": []}
