"""The gateway owns words: HTTP, auth, tenants, chat templates, sessions, journal. It has no torch."""
