"""The longer statements of the index."""

from __future__ import annotations

REUSE_BONUS = 300.0
FIRST_CHUNK_BONUS = 3600.0
COUNTED_HITS = 64
SUPERSEDED_PENALTY = 1e9
"""Seconds that one reuse adds to a chunk's last use; the same for a first chunk; the most that count; what a
superseded chunk loses. A prompt that was reused 64 times outlives its last use by less than three days."""

USABLE = "state = 'stored' AND (expires = 0 OR expires > ?)"
FOUND = "key, tier, tokens, bytes, codec, fidelity, hits, owner, expires, prefix"
FOUND_TYPES = [bytes, str, int, int, str, str, int, bytes, float, bytes]
ROW = (
    "key, parent, start, tokens, prefix, bytes, codec, fidelity, model, band, owner, expires, last_used, tier, state,"
    " raw_bytes"
)
INSERT = (
    f"INSERT INTO chunks ({ROW}, hits, superseded, worth)"
    " VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, 0, 0, ?13)"
)
REPLACE = (
    " ON CONFLICT (key) DO UPDATE SET bytes = excluded.bytes, raw_bytes = excluded.raw_bytes, codec = excluded.codec,"
    " fidelity = excluded.fidelity, tier = excluded.tier, state = excluded.state, expires = excluded.expires,"
    " owner = excluded.owner, prefix = excluded.prefix"
)
TOUCH = (
    "UPDATE chunks SET last_used = MAX(last_used, ?1), hits = hits + ?2,"
    " superseded = CASE WHEN ?2 > 0 THEN 0 ELSE superseded END,"
    f" worth = MAX(last_used, ?1) + MIN(hits + ?2, {COUNTED_HITS})"
    f" * (CASE WHEN start = 0 THEN {FIRST_CHUNK_BONUS} ELSE {REUSE_BONUS} END)"
    f" - (CASE WHEN ?2 > 0 THEN 0 ELSE superseded END) * {SUPERSEDED_PENALTY} WHERE key = ?3"
)
SUPERSEDE = f"UPDATE chunks SET superseded = 1, worth = worth - {SUPERSEDED_PENALTY} WHERE key = ? AND superseded = 0"
LENGTHS = (  # steps from one length to the next larger one: a parent may have a hundred thousand followers
    "WITH RECURSIVE found (tokens) AS (SELECT MIN(tokens) FROM chunks WHERE parent = ?1"
    " UNION ALL SELECT (SELECT MIN(tokens) FROM chunks WHERE parent = ?1 AND tokens > found.tokens) FROM found"
    " WHERE found.tokens IS NOT NULL) SELECT tokens FROM found WHERE tokens IS NOT NULL"
)
MODELS = (
    "WITH RECURSIVE found (model) AS (SELECT MIN(model) FROM chunks WHERE tier = 'disk'"
    " UNION ALL SELECT (SELECT MIN(model) FROM chunks WHERE tier = 'disk' AND model > found.model) FROM found"
    " WHERE found.model IS NOT NULL) SELECT model FROM found WHERE model IS NOT NULL"
)
