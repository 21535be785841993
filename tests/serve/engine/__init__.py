"""Tests of the embedded engine, on tiny random models."""
