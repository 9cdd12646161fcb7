"""Names of models, and the library of block stores on this machine."""
