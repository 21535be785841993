"""The durable record of sessions, responses, feedback, promotions and runs (SQL)."""
