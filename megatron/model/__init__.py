"""The GPT model: LLaMA-style and GPT-2-style variants as a DeepSpeed pipeline module."""
