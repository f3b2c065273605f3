# type: ignore  (as users write it)
"""Lightning's Trainer with DDP, as its documentation shows it; it knows nothing of being traced.

torchrun ... lightning_ddp.py STEPS

It saves at each second step (SAVE_EVERY), and goes on from the last checkpoint in ./checkpoints.
"""

import os
import sys
import time

import lightning
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

steps = int(sys.argv[1])
width = int(os.environ.get("WIDTH", "1024"))
save_every = int(os.environ.get("SAVE_EVERY", "2"))


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])

    def training_step(self, batch, index):
        loss = torch.nn.functional.mse_loss(self.layers(batch), batch)
        print(f"step {self.global_step + 1} loss {loss.item()!r}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Stream(torch.utils.data.IterableDataset):
    """Of unknown length, so Lightning requests the second batch before it trains on the first."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        return iter(torch.randn(16, width, generator=generator))


class TimedTrainer(lightning.Trainer):
    def save_checkpoint(self, *args, **kwargs):
        began = time.monotonic_ns()
        super().save_checkpoint(*args, **kwargs)
        print("save", began, time.monotonic_ns())


class TimedFiles(TorchCheckpointIO):
    def load_checkpoint(self, *args, **kwargs):
        began = time.monotonic_ns()
        found = super().load_checkpoint(*args, **kwargs)
        print("load", began, time.monotonic_ns())
        return found


lightning.seed_everything(1)
saver = ModelCheckpoint(dirpath="checkpoints", every_n_train_steps=save_every, save_last=True)
trainer = TimedTrainer(
    max_steps=steps, accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", logger=False,
    callbacks=[saver], plugins=[TimedFiles()], enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
data = torch.utils.data.DataLoader(Stream(), batch_size=1)
last = "checkpoints/last.ckpt"
trainer.fit(Model(), data, ckpt_path=last if os.path.exists(last) else None)
torch.distributed.destroy_process_group()
