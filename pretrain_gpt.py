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
    from megatron.training.data import BatchRequest, DataRequest, SplitDatasets


def model_provider(config: Config, padded_vocab_size: int, runtime: Runtime) -> GPTModelPipe:
    """The pipeline stage of this rank, with its parameters still zero."""
    from megatron.model.gpt_model import GPTModelPipe
    from megatron.parallel.topology import SequenceGroup

    return GPTModelPipe(
        config.model,
        padded_vocab_size,
        runtime.layout,
        runtime.coordinates.tp,
        runtime.device,
        loss_func,
        dp_rank=runtime.coordinates.dp,
        sequence_parallel=config.parallel.sequence_parallel,
        sequence=SequenceGroup.of(runtime.coordinates, config.parallel.ds_sequence_parallel_size),
    )


def get_batch_pipe(data: dict[str, torch.Tensor], request: BatchRequest) -> tuple[Any, Any]:
    """(inputs, labels) of {"text": [b, s + 1]} on `request.device`: one copy of the text, and views of it.

    inputs: tokens [b, s], or (tokens, position_ids) with learned positions; None except on the first stage.
    labels: (labels, loss_mask, counted), the first two [b, s]; None except on the last stage. Predicting from
    `request.eod_token` (--eod-mask-loss) does not count. `counted`: how many tokens of the micro-batch do.
    With --ds-sequence-parallel-size all have this rank's part of s; `counted` is then the mean over the ranks.
    """
    import torch

    # From pinned memory the copy waits for no kernel, and no kernel that does not use it waits for the copy.
    text = data["text"].to(request.device, non_blocking=True)
    tokens = text[:, :-1]
    length = tokens.shape[1]
    here = slice(request.part * length // request.parts, (request.part + 1) * length // request.parts)
    inputs: Any = None
    if request.first_stage:
        inputs = tokens[:, here]
        if request.position_ids:
            inputs = inputs, torch.arange(here.start, here.stop, device=text.device).expand_as(inputs)
    if not request.last_stage:
        return inputs, None
    if request.eod_token is None:
        loss_mask = torch.ones(tokens.shape, dtype=torch.float32, device=text.device)
    else:
        loss_mask = (tokens != request.eod_token).float()
    # The mean over the ranks, as DeepSpeed averages their losses and gradients: then their sum is over all tokens.
    counted = loss_mask.sum() / request.parts
    return inputs, (text[:, 1:][:, here], loss_mask[:, here], counted)


def loss_func(logits: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor, torch.Tensor], tp: Any) -> torch.Tensor:
    """Mean cross entropy over the tokens that the mask keeps.

    `logits` [b, s, padded_vocab / TP]; `labels` = (targets [b, s], loss_mask [b, s], number of tokens that it keeps).
    """
    from megatron.parallel.cross_entropy import vocab_parallel_cross_entropy

    targets, loss_mask, counted = labels
    losses = vocab_parallel_cross_entropy(logits, targets, tp)
    return (losses * loss_mask).sum() / counted


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
        run_on_builder=request.run_on_builder,
        agree=request.agree,
    )


if __name__ == "__main__":
    raise SystemExit(
        pretrain(train_valid_test_datasets_provider, model_provider, get_batch_pipe, entered_ns=ENTERED_NS)
    )
