"""The Triton backend: the same decision, compiled for NVIDIA and AMD GPUs, or interpreted where there is none."""
