"""Alembic migrations of the journal, packaged so that `Journal.open` can run them from an installation."""
