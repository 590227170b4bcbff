"""Anthropic's Messages API, over the chats of ``server.openai``."""
