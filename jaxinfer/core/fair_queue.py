"""``FairQueue``: items of several clients, which are served in turn."""

from __future__ import annotations

from collections import OrderedDict, deque


class FairQueue[T]:
    """Each client's items come in order, and the clients in turn, so that a client waits for one
    item of each other client and not for all of them. It has no lock.
    """

    def __init__(self) -> None:
        self._items: OrderedDict[str, deque[T]] = OrderedDict()  # by client, none of them empty

    def __bool__(self) -> bool:
        return bool(self._items)

    def put(self, client: str, item: T) -> None:
        """Add an item to those of a client."""
        self._items.setdefault(client, deque()).append(item)

    def take(self) -> T:
        """Remove and return the next item; raises ``KeyError`` if there is none."""
        client, own = self._items.popitem(last=False)
        item = own.popleft()
        if own:
            self._items[client] = own
        return item

    def remove(self, client: str, item: T) -> None:
        """Remove an item of a client, if it is there."""
        own = self._items.get(client)
        if own is None or item not in own:
            return
        own.remove(item)
        if not own:
            del self._items[client]
