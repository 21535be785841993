"""Benchmarks. Each prints its figures; `make bench-memory` and `make bench-engine` run them."""
