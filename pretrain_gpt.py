"""Pretrain GPT: what is particular to the model and its data; --help lists the flags."""

from __future__ import annotations

from restart_trace.clock import now_ns

ENTERED_NS = now_ns()

from typing import TYPE_CHECKING, Any  # noqa: E402  the moment above is the start of our own code

from megatron.training import pretrain  # noqa: E402

if TYPE_CHECKING:
    import torch

    from megatron.config import Config
    from megatron.model.gpt_model import GPTModelPipe
    from megatron.startup.initialize import Runtime
    from megatron.training.data import DataRequest, SplitDatasets


def model_provider(config: Config, padded_vocab_size: int, runtime: Runtime) -> GPTModelPipe:
    """The pipeline stage of this rank, with its parameters still zero."""
    from megatron.model.gpt_model import GPTModelPipe

    return GPTModelPipe(
        config.model,
        padded_vocab_size,
        runtime.layout,
        runtime.coordinates.tp,
        runtime.device,
        loss_func,
        sequence_parallel=config.parallel.sequence_parallel,
    )


def get_batch_pipe(data: dict[str, torch.Tensor], eod_token: int | None) -> tuple[Any, Any]:
    """((tokens, position_ids), (labels, loss_mask)), each [b, s], of {"text": [b, s + 1]}.

    With `eod_token` (--eod-mask-loss), predicting from that token does not count.
    """
    import torch

    text = data["text"]
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    position_ids = torch.arange(tokens.shape[1]).unsqueeze(0).expand_as(tokens).contiguous()
    loss_mask = torch.ones(tokens.shape, dtype=torch.float32)
    if eod_token is not None:
        loss_mask[tokens == eod_token] = 0.0
    return (tokens, position_ids), (labels, loss_mask)


def loss_func(logits: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor], tp: Any) -> torch.Tensor:
    """Mean cross entropy over the tokens that the mask keeps.

    `logits` [b, s, padded_vocab / TP]; `labels` = (targets [b, s], loss_mask [b, s]).
    """
    from megatron.parallel.cross_entropy import vocab_parallel_cross_entropy

    targets, loss_mask = labels
    losses = vocab_parallel_cross_entropy(logits.float(), targets, tp)
    return (losses * loss_mask).sum() / loss_mask.sum()


def train_valid_test_datasets_provider(request: DataRequest) -> SplitDatasets:
    """The three datasets; collective, since one rank builds what is not in the index cache yet."""
    from megatron.data.given_index import dataset_of_files
    from megatron.data.gpt_dataset import build_train_valid_test_datasets

    data, model, training = request.config.data, request.config.model, request.config.training
    return build_train_valid_test_datasets(
        data,
        train_valid_test_num_samples=request.indexed_samples,
        required_num_samples=request.needed_samples,
        seq_length=model.seq_length,
        seed=training.seed,
        train_dataset=dataset_of_files(data.train_index_files),
        is_builder=request.is_builder,
        agree=request.agree,
    )


if __name__ == "__main__":
    raise SystemExit(
        pretrain(train_valid_test_datasets_provider, model_provider, get_batch_pipe, entered_ns=ENTERED_NS)
    )
