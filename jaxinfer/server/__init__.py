"""Floor 6: OpenAI's HTTP endpoints over an ``EngineClient``; jax is never imported here."""
