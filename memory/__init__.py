"""What must survive: the journal (SQL) and KV memory (chunks of KV cache).

The ground floor: imports none of the other packages, and no torch.
"""
