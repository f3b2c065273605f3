"""Engine `lazy` in other people's trainers (docs/guides/lazy_in_your_trainer.md).

`megatron.adapters.dcp` has a storage writer and reader for torch.distributed.checkpoint; `megatron.adapters.deepspeed`
teaches DeepSpeed a checkpoint engine. Neither imports this project's trainer or its flags, or the other's library.
"""
