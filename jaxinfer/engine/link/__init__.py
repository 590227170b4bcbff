"""An engine on another thread or in another process, and its client for an asyncio loop."""
