"""Float64 NumPy definitions of every operation, forward and backward."""
