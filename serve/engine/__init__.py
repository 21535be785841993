"""The embedded engine: token ids in, token ids out, on one CPU or one GPU, with torch."""
