"""Hardware: profiles, measurements, and detection of CPU, memory, disk and GPU."""
