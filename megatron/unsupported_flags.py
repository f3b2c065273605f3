"""Upstream's flags that this fork refuses, each with what to use instead, and those that change nothing here.

Names are those of Megatron-DeepSpeed 4efb479d and a few older ones that its published scripts still use.
"""

from __future__ import annotations

_MOE = "mixture of experts is not part of this fork; train a dense model"
_T5_BERT = "only decoder-only GPT is trained here; drop it"
_VISION = "there is no vision model here; drop it"
_RETRIEVAL = "there is no retrieval model here; drop it"
_FP8 = "fp8 and Transformer Engine are not used; train in --bf16"
_RECOMPUTE = "use --checkpoint-activations, with --checkpoint-num-layers N for N layers per chunk"
_SAMPLES = "the schedule counts iterations; use --train-iters, --lr-decay-iters and --lr-warmup-iters"
_CURRICULUM = "the batch has a constant shape here; drop it"
_SEQUENCE = "sequence parallelism is not supported; use --tensor-model-parallel-size"
_DISTILL = "knowledge distillation is not part of this fork; drop it"
_INFERENCE = "this fork trains; use another program for inference"
_ZERO_JSON = "set it in zero_optimization of the --deepspeed_config file"
_TIMERS = "phases are timed by the restart trace; use --restart-trace-dir"
_PROFILE = "use --restart-trace on with --restart-trace-nvtx on under a profiler"
_WANDB = "use --tensorboard-dir"
_OPTIMIZER = "the fastest Adam that is installed for the device is used and named in the log; drop it"
_INDEX = "the sample index is built and cached; use --data-cache-path to say where"
_DDP = "gradients are reduced by DeepSpeed; drop it"
_PIPELINE = "the schedule is DeepSpeed's 1F1B; use --pipeline-model-parallel-size alone"
_WARMUP = "samples are read from the memory map as they are needed; drop it"
_INIT = "weights are initialized on the device that they live on; drop it"
_VARIANT = "this variant of the model is not implemented; use --normalization, --swiglu or the default GELU"
_FP32_PARTS = "parameters and activations stay in the dtype that --bf16 or --fp16 choose; drop it"
_DOC_RESET = "samples attend across documents, as upstream's default; drop it"
_DATALOADER = (
    "data is read once in the order of the sample index and resumes at the consumed samples; drop it"
)
_MULTI_LAYERS = "use --num-layers"
_ATTENTION = "attention runs through scaled_dot_product_attention; use --use-flash-attn-v2 or no such flag"
_KILL = "send SIGTERM with --exit-signal-handler given"

_REASONS: dict[str, str] = {
    _WARMUP: "--mmap-warmup",
    _MOE: """
        --num-experts --mlp-type --topk --expert-interval --num-experts-switch
        --disable-moe-token-dropping --moe-train-capacity-factor --moe-eval-capacity-factor
        --moe-min-capacity --moe-loss-coeff --create-moe-param-group --use-tutel
        --disable-moe-top2-2nd-expert-sampling --enable-expert-tensor-parallelism
        --moe-expert-parallel-size
    """,
    _T5_BERT: """
        --decoder-num-layers --decoder-seq-length --bert-no-binary-head --vocab-extra-ids
        --mask-prob --short-seq-prob --sample-rate --pipeline-model-parallel-split-rank
        --standalone-embedding-stage --apply-residual-connection-post-layernorm
    """,
    _VISION: """
        --num-classes --img-h --img-w --num-channels --patch-dim --classes-fraction
        --data-per-class-fraction --no-data-sharding --head-lr-mult --vision-pretraining
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
        --fp8-e4m3 --fp8-hybrid --no-fp8-wgrad --fp8-margin --fp8-interval --transformer-impl
        --fp8-amax-history-len --fp8-amax-compute-algo
    """,
    _RECOMPUTE: """
        --recompute-activations --recompute-granularity --recompute-method --recompute-num-layers
        --distribute-saved-activations --distribute-checkpointed-activations
        --activations-checkpoint-method --activations-checkpoint-num-layers
        --activations-checkpoint-granularity
    """,
    _SAMPLES: """
        --train-samples --train-tokens --lr-decay-samples --lr-decay-tokens --lr-warmup-samples
        --lr-warmup-tokens --warmup
    """,
    _CURRICULUM: """
        --rampup-batch-size --curriculum-learning --data-efficiency-curriculum-learning --random-ltd
    """,
    _SEQUENCE: """
        --sequence-parallel --ds-sequence-parallel-size --force-ds-sequence-parallel
        --ds-sequence-parallel-fpdt --ds-sequence-parallel-fpdt-chunk-size
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
    _TIMERS: """
        --timing-log-level --timing-log-option
    """,
    _PROFILE: """
        --profile --profile_steps --profile-steps --profile-ranks
    """,
    _WANDB: """
        --wandb-project --wandb-exp-name --wandb-save-dir
    """,
    _OPTIMIZER: """
        --cpu-optimizer --cpu_torch_adam --ds_fused_adam
    """,
    _INDEX: """
        --train-idx-path --train-desc-path --train-doc-idx-path --train-sample-idx-path
        --train-shuffle-idx-path --train-data-exact-num-epochs --return-data-index
    """,
    _DDP: """
        --DDP-impl --use-distributed-optimizer --use-contiguous-buffers-in-ddp
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
        --dataloader-type --repeated-dataloader --use-dataset-only
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
    "--no-pipeline-parallel": "training always runs through the pipeline engine; "
    "--pipeline-model-parallel-size 1 is the run without pipeline parallelism",
    "--use-checkpoint-args": "give the arguments of the run again; loading says which of them differ",
    "--universal-checkpoint": "another layout needs no conversion; --redistribute universal makes one",
    "--no-initialization": "weights are always initialized before a checkpoint is loaded; drop it",
    "--reset-iteration": "use --finetune",
    "--skip-train": "evaluation runs while training; use --eval-interval and --eval-iters",
    "--use-flash-attn-triton": _ATTENTION,
    "--use-flash-attn-builder": _ATTENTION,
    "--log-params-norm": "the gradient norm is logged; drop it",
    "--log-num-zeros-in-grad": "the gradient norm is logged; drop it",
    "--log-optimizer-states-to-tensorboard": "the log has the gradient norm; drop it",
    "--empty-unused-memory-level": "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True instead",
    "--remote-device": "ZeRO-3 does not run with pipelines; use --zero-stage 1",
    "--use-pin-memory": "ZeRO-3 does not run with pipelines; use --zero-stage 1",
    "--scattered-embeddings": "use --tensor-model-parallel-size, or --partition-activations, to save memory",
    "--split-transformers": "use --checkpoint-activations to save memory",
    "--memory-centric-tiled-linear": "use --tensor-model-parallel-size to save memory",
    "--tile-factor": "use --tensor-model-parallel-size to save memory",
    "--aml-data-download-path": "give the whole path in --data-path",
    "--trust-remote-code": "there is no HFTokenizer here; use GPTSentencePieceTokenizer or GPT2BPETokenizer",
    "--deepscale": "use --deepspeed",
    "--deepscale_config": "use --deepspeed_config",
}

UNSUPPORTED: dict[str, str] = {
    name: why for why, names in _REASONS.items() for name in names.split()
} | _SINGLE
"""Flag -> what to use instead."""

_FLASH = "scaled_dot_product_attention takes its flash kernel by itself where dtype and head size allow"
_NO_KERNEL = "there is no such fused kernel here to switch off"

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
    "--no-barrier-with-level-1-timing": "nothing is timed behind an extra barrier here",
    "--use-flash-attn": _FLASH,
    "--use-flash-attn-v1": _FLASH,
    "--use-flash-attn-v2": _FLASH,
}
"""Flag -> why it changes nothing: it switches off what is not there, or asks for what is always done."""
