"""Dataset files: JSONL rows of prompt and completion, and a card beside them.

Invariants: the digest is that of the rows' bytes, and equal examples give equal bytes, so that the same journal gives
the same dataset anywhere; the card is written last, so a folder with a card is a whole dataset; each row says which
session, reply and feedback it came from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from memory.files import write_atomic

Message = dict[str, Any]
CARD = "dataset.json"
ROWS = "train.jsonl"
HELDOUT = "heldout.jsonl"


class DatasetError(ValueError):
    """A dataset file is missing, unreadable or not what its card says; the message says which and where."""


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """Where an example came from. `sessions` are all whose words are in it, the corrected one included."""

    session: str
    response: str
    feedback: str
    tenant: str
    source: str
    sessions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Example:
    """One conversation up to a reply, and the answer that should have been given."""

    messages: tuple[Message, ...]
    completion: Message
    lineage: Lineage

    def to_row(self) -> str:
        """One line of JSON, without the line break."""
        row = {"messages": self.messages, "completion": self.completion, "lineage": asdict(self.lineage)}
        return json.dumps(row, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, kw_only=True)
class DatasetCard:
    """What is in a dataset, and what was left out and why. Times are UTC seconds since 1970; None is no bound."""

    digest: str
    examples: int
    heldout_examples: int
    new_examples: int
    """Examples whose feedback came after the mark of the run before."""
    since: float | None
    until: float | None
    dropped: dict[str, int]
    """Examples left out, by reason."""
    scrubbed: dict[str, int]
    """Personal data replaced, by kind."""
    sources: dict[str, int]
    """Examples by source, as "tenant/source"."""
    sessions: tuple[tuple[str, str], ...]
    """(tenant, session id) of every session whose words are in the training rows."""


def rows_digest(rows: bytes) -> str:
    """Digest of a dataset by the bytes of its rows: 64 hex digits of BLAKE3."""
    return blake3(rows).hexdigest()


def encode_rows(examples: Sequence[Example]) -> bytes:
    """The JSONL file of these examples."""
    return "".join(f"{example.to_row()}\n" for example in examples).encode()


def write_dataset(folder: Path, examples: Sequence[Example], heldout: Sequence[Example], card: DatasetCard) -> None:
    """Writes rows, held-out rows and then the card into `folder`, durably.

    Raises `DatasetError` when the card is not of these examples, `OSError` as the file system gives it.
    """
    rows = encode_rows(examples)
    if card.digest != rows_digest(rows) or card.examples != len(examples) or card.heldout_examples != len(heldout):
        raise DatasetError(f"the card for {folder} was made for other examples")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / ROWS, rows)
    write_atomic(folder / HELDOUT, encode_rows(heldout))
    write_atomic(folder / CARD, json.dumps(asdict(card), ensure_ascii=False, indent=1, sort_keys=True).encode())


def read_card(folder: Path) -> DatasetCard:
    """The card of a whole dataset. Raises `DatasetError` when there is none, or the rows are not the card's."""
    try:
        values = json.loads((folder / CARD).read_text(encoding="utf-8"))
        values["sessions"] = tuple((tenant, session) for tenant, session in values["sessions"])
        card = DatasetCard(**values)
        found = rows_digest((folder / ROWS).read_bytes())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{folder} holds no whole dataset: {error}; build it again") from error
    if found != card.digest:
        raise DatasetError(f"{folder / ROWS} was changed after it was built: its digest is {found}, not {card.digest}")
    return card


def read_examples(path: Path) -> list[Example]:
    """The examples of a JSONL file. Raises `DatasetError` with the number of the first line that is not one."""
    examples = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                lineage = row["lineage"] | {"sessions": tuple(row["lineage"].get("sessions", ()))}
                example = Example(
                    messages=tuple(row["messages"]), completion=row["completion"], lineage=Lineage(**lineage)
                )
            except (ValueError, KeyError, TypeError) as error:
                raise DatasetError(f"{path.name}, line {number} is not an example: {error!r}") from error
            examples.append(example)
    return examples
