"""Suite scores kept on disk: base and champion are scored once, and an evaluation that was killed goes on.

A file's name is a digest of everything that decides its content: the suite (examples and settings), the weights, the
tokenizer and template, how the worker computes, and the program's version. Files are written whole or not at all; a
file that cannot be read back is scored again, with a warning in the log.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import ValidationError

from evals.results import SuiteScores
from evals.suites.base import Suite, content_digest
from memory.files import write_atomic

_FORMAT = 1
_log = logging.getLogger(__name__)


class KeptScores:
    """Scores of one worker's models in one folder; `computed` says what the worker and this program are."""

    def __init__(self, folder: Path | None, text_digest: str, computed: str) -> None:
        self._folder = folder
        self._conditions = [_FORMAT, text_digest, computed]

    def load(self, suite: Suite, weights_id: str | None) -> SuiteScores | None:
        """The kept scores, or None when there are none or the worker tells no weights id."""
        file = self._file(suite, weights_id)
        if file is None or not file.exists():
            return None
        try:
            return SuiteScores.model_validate_json(file.read_bytes())
        except (OSError, ValidationError) as error:
            _log.warning("%s cannot be used and is scored again: %s", file, error)
            return None

    def save(self, suite: Suite, weights_id: str | None, scores: SuiteScores) -> None:
        """Keeps `scores`; does nothing without a folder or a weights id."""
        file = self._file(suite, weights_id)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, scores.model_dump_json().encode())

    def _file(self, suite: Suite, weights_id: str | None) -> Path | None:
        if self._folder is None or weights_id is None:
            return None
        digest = content_digest(self._conditions, suite.name, suite.digest, weights_id)
        return self._folder / f"{suite.name}-{digest[:32]}.json"
