"""Fused forms of kernels in `kernels_xla`, written in Pallas for NVIDIA GPUs. The einsums there are the definition."""
