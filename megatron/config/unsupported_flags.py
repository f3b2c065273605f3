"""Upstream's flags that this fork refuses, each with what to use instead, and those that change nothing here.

Names are those of Megatron-DeepSpeed 4efb479d and a few older ones that its published scripts still use.
"""

from __future__ import annotations

from typing import NamedTuple


def _by_flag(text: str) -> dict[str, str]:
    """Flag -> reason, of lines `FLAG FLAG ...: reason`; the flags may take several lines."""
    found: dict[str, str] = {}
    flags: list[str] = []
    for line in text.strip().splitlines():
        names, colon, reason = line.partition(": ")
        flags += names.split()
        if colon:
            found |= dict.fromkeys(flags, reason)
            flags = []
    return found


UNSUPPORTED = _by_flag("""
--mmap-warmup: samples are read from the memory map on demand; drop it
--decoder-num-layers --decoder-seq-length --bert-no-binary-head --vocab-extra-ids --mask-prob --short-seq-prob
    --sample-rate --pipeline-model-parallel-split-rank --standalone-embedding-stage
    --apply-residual-connection-post-layernorm: this fork trains decoder-only GPT; drop it
--num-classes --img-h --img-w --num-channels --patch-dim --classes-fraction --data-per-class-fraction
    --head-lr-mult --vision-pretraining --vision-pretraining-type --vision-backbone-type --swin-backbone-type
    --mask-type --mask-factor --iter-per-epoch --dino-local-img-size --dino-local-crops-number
    --dino-head-hidden-size --dino-bottleneck-size --dino-freeze-last-layer --dino-norm-last-layer
    --dino-warmup-teacher-temp --dino-teacher-temp --dino-warmup-teacher-temp-epochs
    : this fork has no vision model; drop it
--ict-head-size --biencoder-projection-dim --biencoder-shared-query-context-model --ict-load --bert-load
    --titles-data-path --query-in-block-prob --use-one-sent-docs --evidence-data-path
    --retriever-report-topk-accuracies --retriever-score-scaling --retriever-seq-length --block-data-path
    --embedding-path --indexer-batch-size --indexer-log-interval --retro-workdir --retro-add-retriever
    --retro-cyclic-train-iters --retro-encoder-layers --retro-encoder-hidden-dropout
    --retro-encoder-attention-dropout --retro-num-neighbors --retro-num-retrieved-chunks --retro-return-doc-ids
    : this fork has no retrieval model; drop it
--fp8-e4m3 --fp8-hybrid --no-fp8-wgrad --fp8-margin --fp8-interval --fp8-amax-history-len
    --fp8-amax-compute-algo: fp8 and Transformer Engine are not used; train in --bf16
--distribute-saved-activations --distribute-checkpointed-activations
    : use --partition-activations, with --deepspeed-activation-checkpointing
--curriculum-learning --data-efficiency-curriculum-learning --random-ltd
    : curricula and random-LTD are not supported, every batch has the same shape; drop it
--ds-sequence-parallel-fpdt --ds-sequence-parallel-fpdt-chunk-size --ds-sequence-parallel-fpdt-offloading
    : a rank attends with its part of the heads to the whole sequence at once; use --ds-sequence-parallel-size alone, \
or with --checkpoint-activations
--num-layers-teacher --num-experts-teacher --hidden-size-teacher --num-attention-heads-teacher --mos --kd
    --kd-alpha-ce --kd-beta-ce --kd-temp --load-teacher: knowledge distillation is not part of this fork; drop it
--inference --ds-inference --inference-batch-times-seqlen-threshold --max-tokens-to-oom
    --output-bert-embeddings --bert-embedder-type: this fork only trains; use another program for inference
--zero-reduce-scatter --zero-contigious-gradients --zero-reduce-bucket-size --zero-allgather-bucket-size
    : set it in zero_optimization of the --deepspeed_config file
--cpu_torch_adam --ds_fused_adam
    : the fastest Adam that is installed for the device is used and named in the log; drop it
--train-data-exact-num-epochs --return-data-index: the sample index is built and cached; --data-cache-path says where
--use-distributed-optimizer --use-contiguous-buffers-in-ddp: gradients are reduced by DeepSpeed; drop it
--num-layers-per-virtual-pipeline-stage --enable-zbh1-pipeline --enable-zbh1-exact-semantics
    --overlap-p2p-communication --use-ring-exchange-p2p
    : the schedule is DeepSpeed's 1F1B; use --pipeline-model-parallel-size alone
--use-cpu-initialization --lazy-mpu-init --init-method-xavier-uniform
    : weights are always initialized on their own device; drop it
--apply-layernorm-1p --openai-gelu --squared-relu --onnx-safe
    : this variant of the model is not implemented; use --normalization, --swiglu or the default GELU
--fp32-residual-connection --fp16-lm-cross-entropy --embedding-weights-in-fp32
    : parameters and activations have the dtype of --bf16 or --fp16; drop it
--reset-position-ids --reset-attention-mask: samples attend across documents, as upstream's do by default; drop it
--repeated-dataloader --use-dataset-only
    : data is read once, in the order of the sample index, and resumes after the consumed samples; drop it
--num-experts-switch: another mixture of experts, without a limit of tokens; use --num-experts
--use-tutel: tokens are sent to experts by torch's own operations; drop it
--encoder-num-layers: use --num-layers
--kill-switch-file --adlr-autoresume --adlr-autoresume-interval: give --exit-signal-handler and send SIGTERM
--encoder-seq-length: use --seq-length
--batch-size: use --micro-batch-size
--model-parallel-size: use --tensor-model-parallel-size
--no-initialization: weights that a checkpoint replaces are not initialized anyway; drop it
--skip-train: evaluation runs while training; use --eval-interval and --eval-iters
--empty-unused-memory-level: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True instead
--remote-device --use-pin-memory: the weights of --zero-stage 3 stay on the device that computes; drop it
--scattered-embeddings: use --tensor-model-parallel-size, or --partition-activations, to save memory
--split-transformers: use --checkpoint-activations to save memory
--memory-centric-tiled-linear --tile-factor: use --tensor-model-parallel-size to save memory
--aml-data-download-path: give the whole path in --data-path
--trust-remote-code: this fork has no HFTokenizer; use GPTSentencePieceTokenizer or GPT2BPETokenizer
--warmup: use --lr-warmup-fraction
--deepscale: use --deepspeed
--deepscale_config: use --deepspeed_config
""")
"""Flag -> what to use instead."""

_SWITCHES = _by_flag("""
--deepspeed: training always runs through DeepSpeed
--no-query-key-layer-scaling: attention is computed without that scaling, which cancels out: \
scaled_dot_product_attention accumulates in fp32 and needs no help with fp16's range
--attention-softmax-in-fp32: scaled_dot_product_attention always accumulates its softmax in fp32
--no-masked-softmax-fusion --no-bias-dropout-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm
    --disable-mem-efficient-ln: this fork has no such fused kernel
--no-async-tensor-model-parallel-allreduce: tensor-parallel all-reduces are never asynchronous here
--no-scatter-gather-tensors-in-pipeline: DeepSpeed's pipeline does not scatter what it sends
--no-contiguous-buffers-in-local-ddp: there is no local DDP; gradients are reduced by DeepSpeed
--no-barrier-with-level-1-timing: timers add no barrier here
--use-flash-attn --use-flash-attn-v1 --use-flash-attn-v2 --use-flash-attn-triton --use-flash-attn-builder
    : scaled_dot_product_attention selects its flash kernel by itself if dtype and head size allow it
--use-checkpoint-args: the flags define the model; a checkpoint of another model is refused, with the names of the \
flags that differ
--no-data-sharding: it concerns retrieval models only
--force-ds-sequence-parallel: the ranks that share a sequence always exchange heads, and a rank alone has no other
--create-moe-param-group: experts that are divided over data-parallel ranks always have groups of their own
--enable-expert-tensor-parallelism: experts are always split over TP
""")
# Each switches off what is not there, or asks for what is always done.


class NoEffect(NamedTuple):
    """A flag that changes nothing here, and why. `accepted`: its only possible values; None: all."""

    why: str
    accepted: tuple[str, ...] | None = None
    otherwise: str = ""  # what to do instead of another value
    nargs: int | str = 1  # of argparse: how many values it takes


NO_EFFECT: dict[str, NoEffect] = {
    **{name: NoEffect(why, nargs=0) for name, why in _SWITCHES.items()},
    "--dataloader-type": NoEffect("samples are read once, in order", ("single",), UNSUPPORTED["--repeated-dataloader"]),
    "--DDP-impl": NoEffect(
        "gradients are reduced by DeepSpeed", ("local", "torch"), UNSUPPORTED["--use-distributed-optimizer"]
    ),
    "--transformer-impl": NoEffect("this program has its own layers", ("local",), UNSUPPORTED["--fp8-hybrid"]),
    "--timing-log-level": NoEffect(
        "the restart trace records the time of every iteration, save and load; see --restart-trace-dir",
        ("0", "1", "2"),
        "use 0, 1 or 2",
    ),
    "--timing-log-option": NoEffect(
        "the restart trace records the times of all ranks; see --restart-trace-dir",
        ("max", "minmax", "all"),
        "use max, minmax or all",
    ),
    "--train-desc-path": NoEffect("index files describe themselves; see --train-doc-idx-path"),
    "--train-idx-path": NoEffect(
        "it is for BERT's data; GPT's index files are given by --train-doc-idx-path and the two flags beside it"
    ),
    **dict.fromkeys(
        ("--wandb-project", "--wandb-exp-name", "--wandb-save-dir"),
        NoEffect("no Weights & Biases run is started; --tensorboard-dir writes the same figures"),
    ),
}
"""Flag -> why it changes nothing, and which of its values are refused because they would have to."""
