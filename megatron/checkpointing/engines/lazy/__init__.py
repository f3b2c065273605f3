"""Engine `lazy`: asynchronous, one safetensors file per rank, direct I/O."""
