"""Modules that use a device or distinguish devices, with the parts that run them; and those that know CUDA alone.

tests/unit/test_gpu_tier.py compares both with the code. docs/gpu.md has what stands on other accelerators in the place
of what is CUDA's alone.
"""

from __future__ import annotations

# Parts of tests/gpu/parts.py ("resume-ENGINE": of each engine) -> modules. Of "nothing", jobs of other trainers and
# saves in them were run on CPUs alone, as was the exchange of weights between replicas, tensorboard is not in the
# bundle, and standby ranks are refused on devices.
RUN_BY = {
    "machine": (
        "megatron/config/parallel.py",
        "megatron/model/norms.py",
        "megatron/model/transformer.py",
        "megatron/parallel/products.py",
        "megatron/parallel/random.py",
        "megatron/startup/initialize.py",
        "megatron/startup/watch.py",
        "megatron/training/trainer.py",
        "restart_trace/recorder.py",
        "megatron/startup/kernels.py",
        "megatron/startup/communicators.py",
    ),
    "step-time-compiled": ("megatron/startup/compilation.py",),
    "machine, tests": (
        "restart_trace/probes.py",
        "restart_trace/devices.py",
        "megatron/data/data_samplers.py",
        "megatron/training/data.py",
    ),
    "nothing": (
        "restart_trace/hooks/steps.py",
        "megatron/checkpointing/state/replicas.py",
        "megatron/launch/cli.py",
        "megatron/training/log.py",
        "megatron/adapters/snapshot.py",
    ),
    "resume-fastpersist-decoupled": ("megatron/checkpointing/engines/fastpersist/decoupled_engine.py",),
    "resume-lazy": (
        "megatron/training/checkpoints.py",
        "megatron/checkpointing/engines/lazy/arena.py",
        "megatron/checkpointing/engines/lazy/host_cache.py",
        "megatron/checkpointing/engines/lazy/reader.py",
        "megatron/checkpointing/engines/lazy/writer.py",
        "megatron/fileio/device_copies.py",
        "megatron/fileio/device_waits.py",
        "megatron/fileio/host_buffers.py",
        "restart_trace/device_threads.py",
        "megatron/fileio/pinned_memory.py",
    ),
    "resume-lazy, reshard": ("megatron/fileio/ranged_reader.py",),
    "memory": ("megatron/training/slot_memory.py",),
    "resume-ENGINE": (
        "megatron/startup/determinism.py",
        "megatron/checkpointing/state/hashes.py",
        "tools/restart_drill/command.py",
        "megatron/optimizer/build.py",
    ),
    "resume-torch": ("megatron/checkpointing/engines/host_staging.py",),
    "resume-fastpersist": ("megatron/checkpointing/engines/fastpersist/writer.py",),
    "resume-dcp-async, resume-dcp-process": ("megatron/checkpointing/engines/dcp/staging.py",),
    "resume-torchsnapshot": ("megatron/checkpointing/engines/torchsnapshot/library.py",),
    "resume-datastates": (
        "megatron/checkpointing/engines/datastates/engine.py",
        "megatron/checkpointing/engines/datastates/library.py",
    ),
    "launch, fork": ("megatron/launch/preload.py",),
    "device-error": ("megatron/startup/injected_faults.py",),
    "engines": (
        "tools/ckpt_replay/context.py",
        "tools/ckpt_replay/loading.py",
        "tools/ckpt_replay/prepare.py",
        "tools/ckpt_replay/saving.py",
        "tools/ckpt_replay/steps.py",
        "tools/ckpt_replay/worker.py",
        "tools/ckpt_plan/rank_state.py",
    ),
    "launch": (
        "tools/restart_bench/interpreter.py",
        "tools/restart_bench/nodes.py",
        "tools/restart_bench/settings.py",
        "tools/restart_bench/training.py",
    ),
}

CUDA_ALONE = {
    "megatron/checkpointing/engines/datastates/library.py",
    "megatron/checkpointing/engines/dcp/staging.py",
    "megatron/checkpointing/engines/fastpersist/writer.py",
    "megatron/config/parallel.py",
    "megatron/fileio/device_waits.py",
    "megatron/fileio/pinned_memory.py",
    "megatron/launch/health.py",
    "megatron/launch/preload.py",
    "megatron/launch/rank.py",
    "megatron/optimizer/build.py",
    "megatron/peers/rdma.py",
    "megatron/startup/determinism.py",
    "megatron/startup/initialize.py",
    "megatron/startup/watch.py",
    "megatron/training/hf_exports.py",
    "megatron/training/slot_memory.py",
    "megatron/training/trainer.py",
    "restart_trace/devices.py",
    "restart_trace/probes.py",
    "restart_trace/process.py",
    "restart_trace/recorder.py",
    "tools/ckpt_plan/rank_state.py",
    "tools/restart_bench/interpreter.py",
    "tools/restart_bench/launchers/launch.py",
    "tools/restart_bench/nodes.py",
    "tools/restart_bench/settings.py",
    "tools/restart_bench/training.py",
    "tools/restart_drill/command.py",
}
