"""Failures of huggingface-hub as one sentence with the remedy."""

from __future__ import annotations

import errno
import logging
from collections.abc import Generator
from contextlib import contextmanager

from jaxinfer.core.errors import CacheError, JaxinferError, SourceError
from jaxinfer.weights.hub.names import HubName

OFFLINE = "HF_HUB_OFFLINE forbids to fetch it"
_GO_ON = "run again: what has arrived is kept"


@contextmanager
def sentences(name: HubName, doing: str) -> Generator[None]:
    """Raise failures of the block as ``SourceError`` or ``CacheError``; ``doing`` is "ask" while
    the hub is asked about a model, else the name of what is transferred.

    huggingface-hub's own lines about them are not shown.
    """
    from huggingface_hub.utils import logging as hub_logging

    before = hub_logging.get_verbosity()
    hub_logging.set_verbosity(max(before, logging.ERROR))
    try:
        yield
    except JaxinferError:
        raise
    except Exception as error:
        raise _sentence(error, name, doing) from error
    finally:
        hub_logging.set_verbosity(before)


def _sentence(error: Exception, name: HubName, doing: str) -> JaxinferError:
    from huggingface_hub import constants, errors

    endpoint = constants.ENDPOINT
    cause = error.__cause__
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(cause, Exception):
        return _sentence(cause, name, doing)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return not_here(name, OFFLINE)
    if isinstance(error, errors.HfHubHTTPError):
        return SourceError(_of_status(error, name))
    if isinstance(error, UnicodeEncodeError):  # of the request's headers
        return SourceError(
            f"the token for {name.repo} has characters that no token has; set HF_TOKEN to the "
            "token alone"
        )
    if isinstance(error, errors.FileMetadataError) or (
        isinstance(error, ValueError | TypeError | KeyError | AssertionError) and doing == "ask"
    ):
        return SourceError(
            f"{endpoint} answered about {name} with something other than a hub's data, such as a "
            "proxy's page; check HF_ENDPOINT and the proxy settings"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CacheError(f"the disk filled up while {name} was fetched; make room, then {_GO_ON}")
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return CacheError(
            f"cannot write {error.filename} ({error.strerror}); make it writable, or choose "
            "another folder with HF_HOME or download_dir (--download-dir)"
        )
    reason = _short(error)
    if doing == "ask":
        return SourceError(
            f"cannot reach {endpoint} to ask about {name} ({reason}); check the network, the proxy "
            "settings and HF_ENDPOINT, or give a local folder"
        )
    return SourceError(f"the transfer of {doing} of {name} broke off ({reason}); {_GO_ON}")


def _of_status(error: Exception, name: HubName) -> str:
    """The sentence for an answer with an error's status."""
    from huggingface_hub import constants, errors, get_token

    response = getattr(error, "response", None)
    status = getattr(response, "status_code", 0)
    has_token = get_token() is not None
    log_in = "set HF_TOKEN or run `hf auth login`"
    if isinstance(error, errors.GatedRepoError) or status == 403:
        if has_token:
            return (
                f"{name.repo} is gated, and the account of the token in use has no access; ask for "
                f"it on the model's page ({constants.ENDPOINT}/{name.repo})"
            )
        return (
            f"{name.repo} is gated; accept its terms on {constants.ENDPOINT}/{name.repo}, then "
            f"{log_in}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"{name.repo} has no revision {name.revision or constants.DEFAULT_REVISION}; name a "
            "branch, a tag or a commit's whole hash"
        )
    if status == 401 and has_token:
        return (
            f"the hub refuses the token for {name.repo}; renew it ({log_in}), or correct the name "
            "if the model does not exist"
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        private = "it is private" if has_token else f"it is private: then {log_in}"
        return (
            f"model {name.repo} is no existing folder, and {constants.ENDPOINT} has no such model; "
            f"correct the name, unless {private}"
        )
    if status == 429:
        return f"the hub takes no more requests at present; wait a few minutes, or {log_in}"
    return f"{constants.ENDPOINT} answered {status} about {name}; try again later"


def not_here(name: HubName, why: str) -> SourceError:
    """The error for a model that is not complete in the cache, while the hub may not be asked."""
    return SourceError(
        f"{name} is not complete in the cache, and {why}; run `jaxinfer pull {name}` first"
    )


def _short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0].rstrip(".")[:200]
