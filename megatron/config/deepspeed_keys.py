"""Every key that a --deepspeed_config file may hold, and what becomes of it: dotted name -> rule.

A key that is not here is unknown and refused. The names are those of DeepSpeed 0.19.8 (deepspeed/runtime/config.py,
runtime/constants.py and the models they read), of its keys that were removed, and of the checkpoint stanzas of restart
studies with DataStates-LLM (https://github.com/DataStates/datastates-llm) and its fork of DeepSpeed; a test compares
them with the installed DeepSpeed. "Has an effect" is what trainings of this program show: its model is a PipelineModule
under ZeRO-1 or ZeRO-3, and its checkpoints are not written by DeepSpeed's save_checkpoint.
"""

from __future__ import annotations

from typing import Any, NamedTuple

MAXIMUM = 2**63 - 1  # of a whole number
_BUCKET = 500_000_000


class Kind(NamedTuple):
    """A type of value: `name` is one of bool, int, number, str, names (a list of strings)."""

    name: str
    least: int | None = None
    above: int | None = None
    most: int = MAXIMUM
    choices: tuple[str, ...] = ()  # of a str, whatever its case
    multiple: int = 1


BOOL, INT, NUMBER, STR = Kind("bool"), Kind("int"), Kind("number"), Kind("str")
COUNT, POSITIVE = Kind("int", least=1), Kind("number", above=0)


class Section(NamedTuple):
    """An object whose keys have rules of their own."""


class Passes(NamedTuple):
    """Handed to DeepSpeed, which acts on it.

    `takers`: the optimizers of DeepSpeed that do, if not all; with another only `default`, DeepSpeed's, is accepted.
    """

    kind: Kind
    default: Any = None
    takers: tuple[str, ...] = ()


class Settled(NamedTuple):
    """A flag decides it: the file gives the flag its value, or agrees with it. Also "auto", the flag's value."""

    kind: Kind


class Inert(NamedTuple):
    """Accepted at `default` alone, where it changes nothing; `why` follows "only ... is supported: "."""

    default: Any
    why: str


class Off(NamedTuple):
    """A section for a feature that this fork lacks; accepted if it switches the feature off: false, null or `off`.

    `keys` are the names within it, dotted where they are nested.
    """

    instead: str
    keys: tuple[str, ...] = ()
    off: tuple[str, Any] = ("enabled", False)


class Refused(NamedTuple):
    """Not accepted, unless null or false; `instead` follows "is not supported; drop it and "."""

    instead: str


class Names(NamedTuple):
    """A stanza that names a checkpoint engine: by true, by an object with keys of its own, or by either."""

    engine: str
    as_bool: bool = True
    as_object: bool = True


Rule = Section | Passes | Settled | Inert | Off | Refused | Names

# DeepSpeed's optimizers: at ZeRO stage 1 in bf16, and in fp16 and fp32; at stage 3.
BF16, ZERO_1, ZERO_3 = "BF16_Optimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"

_STAGE_3 = "it is for ZeRO stage 3, and not tried with this program's"
_STAGE_2 = "it is for ZeRO stage 2, and checkpoints are made of ZeRO-1 shards"
_NO_OFFLOAD = "use --cpu-optimizer, or leave states on their device"
_ALL_IN_MEMORY = "all of the optimizer's state is in host memory (--cpu-optimizer), or none"
_LOSS = "gradients are the mean over the global batch"
_MASTER = "master weights and moments are fp32"
_PARTITION = "the model is cut into stages by --pipeline-model-parallel-size"
_RECOMPUTE = "use --checkpoint-activations, which says how stages recompute"
_OTHER_TRACE = "the restart trace (--save, --restart-trace-dir) records the bytes and the time of every write"
_NO_TIMER = "under pipelines nothing reads that timer; the training log has samples, tokens and TFLOPs per second"
_OWN_SAVE = "checkpoints are written by this program's engines, not by DeepSpeed's save_checkpoint"
_IO_FLAGS = "of the async_io operator --io-threads and --io-block-size can be set"
_BOARD = "use --tensorboard-dir, or the section tensorboard or csv_monitor"
_AS_IT_IS = "train the model as it is"
_NOT_READ = "DeepSpeed reads it and does nothing with it"
_STEADY = "train with one sequence length; every batch has the same shape"
_OFFLOAD_KEYS = "device nvme_path buffer_count pin_memory "
_DEVICE_NONE = ("device", "none")
_DTYPE = Kind("str", choices=("fp32", "fp16", "bf16"))


def _all(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


def _inert(why: str, **defaults: Any) -> dict[str, Rule]:
    return {name: Inert(default, why) for name, default in defaults.items()}


def _off(instead: str, keys: str = "", off: tuple[str, Any] = ("enabled", False)) -> Off:
    return Off(instead, tuple(keys.split()), off)


_TOP: dict[str, Rule] = {
    **_all("train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps", Settled(COUNT)),
    "gradient_clipping": Settled(Kind("number", least=0)),
    "steps_per_print": Passes(COUNT),
    **_all("wall_clock_breakdown memory_breakdown dump_state disable_python_gc", Passes(BOOL)),
    "zero_allow_untested_optimizer": Passes(BOOL),
    "prescale_gradients": Passes(BOOL, False, (BF16, ZERO_1)),
    "log_level": Passes(Kind("str", choices=("debug", "info", "warning", "error", "critical"))),
    "communication_data_type": Passes(_DTYPE),
    **_inert(_LOSS, gradient_predivide_factor=1.0, gradient_allreduce_op="mean"),
    "managed_gradient_accumulation": Inert(True, "the pipeline schedule accumulates"),
    "disable_allgather": Inert(False, _NOT_READ),
    "zero_force_ds_cpu_optimizer": Passes(BOOL),
    "sequence_parallel_size": Inert(1, "use --ds-sequence-parallel-size"),
    "seq_parallel_communication_data_type": Inert("fp32", "gradients are reduced as those of data-parallel ranks"),
    "dataloader_drop_last": Inert(False, "this program has its own data loader, and its batches are complete"),
    "use_data_before_expert_parallelism": Inert(False, "experts are divided over neighbouring data-parallel ranks"),
    "data_parallel_size": Refused("start as many processes as TP x PP x DP"),
    "vocabulary_size": Refused("use --vocab-size or the tokenizer's files"),
    "seed": Refused("use --seed"),
    "optimizer": Refused("use --optimizer, --lr, --weight-decay and --adam-beta1/2"),
    "scheduler": Refused("use --lr-decay-style and the other --lr flags"),
    "max_train_batch_size": Refused("use --global-batch-size"),
    "async_ckpt_config": Refused("use --checkpoint-engine lazy, or another that saves in the background"),
    "tensor_parallel": Refused("use --tensor-model-parallel-size"),
    "expert_parallel": Refused("use --num-experts and --moe-expert-parallel-size"),
    "weight_quantization": Refused(_AS_IT_IS),
    "nebula": _off(
        "use --checkpoint-engine NAME",
        "enabled persistent_storage_path persistent_time_interval num_of_version_in_retention "
        "enable_nebula_load load_path",
    ),
    "datastates": _off("use --checkpoint-engine datastates", "enabled"),
    "amp": _off("use --bf16 or --fp16", "enabled opt_level"),
    "torch_autocast": _off("use --bf16 or --fp16", "enabled dtype lower_precision_safe_modules"),
    "curriculum_learning": _off(
        _STEADY,
        "enabled curriculum_type min_difficulty max_difficulty schedule_type "
        "schedule_config.total_curriculum_step schedule_config.difficulty_step schedule_config.root_degree "
        "schedule_config.difficulty schedule_config.max_step",
    ),
    "data_efficiency": _off(_STEADY, "enabled seed"),
    **_all("compression_training quantize_training eigenvalue", _off(_AS_IT_IS, "enabled")),
    "progressive_layer_drop": _off("train all layers", "enabled theta gamma"),
    "sparse_attention": _off("use --use-flash-attn or the default attention", "enabled mode"),
    "sparse_gradients": _off("leave gradients dense"),
    "graph_harvesting": _off("leave it out"),
    "elasticity": _off("use --global-batch-size and --micro-batch-size", "enabled"),
    "autotuning": _off("measure with benchmarks.launchers", "enabled"),
    "hybrid_engine": _off(
        "train without generating",
        "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
        "tp_gather_partition_size enable_cuda_graph",
    ),
    "wandb": _off(_BOARD, "enabled group team project"),
    "comet": _off(
        _BOARD, "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode"
    ),
    **_all("none_ckpt none_ckpt_config", Names("none", as_object=False)),
    "torchsnapshot_ckpt": Names("torchsnapshot"),
    "datastates_ckpt": Names("datastates", as_bool=False),
}

_SECTIONS: dict[str, dict[str, Rule]] = {
    "torchsnapshot_ckpt": {"enabled": Passes(BOOL)},
    "datastates_ckpt": {
        "host_cache_size": Settled(POSITIVE),
        "engine_type": Settled(Kind("str", choices=("simple_engine", "state_engine", "state_aggregated_engine"))),
        "profile_engine": Settled(BOOL),
        "pin_host_cache": Inert(True, "the library always pins its cache"),
        "fast_cache_init": Inert(False, "the library does not read it"),
        "parser_threads": Inert(
            1, "several threads of the library race for the numbers of its memory regions and end the process"
        ),
    },
    "checkpoint": {
        "writer": Names("fastpersist", as_bool=False),
        "checkpoint_serialization": Inert(True, "files are torch.save's zip files"),
        "tag_validation": Inert("Fail", "the ranks agree on each checkpoint, its name included, before its commit"),
        "use_node_local_storage": Inert(False, _OWN_SAVE),
        "parallel_write": Section(),
        "load_universal": Refused("give --universal-checkpoint"),
    },
    "checkpoint.parallel_write": {"pipeline_stage": Inert(False, _OWN_SAVE)},
    "checkpoint.writer": {
        "type": Settled(Kind("str", choices=("fast", "python"))),
        "decoupled": Settled(BOOL),
        "io_buffer_size": Settled(Kind("int", least=8192, multiple=8192)),
        "io_buffer_double": Inert(True, "two buffers let one be filled while the other is written"),
        "show_statistics": Inert(False, _OTHER_TRACE),
        "data_parallel": Settled(Kind("str", choices=("replica",))),  # with one replica: one writer, as every file here
        "io_multiplier": Inert(1, "each file has one writer"),
    },
    "aio": {
        "block_size": Settled(Kind("int", least=4096, multiple=4096)),
        "intra_op_parallelism": Settled(COUNT),
        **_inert(_IO_FLAGS, queue_depth=8, single_submit=False, overlap_events=True, use_gds=False),
    },
    "zero_optimization": {
        "stage": Settled(Kind("int", least=0)),
        "reduce_bucket_size": Passes(COUNT, _BUCKET, (ZERO_1, ZERO_3)),
        "use_multi_rank_bucket_allreduce": Passes(BOOL, True, (ZERO_1,)),
        "round_robin_gradients": Passes(BOOL, False, (ZERO_1,)),
        "parameter_alignment": Passes(BOOL, False, (ZERO_1,)),
        "allgather_bucket_size": Inert(_BUCKET, "torch gathers a partition in one call, whatever its size"),
        "allgather_partitions": Inert(True, _NOT_READ),
        "reduce_scatter": Inert(True, "at stage 1 both settings add up the same buckets"),
        "contiguous_gradients": Inert(True, "without it DeepSpeed's ZeRO-1 copies gradients another way, untried here"),
        "overlap_comm": Passes(BOOL, False, (ZERO_3,)),
        "compute_grad_norm": Inert(True, "the training log and --clip-grad need the norm"),
        "load_from_fp32_weights": Inert(True, "a checkpoint restores its fp32 master weights"),
        "elastic_checkpoint": Inert(False, "a checkpoint loads onto another DP as it is"),
        "ignore_unused_parameters": Inert(True, _STAGE_2),
        "legacy_stage1": Inert(False, "DeepSpeed has dropped it"),
        "offload_param": _off(_NO_OFFLOAD, _OFFLOAD_KEYS + "buffer_size max_in_cpu", _DEVICE_NONE),
        "offload_optimizer": Section(),
        **_all("cpu_offload cpu_offload_param cpu_offload_use_pin_memory zenflow", Refused(_NO_OFFLOAD)),
        **_all(
            "leaf_module mics_shard_size mics_hierarchical_params_gather zeropp_loco_param",
            Refused("leave it out: " + _STAGE_3),
        ),
        **_inert(
            _STAGE_3,
            zero_hpz_partition_size=1,
            zero_quantized_weights=False,
            zero_quantized_nontrainable_weights=False,
            zero_quantized_gradients=False,
            memory_efficient_linear=True,
            pipeline_loading_checkpoint=False,
            override_module_apply=True,
            log_trace_cache_warnings=False,
            enable_sanity_checks=False,
            save_muon_momentum_buffer_in_memory=False,
            stage3_gather_fp16_weights_on_model_save=False,
        ),
        "sub_group_size": Passes(COUNT, 1_000_000_000, (ZERO_3,)),
        **{
            prefix + name: Passes(Kind("int", least=0), default, (ZERO_3,))
            for prefix in ("", "stage3_")
            for name, default in (
                ("prefetch_bucket_size", 50_000_000),
                ("param_persistence_threshold", 100_000),
                ("model_persistence_threshold", MAXIMUM),
                ("max_live_parameters", 1_000_000_000),
                ("max_reuse_distance", 1_000_000_000),
            )
        },
        **{
            prefix + name: Inert(default, _STAGE_3)
            for prefix in ("", "stage3_")
            for name, default in (
                ("gather_16bit_weights_on_model_save", False),
                ("module_granularity_threshold", 0),
                ("use_all_reduce_for_fetch_params", False),
                ("allgather_sequential", False),
            )
        },
    },
    "zero_optimization.offload_optimizer": {
        "device": Settled(Kind("str", choices=("none", "cpu"))),
        "pin_memory": Passes(BOOL),
        **_inert(_ALL_IN_MEMORY, nvme_path=None, buffer_count=4, pipeline_read=False, pipeline_write=False),
        **_inert(_ALL_IN_MEMORY, fast_init=False, ratio=1.0, super_offload=False, cpuadam_cores_perc=0.8),
    },
    "bf16": {
        "enabled": Settled(BOOL),
        "immediate_grad_update": Passes(BOOL, takers=(BF16,)),
        "check_grad_overflow": Inert(True, "BF16_Optimizer, which trains bf16, looks for no overflow"),
        **_inert(_MASTER, bf16_master_weights_and_grads=False, bf16_optimizer_states=False),
    },
    "fp16": {
        "enabled": Settled(BOOL),
        "loss_scale": Settled(Kind("number", least=0)),
        "initial_scale_power": Settled(Kind("int", least=0, most=127)),  # 2^128 is no fp32 number
        **_all("loss_scale_window hysteresis min_loss_scale", Settled(COUNT)),
        "consecutive_hysteresis": Passes(BOOL),
        "auto_cast": Inert(False, "inputs are token numbers, which must not become floating-point"),
        "fp16_master_weights_and_grads": Inert(False, _MASTER),
    },
    "data_types": {
        **_all("grad_accum_dtype param_dtype", Settled(_DTYPE)),
        "buffer_dtype": Inert(None, "the model keeps its buffers in fp32"),
        "keep_in_fp32_modules": Inert("auto", "parameters have the run's precision"),
    },
    "activation_checkpointing": {
        **_all("partition_activations contiguous_memory_optimization cpu_checkpointing", Settled(BOOL)),
        **_all("synchronize_checkpoint_boundary profile", Settled(BOOL)),
        "number_checkpoints": Settled(COUNT),
    },
    "pipeline": {
        **_inert(_PARTITION, stages="auto", partition="best"),
        "seed_layers": Inert(False, "use --seed; every layer has its own random numbers"),
        **_inert(_RECOMPUTE, activation_checkpoint_interval=0, use_reentrant=True),
        **_all("pipe_partitioned grad_partitioned", Settled(BOOL)),
    },
    "flops_profiler": {
        **_all("enabled detailed", Passes(BOOL)),
        **_all("profile_step top_modules", Passes(COUNT)),
        "recompute_fwd_factor": Inert(0.0, "the profile is of the forward pass"),
        "module_depth": Passes(Kind("int", least=-1)),
        "output_file": Passes(STR),
    },
    "comms_logger": {**_all("enabled verbose prof_all debug", Passes(BOOL)), "prof_ops": Passes(Kind("names"))},
    "tensorboard": {"enabled": Passes(BOOL), **_all("output_path job_name", Passes(STR))},
    "csv_monitor": {"enabled": Passes(BOOL), **_all("output_path job_name", Passes(STR))},
    "timers": {"throughput": Section()},
    "timers.throughput": _inert(_NO_TIMER, enabled=True, synchronized=True),
    "compile": _inert(
        "the model is not compiled",
        deepcompile=False,
        autoep_non_moe=False,
        free_activation=False,
        free_activation_threshold=10_485_760,
        offload_activation=False,
        offload_activation_pin_memory=True,
        offload_opt_states=False,
        double_buffer=True,
        symmetric_memory=False,
        debug_log=False,
        offload_parameters=False,
        sync_before_reduce=False,
        sync_after_reduce=False,
        sync_before_allgather=False,
        sync_after_allgather=False,
        keep_int_input_tensors=True,
        keep_all_input_tensors=False,
        passes=None,
    ),
}

KEYS: dict[str, Rule] = {name: Section() for name in _SECTIONS} | _TOP
for _name, _rules in _SECTIONS.items():
    KEYS |= {f"{_name}.{_key}": _rule for _key, _rule in _rules.items()}
