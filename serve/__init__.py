"""The serving tier: the gateway (words), the workers (tokens) and what connects them.

May import `memory`. Knows nothing of training, evaluation or pipelines.
"""
