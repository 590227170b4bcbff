"""What users call: ``LLM`` and ``AsyncLLM``, under vLLM's names."""
