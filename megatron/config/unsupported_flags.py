"""Upstream's flags that this fork refuses, each with what to use instead, and those that change nothing here.

Names are those of Megatron-DeepSpeed 4efb479d and a few older ones that its published scripts still use.
"""

from __future__ import annotations

from typing import NamedTuple

_MOE = "mixture of experts is not part of this fork; train a dense model"
_T5_BERT = "this fork trains decoder-only GPT; drop it"
_VISION = "this fork has no vision model; drop it"
_RETRIEVAL = "this fork has no retrieval model; drop it"
_FP8 = "fp8 and Transformer Engine are not used; train in --bf16"
_RECOMPUTE = "use --partition-activations, with --deepspeed-activation-checkpointing"
_CURRICULUM = "curricula and random-LTD are not supported, every batch has the same shape; drop it"
_SEQUENCE = "sequence parallelism is not supported; use --tensor-model-parallel-size"
_DISTILL = "knowledge distillation is not part of this fork; drop it"
_INFERENCE = "this fork only trains; use another program for inference"
_ZERO_JSON = "set it in zero_optimization of the --deepspeed_config file"
_PROFILE = "use --restart-trace on with --restart-trace-nvtx on under a profiler"
_OPTIMIZER = "the fastest Adam that is installed for the device is used and named in the log; drop it"
_INDEX = "the sample index is built and cached; --data-cache-path says where"
_DDP = "gradients are reduced by DeepSpeed; drop it"
_PIPELINE = "the schedule is DeepSpeed's 1F1B; use --pipeline-model-parallel-size alone"
_WARMUP = "samples are read from the memory map on demand; drop it"
_INIT = "weights are always initialized on their own device; drop it"
_VARIANT = "this variant of the model is not implemented; use --normalization, --swiglu or the default GELU"
_FP32_PARTS = "parameters and activations have the dtype of --bf16 or --fp16; drop it"
_DOC_RESET = "samples attend across documents, as upstream's do by default; drop it"
_DATALOADER = (
    "data is read once, in the order of the sample index, and resumes after the consumed samples; drop it"
)
_MULTI_LAYERS = "use --num-layers"
_KILL = "give --exit-signal-handler and send SIGTERM"

_REASONS: dict[str, str] = {
    _WARMUP: "--mmap-warmup",
    _T5_BERT: """
        --decoder-num-layers --decoder-seq-length --bert-no-binary-head --vocab-extra-ids
        --mask-prob --short-seq-prob --sample-rate --pipeline-model-parallel-split-rank
        --standalone-embedding-stage --apply-residual-connection-post-layernorm
    """,
    _VISION: """
        --num-classes --img-h --img-w --num-channels --patch-dim --classes-fraction
        --data-per-class-fraction --head-lr-mult --vision-pretraining
        --vision-pretraining-type --vision-backbone-type --swin-backbone-type --mask-type
        --mask-factor --iter-per-epoch --dino-local-img-size --dino-local-crops-number
        --dino-head-hidden-size --dino-bottleneck-size --dino-freeze-last-layer
        --dino-norm-last-layer --dino-warmup-teacher-temp --dino-teacher-temp
        --dino-warmup-teacher-temp-epochs
    """,
    _RETRIEVAL: """
        --ict-head-size --biencoder-projection-dim --biencoder-shared-query-context-model --ict-load
        --bert-load --titles-data-path --query-in-block-prob --use-one-sent-docs
        --evidence-data-path --retriever-report-topk-accuracies --retriever-score-scaling
        --retriever-seq-length --block-data-path --embedding-path --indexer-batch-size
        --indexer-log-interval --retro-workdir --retro-add-retriever --retro-cyclic-train-iters
        --retro-encoder-layers --retro-encoder-hidden-dropout --retro-encoder-attention-dropout
        --retro-num-neighbors --retro-num-retrieved-chunks --retro-return-doc-ids
    """,
    _FP8: """
        --fp8-e4m3 --fp8-hybrid --no-fp8-wgrad --fp8-margin --fp8-interval
        --fp8-amax-history-len --fp8-amax-compute-algo
    """,
    _RECOMPUTE: """
        --distribute-saved-activations --distribute-checkpointed-activations
    """,
    _CURRICULUM: """
        --curriculum-learning --data-efficiency-curriculum-learning --random-ltd
    """,
    _SEQUENCE: """
        --force-ds-sequence-parallel --ds-sequence-parallel-fpdt --ds-sequence-parallel-fpdt-chunk-size
        --ds-sequence-parallel-fpdt-offloading
    """,
    _DISTILL: """
        --num-layers-teacher --num-experts-teacher --hidden-size-teacher
        --num-attention-heads-teacher --mos --kd --kd-alpha-ce --kd-beta-ce --kd-temp --load-teacher
    """,
    _INFERENCE: """
        --inference --ds-inference --inference-batch-times-seqlen-threshold --max-tokens-to-oom
        --output-bert-embeddings --bert-embedder-type
    """,
    _ZERO_JSON: """
        --zero-reduce-scatter --zero-contigious-gradients --zero-reduce-bucket-size
        --zero-allgather-bucket-size
    """,
    _PROFILE: """
        --profile --profile_steps --profile-steps --profile-ranks
    """,
    _OPTIMIZER: """
        --cpu-optimizer --cpu_torch_adam --ds_fused_adam
    """,
    _INDEX: """
        --train-data-exact-num-epochs --return-data-index
    """,
    _DDP: """
        --use-distributed-optimizer --use-contiguous-buffers-in-ddp
    """,
    _PIPELINE: """
        --num-layers-per-virtual-pipeline-stage --enable-zbh1-pipeline --enable-zbh1-exact-semantics
        --overlap-p2p-communication --use-ring-exchange-p2p
    """,
    _INIT: """
        --use-cpu-initialization --lazy-mpu-init --init-method-xavier-uniform
    """,
    _VARIANT: """
        --apply-layernorm-1p --openai-gelu --squared-relu --onnx-safe
    """,
    _FP32_PARTS: """
        --fp32-residual-connection --fp16-lm-cross-entropy --embedding-weights-in-fp32
    """,
    _DOC_RESET: """
        --reset-position-ids --reset-attention-mask
    """,
    _DATALOADER: """
        --repeated-dataloader --use-dataset-only
    """,
    _MOE: """
        --num-experts-switch
    """,
    _MULTI_LAYERS: """
        --encoder-num-layers
    """,
    _KILL: """
        --kill-switch-file --adlr-autoresume --adlr-autoresume-interval
    """,
}

_SINGLE: dict[str, str] = {
    "--encoder-seq-length": "use --seq-length",
    "--batch-size": "use --micro-batch-size",
    "--model-parallel-size": "use --tensor-model-parallel-size",
    "--no-initialization": "weights that a checkpoint replaces are not initialized anyway; drop it",
    "--skip-train": "evaluation runs while training; use --eval-interval and --eval-iters",
    "--empty-unused-memory-level": "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True instead",
    "--remote-device": "ZeRO-3 does not run with pipelines; use --zero-stage 1",
    "--use-pin-memory": "ZeRO-3 does not run with pipelines; use --zero-stage 1",
    "--scattered-embeddings": "use --tensor-model-parallel-size, or --partition-activations, to save memory",
    "--split-transformers": "use --checkpoint-activations to save memory",
    "--memory-centric-tiled-linear": "use --tensor-model-parallel-size to save memory",
    "--tile-factor": "use --tensor-model-parallel-size to save memory",
    "--aml-data-download-path": "give the whole path in --data-path",
    "--trust-remote-code": "this fork has no HFTokenizer; use GPTSentencePieceTokenizer or GPT2BPETokenizer",
    "--warmup": "use --lr-warmup-fraction",
    "--deepscale": "use --deepspeed",
    "--deepscale_config": "use --deepspeed_config",
}

UNSUPPORTED: dict[str, str] = {
    name: why for why, names in _REASONS.items() for name in names.split()
} | _SINGLE
"""Flag -> what to use instead."""

_FLASH = "scaled_dot_product_attention selects its flash kernel by itself if dtype and head size allow it"
_NO_KERNEL = "this fork has no such fused kernel"

_NO_SEQUENCE_PARALLEL = (
    "every TP rank keeps all activations between its parallel layers: same result, more memory"
)
_DENSE = "the model is dense: --num-experts is 1"
_WANDB = "no Weights & Biases run is started; --tensorboard-dir writes the same figures"
_DDP_REDUCES = "gradients are reduced by DeepSpeed"

NO_EFFECT: dict[str, str] = {
    "--deepspeed": "training always runs through DeepSpeed",
    "--no-query-key-layer-scaling": "attention is computed without that scaling, which cancels out: "
    "scaled_dot_product_attention accumulates in fp32 and needs no help with fp16's range",
    "--attention-softmax-in-fp32": "scaled_dot_product_attention always accumulates its softmax in fp32",
    "--no-masked-softmax-fusion": _NO_KERNEL,
    "--no-bias-dropout-fusion": _NO_KERNEL,
    "--no-gradient-accumulation-fusion": _NO_KERNEL,
    "--no-persist-layer-norm": _NO_KERNEL,
    "--disable-mem-efficient-ln": _NO_KERNEL,
    "--no-async-tensor-model-parallel-allreduce": "tensor-parallel all-reduces are never asynchronous here",
    "--no-scatter-gather-tensors-in-pipeline": "DeepSpeed's pipeline does not scatter what it sends",
    "--no-contiguous-buffers-in-local-ddp": "there is no local DDP; gradients are reduced by DeepSpeed",
    "--no-barrier-with-level-1-timing": "timers add no barrier here",
    "--use-flash-attn": _FLASH,
    "--use-flash-attn-v1": _FLASH,
    "--use-flash-attn-v2": _FLASH,
    "--use-flash-attn-triton": _FLASH,
    "--use-flash-attn-builder": _FLASH,
    "--sequence-parallel": _NO_SEQUENCE_PARALLEL,
    "--use-checkpoint-args": "the flags define the model; a checkpoint of another model is refused, with the names of "
    "the flags that differ",
    "--no-data-sharding": "it concerns retrieval models only",
    "--create-moe-param-group": _DENSE,
    "--disable-moe-token-dropping": _DENSE,
    "--disable-moe-top2-2nd-expert-sampling": _DENSE,
    "--enable-expert-tensor-parallelism": _DENSE,
    "--use-tutel": _DENSE,
}
"""Flag -> why it changes nothing: it switches off what is not there, or asks for what is always done."""


class InertValue(NamedTuple):
    """A flag that takes values and changes nothing here. `accepted`: its only possible values; None: all."""

    why: str
    accepted: tuple[str, ...] | None = None
    otherwise: str = ""  # what to do instead of another value
    many: bool = False


NO_EFFECT_VALUES: dict[str, InertValue] = {
    "--num-experts": InertValue("the model is dense", ("1",), _MOE, many=True),
    "--moe-expert-parallel-size": InertValue(_DENSE),
    "--expert-interval": InertValue(_DENSE),
    "--mlp-type": InertValue(_DENSE, ("standard",), _MOE),
    "--topk": InertValue(_DENSE),
    "--moe-train-capacity-factor": InertValue(_DENSE),
    "--moe-eval-capacity-factor": InertValue(_DENSE),
    "--moe-min-capacity": InertValue(_DENSE),
    "--moe-loss-coeff": InertValue(_DENSE),
    "--ds-sequence-parallel-size": InertValue("a sequence is never split over ranks", ("1",), _SEQUENCE),
    "--dataloader-type": InertValue("samples are read once, in order", ("single",), _DATALOADER),
    "--DDP-impl": InertValue(_DDP_REDUCES, ("local", "torch"), _DDP),
    "--transformer-impl": InertValue("this program has its own layers", ("local",), _FP8),
    "--timing-log-level": InertValue(
        "the restart trace records the time of every iteration, save and load; see --restart-trace-dir",
        ("0", "1", "2"),
        "use 0, 1 or 2",
    ),
    "--timing-log-option": InertValue(
        "the restart trace records the times of all ranks; see --restart-trace-dir",
        ("max", "minmax", "all"),
        "use max, minmax or all",
    ),
    "--train-desc-path": InertValue("index files describe themselves; see --train-doc-idx-path"),
    "--train-idx-path": InertValue(
        "it is for BERT's data; GPT's index files are given by --train-doc-idx-path and the two flags beside it"
    ),
    "--wandb-project": InertValue(_WANDB),
    "--wandb-exp-name": InertValue(_WANDB),
    "--wandb-save-dir": InertValue(_WANDB),
}
"""Flag with a value -> why it changes nothing, and which values are refused because they would have to."""
