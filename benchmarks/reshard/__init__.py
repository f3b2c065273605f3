"""How long a checkpoint takes to load onto another layout: directly, through DeepSpeed's conversion, and on its own."""
