"""The worker client and the router."""
