"""GPU kernels of the experts, in Triton; imported only where a graphics card computes, or in tests."""
