"""The text of an answer as reasoning, content and tool calls: formats, and an incremental parser."""
