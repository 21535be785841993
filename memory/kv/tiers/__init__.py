"""Where chunks lie: RAM, and files with an index that can be rebuilt from them."""
