"""Ollama's API, over the chats of ``server.openai``."""
