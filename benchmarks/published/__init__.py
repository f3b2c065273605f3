"""Published figures predicted from their stated inputs, by the code of ckpt-plan and of `ckpt-analysis project`."""
