"""What is compiled: buckets, executables, the memory they need, bundles on disk."""
