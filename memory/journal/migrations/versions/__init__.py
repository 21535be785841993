"""One file for each schema revision, oldest first by number."""
