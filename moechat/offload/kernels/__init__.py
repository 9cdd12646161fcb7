"""GPU kernels of the experts, in Triton; imported only where a GPU computes, or in tests."""
