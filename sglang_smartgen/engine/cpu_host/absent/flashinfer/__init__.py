"""Stands before the real FlashInfer on a host without a GPU; see cpu_host/no_flashinfer.py."""

raise ImportError("FlashInfer is for NVIDIA GPUs, and this host has none")
