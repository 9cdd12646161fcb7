"""Model names, the library of block stores on this machine, known shapes, and the demo model."""
