"""Answers as reasoning, content and tool calls: their formats, and an incremental parser."""
