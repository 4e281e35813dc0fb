"""Optional C++ kernels for CPU: built at first use with the system's compiler, never required."""
