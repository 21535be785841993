"""KV memory: the persistent, content-addressed store of KV caches, cut into chunks.

Here lives what names, encodes, keeps and finds chunks; numpy only, no torch.
A chunk that cannot be proven right is never handed out: losing one costs time, never words.
"""
