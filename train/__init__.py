"""Turns a dataset into an adapter: curation, datasets, recipes, and the subprocess that runs them.

May import `serve` and `memory`. Does not decide what ships: that is `evals` and `pipelines`.
"""
