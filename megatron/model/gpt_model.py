"""GPT as a DeepSpeed PipelineModule.

Pipeline layers are numbered as upstream numbers them: 0 nothing, 1 embedding, 2..L+1 transformer blocks,
L+2 final norm, L+3 head. The numbers are part of the checkpoint's file names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import deepspeed
import deepspeed.moe.layer
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import groups as deepspeed_groups

from megatron.config import ConfigError, ModelConfig
from megatron.model.embedding import EmbeddingPipe, LMHeadPipe, TiedHead, tied_logits
from megatron.model.experts import AuxiliaryLoss
from megatron.model.norms import LayerNorm, RMSNorm
from megatron.model.transformer import ParallelTransformerLayerPipe
from megatron.parallel.expert_parallel import ExpertParallel, ExpertParallelGroup
from megatron.parallel.placement import Placement
from megatron.parallel.topology import Layout, SequenceGroup, TensorParallelGroup
from megatron.parallel.ulysses import new_sequence_group

LossFunction = Callable[[torch.Tensor, Any, TensorParallelGroup], torch.Tensor]
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _pass_through(inputs: Any) -> Any:
    """Layer 0: upstream casts here; our inputs are token ids, so only its number is needed."""
    return inputs


class GPTModelPipe(PipelineModule):
    """The model of one pipeline stage; parameters are zero until initialize_parameters or a load.

    `loss_func(logits, labels, tensor-parallel group)` runs on the last stage. `sequence_parallel`: see
    megatron/parallel/sequence.py. `sequence`: the ranks of this one's sequences, still without their process group.
    `dp_rank`: says which experts this rank holds, if they are divided.
    Raises ValueError from DeepSpeed if the layers cannot be spread over the stages, ConfigError if experts are divided,
    but not on each stage, in fp16 or fp32.
    """

    def __init__(
        self,
        config: ModelConfig,
        padded_vocab_size: int,
        layout: Layout,
        tp_rank: int,
        device: torch.device,
        loss_func: LossFunction,
        *,
        dp_rank: int = 0,
        sequence_parallel: bool = False,
        sequence: SequenceGroup | None = None,
    ) -> None:
        self.tp = TensorParallelGroup(rank=tp_rank, size=layout.tp, sequence_parallel=sequence_parallel)
        self.model_config = config
        sequence = sequence or SequenceGroup()
        self.expert_parallel = ExpertParallel(layout, dp_rank)
        place = Placement(self.tp, TORCH_DTYPES[config.params_dtype], device, sequence, self.expert_parallel)
        self.auxiliary_loss = AuxiliaryLoss(config.moe_loss_coeff) if config.has_experts else None
        interval = config.checkpoint_num_layers if config.checkpoint_activations else 0
        super().__init__(
            layers=_layer_specs(config, padded_vocab_size, place, self.auxiliary_loss),
            loss_fn=lambda logits, labels: loss_func(logits, labels, self.tp),
            topology=PipeModelDataParallelTopology(num_pp=layout.pp, num_mp=layout.tp, num_dp=layout.dp),
            activation_checkpoint_interval=interval,
            partition_method="type:transformer",
        )
        if layout.ep > 1 and config.params_dtype != "bf16":
            check_stages(config.experts_per_layer, self.parts, layout.ep)
        self.tp.group = self._grid.get_slice_parallel_group()
        if sequence.size > 1:
            sequence.group = new_sequence_group(layout, sequence.size, self._grid.get_global_rank())
        self.expert_parallel.connect(config.experts_per_layer)
        self.divided_experts = _DividedExperts.of(self)

    def initialize_parameters(self, seed: int) -> None:
        """Draw all parameters of this stage; the same values for the same seed on every layout.

        With --zero-stage 3, once DeepSpeed has divided them, collective: a layer at a time is whole on all ranks.
        """
        for index, layer in self.numbered_layers():
            for name, module in layer.named_modules():
                reset = getattr(module, "reset_parameters", None)
                # torch's own modules have a method of that name without our arguments
                if reset is not None and type(module).__module__.startswith("megatron."):
                    mine = [param for param in module.parameters(recurse=False) if hasattr(param, "ds_id")]
                    with deepspeed.zero.GatheredParameters(mine, modifier_rank=0, enabled=bool(mine)):
                        reset(seed, f"{index}.{name}".rstrip("."))

    def transformer_layers(self) -> list[ParallelTransformerLayerPipe]:
        """The transformer blocks of this stage."""
        return [layer for layer in self.forward_funcs if isinstance(layer, ParallelTransformerLayerPipe)]

    def numbered_layers(self) -> list[tuple[int, torch.nn.Module]]:
        """(pipeline layer number, module) of this stage; a tied copy counts under the embedding's number."""
        first: Any = self._local_start
        layers = [
            (first + i, layer) for i, layer in enumerate(self.forward_funcs) if isinstance(layer, torch.nn.Module)
        ]
        seen = {id(layer) for _, layer in layers}
        tied = [(1, module) for module in self.tied_modules.values() if id(module) not in seen]
        return layers + tied


def check_stages(experts_per_layer: Sequence[int], parts: Sequence[int], ep: int) -> None:
    """Refuse stages that divide their experts differently: DeepSpeed's optimizer for fp16 and fp32 adds up the norms of
    each group of parameters over all stages, and would wait for those without such a group.
    """
    blocks = [(max(first - 2, 0), max(end - 2, 0)) for first, end in itertools.pairwise(parts)]
    ranks = [sorted({min(ep, experts) for experts in experts_per_layer[first:end]} - {1}) for first, end in blocks]
    if any(found != ranks[0] for found in ranks):
        shown = "; ".join(f"{stage}: " + (" and ".join(map(str, found)) or "1") for stage, found in enumerate(ranks))
        raise ConfigError(
            f"--moe-expert-parallel-size {ep}: in fp16 and fp32 all pipeline stages must divide experts over the same "
            f"numbers of ranks, and the stages do so over {shown}: give --bf16, or other values of "
            "--pipeline-model-parallel-size, --expert-interval and --num-experts"
        )


class _DividedExperts(deepspeed.moe.layer.MoE):
    """Tells DeepSpeed, which looks for modules of its class, that there are experts, and the groups that have them.

    Without parameters: the experts are in the layers.
    """

    def __init__(self, groups: Collection[ExpertParallelGroup]) -> None:
        torch.nn.Module.__init__(self)  # not DeepSpeed's, which makes a layer
        self.num_experts = max(group.size for group in groups)
        for group in groups:
            deepspeed_groups._EXPERT_PARALLEL_GROUP[group.name] = group.group
            deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP[group.name] = group.replicas

    @staticmethod
    def of(stage: GPTModelPipe) -> _DividedExperts | None:
        """None for a stage without divided experts."""
        sizes = {mark.ranks for param in stage.parameters() if (mark := getattr(param, "divided_expert", None))}
        return _DividedExperts([stage.expert_parallel.groups[size] for size in sorted(sizes)]) if sizes else None

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """The groups are there."""


def _layer_specs(
    config: ModelConfig, padded_vocab_size: int, place: Placement, auxiliary: AuxiliaryLoss | None
) -> list[Any]:
    ends = (config, padded_vocab_size, place)
    blocks = [
        LayerSpec(ParallelTransformerLayerPipe, config, place, experts, auxiliary)
        for experts in config.experts_per_layer
    ]
    norm_class = RMSNorm if config.normalization == "rmsnorm" else LayerNorm
    norm = LayerSpec(norm_class, config.hidden_size, config.layernorm_epsilon, place)
    if config.untie_embeddings_and_output_weights:
        return [_pass_through, LayerSpec(EmbeddingPipe, *ends), *blocks, norm, LayerSpec(LMHeadPipe, *ends)]
    weight = "word_embeddings.weight"
    first = TiedLayerSpec("embed", EmbeddingPipe, *ends, tied_weight_attr=weight)
    last = TiedLayerSpec("embed", TiedHead, *ends, forward_fn=tied_logits, tied_weight_attr=weight)
    return [_pass_through, first, *blocks, norm, last]
