"""Codecs: how the KV of one chunk becomes the payload of its file, and back."""
