"""The HTTP server: OpenAI's endpoints over an ``EngineClient``. Must not import jax."""
