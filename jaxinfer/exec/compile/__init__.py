"""Compilation: buckets, executables, the memory they need, bundles on disk."""
