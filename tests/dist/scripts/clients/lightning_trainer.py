# type: ignore  (as users write it: Lightning is no dependency)
"""Lightning's Trainer with DeepSpeed, which needs a CUDA GPU; it knows nothing of being traced."""

import lightning
import torch


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)])

    def training_step(self, batch, index):
        return torch.nn.functional.mse_loss(self.layers(batch), batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


trainer = lightning.Trainer(
    max_steps=2, accelerator="gpu", devices=1, strategy="deepspeed_stage_1", precision="bf16-mixed", logger=False
)
data = torch.utils.data.DataLoader(torch.randn(8, 1024), batch_size=1)
trainer.fit(Model(), data)
trainer.save_checkpoint("checkpoints")
