"""Benchmarks of KV memory: `python -m benchmarks.memory`, or any module of this folder by itself."""
