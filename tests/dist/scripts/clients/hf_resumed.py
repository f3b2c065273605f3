# type: ignore  (as users write it: DeepSpeed and Transformers are not annotated throughout)
"""Hugging Face's Trainer with DeepSpeed, which goes on from the newest complete checkpoint in ./checkpoints.

    torchrun ... hf_resumed.py ZERO_STAGE STEPS

It saves at each second step. Dropout makes each loss depend on the random states of its rank.
"""

import json
import os
import sys

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from megatron.adapters.trainer import last_complete_checkpoint

stage, steps = int(sys.argv[1]), int(sys.argv[2])
width = int(os.environ.get("WIDTH", "1024"))
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for half a minute
config = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": stage},
    "optimizer": {"type": "Adam", "params": {"lr": "auto", "torch_adam": True}}, "bf16": {"enabled": True},
    "checkpoint": json.loads(os.environ.get("CHECKPOINT", "{}")),
}  # fmt: skip


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']!r}", flush=True)


set_seed(1)
arguments = TrainingArguments(
    output_dir="checkpoints", max_steps=steps, save_steps=2, save_total_limit=2, per_device_train_batch_size=1,
    lr_scheduler_type="constant", bf16=True, use_cpu=True, deepspeed=config, logging_steps=1, report_to=[],
    disable_tqdm=True,
)  # fmt: skip
shape = {"vocab_size": 64, "hidden_size": width // 2, "intermediate_size": width, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, attention_dropout=0.2))
tokens = torch.arange(16).repeat(16, 1)
samples = [{"input_ids": row, "labels": row} for row in tokens]
trainer = Trainer(model=model, args=arguments, train_dataset=samples, callbacks=[PrintLoss])
last = last_complete_checkpoint("checkpoints")
print("resumed", last, flush=True)
if last != f"checkpoints/checkpoint-{steps}":  # Trainer would do a step more
    trainer.train(resume_from_checkpoint=last)
torch.distributed.destroy_process_group()
