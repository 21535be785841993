"""Evaluation suites as plain files, and the scorers that read them."""
