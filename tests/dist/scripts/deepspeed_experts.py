"""One rank: DeepSpeed's own save_checkpoint of a model with upstream's names of parameters, in a given state.

GIVEN_STATE names a file of torch.save, a `Given`; the checkpoint goes to SAVED_TO. With a pipeline the model is a
PipelineModule as upstream's GPTModelPipe, otherwise as its GPTModel with --no-pipeline-parallel. Experts are
DeepSpeed's own MoE. The model computes nothing of a GPT: its one step only makes DeepSpeed's optimizer state.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron.parallel.topology import Layout
from tests.upstream_files import State, UpstreamModel, local_of


@dataclass
class Given:
    """`state`: kind -> name in this program's checkpoints -> full tensor. `experts`: of each block.

    `client`: what upstream saves beside DeepSpeed's state. `dtype`: "bf16" or "fp32".
    """

    layout: Layout
    pipeline: bool
    zero_stage: int
    dtype: str
    model: UpstreamModel
    experts: list[int]
    residual: bool
    state: State
    client: dict[str, Any]
    universal_checkpoint_info: dict[str, Any]


def put(root: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    """A parameter in modules called as the parts of its name."""
    first, _, rest = name.partition(".")
    if not rest:
        root.register_parameter(first, nn.Parameter(torch.zeros(shape)))
        return
    if not hasattr(root, first):
        root.add_module(first, nn.Module())
    put(getattr(root, first), rest, shape)


class Summed(nn.Module):
    """Every parameter has a gradient; input and output: a tensor of one element."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + sum(parameter.sum() for parameter in self.parameters()))


class PipelineLayer(Summed):
    """The pipeline layer called `number`, as a TP rank holds it."""

    def __init__(self, given: Given, tp: int, number: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        moe = Summed()
        for name, full in given.state["master"].items():
            prefix, _, rest = name.replace("tied_modules.embed.", "1.").partition(".")
            if prefix != str(number):
                continue
            shape = tuple(local_of(given.model, name, full, tp, given.layout.tp).shape)
            expert = re.fullmatch(r"mlp\.deepspeed_moe\.experts\.deepspeed_experts\.0\.(.+)", rest)
            if expert is not None:
                put(moe, expert[1], shape)
            elif "deepspeed_moe" not in rest and not rest.startswith(("mlp.mlp.", "mlp.coefficient.")):
                put(self, rest, shape)
        experts = given.experts[number - 2] if 2 <= number < 2 + len(given.experts) else 1
        if experts > 1:
            self.mlp = MoE(
                given.model.hidden, moe, experts, ep_size=given.layout.expert_ranks(experts),
                use_residual=given.residual, enable_expert_tensor_parallelism=True,
            )  # fmt: skip
        for parameter in self.parameters():
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]  # no norm is to be without parameters


class WholeModel(nn.Module):
    """As upstream's GPTModel, whose state is that of nested modules."""

    def __init__(self, layers: dict[int, PipelineLayer], blocks: int) -> None:
        super().__init__()
        self.language_model = language_model = nn.Module()
        language_model.embedding = layers[1]
        language_model.encoder = encoder = nn.Module()
        encoder.layers = nn.ModuleList(layers[number] for number in range(2, blocks + 2))
        encoder.final_layernorm = layers[blocks + 2]
        if blocks + 3 in layers:
            language_model.output_layer = layers[blocks + 3].lm_head
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + sum(parameter.float().sum() for parameter in self.parameters()))

    def state_for_save(self, *_: Any, **__: Any) -> dict[str, Any]:
        """As its state_dict_for_save_checkpoint: nested, with the weights of experts on top."""
        whole = nn.Module.state_dict(self)
        experts = {name: tensor for name, tensor in whole.items() if ".deepspeed_experts." in name}
        found: dict[str, Any] = dict(experts)
        for name in whole.keys() - experts.keys():
            *path, last = self._nested(name)
            inner = found
            for part in path:
                inner = inner.setdefault(part, {})
            inner[last] = whole[name]
        return found

    @staticmethod
    def _nested(name: str) -> list[str]:
        for flat in ("language_model.encoder.", "language_model.embedding.word_embeddings.",
                     "language_model.embedding.position_embeddings.", "language_model.output_layer."):  # fmt: skip
            if name.startswith(flat):
                return [*flat.strip(".").split("."), name.removeprefix(flat)]
        raise AssertionError(name)


def parameters_here(given: Given, module: Any, dp: int) -> dict[str, nn.Parameter]:
    """Name in this program's checkpoints -> live parameter of this rank."""
    found, blocks = {}, len(given.experts)
    for name, parameter in module.named_parameters():
        if not given.pipeline:
            name = re.sub(r"^language_model\.encoder\.layers\.(\d+)", lambda m: str(int(m[1]) + 2), name)
            name = name.replace("language_model.encoder.final_layernorm", str(blocks + 2))
            name = name.replace("language_model.output_layer", f"{blocks + 3}.lm_head")
            name = name.replace("language_model.embedding", "1" if given.model.llama else "tied_modules.embed")
        number, _, _ = name.partition(".")
        if number.isdecimal() and 2 <= int(number) < blocks + 2:
            experts = given.experts[int(number) - 2]
            each = experts // (ranks := given.layout.expert_ranks(experts))
            on_rank = re.search(r"deepspeed_experts\.(\d+)", name)
            if on_rank is not None:
                name = name.replace(on_rank[0], f"deepspeed_experts.{dp % ranks * each + int(on_rank[1])}")
        found[name] = parameter
    return found


def build(given: Given, rank: int) -> tuple[Any, Any]:
    """(model, mpu) of this rank."""
    from deepspeed.runtime.pipe import LayerSpec, PipelineModule
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

    layout = given.layout
    topology = PipeModelDataParallelTopology(num_pp=layout.pp, num_mp=layout.tp, num_dp=layout.dp)
    tp, blocks = layout.coordinates(rank).tp, len(given.experts)
    last = blocks + (3 if given.model.llama else 2)
    if not given.pipeline:
        layers = {number: PipelineLayer(given, tp, number) for number in range(1, last + 1)}
        return WholeModel(layers, blocks), PipelineParallelGrid(topology)
    assert given.model.llama
    specs = [LayerSpec(PipelineLayer, given, tp, number) for number in range(1, last + 1)]
    layers = [lambda x: x, *specs]
    return PipelineModule(layers, topology=topology, loss_fn=lambda x, _: x.sum(), partition_method="uniform"), None


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """As upstream's with --create-moe-param-group."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    decays: list[dict[str, Any]] = [
        {"name": "wd_no_scale_lr", "params": [], "wd_mult": 1.0, "lr_mult": 1.0},
        {"name": "no_wd_no_scale_lr", "params": [], "wd_mult": 0.0, "lr_mult": 1.0, "weight_decay": 0.0},
    ]
    for name, parameter in module.named_parameters():
        decays[name.endswith(".bias") or parameter.dim() == 1]["params"].append(parameter)
    return split_params_into_different_moe_groups_for_optimizer(decays)


def fill_shard(optimizer: torch.optim.Optimizer, parameter: Any, local: dict[str, torch.Tensor]) -> None:
    """Put this rank's part of the masters and moments of a parameter where DeepSpeed says that it lies."""
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return
    from_, to = mapping.lp_fragment_address, mapping.hp_fragment_address
    (flat,) = optimizer.param_groups[mapping.param_group_index]["params"]
    targets = {"master": flat.data, **optimizer.state[flat]}
    for kind, values in local.items():
        targets[kind][to.start : to.start + to.numel] = values.reshape(-1)[from_.start : from_.start + from_.numel]


def main() -> None:
    import deepspeed
    import torch.distributed as dist

    given: Given = torch.load(os.environ["GIVEN_STATE"], weights_only=False)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    rank, layout = dist.get_rank(), given.layout
    model, mpu = build(given, rank)
    engine: Any = deepspeed.initialize(
        model=model,
        mpu=mpu,
        optimizer=torch.optim.AdamW(groups_of(model), lr=0.0),
        config={
            "train_batch_size": layout.dp, "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": given.zero_stage}, "bf16": {"enabled": given.dtype == "bf16"},
            **({"data_types": {"grad_accum_dtype": "fp32"}} if given.dtype == "bf16" else {}),
        },
    )[0]  # fmt: skip
    one = torch.ones(1, 1, dtype=torch.bfloat16 if given.dtype == "bf16" else torch.float32)
    if given.pipeline:
        engine.train_batch(iter([(one, one)]))
    else:
        engine.backward(engine(one).sum())
        engine.step()
    at = layout.coordinates(rank)
    for name, parameter in parameters_here(given, engine.module, at.dp).items():
        local = {kind: local_of(given.model, name, given.state[kind][name], at.tp, layout.tp) for kind in given.state}
        parameter.data.copy_(local["master"])
        fill_shard(engine.basic_optimizer, parameter, local)
    for values in engine.basic_optimizer.state.values():
        values["step"].fill_(given.client["iteration"])
    engine.module.universal_checkpoint_info = given.universal_checkpoint_info
    if not given.pipeline:
        engine.module.state_dict = engine.module.state_for_save
    engine.save_checkpoint(os.environ["SAVED_TO"], f"global_step{given.client['iteration']}", given.client)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
