"""Requests and answers as OpenAI's clients read them: fields in, JSON and events out."""
