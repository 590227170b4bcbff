"""Requests and responses in OpenAI's form: fields in, JSON and events out."""
