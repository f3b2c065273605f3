# type: ignore  (as users write it)
"""Hugging Face's Trainer with DDP alone, as its documentation shows it; it knows nothing of being traced.

torchrun ... hf_alone.py STEPS

It saves at each second step (SAVE_EVERY), and goes on from the last checkpoint in ./checkpoints.
"""

import os
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

steps = int(sys.argv[1])
width = int(os.environ.get("WIDTH", "1024"))
save_every = int(os.environ.get("SAVE_EVERY", "2"))


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']!r}", flush=True)


class TimedTrainer(Trainer):
    def _save_checkpoint(self, *args, **kwargs):
        began = time.monotonic_ns()
        super()._save_checkpoint(*args, **kwargs)
        print("save", began, time.monotonic_ns())

    def _load_from_checkpoint(self, *args, **kwargs):
        self.began = time.monotonic_ns()
        super()._load_from_checkpoint(*args, **kwargs)

    def _load_rng_state(self, checkpoint):
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            print("load", self.began, time.monotonic_ns())


set_seed(1)
arguments = TrainingArguments(
    output_dir="checkpoints", max_steps=steps, save_steps=save_every, per_device_train_batch_size=1,
    gradient_accumulation_steps=2, use_cpu=True,
    logging_steps=1, report_to=[], disable_tqdm=True, log_level="error", log_on_each_node=True,
)  # fmt: skip
shape = {"vocab_size": 64, "hidden_size": width // 2, "intermediate_size": width, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4))
tokens = torch.arange(16).repeat(16, 1)
samples = [{"input_ids": row, "labels": row} for row in tokens]
trainer = TimedTrainer(model=model, args=arguments, train_dataset=samples, callbacks=[PrintLoss])
last = get_last_checkpoint("checkpoints") if os.path.isdir("checkpoints") else None
trainer.train(resume_from_checkpoint=last)
torch.distributed.destroy_process_group()
