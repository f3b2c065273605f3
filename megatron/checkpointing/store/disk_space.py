"""How many checkpoints a run saves and keeps, how large they are, and whether the storage has room; no torch."""

from __future__ import annotations

from megatron.config import Config

_ELEMENT_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
_MASTER_WEIGHT = 4  # bytes, and as many for each moment
_HEADROOM = 1.01  # of a slot in host memory: shards are padded, and hold a little besides their tensors
_SMALL = 1 << 20  # bytes of a save beside its tensors: settings, names, random state


def saves_left(config: Config, iteration: int) -> int:
    """Checkpoints that are still to be saved after `iteration`: one each --save-interval, and one at the end."""
    last, interval = config.training.train_iters, config.checkpoint.save_interval
    if iteration >= last or interval is None:
        return 0
    return last // interval - iteration // interval + (last % interval > 0)


def exports_left(config: Config, iteration: int) -> int:
    """Exports that --export-hf-interval is still to make after `iteration`."""
    last, interval = config.training.train_iters, config.checkpoint.export_hf_interval
    return 0 if interval is None or iteration >= last else last // interval - iteration // interval


def export_bytes(config: Config, parameters: int) -> int:
    """Bytes of an export of a model of so many parameters: the weights."""
    return parameters * _ELEMENT_SIZE[config.model.params_dtype]


def lack_for_exports(config: Config, one: int, left: int, free: int) -> str | None:
    """What to warn of where exports are on other storage than --save; None if there is room. As `lack_of_space`."""
    if left * one <= free:
        return None
    return (
        f"--export-hf-dir {config.checkpoint.export_directory}: {_size(free)} are free, and {left} exports of "
        f"{_size(one)} are to come: later ones will fail; free space, give another directory, or a larger "
        "--export-hf-interval"
    )


def no_space(config: Config, one: int, free: int) -> str | None:
    """Why no save of the run could succeed; None if there is room for a checkpoint. Arguments as `lack_of_space`."""
    if one <= free:
        return None
    return (
        f"--save {config.checkpoint.save}: {_size(free)} are free, and a checkpoint is {_size(one)}: no save could "
        "succeed; free space, give another --save, or train without --save"
    )


def lack_of_space(config: Config, one: int, present: int, left: int, free: int, exports: int = 0) -> str | None:
    """What to warn of; None if there is room.

    `one`: bytes of a checkpoint; `present`: complete ones in --save; `left`: saves to come; `free`: bytes; `exports`:
    bytes of the exports to come in the same storage. With --keep-last N there are N, and one more while it is saved.
    """
    keep = config.checkpoint.keep_last
    more = left if keep is None else min(left, max(keep + 1 - present, 1))
    if more * one + exports <= free:
        return None
    kept = f"all of {left} to come" if keep is None else f"--keep-last {keep}, and one more while it is saved"
    kept += f", and exports of {_size(exports)} (--export-hf-interval)" if exports else ""
    fix = "free space, give another --save" + (", or --keep-last N" if keep is None else ", or a smaller --keep-last")
    return (
        f"--save {config.checkpoint.save}: {_size(free)} are free, which is room for {free // one} checkpoints "
        f"of {_size(one)}, and {more} more are needed ({kept}): later saves will fail; {fix}"
    )


def checkpoint_bytes(config: Config, parameters: int) -> int:
    """Bytes of the tensors that a model of so many parameters puts into a checkpoint: weights and optimizer.

    As tools.ckpt_plan, without the alignment of shards and without metadata.
    """
    return parameters * (weight_bytes(config) + _optimizer_bytes(config))


def rank_bytes(config: Config, parameters: int, dp: int, dp_size: int) -> int:
    """As `checkpoint_bytes`, what the rank `dp` of `dp_size` replicas saves, which holds so many parameters.

    The first replica saves the weights, each rank its shard of the optimizer's state.
    """
    weights = weight_bytes(config) if dp == 0 else 0
    return parameters * weights + -(-parameters * _optimizer_bytes(config) // dp_size)


def slot_bytes(config: Config, parameters: int, dp_size: int) -> int:
    """Bytes of a slot in host memory for a save of engine `memory`, of a rank with so many parameters.

    Every replica keeps the weights, as the first one does.
    """
    return int(_HEADROOM * rank_bytes(config, parameters, 0, dp_size)) + _SMALL


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def weight_bytes(config: Config) -> int:
    """Per parameter. With --zero-stage 3 the weights are in no file: they are the master weights, rounded."""
    return 0 if config.parallel.zero_stage == 3 else _ELEMENT_SIZE[config.model.params_dtype]


def _optimizer_bytes(config: Config) -> int:
    """Per parameter: of the master weight and its moments."""
    return 0 if config.checkpoint.no_save_optim else _MASTER_WEIGHT + moment_bytes(config)


def moment_bytes(config: Config) -> int:
    """Per parameter: of the moments that the optimizer keeps, saved or not."""
    optimizer = config.optimizer
    return _MASTER_WEIGHT * (2 if optimizer.optimizer == "adam" else int(optimizer.sgd_momentum > 0))
