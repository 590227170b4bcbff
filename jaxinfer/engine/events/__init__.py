"""Events of the KV cache, for routers that send a request where its prefix is."""
