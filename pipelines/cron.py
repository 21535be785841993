"""Cron expressions with cron's own meaning, as APScheduler triggers.

APScheduler counts weekdays from Monday and wants day and weekday both to match; cron counts from Sunday and, where both
are restricted, takes either. Source: crontab(5) of the Debian cron package.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from apscheduler.triggers.combining import OrTrigger
from apscheduler.triggers.cron import CronTrigger

_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")


class BadCron(ValueError):
    """The expression is none; the message says which part and what is allowed."""


def cron_trigger(expression: str, timezone: str) -> Any:
    """An APScheduler trigger. Raises `BadCron`."""
    fields = expression.split()
    if len(fields) != 5:
        raise BadCron(f"cron needs five fields (minute, hour, day, month, weekday), not {expression!r}")
    minute, hour, day, month, weekday = fields
    weekday = weekdays(weekday)
    base = {"minute": minute, "hour": hour, "month": month, "timezone": timezone}
    try:
        if day != "*" and weekday != "*":
            trigger = OrTrigger([CronTrigger(day=day, **base), CronTrigger(day_of_week=weekday, **base)])
        else:
            trigger = CronTrigger(day=day, day_of_week=weekday, **base)
    except (ValueError, TypeError, LookupError) as error:
        raise BadCron(f"cron expression {expression!r} in time zone {timezone!r}: {error}") from error
    if trigger.get_next_fire_time(None, datetime.now(UTC)) is None:
        raise BadCron(f"cron expression {expression!r} names a day that never comes")
    return trigger


def weekdays(field: str) -> str:
    """A weekday field of cron (0 or 7 is Sunday) as a list of names; `*` stays. Raises `BadCron`."""
    if field == "*":
        return "*"
    chosen: set[int] = set()
    for part in field.lower().split(","):
        span, _, step = part.partition("/")
        first, dash, last = span.partition("-")
        begin = 0 if span == "*" else _day(first, field)
        end = 6 if span == "*" else _day(last, field) if dash else (6 if step else begin)
        if step and (not step.isdigit() or int(step) == 0):
            raise BadCron(f"weekday {field!r}: {step!r} is no step")
        if end < begin:
            raise BadCron(f"weekday {field!r}: {span!r} runs backwards")
        chosen |= {day % 7 for day in range(begin, end + 1, int(step or 1))}
    return ",".join(_DAYS[day] for day in sorted(chosen))


def _day(text: str, field: str) -> int:
    if text in _DAYS:
        return _DAYS.index(text)
    if text.isdigit() and int(text) <= 7:
        return int(text)
    raise BadCron(f"weekday {field!r}: {text!r} is neither 0 to 7 nor one of {', '.join(_DAYS)}")
