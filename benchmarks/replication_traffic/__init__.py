"""What copies of saves in memory of other hosts cost a step: sent at once, and interleaved with training's traffic."""
