"""An engine that runs elsewhere, on a thread or in a process, and an asyncio loop's side of it."""
