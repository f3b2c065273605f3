"""Engine `lazy` in other people's trainers (docs/guides/lazy_in_your_trainer.md).

`megatron.adapters.dcp` has a storage writer and reader for torch.distributed.checkpoint; `megatron.adapters.deepspeed`
teaches DeepSpeed a checkpoint engine; `megatron.adapters.trainer` knows which of its checkpoints Hugging Face's Trainer
can resume from. None imports this project's trainer or its flags; `dcp` does not import DeepSpeed.
"""
