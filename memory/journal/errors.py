"""What the journal raises. Callers turn these into HTTP errors or outcomes; nothing is swallowed here."""

from __future__ import annotations


class JournalError(Exception):
    """Any failure that the journal names itself."""


class NotFound(JournalError):
    """No such record for this tenant: it never existed, was deleted, or belongs to somebody else.

    The three cases are one error on purpose: an answer that tells them apart tells one tenant about another.
    """

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"{kind} {name!r} not found")
        self.kind = kind
        self.name = name


class Gone(NotFound):
    """A record of this tenant that ended: `why` is "deleted" or "expired". Told apart only for its own tenant."""

    def __init__(self, kind: str, name: str, why: str) -> None:
        super().__init__(kind, name)
        self.why = why


class Conflict(JournalError):
    """Another writer was first: the id is taken, or the session has moved on. Read it again and retry."""


class InvalidRecord(JournalError, ValueError):
    """The record breaks a rule of its kind; the message says which value and what is allowed."""


class LeaseLost(JournalError):
    """The lease ran out and somebody else may hold it: stop at once and touch nothing more."""


class SchemaTooNew(JournalError):
    """A newer release wrote this database: run that release, or restore a backup."""
