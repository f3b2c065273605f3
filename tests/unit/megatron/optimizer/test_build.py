"""Parameter groups in upstream's order, and what the optimizers do with them."""

from __future__ import annotations

import logging
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron.config import ConfigError, OptimizerConfig
from megatron.optimizer.build import build_optimizer, parameter_groups, warn_of_l2_weight_decay


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(3, 2)
        self.norm = torch.nn.LayerNorm(2)
        self.frozen = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.last = torch.nn.Linear(2, 2, bias=False)


def names_in(model: torch.nn.Module, group: dict[str, Any]) -> list[str]:
    names = {id(param): name for name, param in model.named_parameters()}
    return [names[id(param)] for param in group["params"]]


def test_biases_and_norms_do_not_decay() -> None:
    model = Block()
    decayed, plain = parameter_groups(model)
    assert names_in(model, decayed) == ["dense.weight", "last.weight"]
    assert names_in(model, plain) == ["dense.bias", "norm.weight", "norm.bias"]
    assert (decayed["name"], decayed["wd_mult"], decayed["lr_mult"]) == ("wd_no_scale_lr", 1.0, 1.0)
    assert (plain["name"], plain["wd_mult"], plain["lr_mult"]) == ("no_wd_no_scale_lr", 0.0, 1.0)


def test_stage_without_a_kind_has_no_group_of_it() -> None:
    assert [g["name"] for g in parameter_groups(torch.nn.Linear(2, 2, bias=False))] == ["wd_no_scale_lr"]
    assert [g["name"] for g in parameter_groups(torch.nn.LayerNorm(2))] == ["no_wd_no_scale_lr"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="apex takes over where it is installed beside CUDA")
def test_adam_is_adamw() -> None:
    """One step against torch's AdamW, and not against its Adam."""

    def stepped(make: Any) -> torch.Tensor:
        torch.manual_seed(3)
        model = torch.nn.Linear(4, 4, bias=False)
        optimizer = make(model)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
        return model.weight.detach()

    config = OptimizerConfig(lr=0.1, weight_decay=0.5, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6)
    settings: Any = {"lr": 0.1, "weight_decay": 0.5, "betas": (0.8, 0.95), "eps": 1e-6}
    ours = stepped(lambda model: build_optimizer(model, config))
    assert torch.allclose(ours, stepped(lambda model: torch.optim.AdamW(model.parameters(), **settings)), atol=1e-6)
    assert not torch.allclose(ours, stepped(lambda model: torch.optim.Adam(model.parameters(), **settings)), atol=1e-2)


def test_sgd_takes_its_momentum() -> None:
    optimizer = build_optimizer(Block(), OptimizerConfig(lr=0.1, optimizer="sgd", sgd_momentum=0.7))
    assert isinstance(optimizer, torch.optim.SGD)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.7, 0.7]


def test_the_log_says_which_optimizer_runs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "megatron.optimizer.build"):
        build_optimizer(Block(), OptimizerConfig(lr=0.1, optimizer="sgd"))
    assert caplog.messages == ["optimizer: torch.optim.sgd.SGD"]


def test_unknown_optimizer_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="--optimizer lion: choose one of adam, sgd"):
        OptimizerConfig(lr=0.1, optimizer="lion")


def test_l2_weight_decay_of_a_checkpoint_is_told(caplog: pytest.LogCaptureFixture) -> None:
    params = [torch.nn.Parameter(torch.ones(2))]
    warn_of_l2_weight_decay(torch.optim.Adam(params, decoupled_weight_decay=True))
    warn_of_l2_weight_decay(torch.optim.SGD(params, lr=0.1))
    assert caplog.messages == []
    warn_of_l2_weight_decay(torch.optim.Adam(params))
    assert len(caplog.messages) == 1 and "continues with L2" in caplog.messages[0]


def install_apex(monkeypatch: pytest.MonkeyPatch, with_extension: bool) -> type:
    """Stand-ins for the modules of apex, which cannot be built without CUDA; `amp_C` is the extension."""

    class FusedAdam(torch.optim.Adam):
        def __init__(self, groups: Any, adam_w_mode: bool, **options: Any) -> None:
            super().__init__(groups, **options)
            self.adam_w_mode = adam_w_mode

    modules = {name: ModuleType(name) for name in ("apex", "apex.optimizers")}
    modules["apex.optimizers"].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    if with_extension:
        modules["amp_C"] = ModuleType("amp_C")
        modules["amp_C"].multi_tensor_adam = None  # type: ignore[attr-defined]
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return FusedAdam


def test_apex_is_taken_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = install_apex(monkeypatch, with_extension=True)
    optimizer = build_optimizer(Block(), OptimizerConfig(lr=0.1))
    assert type(optimizer) is cls and vars(optimizer)["adam_w_mode"] is True


def test_apex_without_its_extension_is_told_and_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_apex(monkeypatch, with_extension=False)
    optimizer = build_optimizer(Block(), OptimizerConfig(lr=0.1))
    assert type(optimizer) is torch.optim.Adam and optimizer.param_groups[0]["decoupled_weight_decay"] is True
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "apex is installed without its CUDA extensions (No module named 'amp_C'): torch's Adam is used" in warning


def test_an_extension_that_lacks_adam_is_told_and_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_apex(monkeypatch, with_extension=True)
    monkeypatch.delattr(sys.modules["amp_C"], "multi_tensor_adam")
    assert type(build_optimizer(Block(), OptimizerConfig(lr=0.1))) is torch.optim.Adam
    assert "apex's extension amp_C has no multi_tensor_adam: torch's Adam is used" in caplog.text
