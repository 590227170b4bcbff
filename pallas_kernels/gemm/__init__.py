"""The common parts of the GEMMs for NVIDIA Hopper: pipeline, tiles, shared memory and epilogues."""
