"""HTTP below any endpoint: the server's life, connections, guards, errors, events, the log."""
