"""Engine `memory`: saves in host memory that outlives the ranks, on the parts of engine `lazy`."""
