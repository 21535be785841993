"""Errors a user can mend. The command line prints these as one line; anything else is a bug and keeps its traceback."""

from __future__ import annotations

from evals.errors import EvalError
from loop.config import ConfigError
from loop.demo.errors import DemoError
from loop.memory import MemoryCommandError
from loop.memory_picture import PictureError
from loop.supervisor import SupervisorError
from memory.journal import JournalError
from memory.kv.keyring import KeyringError
from pipelines.cron import BadCron
from pipelines.lease import Busy
from pipelines.promotion import NothingToRollBack
from pipelines.registry import RegistryError
from pipelines.schedule import FixedBySettings
from serve.pull import PullError
from train.launch import TrainFailed

USER_ERRORS = (
    Busy,
    BadCron,
    ConfigError,
    DemoError,
    EvalError,
    FixedBySettings,
    JournalError,
    KeyringError,
    MemoryCommandError,
    NothingToRollBack,
    PictureError,
    PullError,
    RegistryError,
    SupervisorError,
    TrainFailed,
)
