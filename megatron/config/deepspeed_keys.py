"""Every key that a --deepspeed_config file may hold, and what becomes of it: dotted name -> rule.

A key that is not here is unknown and refused. The names are those of DeepSpeed 0.19.8 (deepspeed/runtime/config.py,
runtime/constants.py and the models they read), of its keys that were removed, and of the checkpoint stanzas of restart
studies with DataStates-LLM (https://github.com/DataStates/datastates-llm) and its fork of DeepSpeed; a test compares
them with the installed DeepSpeed. "Has an effect" is what trainings of this program show: its model is a PipelineModule
under ZeRO-1, and its checkpoints are not written by DeepSpeed's save_checkpoint.
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

    `zero_default`: it is read by DeepSpeedZeroOptimizer alone, which trains fp16 and fp32; BF16_Optimizer, which trains
    bf16, has no such thing, so that there only this default of DeepSpeed's is accepted.
    """

    kind: Kind
    zero_default: Any = None


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

_STAGE_3 = "it is for ZeRO stage 3, and checkpoints are made of ZeRO-1 shards"
_STAGE_2 = "it is for ZeRO stage 2, and checkpoints are made of ZeRO-1 shards"
_NO_OFFLOAD = "leave states on their device; nothing is offloaded here"
_LOSS = "gradients are the mean over the global batch"
_LOADER = "this program has its own data loader, and its batches are complete"
_MASTER = "master weights and moments are fp32"
_COMPILE = "the model is not compiled"
_PARTITION = "the model is cut into stages by --pipeline-model-parallel-size"
_RECOMPUTE = "use --checkpoint-activations, which says how stages recompute"
_OTHER_TRACE = "the restart trace (--save, --restart-trace-dir) records the bytes and the time of every write"
_NO_TIMER = (
    "under pipelines nothing reads that timer; the training log has samples, tokens and TFLOPs per second"
)
_OWN_SAVE = "checkpoints are written by this program's engines, not by DeepSpeed's save_checkpoint"
_IO_FLAGS = "of the async_io operator --io-threads and --io-block-size can be set"
_BOARD = "use --tensorboard-dir, or the section tensorboard or csv_monitor"
_TP = "use --tensor-model-parallel-size"
_MOE = "train a dense model; this fork has no experts"
_PRECISION = "use --bf16 or --fp16"
_CURRICULUM_KEYS = (
    "enabled",
    "curriculum_type",
    "min_difficulty",
    "max_difficulty",
    "schedule_type",
    "schedule_config.total_curriculum_step",
    "schedule_config.difficulty_step",
    "schedule_config.root_degree",
    "schedule_config.difficulty",
    "schedule_config.max_step",
)
_HYBRID_ENGINE_KEYS = (
    "enabled",
    "max_out_tokens",
    "inference_tp_size",
    "release_inference_cache",
    "pin_parameters",
    "tp_gather_partition_size",
    "enable_cuda_graph",
)
_COMET_KEYS = (
    "enabled",
    "samples_log_interval",
    "project",
    "workspace",
    "api_key",
    "experiment_name",
    "experiment_key",
    "online",
    "mode",
)
_PARAM_KEYS = ("buffer_size", "max_in_cpu")
_OPTIMIZER_KEYS = (
    "pipeline_read",
    "pipeline_write",
    "fast_init",
    "ratio",
    "super_offload",
    "cpuadam_cores_perc",
)
_OFFLOAD_KEYS = ("device", "nvme_path", "buffer_count", "pin_memory")
_DEVICE_NONE = ("device", "none")

_TOP: dict[str, Rule] = {
    "train_batch_size": Settled(COUNT),
    "train_micro_batch_size_per_gpu": Settled(COUNT),
    "gradient_accumulation_steps": Settled(COUNT),
    "gradient_clipping": Settled(Kind("number", least=0)),
    "steps_per_print": Passes(COUNT),
    "wall_clock_breakdown": Passes(BOOL),
    "memory_breakdown": Passes(BOOL),
    "dump_state": Passes(BOOL),
    "disable_python_gc": Passes(BOOL),
    "log_level": Passes(Kind("str", choices=("debug", "info", "warning", "error", "critical"))),
    "zero_allow_untested_optimizer": Passes(BOOL),
    "prescale_gradients": Passes(BOOL),
    "communication_data_type": Passes(Kind("str", choices=("fp32", "fp16", "bf16"))),
    "gradient_predivide_factor": Inert(1.0, _LOSS),
    "gradient_allreduce_op": Inert("mean", _LOSS),
    "managed_gradient_accumulation": Inert(True, "the pipeline schedule accumulates"),
    "disable_allgather": Inert(False, "DeepSpeed reads it and does nothing with it"),
    "zero_force_ds_cpu_optimizer": Inert(True, "nothing is offloaded here"),
    "seq_parallel_communication_data_type": Inert("fp32", "sequences are not split over ranks"),
    "sequence_parallel_size": Inert(1, "sequences are not split over ranks"),
    "dataloader_drop_last": Inert(False, _LOADER),
    "use_data_before_expert_parallelism": Inert(False, "there are no experts here"),
    "data_parallel_size": Refused("start as many processes as TP x PP x DP"),
    "vocabulary_size": Refused("use --vocab-size or the tokenizer's files"),
    "seed": Refused("use --seed"),
    "optimizer": Refused("use --optimizer, --lr, --weight-decay and --adam-beta1/2"),
    "scheduler": Refused("use --lr-decay-style and the other --lr flags"),
    "max_train_batch_size": Refused("use --global-batch-size"),
    "async_ckpt_config": Refused("use --checkpoint-engine lazy, or another that saves in the background"),
    "tensor_parallel": Refused(_TP),
    "expert_parallel": Refused(_MOE),
    "weight_quantization": Refused("train the model as it is"),
    "nebula": Off(
        "use --checkpoint-engine NAME",
        (
            "enabled",
            "persistent_storage_path",
            "persistent_time_interval",
            "num_of_version_in_retention",
            "enable_nebula_load",
            "load_path",
        ),
    ),
    "datastates": Off("use --checkpoint-engine datastates", ("enabled",)),
    "amp": Off(_PRECISION, ("enabled", "opt_level")),
    "torch_autocast": Off(_PRECISION, ("enabled", "dtype", "lower_precision_safe_modules")),
    "curriculum_learning": Off(
        "train with one sequence length; every batch has the same shape", _CURRICULUM_KEYS
    ),
    "data_efficiency": Off(
        "train with one sequence length; every batch has the same shape", ("enabled", "seed")
    ),
    "compression_training": Off("train the model as it is", ("enabled",)),
    "quantize_training": Off("train the model as it is", ("enabled",)),
    "progressive_layer_drop": Off("train all layers", ("enabled", "theta", "gamma")),
    "eigenvalue": Off("train the model as it is", ("enabled",)),
    "sparse_attention": Off("use --use-flash-attn or the default attention", ("enabled", "mode")),
    "sparse_gradients": Off("leave gradients dense"),
    "graph_harvesting": Off("leave it out"),
    "elasticity": Off("use --global-batch-size and --micro-batch-size", ("enabled",)),
    "autotuning": Off("measure with tools.restart_speed", ("enabled",)),
    "hybrid_engine": Off("train without generating", _HYBRID_ENGINE_KEYS),
    "wandb": Off(_BOARD, ("enabled", "group", "team", "project")),
    "comet": Off(_BOARD, _COMET_KEYS),
    "none_ckpt": Names("none", as_object=False),
    "none_ckpt_config": Names("none", as_object=False),
    "torchsnapshot_ckpt": Names("torchsnapshot"),
    "datastates_ckpt": Names("datastates", as_bool=False),
}

_SECTIONS: dict[str, dict[str, Rule]] = {
    "torchsnapshot_ckpt": {"enabled": Passes(BOOL)},
    "datastates_ckpt": {
        "host_cache_size": Settled(POSITIVE),
        "engine_type": Settled(Kind("str", choices=("simple_engine", "state_engine"))),
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
        "tag_validation": Inert(
            "Fail", "the ranks agree on each checkpoint, its name included, before its commit"
        ),
        "use_node_local_storage": Inert(False, _OWN_SAVE),
        "parallel_write": Section(),
        "load_universal": Refused("another layout needs no conversion; --redistribute universal makes one"),
    },
    "checkpoint.parallel_write": {"pipeline_stage": Inert(False, _OWN_SAVE)},
    "checkpoint.writer": {
        "type": Settled(Kind("str", choices=("fast", "python"))),
        "decoupled": Settled(BOOL),
        "io_buffer_size": Settled(Kind("int", least=8192, multiple=8192)),
        "io_buffer_double": Inert(True, "two buffers let one be filled while the other is written"),
        "show_statistics": Inert(False, _OTHER_TRACE),
        "data_parallel": Inert(None, "each file has one writer; DP ranks do not share one"),
        "io_multiplier": Inert(1, "each file has one writer"),
    },
    "aio": {
        "block_size": Settled(Kind("int", least=4096, multiple=4096)),
        "intra_op_parallelism": Settled(COUNT),
        "queue_depth": Inert(8, _IO_FLAGS),
        "single_submit": Inert(False, _IO_FLAGS),
        "overlap_events": Inert(True, _IO_FLAGS),
        "use_gds": Inert(False, _IO_FLAGS),
    },
    "zero_optimization": {
        "stage": Settled(Kind("int", least=0)),
        "reduce_bucket_size": Passes(COUNT, _BUCKET),
        "use_multi_rank_bucket_allreduce": Passes(BOOL, True),
        "round_robin_gradients": Passes(BOOL, False),
        "parameter_alignment": Passes(BOOL, False),
        "allgather_bucket_size": Inert(_BUCKET, "torch gathers a partition in one call, whatever its size"),
        "allgather_partitions": Inert(True, "DeepSpeed reads it and does nothing with it"),
        "reduce_scatter": Inert(True, "at stage 1 both settings add up the same buckets"),
        "contiguous_gradients": Inert(
            True, "without it DeepSpeed's ZeRO-1 copies gradients another way, untried here"
        ),
        "overlap_comm": Inert(False, "pipelines reduce gradients after their last backward pass"),
        "compute_grad_norm": Inert(True, "the training log and --clip-grad need the norm"),
        "load_from_fp32_weights": Inert(True, "a checkpoint restores its fp32 master weights"),
        "elastic_checkpoint": Inert(False, "a checkpoint loads onto another DP as it is; see --redistribute"),
        "ignore_unused_parameters": Inert(True, _STAGE_2),
        "legacy_stage1": Inert(False, "DeepSpeed has dropped it"),
        "offload_param": Off(_NO_OFFLOAD, _OFFLOAD_KEYS + _PARAM_KEYS, _DEVICE_NONE),
        "offload_optimizer": Off(_NO_OFFLOAD, _OFFLOAD_KEYS + _OPTIMIZER_KEYS, _DEVICE_NONE),
        "cpu_offload": Refused(_NO_OFFLOAD),
        "cpu_offload_param": Refused(_NO_OFFLOAD),
        "cpu_offload_use_pin_memory": Refused(_NO_OFFLOAD),
        "zenflow": Refused(_NO_OFFLOAD),
        "leaf_module": Refused("leave it out: " + _STAGE_3),
        "sub_group_size": Inert(1_000_000_000, _STAGE_3),
        "zero_hpz_partition_size": Inert(1, _STAGE_3),
        "zero_quantized_weights": Inert(False, _STAGE_3),
        "zero_quantized_nontrainable_weights": Inert(False, _STAGE_3),
        "zero_quantized_gradients": Inert(False, _STAGE_3),
        "memory_efficient_linear": Inert(True, _STAGE_3),
        "pipeline_loading_checkpoint": Inert(False, _STAGE_3),
        "override_module_apply": Inert(True, _STAGE_3),
        "log_trace_cache_warnings": Inert(False, _STAGE_3),
        "enable_sanity_checks": Inert(False, _STAGE_3),
        "save_muon_momentum_buffer_in_memory": Inert(False, _STAGE_3),
        "mics_shard_size": Refused("leave it out: " + _STAGE_3),
        "mics_hierarchical_params_gather": Refused("leave it out: " + _STAGE_3),
        "zeropp_loco_param": Refused("leave it out: " + _STAGE_3),
        "stage3_gather_fp16_weights_on_model_save": Inert(False, _STAGE_3),
        **{
            prefix + name: Inert(default, _STAGE_3)
            for prefix in ("", "stage3_")
            for name, default in (
                ("prefetch_bucket_size", 50_000_000),
                ("param_persistence_threshold", 100_000),
                ("model_persistence_threshold", MAXIMUM),
                ("max_live_parameters", 1_000_000_000),
                ("max_reuse_distance", 1_000_000_000),
                ("gather_16bit_weights_on_model_save", False),
                ("module_granularity_threshold", 0),
                ("use_all_reduce_for_fetch_params", False),
                ("allgather_sequential", False),
            )
        },
    },
    "bf16": {
        "enabled": Settled(BOOL),
        "immediate_grad_update": Passes(BOOL),
        "check_grad_overflow": Inert(True, "BF16_Optimizer, which trains bf16, looks for no overflow"),
        "bf16_master_weights_and_grads": Inert(False, _MASTER),
        "bf16_optimizer_states": Inert(False, _MASTER),
    },
    "fp16": {
        "enabled": Settled(BOOL),
        "loss_scale": Settled(Kind("number", least=0)),
        "initial_scale_power": Settled(Kind("int", least=0, most=127)),  # 2^128 is no fp32 number
        "loss_scale_window": Settled(COUNT),
        "hysteresis": Settled(COUNT),
        "min_loss_scale": Settled(COUNT),
        "consecutive_hysteresis": Passes(BOOL),
        "auto_cast": Inert(False, "inputs are token numbers, which must not become floating-point"),
        "fp16_master_weights_and_grads": Inert(False, _MASTER),
    },
    "data_types": {
        "grad_accum_dtype": Settled(Kind("str", choices=("fp32", "fp16", "bf16"))),
        "param_dtype": Settled(Kind("str", choices=("fp32", "fp16", "bf16"))),
        "buffer_dtype": Inert(None, "the model keeps its buffers in fp32"),
        "keep_in_fp32_modules": Inert("auto", "parameters have the run's precision"),
    },
    "activation_checkpointing": {
        "partition_activations": Settled(BOOL),
        "contiguous_memory_optimization": Settled(BOOL),
        "cpu_checkpointing": Settled(BOOL),
        "number_checkpoints": Settled(COUNT),
        "synchronize_checkpoint_boundary": Settled(BOOL),
        "profile": Settled(BOOL),
    },
    "pipeline": {
        "stages": Inert("auto", _PARTITION),
        "partition": Inert("best", _PARTITION),
        "seed_layers": Inert(False, "use --seed; every layer has its own random numbers"),
        "activation_checkpoint_interval": Inert(0, _RECOMPUTE),
        "use_reentrant": Inert(True, _RECOMPUTE),
        "pipe_partitioned": Inert(True, "TP ranks send activations to the next stage in parts"),
        "grad_partitioned": Inert(True, "TP ranks send gradients to the stage before in parts"),
    },
    "flops_profiler": {
        "enabled": Passes(BOOL),
        "profile_step": Passes(COUNT),
        "recompute_fwd_factor": Inert(0.0, "the profile is of the forward pass"),
        "module_depth": Passes(Kind("int", least=-1)),
        "top_modules": Passes(COUNT),
        "detailed": Passes(BOOL),
        "output_file": Passes(STR),
    },
    "comms_logger": {
        "enabled": Passes(BOOL),
        "verbose": Passes(BOOL),
        "prof_all": Passes(BOOL),
        "prof_ops": Passes(Kind("names")),
        "debug": Passes(BOOL),
    },
    **{
        name: {"enabled": Passes(BOOL), "output_path": Passes(STR), "job_name": Passes(STR)}
        for name in ("tensorboard", "csv_monitor")
    },
    "timers": {"throughput": Section()},
    "timers.throughput": {"enabled": Inert(True, _NO_TIMER), "synchronized": Inert(True, _NO_TIMER)},
    "compile": {
        name: Inert(default, _COMPILE)
        for name, default in {
            "deepcompile": False,
            "autoep_non_moe": False,
            "free_activation": False,
            "free_activation_threshold": 10_485_760,
            "offload_activation": False,
            "offload_activation_pin_memory": True,
            "offload_opt_states": False,
            "double_buffer": True,
            "symmetric_memory": False,
            "debug_log": False,
            "offload_parameters": False,
            "sync_before_reduce": False,
            "sync_after_reduce": False,
            "sync_before_allgather": False,
            "sync_after_allgather": False,
            "keep_int_input_tensors": True,
            "keep_all_input_tensors": False,
            "passes": None,
        }.items()
    },
}

KEYS: dict[str, Rule] = {name: Section() for name in _SECTIONS} | _TOP
for _name, _rules in _SECTIONS.items():
    KEYS |= {f"{_name}.{_key}": _rule for _key, _rule in _rules.items()}
