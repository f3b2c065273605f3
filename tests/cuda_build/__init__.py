"""What only a CUDA build of torch shows, without a GPU: run by tests/cuda_build.sh in an environment of its own."""
