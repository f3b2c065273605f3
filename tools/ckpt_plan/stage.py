"""The model of one pipeline stage on the meta device: parameters with names and shapes, and no memory behind them.

The class derives from GPTModelPipe and leaves out only what DeepSpeed's PipelineModule does with process groups;
DeepSpeed's own methods assign layers to stages and build them.
"""

from __future__ import annotations

import contextlib
import functools
import io

import torch
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from megatron.config import ConfigError, ModelConfig
from megatron.model import gpt_model
from megatron.model.experts import AuxiliaryLoss
from megatron.model.gpt_model import TORCH_DTYPES, GPTModelPipe
from megatron.model.transformer import ParallelTransformerLayerPipe
from megatron.parallel.expert_parallel import ExpertParallel
from megatron.parallel.placement import Placement
from megatron.parallel.topology import Coordinates, Layout, TensorParallelGroup

_PARTITION_METHOD = "type:transformer"  # the value that GPTModelPipe passes
# (model, padded vocabulary, stages) -> first layer of each stage, and the end; cached, since DeepSpeed takes 40 ms
_PARTS: dict[tuple[ModelConfig, int, int], list[int]] = {}


class StageOnMeta(GPTModelPipe):
    """The layers of stage `at.pp` that the rank at `at` holds.

    Raises ConfigError if a stage would have no layer, or TP does not divide a parameter.
    """

    def __init__(self, config: ModelConfig, padded_vocab_size: int, layout: Layout, at: Coordinates) -> None:
        torch.nn.Module.__init__(self)
        self.tp = TensorParallelGroup(rank=at.tp, size=layout.tp)
        self.model_config = config
        self.auxiliary_loss = AuxiliaryLoss(config.moe_loss_coeff) if config.has_experts else None
        self.expert_parallel = ExpertParallel(layout, at.dp)
        place = Placement(
            self.tp, TORCH_DTYPES[config.params_dtype], torch.device("meta"), experts=self.expert_parallel
        )
        self._layer_specs = gpt_model._layer_specs(config, padded_vocab_size, place, self.auxiliary_loss)
        self._topo = PipeModelDataParallelTopology(num_pp=layout.pp, num_mp=layout.tp, num_dp=layout.dp)
        self.num_stages = layout.pp
        self.global_rank = layout.rank(*at)
        self.loss_fn = None
        self.seed_layers = False
        self.forward_funcs = []
        self.fwd_map = {}
        self.tied_modules = torch.nn.ModuleDict()
        self.tied_weight_attrs = {}
        self._spread_layers((config, padded_vocab_size, layout.pp), at.pp)
        try:
            self._build()
        except ValueError as exc:  # raised by ParameterSlice
            raise ConfigError(str(exc)) from exc

    @property
    def num_blocks(self) -> int:
        """Transformer layers of the stage."""
        return sum(isinstance(layer, ParallelTransformerLayerPipe) for layer in self.forward_funcs)

    def _spread_layers(self, key: tuple[ModelConfig, int, int], stage: int) -> None:
        if key not in _PARTS:
            with contextlib.redirect_stdout(io.StringIO()):  # the first rank prints the layers of all stages
                self._partition_layers(method=_PARTITION_METHOD)
            _PARTS[key] = self.parts
        self.parts = _PARTS[key]
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def stage_on_meta(config: ModelConfig, padded_vocab_size: int, layout: Layout, at: Coordinates) -> StageOnMeta:
    """The stage as the rank at `at` holds it, and all DP replicas with the same experts; the last one is cached."""
    return _cached(config, padded_vocab_size, layout, at._replace(dp=at.dp % layout.ep))


@functools.lru_cache(maxsize=1)
def _cached(config: ModelConfig, padded_vocab_size: int, layout: Layout, at: Coordinates) -> StageOnMeta:
    return StageOnMeta(config, padded_vocab_size, layout, at)
