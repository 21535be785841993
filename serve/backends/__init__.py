"""How the gateway and the evals reach workers: one client for ours and for vLLM's server, and the router."""
