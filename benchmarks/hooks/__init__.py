"""What restart_trace.hooks cost a DeepSpeed job, and how far they agree with our own trainer's trace."""
