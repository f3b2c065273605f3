"""First and last layers of the pipeline: embedding, and the head that turns hidden states into logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron.config import ModelConfig
from megatron.parallel.layers import ColumnParallelLinear, DrawnLayer, VocabParallelEmbedding
from megatron.parallel.mappings import copy_to_tensor_parallel_region
from megatron.parallel.placement import Placement


class PositionEmbedding(DrawnLayer):
    """Learned positions [max_position_embeddings, hidden], replicated over TP. Input ids [b, s] -> [b, s, hidden]."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__(config.init_method_std)
        self.weight = place.parameter(config.max_position_embeddings, config.hidden_size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class TiedHead(nn.Module):
    """The last stage's copy of the word embedding, where embedding and head are tied but stages apart."""

    def __init__(self, config: ModelConfig, padded_vocab_size: int, place: Placement) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(
            padded_vocab_size, config.hidden_size, init_std=config.init_method_std, place=place
        )


class EmbeddingPipe(TiedHead):
    """Word embedding, plus learned positions in the GPT-2-style model.

    Input (ids [b, s], position_ids [b, s]); output [b, s, hidden].
    """

    def __init__(self, config: ModelConfig, padded_vocab_size: int, place: Placement) -> None:
        super().__init__(config, padded_vocab_size, place)
        self.hidden_dropout = config.hidden_dropout
        self.position_embeddings = PositionEmbedding(config, place) if config.add_position_embedding else None

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        ids, position_ids = inputs
        x = self.word_embeddings(ids)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(position_ids)
        return F.dropout(x, self.hidden_dropout, self.training)


def tied_logits(module: TiedHead, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [b, s, padded_vocab / TP] of hidden states [b, s, hidden] by the tied word embedding."""
    embedding = module.word_embeddings
    return F.linear(copy_to_tensor_parallel_region(hidden, embedding.tp), embedding.weight)


class LMHeadPipe(nn.Module):
    """Untied head: hidden states [b, s, hidden] to logits [b, s, padded_vocab / TP]."""

    def __init__(self, config: ModelConfig, padded_vocab_size: int, place: Placement) -> None:
        super().__init__()
        self.lm_head = ColumnParallelLinear(
            config.hidden_size,
            (padded_vocab_size,),
            bias=False,
            init_std=config.init_method_std,
            place=place,
            vocabulary=True,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(x)
