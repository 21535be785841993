"""Settings of the pipelines: the registry, retraining, the schedule."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

from train.curate import CurateSettings
from train.settings import RecipeName


class RegistrySettings(BaseModel):
    """Where versions are registered."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    folder: Path = Path(".kvloop/mlflow")
    """Folder of MLflow's database and artifacts. Follows `home` unless it is set."""
    model_name: str = Field(default="kvloop", min_length=1)
    """Name of the registered model in MLflow."""
    experiment: str = Field(default="kvloop", min_length=1)
    """Name of the experiment that holds the runs."""

    @property
    def tracking_uri(self) -> str:
        """MLflow's tracking and registry URI: what `mlflow ui --backend-store-uri` takes."""
        return f"sqlite:///{self.folder.absolute() / 'mlflow.db'}"


class RetrainSettings(BaseModel):
    """When a retrain is worth its time, and how its runs are kept apart."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    folder: Path = Path(".kvloop/runs")
    """Folder with one folder for each run. Follows `home` unless it is set."""
    min_examples: int = Field(default=8, ge=1)
    """Fewer new examples than this since the last run that trained: the run ends without training."""
    lease_seconds: float = Field(default=30.0, gt=0)
    """A run whose process gave no sign of life for so long may be taken over."""
    max_attempts: int = Field(default=3, ge=1)
    """A run whose process died this often ends as failed instead of being resumed again."""
    recipe: RecipeName = "sft-kl"
    """How adapters are trained: `sft-kl` with replay against forgetting, `sft` without."""
    curate: CurateSettings = CurateSettings()
    """What may go into a dataset."""


class ScheduleSettings(BaseModel):
    """When the loop retrains by itself. Both ways may be on at once; runs never overlap."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    folder: Path = Path(".kvloop/schedule")
    """Folder of the schedule's database and logs. Follows `home` unless it is set."""
    cron: str | None = None
    """Five fields (minute, hour, day, month, weekday), such as `0 3 * * *`: retrain at these times."""
    feedback_every: int | None = Field(default=None, ge=1)
    """Retrain when this much feedback came in since the last run began."""
    check_seconds: float = Field(default=30.0, gt=0)
    """How often feedback is counted, and how soon a change made by another process is seen."""
    timezone: str = "UTC"
    """Time zone of `cron`, such as `Europe/Berlin`."""

    @field_validator("cron")
    @classmethod
    def _five_fields(cls, value: str | None) -> str | None:
        if value is not None and len(value.split()) != 5:
            raise ValueError(f"cron needs five fields (minute, hour, day, month, weekday), not {value!r}")
        return value
