"""The Python API: ``LLM`` and ``AsyncLLM`` under vLLM's names, and ``load`` for research."""
