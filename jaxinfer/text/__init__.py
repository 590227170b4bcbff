"""Text in, text out: tokenizers, chat templates, incremental detokenisation, stop strings."""
