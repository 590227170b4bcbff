"""GGUF files: their header, metadata and tensors in Hugging Face's terms."""
