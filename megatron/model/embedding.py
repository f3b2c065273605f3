"""First and last layers of the pipeline: embedding, and the head that turns hidden states into logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron.config import ModelConfig
from megatron.model.norms import LayerNorm
from megatron.parallel.layers import ColumnParallelLinear, DrawnLayer, VocabParallelEmbedding, column_parallel_linear
from megatron.parallel.placement import Placement
from megatron.parallel.random import residual_dropout
from megatron.parallel.sequence import part_of_sequence, replicated


class PositionEmbedding(DrawnLayer):
    """Learned positions [max_position_embeddings, hidden], replicated over TP.

    Input ids [b, s]; output [b, s, hidden], or with --sequence-parallel a part of the sequence, [b, s / TP, hidden].
    """

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__(config.init_method_std)
        self.tp = place.tp
        self.weight = place.parameter(config.max_position_embeddings, config.hidden_size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(part_of_sequence(ids, self.tp), replicated(self.weight, self.tp))


class TiedHead(nn.Module):
    """The last stage's copy of the word embedding, where embedding and head are tied but stages apart."""

    def __init__(
        self, config: ModelConfig, padded_vocab_size: int, place: Placement, norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(
            padded_vocab_size, config.hidden_size, init_std=config.init_method_std, place=place, norm=norm
        )


class EmbeddingPipe(TiedHead):
    """Word embedding, with --embed-layernorm normalized, plus learned positions in the GPT-2-style model.

    Input ids [b, s], with learned positions (ids, position_ids), each [b, s]; output [b, s, hidden], or with
    --sequence-parallel [b, s / TP, hidden].
    """

    def __init__(self, config: ModelConfig, padded_vocab_size: int, place: Placement) -> None:
        # As BLOOM's program has it, a part of the embedding: word_embeddings.norm. A tied head has none.
        norm = LayerNorm(config.hidden_size, config.layernorm_epsilon, place) if config.embed_layernorm else None
        super().__init__(config, padded_vocab_size, place, norm)
        self.hidden_dropout = config.hidden_dropout
        self.position_embeddings = PositionEmbedding(config, place) if config.add_position_embedding else None

    def forward(self, inputs: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if self.position_embeddings is None:
            x = self.word_embeddings(inputs)
        else:
            ids, position_ids = inputs
            x = self.word_embeddings(ids) + self.position_embeddings(position_ids)
        return residual_dropout(x, self.hidden_dropout, self.training, self.word_embeddings.tp)


def tied_logits(module: TiedHead, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [b, s, padded_vocab / TP] by the tied word embedding.

    `hidden` [b, s, hidden], or with --sequence-parallel [b, s / TP, hidden].
    """
    embedding = module.word_embeddings
    return column_parallel_linear(hidden, embedding.weight, None, embedding.tp)


class LMHeadPipe(nn.Module):
    """Untied head: hidden states [b, s, hidden], or with --sequence-parallel [b, s / TP, hidden], to logits
    [b, s, padded_vocab / TP]."""

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
