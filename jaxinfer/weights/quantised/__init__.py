"""Quantised safetensors: published formats in, ``lib.quantised`` or a new folder out."""
