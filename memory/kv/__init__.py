"""KV memory: the persistent, content-addressed store of KV caches, cut into chunks."""
