"""What a restart costs, by how ranks are launched, against a plain DeepSpeed script of the same model."""
