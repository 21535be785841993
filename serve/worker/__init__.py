"""The embedded worker's HTTP surface: the subset of vLLM's server that the gateway needs."""
