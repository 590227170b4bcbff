"""``Exchange``: the memory in which the devices of an engine add their partial results."""

from __future__ import annotations

import numpy as np

from jaxinfer.core.errors import EngineError
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.cuda_driver import connect, device_zeros, read_words
from jaxinfer.exec.step.batch import PEERS
from pallas_kernels.lib.exchange import lost_word, words


class Exchange:
    """Memory on each device, to which all of them write: see ``pallas_kernels.lib.exchange``.

    It is never freed, as an abandoned step may still write there.
    """

    def __init__(self, ordinals: tuple[int, ...]) -> None:
        """Raises ``EngineError`` if a device cannot write to the memory of another one."""
        self._ordinals = ordinals
        connect(ordinals)
        size = 4 * words(len(ordinals))
        self._addresses = [device_zeros(ordinal, size) for ordinal in ordinals]
        # int32[2 * N]: low and high half of each address
        self.words = np.array(self._addresses, np.uint64).view(np.int32)

    @classmethod
    def of_program(cls, program: Program) -> Exchange | None:
        """The memory of a program's devices; None if its steps use none."""
        if not program.num_peers:
            return None
        return cls(tuple(device.local_hardware_id for device in program.placement.devices))

    def put_into(self, batch: np.ndarray) -> None:  # int32[...]: see ``BatchLayout``
        """Write the addresses into a step's batch."""
        batch[PEERS : PEERS + len(self.words)] = self.words

    def check(self) -> None:
        """Raise ``EngineError`` if a device has waited in vain for another one."""
        at = 4 * lost_word(len(self._ordinals))
        for ordinal, address in zip(self._ordinals, self._addresses, strict=True):
            if read_words(ordinal, address + at, 1)[0]:
                raise EngineError(
                    f"device {ordinal} has waited some seconds for the results of another one of "
                    f"{list(self._ordinals)}, which did not come: a device has failed or hangs"
                )
