"""All that is slow to import, at once: so that no later phase of a start pays for it, nor any rank that is forked."""

from __future__ import annotations

import gc


def import_everything() -> None:
    """Import torch, DeepSpeed and whatever of the trainer they take with them. Again, it costs next to nothing."""
    gc.disable()  # imports make half a million objects and no garbage: collecting between them is wasted
    from megatron.initialize import freeze_imported_objects, import_heavy

    import_heavy()
    import megatron.checkpointing
    import megatron.engine_setup
    import megatron.model.gpt_model
    import megatron.training_checkpoints
    import megatron.training_data
    import megatron.training_log  # noqa: F401

    freeze_imported_objects()
    gc.enable()
