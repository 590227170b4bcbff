"""Tiers: layer state in host memory and on disk, and its copies from and to the device's pages."""
