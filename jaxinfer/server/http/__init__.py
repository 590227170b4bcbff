"""The layers of HTTP below the endpoints: sockets, connections, guards, errors, events, the log."""
