# type: ignore  (as users write it: DeepSpeed and Transformers are not annotated throughout)
"""Hugging Face's Trainer with DeepSpeed, as its documentation shows it; it knows nothing of being traced.

    torchrun ... hf_trainer.py STEPS ZERO_STAGE

It saves at each second step, and then goes on from its checkpoint.
"""

import copy
import json
import os
import sys
import time

import deepspeed
import torch
import transformers.trainer
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

steps, stage = int(sys.argv[1]), int(sys.argv[2])
width = int(os.environ.get("WIDTH", "1024"))
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for half a minute
config = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": stage},
    "optimizer": {"type": "Adam", "params": {"lr": "auto", "torch_adam": True}}, "bf16": {"enabled": True},
    "checkpoint": json.loads(os.environ.get("CHECKPOINT", "{}")),
}  # fmt: skip


def timed(what, function):
    def call(*arguments, **options):
        began = time.monotonic_ns()
        function(*arguments, **options)
        print(what, began, time.monotonic_ns())

    return call


class TimedTrainer(Trainer):
    def _save_checkpoint(self, *arguments, **options):
        timed("save", super()._save_checkpoint)(*arguments, **options)

    def _load_rng_state(self, checkpoint):
        load = super()._load_rng_state
        (load if checkpoint is None else timed("load", load))(checkpoint)


transformers.trainer.deepspeed_load_checkpoint = timed("load", transformers.trainer.deepspeed_load_checkpoint)
tokens = torch.arange(16).repeat(8, 1)
samples = [{"input_ids": row, "labels": row} for row in tokens]
done = 0
for until in (steps, steps + 1):
    set_seed(1)
    arguments = TrainingArguments(
        output_dir="checkpoints", max_steps=until, save_steps=steps, per_device_train_batch_size=1, bf16=True,
        use_cpu=True, deepspeed=copy.deepcopy(config), logging_steps=1, report_to=[],
        disable_tqdm=True,
    )  # fmt: skip
    shape = {"vocab_size": 64, "hidden_size": width // 2, "intermediate_size": width, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4))
    trainer = TimedTrainer(model=model, args=arguments, train_dataset=samples)
    trainer.train(resume_from_checkpoint=until > steps)
    for entry in trainer.state.log_history:
        if "loss" in entry and entry["step"] > done:
            print(f"step {entry['step']} loss {entry['loss']!r}", flush=True)
    done = until
torch.distributed.destroy_process_group()
