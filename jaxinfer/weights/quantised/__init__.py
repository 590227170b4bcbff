"""Quantised safetensors: published formats in, ``pallas_kernels.quantised`` or a new folder out."""
