"""Tests of the worker's HTTP surface."""
