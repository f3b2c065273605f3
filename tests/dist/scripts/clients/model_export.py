# type: ignore  (as users write it: DeepSpeed and Transformers are not annotated throughout)
"""Trainings that export their weights, as their documentation shows it; they know nothing of being traced.

    torchrun ... model_export.py deepspeed|trainer|trainer_zero3|accelerate|pretrained STEPS

DeepSpeed gathers ZeRO-3's weights into one file with save_16bit_model; the others write a directory.
"""

import os
import sys
import time

import torch

kind, steps = sys.argv[1], int(sys.argv[2])
width = int(os.environ.get("WIDTH", "1024"))
zero3 = {
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "optimizer": {"type": "Adam", "params": {"lr": 5e-5, "torch_adam": True}},
}  # fmt: skip


def export(save, *arguments):
    began = time.monotonic_ns()
    save(*arguments)
    print("save", began, time.monotonic_ns())


def with_deepspeed():
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for half a minute
    deepspeed.init_distributed("gloo")
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])
    engine, *_ = deepspeed.initialize(model=model, config=zero3, model_parameters=model.parameters())
    row = torch.randn(1, width, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(2))
    while engine.global_steps < steps:
        loss = torch.nn.functional.mse_loss(engine(row), row)
        engine.backward(loss)
        engine.step()
        print(f"step {engine.global_steps} loss {loss.item()!r}", flush=True)
    export(engine.save_16bit_model, "exported")


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(1)
    shape = {"vocab_size": 64, "hidden_size": width // 2, "intermediate_size": width, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4))


def with_trainer(deepspeed):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class PrintLoss(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                print(f"step {state.global_step} loss {logs['loss']!r}", flush=True)

    arguments = TrainingArguments(
        output_dir="checkpoints", max_steps=steps, save_strategy="no", per_device_train_batch_size=1, use_cpu=True,
        bf16=deepspeed is not None, deepspeed=deepspeed, logging_steps=1, report_to=[], disable_tqdm=True,
        log_level="error", log_on_each_node=True,
    )  # fmt: skip
    samples = [{"input_ids": row, "labels": row} for row in torch.arange(16).repeat(16, 1)]
    trainer = Trainer(model=llama(), args=arguments, train_dataset=samples, callbacks=[PrintLoss])
    trainer.train()
    export(trainer.save_model, "exported")


def with_accelerate(pretrained):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    row = torch.arange(16).reshape(1, 16)
    for step in range(1, steps + 1):
        loss = model(input_ids=row, labels=row).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item()!r}", flush=True)
    if pretrained:
        unwrapped = accelerator.unwrap_model(model)
        export(lambda: unwrapped.save_pretrained("exported", is_main_process=accelerator.is_main_process))
    else:
        export(accelerator.save_model, model, "exported")


if kind == "deepspeed":
    with_deepspeed()
elif kind in ("trainer", "trainer_zero3"):
    with_trainer(zero3 if kind == "trainer_zero3" else None)
else:
    with_accelerate(kind == "pretrained")
torch.distributed.destroy_process_group()
