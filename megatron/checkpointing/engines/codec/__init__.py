"""States without their tensors, as typed JSON, and pickles from which only known classes are loaded."""
