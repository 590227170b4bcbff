"""A host other than 0: it loads its devices' parts of an engine, and makes the calls of host 0."""

from __future__ import annotations

from dataclasses import replace
from queue import SimpleQueue

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import EngineError
from jaxinfer.core.hosts import Reply, end_process, watch
from jaxinfer.core.progress import NO_PROGRESS, Progress
from jaxinfer.engine.start.build import plan_engine
from jaxinfer.engine.start.hosts import share_executables
from jaxinfer.engine.start.join import starting
from jaxinfer.engine.start.loading import load
from jaxinfer.exec.run.follow import Follower


def follow(config: EngineConfig, progress: Progress = NO_PROGRESS) -> None:
    """Be a host other than 0 of an engine, until host 0 ends. Raises a ``JaxinferError``."""
    with progress.phase("the engine starts"):
        plan = replace(plan_engine(config, progress), tokenizer_spec=None)
        assert plan.joined is not None, "there are several hosts"
        (peer,) = plan.joined.peers
        with starting(plan.joined):
            share_executables(plan, progress)
            loaded = load(plan, progress)
        (executables, _), (state, _) = loaded.executables, loaded.state
        follower = Follower(plan.program, executables.by_name, *state)
        peer.put(Reply())
        progress.note(f"host {config.host_rank} follows {peer.name}")
    messages = SimpleQueue[bytearray]()
    watch(peer, messages.put)
    try:
        while message := messages.get():
            follower.run(message)
    except Exception as error:
        reason = EngineError(f"a call of host 0 failed here ({type(error).__name__}: {error})")
        peer.refuse(str(reason))
        end_process(reason)
