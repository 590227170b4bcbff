"""The exception classes. Every message is one sentence: what is wrong, and the remedy."""


class JaxinferError(Exception):
    """Base of every error that jaxinfer raises on purpose; the CLI prints it and exits with 1."""


class ConfigError(JaxinferError, ValueError):
    """A setting is unknown, out of range or contradicts another one."""


class SourceError(JaxinferError):
    """A model reference cannot be resolved, downloaded or read."""


class CheckpointError(SourceError):
    """A checkpoint file is truncated, corrupt, incomplete or of the wrong shape."""


class UnknownArchitectureError(SourceError):
    """No model family is registered for the architecture that a config names."""


class TokenizerError(JaxinferError):
    """A tokenizer or chat template is missing, unreadable or fails on the given input."""


class NoTokenizerError(TokenizerError):
    """A model's files have no tokenizer."""


class CacheError(JaxinferError):
    """The user cache cannot be written, or one of its entries is unusable."""


class RequestError(JaxinferError, ValueError):
    """One request is invalid or can never fit; other requests are unaffected."""


class ContextLengthError(RequestError):
    """A prompt, or a prompt with the requested tokens, does not fit the context. ``field`` is the
    path of the field that is too large.
    """

    def __init__(self, message: str, field: str = "prompt") -> None:
        super().__init__(message)
        self.field = field


class QueueFullError(RequestError):
    """Too many requests of this kind are open; the same request may be accepted later."""


class TaskError(RequestError):
    """A request asks for text from a model that makes embeddings, or the reverse."""


class ArgumentError(JaxinferError, ValueError):
    """An argument of a function for research has the wrong type, shape, dtype or value."""


class RecordingError(JaxinferError):
    """A recording cannot be read, or cannot be replayed here."""


class EngineError(JaxinferError, RuntimeError):
    """The engine failed or was closed; the message says what to do next."""


class BenchError(JaxinferError):
    """A measurement cannot be made, or the folder of one cannot be read or is not what it was."""
